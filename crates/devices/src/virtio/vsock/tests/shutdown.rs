//! Each direction ends independently, and no bytes in flight are lost.

use super::super::packet::{Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::{Host, noise, read_ok};
use crate::virtio::testing::TIMEOUT;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::Duration;

#[test]
fn the_guest_ends_its_half_and_continues_reading() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    guest.push((7, 1), b"question");
    guest.send_op((7, 1), Op::Shutdown, SHUTDOWN_SEND);
    let mut question = Vec::new();
    stream.read_to_end(&mut question).unwrap();
    assert_eq!(question, b"question");
    let answer = noise(1, 300_000);
    let sent = answer.clone();
    let writer = thread::spawn(move || {
        stream.write_all(&sent).unwrap();
    });
    let mut received = Vec::new();
    guest.until("the answer, then the end", |guest| {
        received.extend(guest.read((7, 1)));
        guest.socket((7, 1)).shutdown & SHUTDOWN_SEND != 0 && guest.socket((7, 1)).inbox.is_empty()
    });
    writer.join().unwrap();
    assert!(received == answer);
    assert!(!guest.socket((7, 1)).reset);
    guest.close((7, 1));
    assert_eq!(guest.device.connection_count(), 0);
}

#[test]
fn a_program_ends_its_half_and_continues_reading() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut program = host.call(80);
    let ports = guest.accept(80);
    read_ok(&mut program);
    program.write_all(b"question").unwrap();
    program.shutdown(Shutdown::Write).unwrap();
    guest.until("the end of the question", |guest| {
        guest.socket(ports).shutdown == SHUTDOWN_SEND
    });
    assert_eq!(guest.read(ports), b"question");
    let answer = noise(1, 300_000);
    let expected = answer.clone();
    let reader = thread::spawn(move || {
        let mut received = Vec::new();
        program.read_to_end(&mut received).unwrap();
        received
    });
    let mut sent = 0;
    guest.until("all sent", |guest| {
        sent += guest.push_some(ports, &answer[sent..]);
        sent == answer.len()
    });
    guest.close(ports);
    assert!(reader.join().unwrap() == expected);
}

#[test]
fn a_programs_close_is_announced_after_all_its_data() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    stream.write_all(b"last words").unwrap();
    drop(stream);
    guest.until("both ends", |guest| {
        guest.socket((7, 1)).shutdown == SHUTDOWN_RECEIVE | SHUTDOWN_SEND
    });
    assert_eq!(guest.read((7, 1)), b"last words");
    // Linux answers with RST once its program has read everything.
    assert!(!guest.socket((7, 1)).reset, "a RST would lose unread bytes");
    guest.send_op((7, 1), Op::Rst, 0);
    guest.until("gone", |guest| guest.device.connection_count() == 0);
}

#[test]
fn ports_of_a_closed_program_are_reusable_before_the_guest_closes() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let listener = host.listen(7);
    guest.connect((7, 1));
    drop(listener.accept().unwrap());
    guest.until("both ends", |guest| guest.socket((7, 1)).shutdown == 3);
    guest.sockets.clear();
    guest.connect((7, 1));
    guest.push((7, 1), b"again");
    let mut bytes = [0; 5];
    listener.accept().unwrap().0.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"again");
    assert_eq!(guest.device.connection_count(), 1);
}

#[test]
fn a_guest_may_write_to_a_program_that_has_closed() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let stream = host.guest_to_host(&mut guest, (7, 1));
    drop(stream);
    let bytes = noise(1, 60_000);
    for _ in 0..20 {
        guest.until("credit", |guest| guest.push_some((7, 1), &bytes) > 0);
    }
    guest.until("a shutdown", |guest| {
        guest.socket((7, 1)).shutdown & SHUTDOWN_RECEIVE != 0
    });
    guest.close((7, 1));
    assert_eq!(guest.device.connection_count(), 0);
}

#[test]
fn a_guests_receive_shutdown_breaks_the_programs_pipe() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    guest.send_op((7, 1), Op::Shutdown, SHUTDOWN_RECEIVE);
    let error = loop {
        match stream.write_all(&[1; 1000]) {
            Ok(()) => thread::sleep(Duration::from_millis(1)),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    guest.push((7, 1), b"still speaking");
    let mut bytes = [0; 14];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"still speaking");
}

#[test]
fn a_guest_may_close_at_once_after_writing_to_a_slow_program() {
    // Closed, or ended with a RST.
    for abrupt in [false, true] {
        let host = Host::new();
        let mut guest = host.guest().start();
        let mut stream = host.guest_to_host(&mut guest, (7, 1));
        let out = noise(5, 300_000);
        let mut sent = 0;
        guest.until("sent", |guest| {
            sent += guest.push_some((7, 1), &out[sent..]);
            sent == out.len()
        });
        match abrupt {
            false => guest.close((7, 1)),
            true => guest.send_op((7, 1), Op::Rst, 0),
        }
        // The ports are free at once, although the program has not read yet.
        guest.until("free", |guest| guest.device.connection_count() == 1);
        guest.sockets.clear();
        let _listener = std::fs::remove_file(host.folder.path().join("v_7"));
        let _second = host.guest_to_host(&mut guest, (7, 1));
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        assert!(received == out);
        guest.until("drained", |guest| guest.device.connection_count() == 1);
    }
}

#[test]
fn ending_the_device_waits_until_the_guests_data_is_read() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    let out = noise(5, 300_000);
    let mut sent = 0;
    guest.until("sent", |guest| {
        sent += guest.push_some((7, 1), &out[sent..]);
        sent == out.len()
    });
    let reader = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        received
    });
    // The VM ends at once.
    guest.device.linger_for(TIMEOUT);
    drop(guest);
    assert!(reader.join().unwrap() == out);
}

#[test]
fn data_sent_before_a_stop_is_delivered() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    for round in 0..200u32 {
        guest.push((7, 1), &round.to_le_bytes());
        let queues = guest.pause();
        let mut bytes = [0; 4];
        stream.read_exact(&mut bytes).unwrap();
        assert_eq!(u32::from_le_bytes(bytes), round);
        guest.activate(queues);
    }
}
