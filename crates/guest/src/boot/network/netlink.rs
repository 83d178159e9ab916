//! Netlink requests (the kernel's Documentation/userspace-api/netlink/intro.rst,
//! rtnetlink(7), sock_diag(7)).

use alloc::vec::Vec;
use core::net::IpAddr;
use jiffy_wire::mac::Mac;
use rustix::fd::OwnedFd;
use rustix::io::{Errno, Result as IoResult};
use rustix::net::{self, AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Numbers from linux/netlink.h, linux/rtnetlink.h and linux/neighbour.h.
mod constant {
    pub const NLM_F_REQUEST: u16 = 0x1;
    pub const NLM_F_ACK: u16 = 0x4;
    pub const NLM_F_DUMP: u16 = 0x300;
    pub const NLM_F_REPLACE_CREATE: u16 = 0x100 | 0x400;
    pub const NLMSG_ERROR: u16 = 2;
    pub const NLMSG_DONE: u16 = 3;
    pub const RTM_NEWLINK: u16 = 16;
    pub const RTM_NEWADDR: u16 = 20;
    pub const RTM_DELADDR: u16 = 21;
    pub const RTM_NEWROUTE: u16 = 24;
    pub const RTM_DELROUTE: u16 = 25;
    pub const RTM_NEWNEIGH: u16 = 28;
    pub const RTM_DELNEIGH: u16 = 29;
    pub const IFF_UP: u32 = 1;
    pub const IFLA_ADDRESS: u16 = 1;
    pub const IFLA_MTU: u16 = 4;
    pub const IFA_ADDRESS: u16 = 1;
    pub const IFA_LOCAL: u16 = 2;
    pub const IFA_F_NODAD: u8 = 2;
    pub const RTA_OIF: u16 = 4;
    pub const RTA_GATEWAY: u16 = 5;
    pub const RT_TABLE_MAIN: u8 = 254;
    pub const RTPROT_BOOT: u8 = 3;
    pub const RTN_UNICAST: u8 = 1;
    pub const RTNH_F_ONLINK: u32 = 4;
    pub const NDA_DST: u16 = 1;
    pub const NDA_LLADDR: u16 = 2;
    pub const NUD_PERMANENT: u16 = 0x80;
    pub const AF_INET: u8 = 2;
    pub const AF_INET6: u8 = 10;
}
use constant::*;

/// A netlink socket.
pub struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    /// Opens a socket for routes, addresses and links, or for another netlink protocol.
    ///
    /// # Errors
    ///
    /// If `socket` fails.
    pub fn open(protocol: Option<Protocol>) -> IoResult<Netlink> {
        let flags = SocketFlags::CLOEXEC;
        let socket = net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
        Ok(Netlink {
            socket,
            sequence: 0,
        })
    }

    /// Index of an interface.
    ///
    /// # Errors
    ///
    /// `ENODEV` if there is no such interface.
    pub fn index_of(&self, name: &str) -> IoResult<u32> {
        net::netdevice::name_to_index(&self.socket, name)
    }

    /// Brings an interface up, and sets its MTU if given.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it.
    pub fn set_link(&mut self, index: u32, mtu: Option<u32>) -> IoResult<()> {
        let mut message = Message::about_link(index, IFF_UP);
        if let Some(mtu) = mtu {
            message.attribute(IFLA_MTU, &mtu.to_ne_bytes());
        }
        self.request(message)
    }

    /// Sets an interface's MAC address.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it.
    pub fn set_mac(&mut self, index: u32, mac: Mac) -> IoResult<()> {
        let mut message = Message::about_link(index, 0);
        message.attribute(IFLA_ADDRESS, &mac.0);
        self.request(message)
    }

    /// Adds an address to an interface, or keeps it.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it.
    pub fn add_address(&mut self, index: u32, address: IpAddr, prefix: u8) -> IoResult<()> {
        let message = Message::new(RTM_NEWADDR, NLM_F_REPLACE_CREATE);
        self.request(message.about_address(index, address, prefix))
    }

    /// Removes an address.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it, as with `EADDRNOTAVAIL` if there is no such address.
    pub fn remove_address(&mut self, index: u32, address: IpAddr, prefix: u8) -> IoResult<()> {
        let message = Message::new(RTM_DELADDR, 0);
        self.request(message.about_address(index, address, prefix))
    }

    /// Adds a permanent neighbour.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it.
    pub fn add_neighbour(&mut self, index: u32, address: IpAddr, mac: Mac) -> IoResult<()> {
        let message = Message::new(RTM_NEWNEIGH, NLM_F_REPLACE_CREATE);
        let mut message = message.about_neighbour(index, address);
        message.attribute(NDA_LLADDR, &mac.0);
        self.request(message)
    }

    /// Removes a neighbour.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it, as with `ENOENT` if there is no such neighbour.
    pub fn remove_neighbour(&mut self, index: u32, address: IpAddr) -> IoResult<()> {
        self.request(Message::new(RTM_DELNEIGH, 0).about_neighbour(index, address))
    }

    /// Adds a default route.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it.
    pub fn add_default_route(&mut self, index: u32, gateway: IpAddr) -> IoResult<()> {
        let message = |flags| {
            Message::new(RTM_NEWROUTE, NLM_F_REPLACE_CREATE).about_default(index, gateway, flags)
        };
        match self.request(message(0)) {
            // The gateway is outside of the interface's prefix (a /32 address).
            Err(Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::INVAL) => {
                self.request(message(RTNH_F_ONLINK))
            }
            other => other,
        }
    }

    /// Removes a default route.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it, as with `ESRCH` if there is no such route.
    pub fn remove_default_route(&mut self, index: u32, gateway: IpAddr) -> IoResult<()> {
        self.request(Message::new(RTM_DELROUTE, 0).about_default(index, gateway, 0))
    }

    /// Sends a request and waits until the kernel has executed it.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it, or `send` or `recv` fails.
    pub fn request(&mut self, message: Message) -> IoResult<()> {
        let sequence = self.send(message, NLM_F_ACK)?;
        let mut buffer = [0u8; 1024];
        loop {
            let (_, count) = net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            for (kind, number, body) in messages(&buffer[..count.min(1024)]) {
                if number == sequence && kind == NLMSG_ERROR {
                    return outcome(body);
                }
            }
        }
    }

    /// Sends a dump request and calls `take` with the body of each answer.
    ///
    /// # Errors
    ///
    /// If the kernel refuses it, or `send` or `recv` fails.
    pub fn dump(&mut self, message: Message, mut take: impl FnMut(&[u8])) -> IoResult<()> {
        let sequence = self.send(message, NLM_F_DUMP)?;
        // The kernel fills messages of this size for readers with smaller buffers as well.
        let mut buffer = alloc::vec![0u8; 32 << 10];
        loop {
            let (_, count) = net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            let count = count.min(buffer.len());
            for (kind, number, body) in messages(&buffer[..count]) {
                match kind {
                    _ if number != sequence => {}
                    NLMSG_DONE => return Ok(()),
                    NLMSG_ERROR => return outcome(body),
                    _ => take(body),
                }
            }
        }
    }

    fn send(&mut self, message: Message, flags: u16) -> IoResult<u32> {
        self.sequence += 1;
        let message = message.finish(self.sequence, flags);
        net::send(&self.socket, &message, SendFlags::empty())?;
        Ok(self.sequence)
    }
}

fn parts(address: &IpAddr) -> (u8, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (AF_INET, address.octets().to_vec()),
        IpAddr::V6(address) => (AF_INET6, address.octets().to_vec()),
    }
}

/// Type, sequence number and body of each complete message.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, u32, &[u8])> {
    core::iter::from_fn(move || {
        let (header, _) = bytes.split_first_chunk::<16>()?;
        let word = |at: usize| {
            u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let kind = u16::from_ne_bytes([header[4], header[5]]);
        let (length, number) = (word(0) as usize, word(8));
        let body = bytes.get(16..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, number, body))
    })
}

/// The result in an NLMSG_ERROR.
fn outcome(body: &[u8]) -> IoResult<()> {
    match body
        .first_chunk::<4>()
        .map(|bytes| i32::from_ne_bytes(*bytes))
    {
        Some(0) => Ok(()),
        Some(error) => Err(Errno::from_raw_os_error(error.wrapping_neg())),
        None => Err(Errno::BADMSG),
    }
}

/// A netlink request that is being built.
pub struct Message(Vec<u8>);

impl Message {
    /// A request without attributes.
    pub fn new(kind: u16, flags: u16) -> Message {
        let mut bytes = Vec::with_capacity(128);
        bytes.extend_from_slice(&[0; 4]); // the length, when it is known
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&(NLM_F_REQUEST | flags).to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]); // sequence; port id: the kernel's choice
        Message(bytes)
    }

    /// Appends bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Appends a 32-bit number.
    pub fn word(&mut self, word: u32) {
        self.bytes(&word.to_ne_bytes());
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        self.bytes(&(4 + value.len() as u16).to_ne_bytes());
        self.bytes(&kind.to_ne_bytes());
        self.bytes(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn about_link(index: u32, flags: u32) -> Message {
        let mut message = Message::new(RTM_NEWLINK, 0);
        // struct ifinfomsg: flags, and the mask of changed flags.
        message.bytes(&[0, 0, 0, 0]);
        message.word(index);
        message.word(flags);
        message.word(flags);
        message
    }

    fn about_address(mut self, index: u32, address: IpAddr, prefix: u8) -> Message {
        let (family, bytes) = parts(&address);
        // The host gave this address to this guest only, so it needs no duplicate address
        // detection.
        let flags = if address.is_ipv6() { IFA_F_NODAD } else { 0 };
        // struct ifaddrmsg
        self.bytes(&[family, prefix, flags, 0]);
        self.word(index);
        self.attribute(IFA_LOCAL, bytes.as_slice());
        self.attribute(IFA_ADDRESS, bytes.as_slice());
        self
    }

    fn about_neighbour(mut self, index: u32, address: IpAddr) -> Message {
        let (family, bytes) = parts(&address);
        // struct ndmsg
        self.bytes(&[family, 0, 0, 0]);
        self.word(index);
        self.bytes(&NUD_PERMANENT.to_ne_bytes());
        self.bytes(&[0, RTN_UNICAST]);
        self.attribute(NDA_DST, bytes.as_slice());
        self
    }

    fn about_default(mut self, index: u32, gateway: IpAddr, flags: u32) -> Message {
        let (family, bytes) = parts(&gateway);
        // struct rtmsg
        self.bytes(&[family, 0, 0, 0, RT_TABLE_MAIN, RTPROT_BOOT, 0, RTN_UNICAST]);
        self.word(flags);
        self.attribute(RTA_GATEWAY, bytes.as_slice());
        self.attribute(RTA_OIF, &index.to_ne_bytes());
        self
    }

    fn finish(mut self, sequence: u32, flags: u16) -> Vec<u8> {
        let length = (self.0.len() as u32).to_ne_bytes();
        self.0[..4].copy_from_slice(&length);
        let flags = u16::from_ne_bytes([self.0[6], self.0[7]]) | flags;
        self.0[6..8].copy_from_slice(&flags.to_ne_bytes());
        self.0[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_attribute_is_padded_but_its_length_is_not() {
        let mut message = Message::new(RTM_NEWLINK, 0);
        message.attribute(7, b"abcde");
        let bytes = message.finish(9, NLM_F_ACK);
        assert_eq!(bytes.len(), 16 + 12);
        assert_eq!(bytes[..4], 28u32.to_ne_bytes());
        assert_eq!(bytes[6..8], 5u16.to_ne_bytes());
        assert_eq!(bytes[16..20], [9, 0, 7, 0]);
        assert_eq!(bytes[20..], *b"abcde\0\0\0");
    }

    #[test]
    fn an_answer_is_found_by_its_number() {
        let mut answer = Vec::new();
        for (sequence, error) in [(1u32, 0i32), (2, -17)] {
            answer.extend(36u32.to_ne_bytes());
            answer.extend(NLMSG_ERROR.to_ne_bytes());
            answer.extend([0; 2]);
            answer.extend(sequence.to_ne_bytes());
            answer.extend([0; 4]);
            answer.extend(error.to_ne_bytes());
            answer.extend([0; 16]);
        }
        let found: Vec<_> = messages(&answer)
            .map(|(kind, number, body)| (kind, number, outcome(body)))
            .collect();
        let expected = [
            (NLMSG_ERROR, 1, Ok(())),
            (NLMSG_ERROR, 2, Err(Errno::EXIST)),
        ];
        assert_eq!(found, expected);
    }

    proptest! {
        #[test]
        fn any_netlink_answer_is_parsed_to_its_end(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for (_, _, body) in messages(&bytes) {
                let _ = outcome(body);
            }
        }
    }
}
