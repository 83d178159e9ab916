//! The whole network, with real packets. Needs root.

mod floods;
mod frames;
mod isolation;
mod names;
mod policies;
mod ports;
mod reconcile;
mod spoofing;
mod world;

use super::{GuestSpec, Host, HostOptions, Report};
use crate::VmId;
use crate::policy::Policy;
use std::collections::BTreeSet;
use world::World;

/// The `number`th VM.
fn vm(number: u32) -> VmId {
    VmId::parse(&format!("{number:012x}")).expect("an id")
}

fn spec(host: &mut Host, number: u32) -> GuestSpec {
    GuestSpec {
        vm: vm(number),
        v4: host.take_address().expect("an address"),
        network: None,
        policy: Policy::default(),
        ports: Vec::new(),
        mtu: 1500,
        queues: 1,
        owner: None,
        asleep: false,
    }
}

fn options() -> HostOptions {
    HostOptions {
        seed: [1, 2, 3, 4, 5],
        ..HostOptions::default()
    }
}

fn open(world: &World) -> (Host, Report) {
    let opened = world
        .host
        .run(|| Host::open(options(), &[], &BTreeSet::new()));
    opened.expect("the network opens")
}

/// Runs it in a thread in the host's namespace.
fn on_host<T: Send>(world: &World, body: impl FnOnce() -> T + Send) -> T {
    world.host.run(body)
}
