//! Pauses and driver resets.

use super::super::Vsock;
use super::super::packet::Op;
use super::super::testing::{EVENT_IDX, Guest};
use super::{Host, noise, read_ok};
use std::io::{Read, Write};
use std::thread;
use std::time::Duration;

#[test]
fn connections_survive_pauses_without_lost_or_repeated_bytes() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let stream = host.guest_to_host(&mut guest, (7, 1));
    let (up, down) = (noise(1, 3 << 20), noise(2, 3 << 20));
    let (sent_down, length) = (down.clone(), up.len());
    let mut writer = stream.try_clone().unwrap();
    let sender = thread::spawn(move || writer.write_all(&sent_down).unwrap());
    let reader = thread::spawn(move || {
        let mut received = vec![0; length];
        { stream }.read_exact(&mut received).unwrap();
        received
    });
    let (mut sent, mut received, mut pauses) = (0, Vec::new(), 0);
    guest.until("all bytes both ways", |guest| {
        sent += guest.push_some((7, 1), &up[sent..]);
        received.extend(guest.read((7, 1)));
        if received.len() / 30_000 > pauses {
            pauses += 1;
            let queues = guest.pause();
            guest.activate(queues);
        }
        sent == up.len() && received.len() >= down.len()
    });
    assert!(pauses > 10, "{pauses}");
    assert!(received == down, "host to guest");
    sender.join().unwrap();
    assert!(reader.join().unwrap() == up, "guest to host");
}

#[test]
fn a_program_may_connect_during_a_pause() {
    let host = Host::new();
    let mut guest = host.guest().start();
    guest.until("idle", |_| true);
    let queues = guest.pause();
    let mut program = host.call(80);
    program.write_all(b"early").unwrap();
    thread::sleep(Duration::from_millis(20));
    guest.activate(queues);
    let ports = guest.accept(80);
    read_ok(&mut program);
    guest.until("early", |guest| guest.socket(ports).inbox == *b"early");
}

#[test]
fn a_driver_reset_drops_all_connections() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    guest.reset_driver();
    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
    assert_eq!(guest.device.connection_count(), 0);
    std::fs::remove_file(host.folder.path().join("v_7")).unwrap();
    let _again = host.guest_to_host(&mut guest, (7, 1));
    assert!(guest.events.is_empty());
}

#[test]
fn unsent_packets_survive_a_pause() {
    let host = Host::new();
    let mut guest = Guest::new(Vsock::new(host.args()).unwrap(), EVENT_IDX).start();
    guest.restocks = false;
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    stream.write_all(&noise(1, 300_000)).ok();
    let queues = guest.pause();
    guest.activate(queues);
    guest.send_op((9, 9), Op::CreditUpdate, 0);
    let queues = guest.pause();
    guest.activate(queues);
    guest.restock();
    let mut received = Vec::new();
    guest.until("all of it, and the RST", |guest| {
        received.extend(guest.read((7, 1)));
        received.len() >= 300_000 && guest.socket((9, 9)).reset
    });
    assert!(received == noise(1, 300_000));
}
