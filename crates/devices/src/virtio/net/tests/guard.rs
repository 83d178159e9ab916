use super::driver::*;
use crate::virtio::net::guard::{Gate, Guard, Range};
use crate::virtio::net::{Backend, Net};
use crate::virtio::testing::{Buffer, TIMEOUT};
use std::io::Write;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vm_memory::{Bytes, GuestAddress};

const OPEN: [u8; 4] = [192, 0, 2, 1];
const CLOSED: [u8; 4] = [10, 1, 2, 3];
const NAMES: [u8; 4] = [10, 0, 0, 53];
const TCP: u8 = 6;
const UDP: u8 = 17;
const SYN: u8 = 2;
const ACK: u8 = 16;
const RST: u8 = 4;

fn guard() -> Guard {
    Guard {
        closed: vec![Range::new([10, 9, 9, 9].into(), 8)],
        name_servers: vec![NAMES.into()],
        tcp: vec![(80, 80), (8000, 8002)],
    }
}

fn guarded() -> (Guest, UnixDatagram) {
    let (ours, host) = UnixDatagram::pair().unwrap();
    host.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut args = args(Backend::Datagrams(vec![ours]));
    args.guard = Some(guard());
    (Guest::start(Net::new(args).unwrap(), USUAL), host)
}

/// A packet with `options` bytes of options, and TCP's flags.
fn packet(to: [u8; 4], protocol: u8, ports: [u16; 2], flags: u8, options: u8) -> Vec<u8> {
    let mut bytes = frame(0, 14);
    bytes.extend([
        0x45 + options / 4,
        0,
        0,
        0,
        0,
        0,
        0x40,
        0,
        64,
        protocol,
        0,
        0,
    ]);
    bytes.extend([10, 118, 0, 2]);
    bytes.extend(to);
    bytes.resize(bytes.len() + usize::from(options), 1);
    bytes.extend(ports.iter().flat_map(|port| port.to_be_bytes()));
    bytes.resize(bytes.len() + 20, 0);
    let at = 14 + 20 + usize::from(options) + 13;
    bytes[at] = flags;
    bytes
}

#[track_caller]
fn expect(guest: &mut Guest, host: &UnixDatagram, frame: &[u8], passes: bool) {
    let before = guest.device.device.totals().sent_refused;
    guest.send(&with_header(frame));
    let refused = guest.device.device.totals().sent_refused - before;
    assert_eq!(refused, u64::from(!passes));
    if passes {
        assert_eq!(received_by(host)[12..], *frame);
    }
}

#[test]
fn packets_to_closed_addresses_are_refused() {
    let (mut guest, host) = guarded();
    for options in [0, 4, 40] {
        let mut check = |to, protocol, ports, flags, passes| {
            let bytes = packet(to, protocol, ports, flags, options);
            expect(&mut guest, &host, &bytes, passes);
        };
        check(OPEN, TCP, [4000, 443], SYN, true);
        check(OPEN, 1, [0, 0], 0, true);
        check(CLOSED, TCP, [4000, 443], SYN, false);
        check(CLOSED, UDP, [4000, 443], 0, false);
        check(CLOSED, 1, [0, 0], 0, false);
        // Only the name server's port 53.
        check(NAMES, TCP, [4000, 53], SYN, true);
        check(NAMES, UDP, [4000, 53], 0, true);
        check(NAMES, TCP, [4000, 54], SYN, false);
        check(NAMES, 1, [4000, 53], 0, false);
        check(CLOSED, UDP, [4000, 53], 0, false);
        // Answers from published ports, and no new connections from them.
        check(CLOSED, TCP, [80, 4000], SYN | ACK, true);
        check(CLOSED, TCP, [8002, 4000], ACK, true);
        check(CLOSED, TCP, [80, 4000], RST, true);
        check(CLOSED, TCP, [80, 4000], SYN, false);
        check(CLOSED, TCP, [80, 4000], SYN | 1, false);
        check(CLOSED, TCP, [8003, 4000], ACK, false);
        check(CLOSED, UDP, [80, 4000], 0, false);
    }
}

/// A frame from `from` to a port of the guest.
fn incoming(from: [u8; 4], protocol: u8, ports: [u16; 2]) -> Vec<u8> {
    let mut frame = packet([10, 118, 0, 2], protocol, ports, 0, 0);
    frame[26..30].copy_from_slice(&from);
    frame
}

#[test]
fn datagrams_of_closed_addresses_may_be_answered() {
    let (ours, mut passt) = UnixStream::pair().unwrap();
    passt.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut args = args(Backend::Passt(ours));
    args.guard = Some(guard());
    let mut guest = Guest::start(Net::new(args).unwrap(), MERGEABLE | CONTROL | EVENT_IDX);
    guest.offer_buffers(256, 2048);
    let mut refused = 0;
    let mut answers = |guest: &mut Guest, to, ports, passes: bool| {
        guest.send(&with_header(&packet(to, UDP, ports, 0, 0)));
        refused += u64::from(!passes);
        assert_eq!(guest.device.device.totals().sent_refused, refused);
    };
    let hear = |passt: &mut UnixStream, guest: &mut Guest, frame: &[u8]| {
        let length = (frame.len() as u32).to_be_bytes();
        passt.write_all(&[&length, frame].concat()).unwrap();
        guest.wait_received();
    };
    answers(&mut guest, CLOSED, [53, 4000], false);
    hear(&mut passt, &mut guest, &incoming(CLOSED, TCP, [4000, 53]));
    let mut fragment = incoming(CLOSED, UDP, [4000, 53]);
    fragment[20] = 0x20;
    hear(&mut passt, &mut guest, &fragment);
    answers(&mut guest, CLOSED, [53, 4000], false);
    hear(&mut passt, &mut guest, &incoming(CLOSED, UDP, [4000, 53]));
    answers(&mut guest, CLOSED, [53, 4000], true);
    answers(&mut guest, CLOSED, [53, 4001], false);
    answers(&mut guest, CLOSED, [54, 4000], false);
    answers(&mut guest, [10, 1, 2, 4], [53, 4000], false);
    // Loopback stays closed, and open addresses take no place.
    hear(
        &mut passt,
        &mut guest,
        &incoming([127, 0, 0, 1], UDP, [4000, 53]),
    );
    answers(&mut guest, [127, 0, 0, 1], [53, 4000], false);
    // The last senders are known, and one that sends again is one of them.
    for port in 1..=200 {
        hear(&mut passt, &mut guest, &incoming(OPEN, UDP, [port, 53]));
    }
    answers(&mut guest, CLOSED, [53, 4000], true);
}

#[test]
fn as_many_senders_are_known_as_the_last_ones() {
    let gate = Gate::new(guard());
    let answers = |port| gate.passes(&packet(CLOSED, UDP, [53, port], 0, 0));
    for port in 1..=256 {
        gate.note(&incoming(CLOSED, UDP, [port, 53]));
    }
    gate.note(&incoming(CLOSED, UDP, [1, 53]));
    gate.note(&incoming(CLOSED, UDP, [1, 53]));
    gate.note(&incoming(CLOSED, UDP, [257, 53]));
    assert!(answers(1) && !answers(2) && answers(3) && answers(256) && answers(257));
    for short in [0, 13, 14, 20, 33, 34, 37] {
        gate.note(&incoming(CLOSED, UDP, [9000, 53])[..short]);
    }
    assert!(!answers(9000));
}

#[test]
fn the_host_itself_is_never_reached() {
    let (mut guest, host) = guarded();
    for to in [
        [127, 0, 0, 1],
        [127, 255, 255, 255],
        [0, 0, 0, 0],
        [0, 1, 2, 3],
        [224, 0, 0, 251],
        [240, 0, 0, 1],
        [255, 255, 255, 255],
    ] {
        for (protocol, flags) in [(TCP, SYN), (TCP, SYN | ACK), (UDP, 0), (1, 0)] {
            let bytes = packet(to, protocol, [80, 53], flags, 0);
            expect(&mut guest, &host, &bytes, false);
        }
    }
    let bytes = packet([128, 0, 0, 1], TCP, [1, 2], SYN, 0);
    expect(&mut guest, &host, &bytes, true);
    let bytes = packet([223, 255, 255, 255], TCP, [1, 2], SYN, 0);
    expect(&mut guest, &host, &bytes, true);
}

#[test]
fn only_arp_and_whole_ipv4_headers_pass() {
    let (mut guest, host) = guarded();
    let with = |at: usize, bytes: &[u8]| {
        let mut packet = packet(OPEN, TCP, [80, 443], SYN, 0);
        packet[at..at + bytes.len()].copy_from_slice(bytes);
        packet
    };
    expect(&mut guest, &host, &with(12, &[0x08, 0x06]), true);
    // IPv6, a VLAN, a length.
    for kind in [[0x86, 0xdd], [0x81, 0x00], [0x00, 0x40]] {
        expect(&mut guest, &host, &with(12, &kind), false);
    }
    // Another version, a header that is too short.
    for first in [0x65, 0x44, 0x00] {
        expect(&mut guest, &host, &with(14, &[first]), false);
    }
    for length in [14, 15, 33] {
        expect(&mut guest, &host, &with(0, &[])[..length], false);
    }
    expect(&mut guest, &host, &with(0, &[])[..34], true);
    // Without ports, or in fragments, a packet to a closed address is no answer.
    let answer = packet(CLOSED, TCP, [80, 4000], ACK, 0);
    for length in [34, 37, 47] {
        expect(&mut guest, &host, &answer[..length], false);
    }
    expect(&mut guest, &host, &answer[..48], true);
    for fragment in [[0x20, 0], [0, 1], [0x1f, 0xff]] {
        let mut part = answer.clone();
        part[20..22].copy_from_slice(&fragment);
        expect(&mut guest, &host, &part, false);
    }
}

/// The guest changes an address after it was checked: what was checked is sent.
#[test]
fn checked_headers_are_sent_from_a_copy() {
    let (mut guest, host) = guarded();
    let memory = guest.memory.clone();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let changes = std::thread::spawn(move || {
        let both = [OPEN, CLOSED].map(|to| with_header(&packet(to, TCP, [80, 443], SYN, 0)));
        while !stopped.load(Ordering::Relaxed) {
            for bytes in &both {
                memory.write_slice(bytes, GuestAddress(SEND)).unwrap();
            }
        }
    });
    let length = with_header(&packet(OPEN, TCP, [80, 443], SYN, 0)).len() as u32;
    let (mut sent, mut rounds) = (0, 0);
    while rounds < 5000 || sent == 0 {
        guest.queues[1].add(&[Buffer::readable(SEND, length)]);
        guest.device.ring(1);
        guest.queues[1].wait_used();
        rounds += 1;
        if guest.device.device.totals().sent_frames > sent {
            sent += 1;
            assert_eq!(received_by(&host)[12 + 30..12 + 34], OPEN);
        }
    }
    stop.store(true, Ordering::Relaxed);
    changes.join().unwrap();
}
