//! End-to-end tests with the real binaries, guests and KVM. They run in two machines that are
//! booted once; the tests take turns.

mod crashes;
mod devices;
mod disks;
mod endurance;
mod files;
mod folders;
mod forks;
mod golden;
mod hibernate;
mod http;
mod images;
mod leaks;
mod life;
mod machine;
mod proxy;
mod refusals;
mod registry;
mod room;
mod running;
mod snapshot_faults;
mod snapshots;
mod streams;
mod support;
mod timelines;
mod upgrade;
