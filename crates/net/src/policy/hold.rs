//! Sockets that reserve published ports, so that no other program of the host can bind them.
//!
//! Packets to such a port are translated to the VM's address before they reach any socket. Without
//! a reservation the port might already belong to another program, or be bound by one later, and
//! that program would receive nothing.

use super::publish::Publish;
use super::target::Protocol;
use crate::Error;
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};

/// Ports that are reserved until this is dropped.
#[derive(Debug, Default)]
pub struct Held {
    _tcp: Vec<TcpListener>,
    _udp: Vec<UdpSocket>,
}

impl Held {
    /// Reserves all of these ports, or none.
    pub fn all(ports: &[Publish]) -> Result<Held, Error> {
        let mut held = Held::default();
        for port in ports {
            for (host, _) in port.pairs() {
                let at = SocketAddr::new(port.address, host);
                let bound = match port.protocol {
                    Protocol::Tcp => TcpListener::bind(at).map(|it| held._tcp.push(it)),
                    Protocol::Udp => UdpSocket::bind(at).map(|it| held._udp.push(it)),
                };
                bound
                    .map_err(|error| Error::Port(format!("{at}/{}", port.protocol), why(&error)))?;
            }
        }
        Ok(held)
    }
}

fn why(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "another program of this host has it",
        io::ErrorKind::AddrNotAvailable => "the host does not have that address",
        io::ErrorKind::PermissionDenied => {
            "ports below net.ipv4.ip_unprivileged_port_start are root's"
        }
        _ => "the kernel refuses it",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_one_vms_until_it_is_let_go() {
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("an address").port();
        let publish: Publish = format!("{port}:80").parse().expect("a port");
        let refused = Held::all(&[publish]).expect_err("taken");
        assert!(refused.to_string().contains("another program"), "{refused}");
        drop(free);
        let held = Held::all(&[publish]).expect("free");
        assert!(Held::all(&[publish]).is_err());
        drop(held);
        Held::all(&[publish]).expect("free again");
        let elsewhere: Publish = "192.0.2.1:8080:80/udp".parse().expect("a port");
        let refused = Held::all(&[elsewhere]).expect_err("no such address");
        assert!(refused.to_string().contains("192.0.2.1:8080/udp"));
    }
}
