//! Slow readers block the writers of their own connections, and no others.

use super::super::BUFFER;
use super::super::packet::Op;
use super::super::testing::Guest;
use super::{Host, noise, read_ok};
use crate::virtio::testing::TIMEOUT;
use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

/// Sends until the device holds all that it may for a program that does not read; returns how many
/// bytes were sent.
fn push_until_blocked(guest: &mut Guest, ports: (u32, u32), out: &[u8]) -> usize {
    let mut sent = 0;
    guest.until("stuck", |guest| {
        sent += guest.push_some(ports, &out[sent..]);
        guest.device.held_bytes() == BUFFER as usize && guest.socket(ports).credit() == 0
    });
    sent
}

#[test]
fn a_program_that_stops_reading_blocks_only_its_own_connection() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut stuck = host.guest_to_host(&mut guest, (7, 1));
    let mut other = host.guest_to_host(&mut guest, (8, 1));
    let out = noise(1, 4 << 20);
    let mut sent = push_until_blocked(&mut guest, (7, 1), &out);
    // The host's kernel buffers some bytes of a Unix socket, the device the rest.
    assert_eq!(guest.device.held_bytes(), BUFFER as usize);
    assert!(sent < out.len() / 2, "{sent}");
    assert_eq!(guest.socket((7, 1)).credit(), 0);

    // The other connection is served meanwhile.
    guest.push((8, 1), b"still here");
    let mut bytes = [0; 10];
    other.read_exact(&mut bytes).unwrap();

    let length = out.len();
    let reader = thread::spawn(move || {
        let mut received = vec![0; length];
        stuck.read_exact(&mut received).unwrap();
        (received, stuck)
    });
    guest.until("the rest", |guest| {
        sent += guest.push_some((7, 1), &out[sent..]);
        sent == out.len()
    });
    let (received, _stuck) = reader.join().unwrap();
    assert!(received == out);
    assert_eq!(guest.device.held_bytes(), 0);
}

#[test]
fn a_guest_that_sends_beyond_its_credit_is_cut_off() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    let out = noise(1, 4 << 20);
    let sent = push_until_blocked(&mut guest, (7, 1), &out);
    guest.push((7, 1), &out[sent..sent + 1]);
    guest.until("RST", |guest| guest.socket((7, 1)).reset);
    // Bytes within the credit are delivered.
    let mut received = Vec::new();
    stream.read_to_end(&mut received).unwrap();
    assert!(received == out[..sent]);
}

#[test]
fn a_guest_that_stops_reading_blocks_its_program() {
    let host = Host::new();
    let mut guest = host.guest();
    guest.window = 50_000;
    let mut guest = guest.start();
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    let out = noise(2, 2 << 20);
    stream.set_nonblocking(true).unwrap();
    let mut sent = 0;
    guest.until("the window and the socket are full", |guest| {
        let before = sent;
        while let Ok(count) = stream.write(&out[sent..]) {
            sent += count;
        }
        sent == before && guest.socket((7, 1)).credit_requests > 0
    });
    assert!(sent < out.len(), "the program was stopped");
    assert_eq!(
        guest.socket((7, 1)).inbox.len(),
        50_000,
        "the window is full"
    );
    assert_eq!(
        guest.socket((7, 1)).credit_requests,
        1,
        "one credit request"
    );

    let mut received = Vec::new();
    guest.until("all of it", |guest| {
        if let Ok(count) = stream.write(&out[sent..]) {
            sent += count;
        }
        received.extend(guest.read((7, 1)));
        received.len() >= out.len()
    });
    assert!(received == out);
}

#[test]
fn all_traffic_waits_while_the_guest_has_no_receive_buffers() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    guest.restocks = false;
    let out = noise(2, 150_000);
    stream.write_all(&out).unwrap();
    // A hostile flood of packets that need answers: at some point the device takes no more.
    guest.until("starved", |guest| {
        guest.socket((7, 1)).inbox.len() > 100_000
    });
    let (mut taken, mut port) = (0, 0);
    let mut since = Instant::now();
    // This many packets are taken even on a slow, busy host.
    while taken < 256 || since.elapsed() < Duration::from_millis(500) {
        assert!(since.elapsed() < TIMEOUT, "{taken}");
        let header = guest.header((9, port), Op::CreditUpdate);
        if guest.try_send(header) {
            (taken, port) = (taken + 1, port + 1);
            since = Instant::now();
        }
    }
    assert!((256..256 + 200).contains(&taken), "{taken}");
    guest.restock();
    let mut received = Vec::new();
    guest.until("all of it", |guest| {
        received.extend(guest.read((7, 1)));
        received.len() >= out.len()
    });
    assert!(received == out);
    guest.until("an answer to each", |guest| {
        (0..taken).count() <= guest.seen.iter().filter(|h| h.src_port == 9).count()
    });
}

#[test]
fn a_bulk_sender_does_not_starve_the_others() {
    let host = Host::new();
    let mut guest = host.guest();
    guest.window = 16 << 20;
    let mut guest = guest.start_by_hand();
    let bulk_listener = host.listen(7);
    guest.send_op((7, 1), Op::Request, 0);
    guest.settle();
    let (mut bulk, _) = bulk_listener.accept().unwrap();
    let mut small = host.call(80);
    guest.settle();
    let ports = guest.accept(80);
    guest.settle();
    read_ok(&mut small);

    // The bulk connection has more waiting bytes than fit into all receive buffers.
    bulk.set_nonblocking(true).unwrap();
    let mut filled = 0;
    while let Ok(count) = bulk.write(&[7; 65536]) {
        filled += count;
    }
    assert!(filled > 3 * 4096, "{filled}");
    small.write_all(b"!").unwrap();
    guest.seen.clear();
    guest.settle();
    let first = guest
        .seen
        .iter()
        .position(|header| header.src_port == ports.0);
    assert!(first.unwrap() <= 1, "{first:?}");
}

#[test]
fn the_driver_is_interrupted_when_it_asked_for_it() {
    let host = Host::new();
    let mut guest = host.guest().start_by_hand();
    let _listener = host.listen(7);
    guest.settle();
    // `used_event` 0 asks for an interrupt after the first buffer. It stays at 0, so there is no
    // other.
    guest.send_op((7, 1), Op::Request, 0);
    guest.settle();
    assert!(guest.socket((7, 1)).accepted);
    let after_first = guest.interrupt.counts().used_buffers;
    assert!(after_first >= 1);
    guest.send_op((7, 2), Op::Request, 0);
    guest.settle();
    assert!(guest.socket((7, 2)).accepted);
    assert_eq!(guest.interrupt.counts().used_buffers, after_first);
}
