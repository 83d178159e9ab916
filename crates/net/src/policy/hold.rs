//! Sockets that reserve published ports, so that no other program of the host can bind them.
//!
//! Packets to such a port are translated to the VM's address before they reach any socket. Without
//! a reservation, another program might already have the port, or bind it later, and would receive
//! nothing. While a VM is hibernated, its ports are not translated, and these sockets accept the
//! connections and receive the datagrams ([`crate::inbound`]).

use super::datagrams::{self, Datagrams};
use super::publish::Publish;
use super::target::Protocol;
use crate::Error;
use jiffy_sys::backlog;
use jiffy_sys::mutex::lock;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

/// Ports that are reserved until this is dropped.
#[derive(Debug, Default)]
pub struct Held {
    tcp: Arc<Listeners>,
    udp: Arc<Datagrams>,
    acceptor: Option<AbortHandle>,
    receiver: Option<AbortHandle>,
}

/// The listening sockets of a VM.
#[derive(Debug, Default)]
pub(crate) struct Listeners(Mutex<Vec<Port>>);

#[derive(Debug)]
struct Port {
    /// The VM's port.
    guest: u16,
    socket: Socket,
}

/// A socket is registered with tokio when connections are to be accepted, which few VMs need.
#[derive(Debug)]
enum Socket {
    Idle(StdListener),
    Accepting(TcpListener),
    /// Registering it failed.
    Lost,
}

/// An accepted connection.
pub(crate) struct Accepted {
    pub(crate) stream: TcpStream,
    pub(crate) from: SocketAddr,
    /// The VM's port.
    pub(crate) guest: u16,
}

impl Held {
    /// Reserves all of these ports, or none.
    ///
    /// # Errors
    ///
    /// If a port is in use or may not be bound: the first such one.
    pub fn all(ports: &[Publish]) -> Result<Held, Error> {
        let mut tcp = Vec::new();
        let mut udp = Vec::new();
        for port in ports {
            for (host, guest) in port.pairs() {
                let at = SocketAddr::new(port.address, host);
                let bound = reserve(at, port.protocol);
                let bound = bound
                    .map_err(|error| Error::Port(format!("{at}/{}", port.protocol), why(&error)))?;
                match port.protocol {
                    Protocol::Tcp => tcp.push(Port {
                        guest,
                        socket: Socket::Idle(bound.into()),
                    }),
                    Protocol::Udp => udp.push(datagrams::Port {
                        guest,
                        socket: datagrams::Socket::Idle(bound.into()),
                    }),
                }
            }
        }
        Ok(Held {
            tcp: Arc::new(Listeners(Mutex::new(tcp))),
            udp: Arc::new(Datagrams::new(udp)),
            acceptor: None,
            receiver: None,
        })
    }

    /// The TCP sockets, unless a task accepts from them already.
    pub(crate) fn listeners(&self) -> Option<Arc<Listeners>> {
        let unattended = self.acceptor.is_none() && !self.tcp.lock().is_empty();
        unattended.then(|| Arc::clone(&self.tcp))
    }

    /// Sets the task that accepts connections; it is aborted when the ports are released.
    pub(crate) fn set_acceptor(&mut self, acceptor: AbortHandle) {
        self.acceptor = Some(acceptor);
    }

    /// The UDP sockets, unless a task receives from them already.
    pub(crate) fn datagrams(&self) -> Option<Arc<Datagrams>> {
        let unattended = self.receiver.is_none() && !self.udp.is_empty();
        unattended.then(|| Arc::clone(&self.udp))
    }

    /// Sets the task that receives datagrams; it is aborted when the ports are released.
    pub(crate) fn set_receiver(&mut self, receiver: AbortHandle) {
        self.receiver = Some(receiver);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // The tasks may end later; another VM must get the ports at once.
        self.tcp.lock().clear();
        self.udp.release();
        for task in self.acceptor.iter().chain(&self.receiver) {
            task.abort();
        }
    }
}

impl Listeners {
    fn lock(&self) -> MutexGuard<'_, Vec<Port>> {
        lock(&self.0)
    }

    /// Accepts the next connection. Called by one task only, in a tokio runtime.
    pub(crate) fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<Accepted>> {
        for port in self.lock().iter_mut() {
            let listener = match &port.socket {
                Socket::Accepting(listener) => listener,
                Socket::Lost => continue,
                Socket::Idle(_) => {
                    let idle = std::mem::replace(&mut port.socket, Socket::Lost);
                    let Socket::Idle(idle) = idle else { continue };
                    port.socket = Socket::Accepting(TcpListener::from_std(idle)?);
                    let Socket::Accepting(listener) = &port.socket else {
                        continue;
                    };
                    listener
                }
            };
            if let Poll::Ready(accepted) = listener.poll_accept(context) {
                let guest = port.guest;
                return Poll::Ready(accepted.map(|(stream, from)| Accepted {
                    stream,
                    from,
                    guest,
                }));
            }
        }
        Poll::Pending
    }
}

/// A bound socket. A TCP socket also listens, or others could bind the port, too.
fn reserve(at: SocketAddr, protocol: Protocol) -> io::Result<OwnedFd> {
    let family = match at {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let kind = match protocol {
        Protocol::Tcp => SocketType::STREAM,
        Protocol::Udp => SocketType::DGRAM,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, kind, flags, None)?;
    if at.is_ipv6() {
        // For such an address only IPv6 packets are translated.
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    if protocol == Protocol::Tcp {
        // Closed connections must not keep the port from the next VM.
        sockopt::set_socket_reuseaddr(&socket, true)?;
    }
    bind(&socket, &at)?;
    if protocol == Protocol::Tcp {
        backlog::enlarge(&socket)?;
    }
    Ok(socket)
}

fn why(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "another program of this host uses it",
        io::ErrorKind::AddrNotAvailable => "the host does not have that address",
        io::ErrorKind::PermissionDenied => {
            "ports below net.ipv4.ip_unprivileged_port_start need CAP_NET_BIND_SERVICE"
        }
        _ => "the kernel can't bind it",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_port_is_refused_to_others_until_released() {
        let free = StdListener::bind("127.0.0.1:0").expect("a port");
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
