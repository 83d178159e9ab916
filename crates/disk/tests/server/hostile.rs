//! A hostile monitor harms only its own connection.

use super::client::*;
use jiffy_devices::virtio::testing::Buffer;
use std::io::Write;
use std::os::fd::AsFd;

/// The server still serves.
fn assert_serves(server: &Server) {
    let mut monitor = server.connect();
    monitor.negotiate();
    assert_eq!(monitor.config(0, 8), 64u64.to_le_bytes());
}

#[test]
fn a_connection_with_invalid_messages_is_closed() {
    let server = Server::start(64, &[]);
    let texts: [&[u8]; 5] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &[0; 12],
        &[0xff; 4096],
        // Another version of the protocol.
        &[1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0],
        // Four gigabytes of payload are announced.
        &[1, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
    ];
    for text in texts {
        let mut monitor = server.connect();
        let _ = monitor.stream.write_all(text);
        let _ = monitor.stream.shutdown(std::net::Shutdown::Write);
        monitor.expect_closed();
        assert_serves(&server);
    }
}

#[test]
fn a_silent_monitor_does_not_block_the_server() {
    let server = Server::start(64, &[]);
    let mut silent = server.connect();
    let mut slow = server.connect();
    slow.stream.write_all(&[1, 0, 0]).unwrap();
    // Both are first in the queue, and stay connected.
    assert_serves(&server);
    silent.expect_closed();
    slow.expect_closed();
}

#[test]
fn contradictory_messages_close_the_connection() {
    let server = Server::start(64, &[]);
    let odd: [(u32, Vec<u8>); 7] = [
        (999, vec![]),
        (SET_FEATURES, u64::MAX.to_le_bytes().to_vec()),
        (SET_VRING_NUM, numbers32(&[0, 0xffff])),
        (SET_VRING_NUM, numbers32(&[77, 64])),
        (
            SET_VRING_ADDR,
            numbers64(&[0, u64::MAX, u64::MAX, u64::MAX, 0]),
        ),
        // An invalid region, without a file.
        (SET_MEM_TABLE, {
            let mut table = numbers32(&[1, 0]);
            table.extend(numbers64(&[u64::MAX, u64::MAX, u64::MAX, u64::MAX]));
            table
        }),
        (GET_CONFIG, numbers32(&[u32::MAX, u32::MAX, 0])),
    ];
    for (request, payload) in odd {
        let mut monitor = server.connect();
        monitor.negotiate();
        monitor.send(request, 0, &payload, &[]);
        let _ = monitor.stream.shutdown(std::net::Shutdown::Write);
        monitor.expect_closed();
        assert_serves(&server);
    }
}

#[test]
fn wrapping_memory_regions_are_refused() {
    let server = Server::start(64, &[]);
    let file = tempfile::tempfile().unwrap();
    file.set_len(MEMORY).unwrap();
    for region in [
        [0, MEMORY, u64::MAX - 4096, 0],
        [u64::MAX - 4096, MEMORY, USER, 0],
        [0, u64::MAX, USER, 0],
        [0, MEMORY, USER, u64::MAX - 4095],
        [0, 0, USER, 0],
    ] {
        let mut monitor = server.connect();
        monitor.negotiate();
        let mut table = numbers32(&[1, 0]);
        table.extend(numbers64(&region));
        monitor.send(SET_MEM_TABLE, 0, &table, &[file.as_fd()]);
        let mut rings = numbers32(&[0, 0]);
        rings.extend(numbers64(&[u64::MAX, 4096, USER, 0]));
        let _ = monitor.try_send(SET_VRING_ADDR, 0, &rings, &[]);
        let _ = monitor.stream.shutdown(std::net::Shutdown::Write);
        monitor.expect_closed();
        assert_serves(&server);
    }
}

#[test]
fn truncated_guest_memory_closes_the_connection() {
    let server = Server::start(64, &[]);
    let mut guest = Guest::over(server.connect());
    guest.driver.add(&[Buffer::writable(0x9000, 1)]);
    // Not even the rings exist any more: touching them raises a signal.
    guest.memory_file.set_len(0).unwrap();
    guest.ring();
    guest.monitor.expect_closed();
    assert_serves(&server);
}

#[test]
fn invalid_rings_are_survived() {
    let server = Server::start(64, &[]);
    let mut guest = Guest::over(server.connect());
    // More requests than the ring holds, with buffers outside memory.
    for _ in 0..64 {
        guest
            .driver
            .add(&[Buffer::writable(u64::MAX - 100, u32::MAX)]);
    }
    guest.driver.set_avail_index(0x8000);
    guest.ring();
    drop(guest);
    assert_serves(&server);
}

#[test]
fn a_flooding_monitor_uses_no_memory_and_delays_no_shutdown() {
    let mut server = Server::start(64, &[]);
    let mut guest = Guest::over(server.connect());
    let waiting: Vec<_> = (0..8).map(|_| server.connect()).collect();
    let before = server.memory();
    let stream = guest.monitor.stream.try_clone().unwrap();
    stream.set_nonblocking(true).unwrap();
    // Each request wants an answer.
    let (mut taken, mut idle) = (0, 0);
    while idle < 100 {
        match guest.monitor.try_send(GET_FEATURES, 0, &[], &[]) {
            Ok(()) => (taken, idle) = (taken + 1, 0),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                idle += 1;
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            Err(error) => panic!("{error}"),
        }
        assert!(taken < 1 << 20, "it takes all there is");
        // Its guest notifies as often.
        guest.ring();
    }
    let grown = server.memory().saturating_sub(before);
    assert!(grown < 8 << 20, "{grown} bytes for {taken} requests");
    assert!(server.terminate());
    drop((guest, waiting));
}
