//! Netlink sockets (netlink(7)): requests to the kernel's network stack, and its answers.
#![allow(unsafe_code)] // setsockopt(2) of levels that `rustix` lacks.

use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

pub use rustix::net::netlink::NETFILTER;

/// Size of the receive buffer, bytes. The kernel fills dumps up to 32 KiB.
const ANSWER_BYTES: usize = 64 << 10;

/// A socket to one of the kernel's netlink families.
#[derive(Debug)]
pub struct NetlinkSocket {
    socket: OwnedFd,
    answer: Vec<u8>,
}

impl NetlinkSocket {
    /// Opens a socket to `protocol`; `None` means NETLINK_ROUTE. Error answers contain the kernel's
    /// message, but no copy of the request.
    ///
    /// # Errors
    ///
    /// If socket(2) or setsockopt(2) fails.
    pub fn open(protocol: Option<Protocol>) -> io::Result<NetlinkSocket> {
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            protocol,
        )?;
        for option in [libc::NETLINK_EXT_ACK, libc::NETLINK_CAP_ACK] {
            set(&socket, libc::SOL_NETLINK, option, 1)?;
        }
        Ok(NetlinkSocket {
            socket,
            answer: vec![0; ANSWER_BYTES],
        })
    }

    /// Sends messages as one datagram. The kernel has processed them when this returns; what it
    /// refuses is in its answers ([`receive`](NetlinkSocket::receive)).
    ///
    /// # Errors
    ///
    /// If send(2) fails, or if the send buffer is too small and can't be enlarged (without
    /// CAP_NET_ADMIN).
    pub fn send(&self, messages: &[u8]) -> io::Result<()> {
        match send(&self.socket, messages, SendFlags::empty()) {
            Err(rustix::io::Errno::MSGSIZE | rustix::io::Errno::NOBUFS) => {
                self.grow(messages.len())?;
                send(&self.socket, messages, SendFlags::empty())
            }
            other => other,
        }?;
        Ok(())
    }

    /// Receives the kernel's next datagram. Without `wait`, `None` if there is none yet.
    ///
    /// # Errors
    ///
    /// `FileTooLarge` if the datagram has more than 64 KiB; it is lost. Otherwise if recv(2) fails,
    /// such as with `ENOBUFS` if datagrams were lost.
    pub fn receive(&mut self, wait: bool) -> io::Result<Option<&[u8]>> {
        let flags = if wait {
            RecvFlags::TRUNC
        } else {
            RecvFlags::TRUNC | RecvFlags::DONTWAIT
        };
        let (_, length) = loop {
            match recv(&self.socket, &mut self.answer[..], flags) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                other => break other?,
            }
        };
        match self.answer.get(..length) {
            Some(answer) => Ok(Some(answer)),
            None => Err(io::ErrorKind::FileTooLarge.into()),
        }
    }

    /// Enlarges the send buffer for a request of that many bytes, beyond the host's limit
    /// (CAP_NET_ADMIN).
    fn grow(&self, bytes: usize) -> io::Result<()> {
        let bytes = libc::c_int::try_from(bytes.saturating_add(ANSWER_BYTES))
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        set(&self.socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, bytes)
    }
}

fn set(socket: &OwnedFd, level: i32, option: i32, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the kernel reads one int.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
