//! A real TAP interface, in a network namespace of the test.
#![allow(unsafe_code)] // unshare(2).

use super::driver::*;
use crate::virtio::device::VirtioDevice;
use crate::virtio::net::{Backend, Net, NetError};
use crate::virtio::testing::{Buffer, Running};
use jiffy_sys::tap::{Tap, TapOptions};
use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::process::Command;
use virtio_bindings::virtio_net::*;

/// Gives this thread a network namespace of its own.
fn own_namespace() {
    // SAFETY: a network namespace does not affect memory or descriptors.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
        .expect("the right to unshare");
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status();
    assert!(status.unwrap().success(), "ip {arguments}");
}

fn queues(name: &CStr, count: u16) -> Vec<OwnedFd> {
    let options = TapOptions {
        name,
        queues: count,
        owner: None,
        offloads: false,
        persistent: false,
    };
    Tap::create(&options).unwrap().queues
}

/// Sends an ARP request for 10.9.0.1 from the guest; returns the answer's opcode.
fn asks_for_address(guest: &mut Guest) -> [u8; 2] {
    let mut request = frame(0, 60);
    request[12..22].copy_from_slice(&[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    request[22..28].copy_from_slice(&MAC.0);
    request[28..32].copy_from_slice(&[10, 9, 0, 2]);
    request[38..42].copy_from_slice(&[10, 9, 0, 1]);
    guest.send(&with_header(&request));
    loop {
        let received = guest.wait_received();
        if received[24..26] == [8, 6] && received[33] == 2 {
            return [received[32], received[33]];
        }
    }
}

#[test]
fn frames_pass_through_a_host_interface() {
    own_namespace();
    let files = queues(c"jiffy0", 1);
    let other = files[0].try_clone().unwrap();
    let net = Net::new(args(Backend::Tap(files))).unwrap();
    for feature in [
        VIRTIO_NET_F_HOST_TSO4,
        VIRTIO_NET_F_HOST_TSO6,
        VIRTIO_NET_F_HOST_UFO,
        VIRTIO_NET_F_GUEST_TSO4,
        VIRTIO_NET_F_GUEST_UFO,
    ] {
        assert_ne!(net.features() & (1 << feature), 0, "{feature}");
    }
    ip("addr add 10.9.0.1/24 dev jiffy0");
    ip("link set jiffy0 up");
    let mut guest = Guest::start(net, USUAL);
    guest.offer_buffers(64, 4096);
    assert_eq!(asks_for_address(&mut guest), [0, 2]);
    // The interface is removed, and the link goes down.
    ip("link del jiffy0");
    guest
        .device
        .interrupt
        .wait(|counts| counts.config_changed == 1);
    assert_eq!(guest.config()[6], 0);
    drop(other);
}

#[test]
fn the_driver_sets_the_number_of_tap_queues() {
    own_namespace();
    let net = Net::new(args(Backend::Tap(queues(c"jiffy0", 4)))).unwrap();
    ip("addr add 10.9.0.1/24 dev jiffy0");
    ip("link set jiffy0 up");
    let mut guest = Guest::start(net, USUAL | 1 << VIRTIO_NET_F_MQ);
    guest.offer_buffers(64, 4096);
    for pair in 1..4 {
        for number in 0..64 {
            let address = RECEIVE + 0x40_0000 + (pair * 64 + number) * 4096;
            guest.queues[2 * pair as usize].add(&[Buffer::writable(address, 4096)]);
        }
        guest.device.ring(2 * pair as u16);
    }
    // With one pair, all frames arrive there.
    assert_eq!(asks_for_address(&mut guest), [0, 2]);
    for pairs in [4, 1, 3, 1] {
        assert_eq!(guest.command(&[4, 0, pairs, 0]), 0);
    }
    assert_eq!(asks_for_address(&mut guest), [0, 2]);
    assert_eq!(guest.config()[6], 1);
    let (device, queues) = guest.device.stop();
    assert_eq!(queues.len(), 9);
    let _: Net = device;
    let _: fn(Net, _, _, _) -> Running<Net> = Running::start;
}

#[test]
fn an_interface_of_another_kind_is_refused() {
    own_namespace();
    let mut single = queues(c"jiffy1", 1);
    single.extend(queues(c"jiffy2", 1));
    let error = Net::new(args(Backend::Tap(single))).unwrap_err();
    assert!(matches!(
        error,
        NetError::TapFlags {
            number: 0,
            needed: "IFF_MULTI_QUEUE",
            ..
        }
    ));
}
