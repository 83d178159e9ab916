//! The UDP sockets among those that reserve published ports.

use jiffy_sys::mutex::lock;
use std::io;
use std::net::{SocketAddr, UdpSocket as StdSocket};
use std::sync::{Mutex, MutexGuard};
use std::task::{Context, Poll};
use tokio::io::ReadBuf;
use tokio::net::UdpSocket;

/// The UDP sockets of a VM.
#[derive(Debug, Default)]
pub(crate) struct Datagrams(Mutex<Vec<Port>>);

#[derive(Debug)]
pub(super) struct Port {
    /// The VM's port.
    pub(super) guest: u16,
    pub(super) socket: Socket,
}

/// A socket is registered with tokio when datagrams are to be received, which few VMs need.
#[derive(Debug)]
pub(super) enum Socket {
    Idle(StdSocket),
    Receiving(UdpSocket),
    /// Registering it failed.
    Lost,
}

/// A received datagram, without its bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Received {
    /// Number of the socket, for [`Datagrams::send`].
    pub(crate) socket: usize,
    /// Its address.
    pub(crate) at: SocketAddr,
    pub(crate) from: SocketAddr,
    /// The VM's port.
    pub(crate) guest: u16,
    pub(crate) length: usize,
}

impl Datagrams {
    pub(super) fn new(ports: Vec<Port>) -> Datagrams {
        Datagrams(Mutex::new(ports))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Port>> {
        lock(&self.0)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Closes the sockets.
    pub(super) fn release(&self) {
        self.lock().clear();
    }

    /// Receives the next datagram. Called by one task only, in a tokio runtime.
    pub(crate) fn poll_receive(
        &self,
        context: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<Received>> {
        for (number, port) in self.lock().iter_mut().enumerate() {
            if let Socket::Idle(_) = &port.socket
                && let Socket::Idle(idle) = std::mem::replace(&mut port.socket, Socket::Lost)
            {
                port.socket = Socket::Receiving(UdpSocket::from_std(idle)?);
            }
            let Socket::Receiving(socket) = &port.socket else {
                continue;
            };
            let mut into = ReadBuf::new(buffer);
            if let Poll::Ready(received) = socket.poll_recv_from(context, &mut into) {
                let length = into.filled().len();
                let guest = port.guest;
                return Poll::Ready(received.and_then(|from| {
                    Ok(Received {
                        socket: number,
                        at: socket.local_addr()?,
                        from,
                        guest,
                        length,
                    })
                }));
            }
        }
        Poll::Pending
    }

    /// Sends a datagram from a published port; it is dropped if the kernel has no room for it. An
    /// error if the ports were released.
    pub(crate) fn send(&self, socket: usize, bytes: &[u8], to: SocketAddr) -> io::Result<()> {
        let ports = self.lock();
        let Some(Socket::Receiving(socket)) = ports.get(socket).map(|port| &port.socket) else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        match socket.try_send_to(bytes, to) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            sent => sent.map(drop),
        }
    }
}
