//! The daemon from outside: a real `jiffyd`, its API, and a stand-in for `jiffy-vmm` (see
//! `examples/fake-vmm/`) whose "guests" run real programs.

mod adoption;
mod api;
mod client;
mod daemon;
mod damage;
mod events;
mod failures;
mod flood;
mod forks;
mod gate;
mod golden;
mod idle;
mod images;
mod kills;
mod life;
mod limits;
mod network;
mod ports;
mod pressure;
mod profiles;
mod proxy;
mod pulls;
mod pushes;
mod queue;
mod registry;
mod room;
mod running;
mod signed;
mod sleep;
mod snapshots;
mod spares;
mod standby;
mod upgrade;
mod vcpus;
mod volume_artifacts;
