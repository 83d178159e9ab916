//! Published ports of the host: `[ADDRESS:]HOST[-HOST]:GUEST[-GUEST][/udp]`.

use super::target::{Protocol, port_range};
use crate::Error;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

/// Most ports in one range: each is held by a socket.
const RANGE: u16 = 1024;

/// Ports of the host that are forwarded to a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Publish {
    /// The host's address. An unspecified address means all; with 127.0.0.1 only the host's own
    /// programs reach the VM.
    pub address: IpAddr,
    /// The host's first port.
    pub host: u16,
    /// The VM's first port.
    pub guest: u16,
    /// Number of consecutive ports.
    pub count: u16,
    /// TCP or UDP.
    pub protocol: Protocol,
}

impl Publish {
    /// The pairs of a host port and a VM port.
    pub fn pairs(self) -> impl Iterator<Item = (u16, u16)> {
        (0..self.count).map(move |it| (self.host + it, self.guest + it))
    }

    /// Whether both use the same port of the host.
    pub fn collides(&self, other: &Publish) -> bool {
        let addresses = self.address == other.address
            || (self.address.is_ipv4() == other.address.is_ipv4()
                && (self.address.is_unspecified() || other.address.is_unspecified()));
        let (mine, theirs) = (u32::from(self.host), u32::from(other.host));
        self.protocol == other.protocol
            && addresses
            && mine < theirs + u32::from(other.count)
            && theirs < mine + u32::from(self.count)
    }
}

impl FromStr for Publish {
    type Err = Error;

    fn from_str(text: &str) -> Result<Publish, Error> {
        let wrong = |why| Error::Publish(text.chars().take(80).collect(), why);
        let (rest, protocol) = match text.rsplit_once('/') {
            Some((rest, "tcp")) => (rest, Protocol::Tcp),
            Some((rest, "udp")) => (rest, Protocol::Udp),
            Some(_) => return Err(wrong("the protocol is tcp or udp")),
            None => (text, Protocol::Tcp),
        };
        let form = "write [ADDRESS:]HOST:GUEST";
        let (rest, guest) = rest.rsplit_once(':').ok_or(wrong(form))?;
        let (address, host) = match rest.rsplit_once(':') {
            None => (IpAddr::V4(Ipv4Addr::LOCALHOST), rest),
            Some((address, host)) => {
                let inside = address
                    .strip_prefix('[')
                    .and_then(|it| it.strip_suffix(']'));
                let address = inside.unwrap_or(address).parse();
                let address =
                    address.map_err(|_| wrong("the address is neither IPv4 nor [IPv6]"))?;
                (address, host)
            }
        };
        let ports = "a port is 1 to 65535, a range FROM-TO";
        let host = port_range(host).ok_or(wrong(ports))?;
        let guest = port_range(guest).ok_or(wrong(ports))?;
        if host.1 - host.0 != guest.1 - guest.0 {
            return Err(wrong("both ranges must have the same number of ports"));
        }
        if host.1 - host.0 >= RANGE {
            return Err(wrong("a range has at most 1024 ports"));
        }
        if address == IpAddr::V6(std::net::Ipv6Addr::LOCALHOST) {
            return Err(wrong(
                "packets to ::1 can't be forwarded to a VM: publish on 127.0.0.1",
            ));
        }
        Ok(Publish {
            address,
            host: host.0,
            guest: guest.0,
            count: host.1 - host.0 + 1,
            protocol,
        })
    }
}

impl fmt::Display for Publish {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.address {
            IpAddr::V4(it) => write!(f, "{it}:")?,
            IpAddr::V6(it) => write!(f, "[{it}]:")?,
        }
        let range = |f: &mut fmt::Formatter, first: u16| match self.count {
            1 => write!(f, "{first}"),
            count => write!(f, "{first}-{}", first + (count - 1)),
        };
        range(f, self.host)?;
        f.write_str(":")?;
        range(f, self.guest)?;
        write!(f, "/{}", self.protocol)
    }
}
