//! Connections that are accepted or refused.

use super::super::packet::{Header, Op};
use super::super::testing::Guest;
use super::super::{CONNECTION_LIMIT, Vsock};
use super::{Host, read_ok};
use crate::virtio::device::VirtioDevice;
use crate::virtio::testing::TIMEOUT;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

#[test]
fn a_guest_connects_to_the_program_on_a_port() {
    let host = Host::new();
    let listener = host.listen(1024);
    let mut guest = host.guest().start();
    guest.connect((1024, 5000));
    let (mut program, _) = listener.accept().unwrap();
    guest.push((1024, 5000), b"hello");
    let mut bytes = [0; 5];
    program.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    program.write_all(b"and back").unwrap();
    let mut answer = Vec::new();
    guest.until("the answer", |guest| {
        answer.extend(guest.read((1024, 5000)));
        answer.len() == 8
    });
    assert_eq!(answer, b"and back");
}

#[test]
fn a_connection_to_a_port_without_a_program_is_refused() {
    let host = Host::new();
    // A file that is not a socket, a socket without a listener, and no file.
    std::fs::write(host.folder.path().join("v_1"), b"").unwrap();
    drop(host.listen(2));
    let mut guest = host.guest().start();
    for port in [1, 2, 3, 0, u32::MAX] {
        guest.send_op((port, 77), Op::Request, 0);
        guest.until("RST", |guest| guest.socket((port, 77)).reset);
        assert!(!guest.socket((port, 77)).accepted);
    }
    assert_eq!(guest.device.connection_count(), 0);
}

#[test]
fn a_program_connects_to_a_guest_port() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut program = host.call(80);
    let ports = guest.accept(80);
    assert_eq!(read_ok(&mut program), ports.0);
    program.write_all(b"ping").unwrap();
    guest.until("ping", |guest| guest.socket(ports).inbox == *b"ping");
    guest.push(ports, b"pong");
    let mut bytes = [0; 4];
    program.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"pong");
}

#[test]
fn a_program_that_the_guest_refuses_finds_its_socket_closed() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut program = host.call(80);
    guest.until("REQUEST", |guest| !guest.requests.is_empty());
    let ports = guest.requests[0];
    guest.send_op(ports, Op::Rst, 0);
    assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
    assert_eq!(guest.device.connection_count(), 0);
}

#[test]
fn bytes_right_after_the_connect_line_are_not_lost() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut program = UnixStream::connect(host.path()).unwrap();
    program.write_all(b"CONN").unwrap();
    std::thread::sleep(Duration::from_millis(20));
    program.write_all(b"ECT 80\nGET / HTTP/1.0\n").unwrap();
    let ports = guest.accept(80);
    read_ok(&mut program);
    guest.until("the early bytes", |guest| {
        guest.socket(ports).inbox == *b"GET / HTTP/1.0\n"
    });
}

#[test]
fn data_of_a_program_that_closes_at_once_is_delivered() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut program = host.call(80);
    program.write_all(b"fire and forget").unwrap();
    drop(program);
    let ports = guest.accept(80);
    guest.until("bytes, then the end", |guest| {
        guest.socket(ports).shutdown == 3
    });
    assert_eq!(guest.socket(ports).inbox, *b"fire and forget");
}

#[test]
fn a_program_may_connect_before_the_driver_is_ready() {
    let host = Host::new();
    let guest = host.guest();
    let mut early: Vec<UnixStream> = (0..20).map(|_| host.call(9)).collect();
    let mut guest = guest.start();
    for _ in 0..20 {
        guest.accept(9);
    }
    for program in &mut early {
        read_ok(program);
    }
}

#[test]
fn an_invalid_connect_line_closes_only_its_socket() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut waiting = UnixStream::connect(host.path()).unwrap();
    for nonsense in [
        &b"GET / HTTP/1.0\n\n"[..],
        b"CONNECT\n",
        b"CONNECT x\n",
        b"CONNECT 99999999999\n",
        &[b'C'; 64],
        b"CONNECT 0000000000000000000000000000000001\n",
        &[0; 32],
    ] {
        let mut program = UnixStream::connect(host.path()).unwrap();
        program.write_all(nonsense).unwrap();
        match program.read(&mut [0; 8]) {
            Ok(0) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            other => panic!("{other:?} after {nonsense:?}"),
        }
    }
    // A program that ends in the middle of its line.
    let mut half = UnixStream::connect(host.path()).unwrap();
    half.write_all(b"CONNECT 8").unwrap();
    drop(half);
    waiting.write_all(b"CONNECT 80\n").unwrap();
    guest.accept(80);
    read_ok(&mut waiting);
    assert_eq!(guest.device.connection_count(), 1);
}

#[test]
fn packets_of_unknown_connections_are_answered_with_rst() {
    let host = Host::new();
    let mut guest = host.guest().start();
    for (index, op) in [
        Op::Response,
        Op::Shutdown,
        Op::Rw,
        Op::CreditUpdate,
        Op::CreditRequest,
    ]
    .into_iter()
    .enumerate()
    {
        let ports = (1 << 30, index as u32);
        guest.send_op(ports, op, 0);
        guest.until("RST", |guest| guest.socket(ports).reset);
    }
    // A RST is not answered with RST, because two peers could continue forever.
    let before = guest.seen.len();
    guest.send_op((5, 5), Op::Rst, 0);
    guest.send_op((6, 6), Op::CreditUpdate, 0);
    guest.until("RST", |guest| guest.socket((6, 6)).reset);
    assert_eq!(guest.seen.len(), before + 1);
}

#[test]
fn an_rst_repeats_the_refused_cid_and_socket_type() {
    let host = Host::new();
    let _program = host.listen(7);
    let mut guest = host.guest().start();
    for (cid, kind) in [(4, 1), (u64::MAX, 1), (0, 1), (2, 2), (2, 0), (2, 77)] {
        let ports = (7, 1000 + u32::from(kind));
        let header = Header {
            dst_cid: cid,
            kind,
            ..guest.header(ports, Op::Request)
        };
        guest.send(header, &[]);
        guest.until("RST", |guest| guest.socket(ports).reset);
        let answer = guest.seen.last().unwrap();
        assert_eq!((answer.src_cid, answer.kind), (cid, kind));
        guest.sockets.clear();
    }
    // An unknown operation ends the connection that it names.
    guest.connect((7, 1));
    let header = Header {
        op: 99,
        ..guest.header((7, 1), Op::Rw)
    };
    guest.send(header, &[]);
    guest.until("RST", |guest| guest.socket((7, 1)).reset);
    assert_eq!(guest.device.connection_count(), 0);
}

#[test]
fn a_second_request_for_the_same_ports_ends_the_first() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut program = host.guest_to_host(&mut guest, (7, 1));
    guest.send_op((7, 1), Op::Request, 0);
    guest.until("RST", |guest| guest.socket((7, 1)).reset);
    assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn a_connection_waits_while_the_backlog_is_full() {
    let host = Host::new();
    let address = rustix::net::SocketAddrUnix::new(host.folder.path().join("v_7")).unwrap();
    let listener = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        None,
    )
    .unwrap();
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let guest = host.guest();
    // This test may accept them slowly.
    guest.device.dial_for(TIMEOUT);
    let mut guest = guest.start();
    for port in 0..10 {
        guest.send_op((7, port), Op::Request, 0);
    }
    let mut accepted = Vec::new();
    for round in 0..10 {
        let open = |guest: &mut Guest| guest.sockets.values().filter(|s| s.accepted).count();
        guest.until("some more", |guest| open(guest) > round);
        accepted.push(rustix::net::accept(&listener).unwrap());
    }
    assert!(guest.sockets.values().all(|s| s.accepted && !s.reset));
}

#[test]
fn connecting_times_out_when_the_program_never_accepts() {
    let host = Host::new();
    let address = rustix::net::SocketAddrUnix::new(host.folder.path().join("v_7")).unwrap();
    let listener = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        None,
    )
    .unwrap();
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let mut guest = host.guest().start();
    for port in 0..4 {
        guest.send_op((7, port), Op::Request, 0);
    }
    guest.until("RST to all that do not fit", |guest| {
        guest.sockets.values().all(|s| s.accepted || s.reset)
    });
    assert!(guest.sockets.values().any(|s| s.reset));
}

#[test]
fn the_connection_limit_holds_for_both_sides_until_one_closes() {
    // Each connection needs two descriptors, both in this process.
    let (soft, hard) = {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        (limit.current, limit.maximum)
    };
    if soft.is_some_and(|soft| soft < 4096) {
        rustix::process::setrlimit(
            rustix::process::Resource::Nofile,
            rustix::process::Rlimit {
                current: Some(hard.unwrap_or(4096).min(4096)),
                maximum: hard,
            },
        )
        .unwrap();
    }
    let host = Host::new();
    let listener = host.listen(7);
    let mut guest = host.guest().start();
    let mut programs = Vec::new();
    for port in 0..CONNECTION_LIMIT as u32 {
        guest.connect((7, port));
        programs.push(listener.accept().unwrap().0);
    }
    guest.send_op((7, 5000), Op::Request, 0);
    guest.until("RST", |guest| guest.socket((7, 5000)).reset);
    let mut refused = UnixStream::connect(host.path()).unwrap();
    // The device may close the socket before the line is sent.
    let _ = refused.write_all(b"CONNECT 80\n");
    assert_eq!(refused.read(&mut [0; 8]).unwrap_or(0), 0);
    assert!(guest.requests.is_empty());

    guest.close((7, 0));
    guest.connect((7, 5001));
    assert_eq!(guest.device.connection_count(), CONNECTION_LIMIT);
}

#[test]
fn the_configuration_space_holds_the_context_id() {
    let host = Host::new();
    let device = Vsock::new(super::VsockArgs {
        cid: 0x1234,
        ..host.args()
    })
    .unwrap();
    let mut bytes = [0xff; 12];
    device.read_config(0, &mut bytes);
    assert_eq!(bytes, [0x34, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    device.read_config(1, &mut bytes[..1]);
    assert_eq!(bytes[0], 0x12);
    device.read_config(u64::MAX, &mut bytes);
    assert_eq!(bytes, [0; 12]);
    assert_eq!(device.device_type(), 19);
    assert_eq!(device.queue_max_sizes().len(), 3);
}
