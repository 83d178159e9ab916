//! Network interfaces, over rtnetlink (the kernel's
//! Documentation/userspace-api/netlink/intro.rst, rtnetlink(7)).

use super::disks;
use crate::program::prepare::reason;
use crate::report::Report;
use alloc::{format, string::String, vec::Vec};
use core::net::IpAddr;
use jiffy_wire::guest::Interface;
use rustix::fd::OwnedFd;
use rustix::io::{Errno, Result as IoResult};
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

const PATIENCE_NS: u64 = 2_000_000_000;
/// Loopback has this index in every network namespace.
const LOOPBACK: u32 = 1;

/// Brings loopback up, and each interface as given. What fails on one is
/// reported and does not stop the others.
pub fn configure(interfaces: &[Interface], report: &mut Report) -> Result<(), String> {
    let mut netlink =
        Netlink::open().map_err(|error| format!("no netlink socket: {}", reason(error)))?;
    netlink
        .set_link(LOOPBACK, None)
        .map_err(|error| format!("loopback stays down: {}", reason(error)))?;
    for interface in interfaces {
        report.step(&format!("interface {}", interface.name), |_| {
            configure_one(&mut netlink, interface)
        });
    }
    Ok(())
}

/// The same for a guest that was restored: an interface that is to be otherwise
/// first loses the addresses and routes it has no more.
pub fn renew(old: &[Interface], new: &[Interface], report: &mut Report) -> Result<(), String> {
    let changed = |it: &&Interface| !new.contains(it);
    let mut netlink =
        Netlink::open().map_err(|error| format!("no netlink socket: {}", reason(error)))?;
    for before in old.iter().filter(changed) {
        let after = new.iter().find(|it| it.name == before.name);
        report.step(&format!("interface {}", before.name), |_| {
            clear(&mut netlink, before, after)
        });
    }
    let added: Vec<Interface> = super::added(old, new);
    configure(&added, report)
}

/// Takes from an interface what it had `before` and shall not have `after`.
fn clear(
    netlink: &mut Netlink,
    before: &Interface,
    after: Option<&Interface>,
) -> Result<(), String> {
    let failed = |what: &str, error| format!("{what} stays on {}: {}", before.name, reason(error));
    let index = net::netdevice::name_to_index(&netlink.socket, &before.name)
        .map_err(|error| format!("there is no interface {}: {}", before.name, reason(error)))?;
    // Routes first: an address takes some of them along.
    for gateway in &before.gateways {
        let stays = after.is_some_and(|after| after.gateways.contains(gateway));
        if let (false, Ok(address)) = (stays, gateway.parse()) {
            gone(netlink.remove_default_route(index, address))
                .map_err(|error| failed(gateway, error))?;
        }
    }
    for text in &before.addresses {
        let stays = after.is_some_and(|after| after.addresses.contains(text));
        if let (false, Some((address, prefix))) = (stays, parse_prefix(text)) {
            gone(netlink.remove_address(index, address, prefix))
                .map_err(|error| failed(text, error))?;
        }
    }
    Ok(())
}

/// What a program has removed before is as good as removed.
fn gone(result: IoResult<()>) -> IoResult<()> {
    match result {
        Err(Errno::ADDRNOTAVAIL | Errno::SRCH) => Ok(()),
        other => other,
    }
}

fn configure_one(netlink: &mut Netlink, interface: &Interface) -> Result<(), String> {
    let name = &interface.name;
    // Checked whole before anything is set.
    let addresses = interface
        .addresses
        .iter()
        .map(|text| {
            parse_prefix(text)
                .ok_or_else(|| format!("{text:?} is not an address with a prefix length"))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let gateways = interface
        .gateways
        .iter()
        .map(|text| {
            text.parse::<IpAddr>()
                .map_err(|_| format!("the gateway {text:?} is not an address"))
        })
        .collect::<Result<Vec<_>, _>>()?;
    if name.is_empty() || name.contains(['/', '\0']) {
        return Err(format!("{name:?} is not the name of an interface"));
    }
    if !disks::wait_for(&format!("/sys/class/net/{name}"), PATIENCE_NS) {
        return Err(format!("there is no interface {name}"));
    }
    let index = net::netdevice::name_to_index(&netlink.socket, name)
        .map_err(|error| format!("there is no interface {name}: {}", reason(error)))?;
    netlink
        .set_link(index, interface.mtu)
        .map_err(|error| format!("{name} cannot be brought up: {}", reason(error)))?;
    for (address, prefix) in addresses {
        netlink
            .add_address(index, address, prefix)
            .map_err(|error| format!("{address}/{prefix} on {name}: {}", reason(error)))?;
    }
    for gateway in gateways {
        netlink
            .add_default_route(index, gateway)
            .map_err(|error| format!("default route by {gateway} on {name}: {}", reason(error)))?;
    }
    Ok(())
}

/// `10.0.0.2/24` or `fd00::2/64`; without a length, the whole address.
fn parse_prefix(text: &str) -> Option<(IpAddr, u8)> {
    let (address, prefix) = match text.split_once('/') {
        Some((address, prefix)) => (address, Some(prefix)),
        None => (text, None),
    };
    let address: IpAddr = address.parse().ok()?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let prefix = prefix.map_or(Some(longest), |prefix| prefix.parse().ok())?;
    (prefix <= longest).then_some((address, prefix))
}

/// Numbers from linux/netlink.h and linux/rtnetlink.h.
mod constant {
    pub const NLM_F_REQUEST_ACK: u16 = 0x1 | 0x4;
    pub const NLM_F_REPLACE_CREATE: u16 = 0x100 | 0x400;
    pub const NLMSG_ERROR: u16 = 2;
    pub const RTM_NEWLINK: u16 = 16;
    pub const RTM_NEWADDR: u16 = 20;
    pub const RTM_DELADDR: u16 = 21;
    pub const RTM_NEWROUTE: u16 = 24;
    pub const RTM_DELROUTE: u16 = 25;
    pub const IFF_UP: u32 = 1;
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
    pub const AF_INET: u8 = 2;
    pub const AF_INET6: u8 = 10;
}
use constant::*;

struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    fn open() -> IoResult<Netlink> {
        let flags = SocketFlags::CLOEXEC;
        let socket = net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        Ok(Netlink {
            socket,
            sequence: 0,
        })
    }

    fn set_link(&mut self, index: u32, mtu: Option<u32>) -> IoResult<()> {
        let mut message = Message::new(RTM_NEWLINK, 0);
        // struct ifinfomsg
        message.bytes(&[0, 0, 0, 0]);
        message.word(index);
        message.word(IFF_UP);
        message.word(IFF_UP);
        if let Some(mtu) = mtu {
            message.attribute(IFLA_MTU, &mtu.to_ne_bytes());
        }
        self.request(message)
    }

    fn add_address(&mut self, index: u32, address: IpAddr, prefix: u8) -> IoResult<()> {
        let message = Message::new(RTM_NEWADDR, NLM_F_REPLACE_CREATE);
        self.request(message.about_address(index, address, prefix))
    }

    fn remove_address(&mut self, index: u32, address: IpAddr, prefix: u8) -> IoResult<()> {
        let message = Message::new(RTM_DELADDR, 0);
        self.request(message.about_address(index, address, prefix))
    }

    fn add_default_route(&mut self, index: u32, gateway: IpAddr) -> IoResult<()> {
        let message = |flags| {
            Message::new(RTM_NEWROUTE, NLM_F_REPLACE_CREATE).about_default(index, gateway, flags)
        };
        match self.request(message(0)) {
            // A gateway outside the interface's own prefix (a /32 address).
            Err(Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::INVAL) => {
                self.request(message(RTNH_F_ONLINK))
            }
            other => other,
        }
    }

    fn remove_default_route(&mut self, index: u32, gateway: IpAddr) -> IoResult<()> {
        self.request(Message::new(RTM_DELROUTE, 0).about_default(index, gateway, 0))
    }

    fn request(&mut self, message: Message) -> IoResult<()> {
        self.sequence += 1;
        net::send(
            &self.socket,
            &message.finish(self.sequence),
            SendFlags::empty(),
        )?;
        let mut buffer = [0u8; 1024];
        loop {
            let (_, count) = net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            if let Some(result) = acknowledgement(&buffer[..count.min(1024)], self.sequence) {
                return result;
            }
        }
    }
}

fn parts(address: &IpAddr) -> (u8, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (AF_INET, address.octets().to_vec()),
        IpAddr::V6(address) => (AF_INET6, address.octets().to_vec()),
    }
}

/// The kernel's answer to the request of this number, if it is in there.
fn acknowledgement(mut bytes: &[u8], sequence: u32) -> Option<IoResult<()>> {
    while let Some((header, _)) = bytes.split_first_chunk::<16>() {
        let word = |at: usize| {
            u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let kind = u16::from_ne_bytes([header[4], header[5]]);
        if kind == NLMSG_ERROR && word(8) == sequence {
            let error = i32::from_ne_bytes(*bytes.get(16..)?.first_chunk::<4>()?);
            return Some(if error == 0 {
                Ok(())
            } else {
                Err(Errno::from_raw_os_error(error.wrapping_neg()))
            });
        }
        let length = (word(0) as usize).max(16).next_multiple_of(4);
        bytes = bytes.get(length..)?;
    }
    None
}

/// A netlink request under construction.
struct Message(Vec<u8>);

impl Message {
    fn new(kind: u16, flags: u16) -> Message {
        let mut bytes = Vec::with_capacity(64);
        bytes.extend_from_slice(&[0; 4]); // the length, when it is known
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&(NLM_F_REQUEST_ACK | flags).to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]); // sequence; port id: the kernel's choice
        Message(bytes)
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn word(&mut self, word: u32) {
        self.bytes(&word.to_ne_bytes());
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        self.bytes(&(4 + value.len() as u16).to_ne_bytes());
        self.bytes(&kind.to_ne_bytes());
        self.bytes(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn about_address(mut self, index: u32, address: IpAddr, prefix: u8) -> Message {
        let (family, bytes) = parts(&address);
        // The host gave this address to this guest: it is nobody else's.
        let flags = if address.is_ipv6() { IFA_F_NODAD } else { 0 };
        // struct ifaddrmsg
        self.bytes(&[family, prefix, flags, 0]);
        self.word(index);
        self.attribute(IFA_LOCAL, bytes.as_slice());
        self.attribute(IFA_ADDRESS, bytes.as_slice());
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

    fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = (self.0.len() as u32).to_ne_bytes();
        self.0[..4].copy_from_slice(&length);
        self.0[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn prefixes_are_checked() {
        assert_eq!(
            parse_prefix("10.0.0.2/24"),
            Some(([10, 0, 0, 2].into(), 24))
        );
        assert_eq!(parse_prefix("10.0.0.2"), Some(([10, 0, 0, 2].into(), 32)));
        assert_eq!(parse_prefix("fd00::2/64").unwrap().1, 64);
        for bad in [
            "",
            "10.0.0.2/33",
            "fd00::/129",
            "10.0.0/8",
            "10.0.0.2/",
            "10.0.0.2/-1",
        ] {
            assert_eq!(parse_prefix(bad), None, "{bad}");
        }
    }

    #[test]
    fn an_attribute_is_padded_but_its_length_is_not() {
        let mut message = Message::new(RTM_NEWLINK, 0);
        message.attribute(7, b"abcde");
        let bytes = message.finish(9);
        assert_eq!(bytes.len(), 16 + 12);
        assert_eq!(bytes[..4], 28u32.to_ne_bytes());
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
        assert_eq!(acknowledgement(&answer, 1), Some(Ok(())));
        assert_eq!(acknowledgement(&answer, 2), Some(Err(Errno::EXIST)));
        assert_eq!(acknowledgement(&answer, 3), None);
    }

    proptest! {
        #[test]
        fn any_answer_is_read_to_its_end(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = acknowledgement(&bytes, 1);
        }
    }
}
