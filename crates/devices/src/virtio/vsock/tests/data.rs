//! Bytes arrive as they were sent: all, once, in order.

use super::super::Vsock;
use super::super::packet::Op;
use super::super::testing::{EVENT_IDX, Guest};
use super::{Host, noise, read_ok};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;

/// Sends and receives on one connection concurrently; returns what was received.
fn exchange(guest: &mut Guest, ports: (u32, u32), out: &[u8], expected: usize) -> Vec<u8> {
    let (mut sent, mut received) = (0, Vec::new());
    guest.until("all bytes both ways", |guest| {
        sent += guest.push_some(ports, &out[sent..]);
        received.extend(guest.read(ports));
        sent == out.len() && received.len() >= expected
    });
    received
}

/// A program that sends `out` while it reads `expected` bytes.
fn program(stream: UnixStream, out: Vec<u8>, expected: usize) -> thread::JoinHandle<Vec<u8>> {
    let mut writer = stream.try_clone().unwrap();
    let sender = thread::spawn(move || writer.write_all(&out).unwrap());
    thread::spawn(move || {
        let mut received = vec![0; expected];
        let mut stream = stream;
        stream.read_exact(&mut received).unwrap();
        sender.join().unwrap();
        received
    })
}

#[test]
fn megabytes_go_both_ways_at_once() {
    for features in [EVENT_IDX, 0] {
        let host = Host::new();
        let mut guest = Guest::new(Vsock::new(host.args()).unwrap(), features).start();
        let stream = host.guest_to_host(&mut guest, (7, 1));
        let (up, down) = (noise(1, 6 << 20), noise(2, 5 << 20));
        let reader = program(stream, down.clone(), up.len());
        let received = exchange(&mut guest, (7, 1), &up, down.len());
        assert!(received == down, "host to guest");
        assert!(reader.join().unwrap() == up, "guest to host");
    }
}

#[test]
fn each_of_150_connections_gets_its_own_bytes() {
    const COUNT: u32 = 150;
    const LENGTH: usize = 100_000;
    let host = Host::new();
    let listener = host.listen(7);
    let mut guest = host.guest().start();
    let mut readers = Vec::new();
    let mut ports = Vec::new();
    for index in 0..COUNT {
        // Every second connection is requested by a program.
        let (stream, made) = if index % 2 == 0 {
            guest.connect((7, index));
            (listener.accept().unwrap().0, (7, index))
        } else {
            let mut stream = host.call(index);
            let made = guest.accept(index);
            assert_eq!(read_ok(&mut stream), made.0);
            (stream, made)
        };
        ports.push(made);
        let out = noise(1000 + u64::from(index), LENGTH);
        readers.push(program(stream, out, LENGTH));
    }
    let out: Vec<Vec<u8>> = (0..COUNT)
        .map(|index| noise(u64::from(index), LENGTH))
        .collect();
    let mut sent = vec![0; ports.len()];
    let mut received = vec![Vec::new(); ports.len()];
    guest.until("all of all", |guest| {
        for (index, ports) in ports.iter().enumerate() {
            sent[index] += guest.push_some(*ports, &out[index][sent[index]..]);
            received[index].extend(guest.read(*ports));
        }
        sent.iter().all(|sent| *sent == LENGTH)
            && received.iter().all(|received| received.len() >= LENGTH)
    });
    for (index, reader) in readers.into_iter().enumerate() {
        assert!(
            reader.join().unwrap() == out[index],
            "guest to host {index}"
        );
        assert!(
            received[index] == noise(1000 + index as u64, LENGTH),
            "host to guest {index}"
        );
    }
}

#[test]
fn payload_sizes_around_packet_limits_pass() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    for length in [0, 1, 43, 44, 45, 4051, 4052, 4053, 4096, 65535, 65536] {
        let bytes = noise(length as u64, length);
        guest.push((7, 1), &bytes);
        let mut received = vec![0; length];
        stream.read_exact(&mut received).unwrap();
        assert!(received == bytes, "{length} to the host");
        stream.write_all(&bytes).unwrap();
        let mut received = Vec::new();
        guest.until("bytes back", |guest| {
            received.extend(guest.read((7, 1)));
            received.len() >= length
        });
        assert!(received == bytes, "{length} to the guest");
    }
}

#[test]
fn a_packet_may_be_split_into_descriptors_anywhere() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    let payload = noise(3, 10_000);
    let mut header = guest.header((7, 1), Op::Rw);
    header.len = payload.len() as u32;
    let mut packet = header.to_bytes().to_vec();
    packet.extend_from_slice(&payload);
    // Bytes of the chain beyond the header's length are not payload.
    packet.extend_from_slice(b"not payload");
    for cuts in [
        vec![44],
        vec![1, 2, 3, 43, 45],
        vec![20, 44, 4140, 8236],
        (1..60).collect(),
        vec![10_044],
        vec![44, 44],
    ] {
        let mut parts = Vec::new();
        let mut from = 0;
        for cut in cuts {
            parts.push(&packet[from..cut]);
            from = cut;
        }
        parts.push(&packet[from..]);
        guest.send_chain(&parts, false);
        let mut received = vec![0; payload.len()];
        stream.read_exact(&mut received).unwrap();
        assert!(received == payload);
    }
}

#[test]
fn ring_indices_wrap() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    let sender = {
        let mut writer = stream.try_clone().unwrap();
        thread::spawn(move || {
            let mut received = vec![0; 8 * 70_000];
            stream.read_exact(&mut received).unwrap();
            writer.write_all(&received).unwrap();
            writer.shutdown(Shutdown::Write).unwrap();
            received
        })
    };
    let out = noise(9, 8 * 70_000);
    for piece in out.chunks(8) {
        // Waits for credit, which comes faster than eight bytes per packet use it.
        while guest.socket((7, 1)).credit() < 8 {
            guest.pump();
        }
        guest.push((7, 1), piece);
    }
    let received = exchange(&mut guest, (7, 1), &[], out.len());
    assert!(received == out);
    assert!(sender.join().unwrap() == out);
}
