//! The daemon from outside: a real `jiffyd`, its API, and a stand-in for
//! `jiffy-vmm` (see `examples/fake-vmm.rs`) whose "guests" run real programs.

mod adoption;
mod api;
mod client;
mod daemon;
mod failures;
mod golden;
mod images;
mod life;
mod registry;
mod room;
mod running;
mod snapshots;
mod standby;
