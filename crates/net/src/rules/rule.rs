//! Builds a rule: conditions, followed by a verdict.

use crate::Cidr;
use crate::links::GROUP;
use crate::nft::expression::{Register, ct, meta, payload};
use crate::nft::{Expression, Verdict};
use std::borrow::Cow;
use std::net::IpAddr;

/// `NFPROTO_*`.
const V4: u8 = 2;
const V6: u8 = 10;
pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
pub(super) const ICMP6: u8 = 58;

/// A field of a packet's headers: base, offset and length (RFC 791 §3.1, RFC 8200 §3, RFC 9293
/// §3.1, RFC 4443 §2.1).
#[derive(Debug, Clone, Copy)]
pub(super) struct Field(u32, u32, u32);

pub(super) const SOURCE_MAC: Field = Field(payload::LINK, 6, 6);
pub(super) const SOURCE4: Field = Field(payload::NETWORK, 12, 4);
pub(super) const DESTINATION4: Field = Field(payload::NETWORK, 16, 4);
pub(super) const SOURCE6: Field = Field(payload::NETWORK, 8, 16);
pub(super) const DESTINATION6: Field = Field(payload::NETWORK, 24, 16);
pub(super) const DESTINATION_PORT: Field = Field(payload::TRANSPORT, 2, 2);
pub(super) const ICMP_TYPE: Field = Field(payload::TRANSPORT, 0, 1);

/// A rule that is being built. Conditions use register 0 and the following ones.
#[derive(Debug, Default)]
pub(super) struct Rule(Vec<Expression>);

impl Rule {
    pub fn new() -> Rule {
        Rule::default()
    }

    fn with(mut self, expressions: impl IntoIterator<Item = Expression>) -> Rule {
        self.0.extend(expressions);
        self
    }

    fn is(self, key: u32, negated: bool, value: impl Into<Vec<u8>>) -> Rule {
        self.with([
            Expression::Meta { key, to: 0 },
            Expression::Compare {
                register: 0,
                negated,
                value: value.into(),
            },
        ])
    }

    pub fn by_guests(self) -> Rule {
        self.is(meta::IIFGROUP, false, GROUP.to_ne_bytes())
    }

    pub fn not_by_guests(self) -> Rule {
        self.is(meta::IIFGROUP, true, GROUP.to_ne_bytes())
    }

    pub fn toward_guests(self) -> Rule {
        self.is(meta::OIFGROUP, false, GROUP.to_ne_bytes())
    }

    pub fn not_toward_guests(self) -> Rule {
        self.is(meta::OIFGROUP, true, GROUP.to_ne_bytes())
    }

    pub fn v4(self) -> Rule {
        self.is(meta::NFPROTO, false, [V4])
    }

    pub fn v6(self) -> Rule {
        self.is(meta::NFPROTO, false, [V6])
    }

    pub fn protocol(self, protocol: u8) -> Rule {
        self.is(meta::L4PROTO, false, [protocol])
    }

    /// Matches TCP or UDP.
    pub fn tcp_or_udp(self) -> Rule {
        // Compared as a range: no protocol with ports in use has a number between 6 and 17.
        self.with([
            Expression::Meta {
                key: meta::L4PROTO,
                to: 0,
            },
            Expression::Between {
                register: 0,
                from: vec![TCP],
                to: vec![UDP],
            },
        ])
    }

    /// Matches one of these states of the connection (`ct::*`).
    pub fn state(self, states: u32) -> Rule {
        self.conntrack(ct::STATE, states)
    }

    /// Matches if an earlier packet of the connection was accepted.
    pub fn confirmed(self) -> Rule {
        self.conntrack(ct::STATUS, ct::CONFIRMED)
    }

    /// Matches if the connection's destination was translated (DNAT), by our rules or others.
    pub fn redirected(self) -> Rule {
        self.conntrack(ct::STATUS, ct::DESTINATION_CHANGED)
    }

    fn conntrack(self, key: u32, bits: u32) -> Rule {
        self.with([
            Expression::Ct { key, to: 0 },
            Expression::And {
                mask: bits.to_ne_bytes().to_vec(),
                register: 0,
            },
            Expression::Compare {
                register: 0,
                negated: true,
                value: vec![0; 4],
            },
        ])
    }

    pub fn load(self, field: Field, to: Register) -> Rule {
        let Field(base, offset, length) = field;
        self.with([Expression::Payload {
            base,
            offset,
            length,
            to,
        }])
    }

    pub fn meta(self, key: u32, to: Register) -> Rule {
        self.with([Expression::Meta { key, to }])
    }

    pub fn value(self, value: impl Into<Vec<u8>>, to: Register) -> Rule {
        let value = value.into();
        self.with([Expression::Load { value, to }])
    }

    /// Matches this value of a field.
    pub fn field(self, field: Field, value: impl Into<Vec<u8>>) -> Rule {
        self.load(field, 0).with([Expression::Compare {
            register: 0,
            negated: false,
            value: value.into(),
        }])
    }

    /// Matches a source address in the range, which also restricts the rule to IPv4 or IPv6.
    pub fn source(self, range: Cidr) -> Rule {
        match range.first() {
            IpAddr::V4(_) => self.v4().within(SOURCE4, range),
            IpAddr::V6(_) => self.v6().within(SOURCE6, range),
        }
    }

    /// Matches a destination address in the range.
    pub fn destination(self, range: Cidr) -> Rule {
        match range.first() {
            IpAddr::V4(_) => self.v4().within(DESTINATION4, range),
            IpAddr::V6(_) => self.v6().within(DESTINATION6, range),
        }
    }

    fn within(self, field: Field, range: Cidr) -> Rule {
        if range.prefix() == 0 {
            return self;
        }
        let (first, bits) = match range.first() {
            IpAddr::V4(it) => (it.octets().to_vec(), 32),
            IpAddr::V6(it) => (it.octets().to_vec(), 128),
        };
        let rule = self.load(field, 0);
        let rule = if range.prefix() < bits {
            let mask = match range.first() {
                IpAddr::V4(_) => (u32::MAX << (32 - range.prefix())).to_be_bytes().to_vec(),
                IpAddr::V6(_) => (u128::MAX << (128 - range.prefix())).to_be_bytes().to_vec(),
            };
            rule.with([Expression::And { mask, register: 0 }])
        } else {
            rule
        };
        rule.with([Expression::Compare {
            register: 0,
            negated: false,
            value: first,
        }])
    }

    /// Matches a destination port between the two.
    pub fn ports(self, (from, to): (u16, u16)) -> Rule {
        if from == to {
            return self.field(DESTINATION_PORT, from.to_be_bytes());
        }
        self.load(DESTINATION_PORT, 0).with([Expression::Between {
            register: 0,
            from: from.to_be_bytes().to_vec(),
            to: to.to_be_bytes().to_vec(),
        }])
    }

    /// Matches if the destination is an address of this host (`RTN_LOCAL`).
    pub fn at_this_host(self) -> Rule {
        self.with([
            Expression::DestinationKind { to: 0 },
            Expression::Compare {
                register: 0,
                negated: false,
                value: 2u32.to_ne_bytes().to_vec(),
            },
        ])
    }

    /// Matches if the set has the value in register 0 and the following ones.
    pub fn in_set(self, set: impl Into<Cow<'static, str>>) -> Rule {
        self.with([Expression::Lookup {
            set: set.into(),
            register: 0,
            to: None,
        }])
    }

    /// Matches if the set lacks the value in register 0 and the following ones.
    pub fn not_in_set(self, set: &'static str) -> Rule {
        self.with([Expression::Missing {
            set: set.into(),
            register: 0,
        }])
    }

    /// Adds the value in register 0 and the following ones to the set, for `timeout` milliseconds.
    pub fn remember(self, set: &'static str, timeout: u64) -> Rule {
        self.with([Expression::Remember {
            set: set.into(),
            register: 0,
            timeout,
        }])
    }

    /// Loads the address of the next hop, if that is a neighbour on an Ethernet.
    pub fn next_hop(self, v4: bool) -> Rule {
        /// `ARPHRD_ETHER`.
        const ETHERNET: u16 = 1;
        let rule = if v4 { self.v4() } else { self.v6() };
        rule.is(meta::OIFTYPE, false, ETHERNET.to_ne_bytes())
            .not_toward_guests()
            .with([Expression::NextHop { v4, to: 0 }])
    }

    /// Counts the connection for the incoming link, in one of `shares` shares (a power of two),
    /// which is chosen at random. Matches if that share has more than `most` connections.
    pub fn connections_over(self, set: &'static str, shares: u32, most: u32) -> Rule {
        self.meta(meta::IIF, 0).meta(meta::RANDOM, 1).with([
            Expression::And {
                mask: (shares - 1).to_ne_bytes().to_vec(),
                register: 1,
            },
            Expression::CountOver {
                set: set.into(),
                register: 0,
                most,
            },
        ])
    }

    /// Replaces the value in register 0 and the following ones by the map's value for it.
    pub fn mapped(self, map: &'static str) -> Rule {
        self.with([Expression::Lookup {
            set: map.into(),
            register: 0,
            to: Some(0),
        }])
    }

    /// Matches if the set has the incoming link.
    pub fn link_in(self, set: &'static str) -> Rule {
        self.meta(meta::IIF, 0).in_set(set)
    }

    /// Ends with the map's verdict for the incoming link.
    pub fn by_link(self, map: &'static str) -> Vec<Expression> {
        let map = map.into();
        self.meta(meta::IIF, 0)
            .with([Expression::VerdictMap { map, register: 0 }])
            .0
    }

    pub fn accept(self) -> Vec<Expression> {
        self.verdict(Verdict::Accept)
    }

    pub fn drop(self) -> Vec<Expression> {
        self.verdict(Verdict::Drop)
    }

    pub fn goto(self, chain: impl Into<Cow<'static, str>>) -> Vec<Expression> {
        self.verdict(Verdict::Goto(chain.into()))
    }

    pub fn verdict(self, verdict: Verdict) -> Vec<Expression> {
        self.end(Expression::Verdict(verdict))
    }

    pub fn end(self, last: Expression) -> Vec<Expression> {
        self.with([last]).0
    }

    /// The conditions alone, without a verdict: for lookups with counters.
    pub fn only(self) -> Vec<Expression> {
        self.0
    }
}
