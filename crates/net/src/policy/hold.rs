//! Sockets that keep published ports from other programs of the host.
//!
//! What comes to such a port goes to its VM before any socket hears of it. Without a socket the
//! port could be another program's already, or become one's, which would then hear nothing.

use super::publish::Publish;
use super::target::Protocol;
use crate::Error;
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};

/// Ports that are held for as long as this lives.
#[derive(Debug, Default)]
pub struct Held {
    _tcp: Vec<TcpListener>,
    _udp: Vec<UdpSocket>,
}

impl Held {
    /// Holds all of these, or none.
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
