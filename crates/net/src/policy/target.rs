//! The targets of rules, and their syntax: `TARGET[:PORT[-PORT]][/tcp|/udp]`.

use super::super::{Cidr, Error};
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// The longest name, in bytes (RFC 1035 §2.3.4, without the final dot).
const NAME_BYTES: usize = 253;
const LABEL_BYTES: usize = 63;

/// TCP or UDP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// Protocol number 6.
    Tcp,
    /// Protocol number 17.
    Udp,
}

impl Protocol {
    /// Its number in IP headers.
    pub fn number(self) -> u8 {
        match self {
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        })
    }
}

impl FromStr for Protocol {
    type Err = Error;

    fn from_str(text: &str) -> Result<Protocol, Error> {
        match text {
            "tcp" => Ok(Protocol::Tcp),
            "udp" => Ok(Protocol::Udp),
            _ => Err(Error::Rule(
                text.chars().take(60).collect(),
                "the protocol is tcp or udp",
            )),
        }
    }
}

/// The ports and the protocol of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Access {
    /// The first and last port; `None` means all ports, and protocols without ports.
    pub ports: Option<(u16, u16)>,
    /// The protocol; `None` means TCP and UDP if there are ports, otherwise all protocols.
    pub protocol: Option<Protocol>,
}

impl Access {
    /// Whether a connection with this protocol number to this port is part of it.
    pub fn covers(self, protocol: u8, port: u16) -> bool {
        let spoken = match self.protocol {
            Some(it) => it.number() == protocol,
            None => {
                self.ports.is_none()
                    || [Protocol::Tcp, Protocol::Udp]
                        .iter()
                        .any(|it| it.number() == protocol)
            }
        };
        spoken
            && self
                .ports
                .is_none_or(|(from, to)| (from..=to).contains(&port))
    }
}

/// A name, or all names below one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Domain {
    name: String,
    below: bool,
}

impl Domain {
    /// Whether this name matches. `name` must be in lower case.
    pub fn covers(&self, name: &str) -> bool {
        if !self.below {
            return name == self.name;
        }
        name.strip_suffix(&self.name)
            .and_then(|it| it.strip_suffix('.'))
            .is_some_and(|it| !it.is_empty())
    }
}

impl FromStr for Domain {
    type Err = Error;

    fn from_str(text: &str) -> Result<Domain, Error> {
        let wrong = || {
            let why = "a domain is NAME or *.NAME, in ASCII letters, digits, `-` and `_`";
            Error::Rule(text.chars().take(60).collect(), why)
        };
        let (name, below) = match text.strip_prefix("*.") {
            Some(name) => (name, true),
            None => (text, false),
        };
        let name = name.strip_suffix('.').unwrap_or(name);
        let letter = |it: u8| it.is_ascii_alphanumeric() || it == b'-' || it == b'_';
        let label = |it: &str| (1..=LABEL_BYTES).contains(&it.len()) && it.bytes().all(letter);
        if name.len() > NAME_BYTES || !name.split('.').all(label) {
            return Err(wrong());
        }
        // 10.0.0 or 1.2.3.4.5 is a mistyped address.
        if name.bytes().all(|it| it.is_ascii_digit() || it == b'.') {
            return Err(wrong());
        }
        Ok(Domain {
            name: name.to_ascii_lowercase(),
            below,
        })
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let star = if self.below { "*." } else { "" };
        write!(f, "{star}{}", self.name)
    }
}

/// The target of a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// `all`: every address beyond the host.
    Everything,
    /// `host`: this host itself. Only valid in a rule that allows a port.
    Host,
    /// `ADDRESS[/PREFIX]`, `[IPV6/PREFIX]`.
    Range(Cidr),
    /// `NAME` or `*.NAME`.
    Domain(Domain),
}

/// A rule that allows or denies.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rule {
    /// The target.
    pub to: Target,
    /// The first and last port; `None` means all ports, and protocols without ports.
    pub ports: Option<(u16, u16)>,
    /// The protocol; `None` means TCP and UDP if there are ports, otherwise all protocols.
    pub protocol: Option<Protocol>,
}

impl Rule {
    /// Whether the rule matches a connection to this address. A rule about a name or the host never
    /// matches an address.
    pub fn covers(&self, address: IpAddr, protocol: u8, port: u16) -> bool {
        let to = match &self.to {
            Target::Everything => true,
            Target::Range(range) => range.contains(address),
            Target::Host | Target::Domain(_) => false,
        };
        to && self.access().covers(protocol, port)
    }

    /// Its ports and protocol.
    pub fn access(&self) -> Access {
        Access {
            ports: self.ports,
            protocol: self.protocol,
        }
    }
}

impl FromStr for Rule {
    type Err = Error;

    fn from_str(text: &str) -> Result<Rule, Error> {
        let wrong = |why| Error::Rule(text.chars().take(80).collect(), why);
        let (rest, protocol) = match text.rsplit_once('/') {
            Some((rest, it)) if !it.ends_with(|it: char| it.is_ascii_digit() || it == ']') => (
                rest,
                Some(
                    it.parse()
                        .map_err(|_| wrong("the protocol is tcp or udp"))?,
                ),
            ),
            _ => (text, None),
        };
        let (target, ports) = if let Some(rest) = rest.strip_prefix('[') {
            let (inside, after) = rest.split_once(']').ok_or(wrong("a `]` is missing"))?;
            match after.strip_prefix(':') {
                Some(ports) => (inside, Some(ports)),
                None if after.is_empty() => (inside, None),
                None => return Err(wrong("after `]` comes `:PORT` or nothing")),
            }
        } else {
            match rest.split_once(':') {
                // Two colons are an IPv6 address without brackets.
                Some((target, ports)) if !ports.contains(':') => (target, Some(ports)),
                _ => (rest, None),
            }
        };
        let ports = ports
            .map(|it| port_range(it).ok_or(wrong("a port is 1 to 65535, a range FROM-TO")))
            .transpose()?;
        let to = match target {
            "all" => Target::Everything,
            "host" => Target::Host,
            _ if target.contains([':', '/']) || target.parse::<IpAddr>().is_ok() => {
                Target::Range(target.parse()?)
            }
            _ => Target::Domain(target.parse()?),
        };
        if to == Target::Host && ports.is_none() {
            return Err(wrong(
                "a rule for the host needs a port or a range, as in host:5432",
            ));
        }
        Ok(Rule {
            to,
            ports,
            protocol,
        })
    }
}

/// `PORT` or `FROM-TO`.
pub fn port_range(text: &str) -> Option<(u16, u16)> {
    let port = |it: &str| {
        let digits = !it.is_empty() && it.bytes().all(|it| it.is_ascii_digit());
        it.parse::<u16>().ok().filter(|port| digits && *port > 0)
    };
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    let range = (port(from)?, port(to)?);
    (range.0 <= range.1).then_some(range)
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match (&self.to, self.ports) {
            (Target::Everything, _) => f.write_str("all")?,
            (Target::Host, _) => f.write_str("host")?,
            (Target::Range(range), _) if range.first().is_ipv6() => write!(f, "[{range}]")?,
            (Target::Range(range), _) => write!(f, "{range}")?,
            (Target::Domain(domain), _) => write!(f, "{domain}")?,
        }
        match self.ports {
            Some((from, to)) if from == to => write!(f, ":{from}")?,
            Some((from, to)) => write!(f, ":{from}-{to}")?,
            None => {}
        }
        match self.protocol {
            Some(protocol) => write!(f, "/{protocol}"),
            None => Ok(()),
        }
    }
}
