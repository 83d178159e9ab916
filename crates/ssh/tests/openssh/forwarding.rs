//! Ports and sockets in the VM.

use crate::harness::{TIMEOUT, wait_until};
use crate::node::{Node, bytes};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;

/// An unused port of this host. It is below those that the kernel gives to listeners of other tests
/// until ssh listens.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 20_000 + (std::process::id() as u16).wrapping_add(number) % 10_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// `ssh -N` with these forwardings.
fn forwarding(node: &Node, forwards: &[String]) -> Child {
    let mut ssh = node.openssh("ssh");
    ssh.args(["-N", "-oExitOnForwardFailure=yes"]);
    for forward in forwards {
        ssh.args(["-L", forward]);
    }
    ssh.arg("web.jiffy").stderr(Stdio::null()).spawn().unwrap()
}

/// Echoes all input of a connection after the end of the input.
fn echo(mut stream: impl Read + Write) {
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    stream.write_all(&all).unwrap();
}

#[test]
fn a_forwarded_port_serves_many_connections_at_once() {
    let node = Node::start();
    let service = TcpListener::bind("127.0.0.1:0").unwrap();
    let there = service.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in service.incoming() {
            thread::spawn(move || echo(stream.unwrap()));
        }
    });
    let (here, closed_here, closed) = (free_port(), free_port(), free_port());
    let mut ssh = forwarding(
        &node,
        &[
            format!("127.0.0.1:{here}:localhost:{there}"),
            format!("127.0.0.1:{closed_here}:127.0.0.1:{closed}"),
        ],
    );
    let open = |port| {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream
    };
    wait_until("ssh listens", || {
        TcpStream::connect(("127.0.0.1", here)).is_ok()
    });
    let clients: Vec<_> = (0..8)
        .map(|number| {
            let mut stream = open(here);
            thread::spawn(move || {
                let sent = bytes(300_000 * number);
                stream.write_all(&sent).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
                let mut got = Vec::new();
                stream.read_to_end(&mut got).unwrap();
                assert!(got == sent, "{} of {} bytes", got.len(), sent.len());
            })
        })
        .collect();
    for client in clients {
        client.join().unwrap();
    }
    // A connection to a port without a listener is closed; the SSH connection stays.
    let mut nobody = Vec::new();
    assert_eq!(open(closed_here).read_to_end(&mut nobody).unwrap_or(0), 0);
    let mut again = open(here);
    again.write_all(b"still there").unwrap();
    again.shutdown(Shutdown::Write).unwrap();
    let mut got = String::new();
    again.read_to_string(&mut got).unwrap();
    assert_eq!(got, "still there");
    ssh.kill().unwrap();
    ssh.wait().unwrap();
    wait_until("all connections have ended", || {
        node.guest_processes().is_empty()
    });
}

#[test]
fn a_unix_socket_of_the_vm_is_forwarded() {
    let node = Node::start();
    let service = UnixListener::bind(node.path("service")).unwrap();
    thread::spawn(move || echo(service.accept().unwrap().0));
    let here = node.text("here");
    let mut ssh = forwarding(&node, &[format!("{here}:{}", node.text("service"))]);
    // The socket's file exists before ssh listens.
    let mut connected = None;
    wait_until("ssh listens", || {
        connected = UnixStream::connect(&here).ok();
        connected.is_some()
    });
    let mut stream = connected.unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(b"hello").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut got = String::new();
    stream.read_to_string(&mut got).unwrap();
    assert_eq!(got, "hello");
    ssh.kill().unwrap();
    ssh.wait().unwrap();
}
