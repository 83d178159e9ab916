//! Connections to host programs that are asked for on a channel, because the process that the device
//! runs in may not connect by name.

use super::super::CONNECTION_LIMIT;
use super::super::packet::Op;
use super::super::testing::Guest;
use super::Host;
use crate::virtio::testing::TIMEOUT;
use jiffy_sys::dial::{REQUEST, answer, channel_of};
use jiffy_sys::handed;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Hands over a channel; returns its other end.
fn hand_channel(host: &Host) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    handed::replace(channel_of(&host.path()), ours.into());
    theirs
}

/// A guest whose device waits for answers as long as this test takes to give them.
fn patient(host: &Host) -> Guest {
    let guest = host.guest();
    guest.device.dial_for(TIMEOUT);
    guest.start()
}

fn port_asked_for(channel: &mut UnixStream) -> u32 {
    let mut request = [0; REQUEST];
    channel.read_exact(&mut request).unwrap();
    u32::from_le_bytes(request)
}

/// A program's end, and the end that the device gets.
fn program() -> (UnixStream, io::Result<UnixStream>) {
    let (program, devices) = UnixStream::pair().unwrap();
    devices.set_nonblocking(true).unwrap();
    (program, Ok(devices))
}

fn is_reset(guest: &mut Guest, ports: (u32, u32)) {
    guest.until("RST", |guest| guest.socket(ports).reset);
    assert!(!guest.socket(ports).accepted);
}

#[test]
fn a_guest_reaches_programs_by_asking_for_connections() {
    let host = Host::new();
    let mut channel = hand_channel(&host);
    // It would be reached by name.
    let listener = host.listen(1);
    let mut guest = patient(&host);
    guest.send_op((1, 77), Op::Request, 0);
    assert_eq!(port_asked_for(&mut channel), 1);
    answer(&channel, &Err(ErrorKind::NotFound.into())).unwrap();
    is_reset(&mut guest, (1, 77));
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err());

    guest.send_op((9, 78), Op::Request, 0);
    assert_eq!(port_asked_for(&mut channel), 9);
    answer(&channel, &Err(ErrorKind::WouldBlock.into())).unwrap();
    assert_eq!(port_asked_for(&mut channel), 9, "the program was busy");
    let (mut program, devices) = program();
    answer(&channel, &devices).unwrap();
    drop(devices);
    guest.until("RESPONSE", |guest| guest.socket((9, 78)).accepted);
    guest.push((9, 78), b"hello");
    let mut bytes = [0; 5];
    program.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    program.write_all(b"back").unwrap();
    guest.until("back", |guest| guest.socket((9, 78)).inbox == *b"back");
}

#[test]
fn without_a_channel_requests_are_refused_until_there_is_another() {
    let host = Host::new();
    let mut channel = hand_channel(&host);
    let mut guest = patient(&host);
    guest.send_op((1, 77), Op::Request, 0);
    port_asked_for(&mut channel);
    drop(channel);
    is_reset(&mut guest, (1, 77));
    guest.send_op((1, 78), Op::Request, 0);
    is_reset(&mut guest, (1, 78));

    let mut channel = hand_channel(&host);
    guest.send_op((1, 79), Op::Request, 0);
    port_asked_for(&mut channel);
    let (_program, devices) = program();
    answer(&channel, &devices).unwrap();
    guest.until("RESPONSE", |guest| guest.socket((1, 79)).accepted);
    // An answer that nobody asked for is ignored; one that makes no sense ends the channel.
    answer(&channel, &devices).unwrap();
    channel.write_all(&[0xff]).unwrap();
    let mut end = [0; 1];
    assert_eq!(channel.read(&mut end).unwrap(), 0);
    assert_eq!(guest.device.connection_count(), 1);
}

#[test]
fn a_connection_that_came_ahead_is_used_once_and_not_after_its_end() {
    let host = Host::new();
    let mut channel = hand_channel(&host);
    let ahead = || {
        let (program, devices) = program();
        let mut name = host.path().into_os_string();
        name.push("_1024");
        handed::replace(name.into(), devices.unwrap().into());
        program
    };
    let mut program = ahead();
    let mut guest = patient(&host);
    guest.connect((1024, 77));
    guest.push((1024, 77), b"x");
    program.read_exact(&mut [0]).unwrap();
    drop(ahead());
    for port in [78, 79] {
        guest.send_op((1024, port), Op::Request, 0);
        assert_eq!(port_asked_for(&mut channel), 1024);
    }
}

#[test]
fn a_guest_that_floods_asks_for_a_bounded_number_of_connections() {
    let host = Host::new();
    let mut channel = hand_channel(&host);
    let mut guest = patient(&host);
    for port in 0..2 * CONNECTION_LIMIT as u32 {
        guest.send_op((1, port), Op::Request, 0);
        guest.send_op((1, port), Op::Rst, 0);
    }
    guest.send_op((2, 0), Op::Request, 0);
    // It gets its turn, however long the device takes for those before it.
    channel.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut others = 0;
    while port_asked_for(&mut channel) != 2 {
        others += 1;
    }
    // Its socket takes fewer, in any case.
    assert!((25..CONNECTION_LIMIT).contains(&others), "{others}");
    // What was given up is not connected.
    for _ in 0..others {
        answer(&channel, &program().1).unwrap();
    }
    let (_program, devices) = program();
    answer(&channel, &devices).unwrap();
    guest.until("RESPONSE", |guest| guest.socket((2, 0)).accepted);
    assert_eq!(guest.device.connection_count(), 1);
}

#[test]
fn a_request_that_is_not_answered_is_refused_before_linux_gives_up() {
    let host = Host::new();
    let mut channel = hand_channel(&host);
    let mut guest = host.guest().start();
    let begun = Instant::now();
    guest.send_op((1, 77), Op::Request, 0);
    port_asked_for(&mut channel);
    is_reset(&mut guest, (1, 77));
    assert!(begun.elapsed() >= Duration::from_secs(1));
    let (mut program, devices) = program();
    answer(&channel, &devices).unwrap();
    drop(devices);
    assert_eq!(program.read(&mut [0]).unwrap(), 0, "it came too late");
}
