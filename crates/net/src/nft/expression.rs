//! The expressions of rules: each loads, compares or decides.

use super::constants::{self as nf, FIRST_REGISTER, VERDICT_REGISTER, data, expression};
use crate::netlink::Attributes;
use std::borrow::Cow;

/// A 4-byte register, counted from 0. Longer values continue in the following registers.
pub type Register = u32;

/// A verdict on a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The packet is accepted by this base chain.
    Accept,
    /// The packet is dropped.
    Drop,
    /// Evaluation continues in another chain, without return.
    Goto(Cow<'static, str>),
}

/// One step of a rule. Names are those of `nft(8)`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "names and numbers are the kernel's")]
pub enum Expression {
    /// `meta KEY` into a register.
    Meta { key: u32, to: Register },
    /// `ct KEY` into a register.
    Ct { key: u32, to: Register },
    /// Bytes of the packet into registers.
    Payload {
        base: u32,
        offset: u32,
        length: u32,
        to: Register,
    },
    /// The type of the packet's destination address (`RTN_*`), into a register.
    DestinationKind { to: Register },
    /// An immediate value into registers.
    Load { value: Vec<u8>, to: Register },
    /// `register & mask`, in place.
    And { mask: Vec<u8>, register: Register },
    /// Continues only if the register has this value (or, negated, has not).
    Compare {
        register: Register,
        negated: bool,
        value: Vec<u8>,
    },
    /// Continues only if the register is between the two.
    Between {
        register: Register,
        from: Vec<u8>,
        to: Vec<u8>,
    },
    /// Continues only if the set has the register's value. A map's value is loaded into `to`.
    Lookup {
        set: Cow<'static, str>,
        register: Register,
        to: Option<Register>,
    },
    /// Continues only if the set lacks the register's value.
    Missing {
        set: Cow<'static, str>,
        register: Register,
    },
    /// Adds the register's value to the set, for `timeout` milliseconds. An existing element does
    /// not change.
    Remember {
        set: Cow<'static, str>,
        register: Register,
        timeout: u64,
    },
    /// Counts the packet's connection in the set's element with the register's value, which is
    /// added if it is missing. Continues only if that element has more than `most` connections.
    CountOver {
        set: Cow<'static, str>,
        register: Register,
        most: u32,
    },
    /// The address of the next hop, into registers.
    NextHop { v4: bool, to: Register },
    /// Applies the verdict that a verdict map has for the register's value.
    VerdictMap {
        map: Cow<'static, str>,
        register: Register,
    },
    /// Ends with a verdict.
    Verdict(Verdict),
    /// Changes the source address to that of the outgoing link.
    Masquerade,
    /// Changes the source address.
    SourceNat { family: u32, address: Register },
    /// Changes the destination address.
    DestinationNat {
        family: u32,
        address: Register,
        port: Register,
    },
    /// Drops the packet and answers with a TCP reset.
    Reset,
    /// Drops the packet and answers with ICMP "administratively prohibited".
    Prohibit,
}

/// `NFT_META_*`.
pub mod meta {
    pub const IIF: u32 = 4;
    pub const OIF: u32 = 5;
    pub const OIFTYPE: u32 = 9;
    pub const NFPROTO: u32 = 15;
    pub const L4PROTO: u32 = 16;
    pub const IIFGROUP: u32 = 21;
    pub const OIFGROUP: u32 = 22;
    pub const RANDOM: u32 = 24;
}

/// `NFT_CT_*`, and bits of the values.
pub mod ct {
    pub const STATE: u32 = 0;
    pub const STATUS: u32 = 2;
    pub const INVALID: u32 = 1;
    pub const ESTABLISHED: u32 = 2;
    pub const RELATED: u32 = 4;
    pub const NEW: u32 = 8;
    pub const CONFIRMED: u32 = 8;
    pub const DESTINATION_CHANGED: u32 = 0x20;
}

/// `NFT_PAYLOAD_*`.
pub mod payload {
    pub const LINK: u32 = 0;
    pub const NETWORK: u32 = 1;
    pub const TRANSPORT: u32 = 2;
}

const LOOKUP_INVERTED: u32 = 1;
const DYNSET_ADD: u32 = 0;
const CONNLIMIT_OVER: u32 = 1;
const RT_NEXT_HOP4: u32 = 1;
const RT_NEXT_HOP6: u32 = 2;
const RANGE_EQ: u32 = 0;
const FIB_RESULT_KIND: u32 = 3;
const FIB_DESTINATION: u32 = 2;
const NAT_SOURCE: u32 = 0;
const NAT_DESTINATION: u32 = 1;
const REJECT_RESET: u32 = 1;
const REJECT_ICMPX: u32 = 2;
const ICMPX_PROHIBITED: u8 = 3;

impl Verdict {
    fn code(&self) -> i32 {
        match self {
            Verdict::Drop => 0,
            Verdict::Accept => 1,
            Verdict::Goto(_) => -4,
        }
    }

    /// Writes it as the value of a `DATA` attribute.
    pub(super) fn write(&self, to: &mut Attributes) {
        to.nested(data::VERDICT, |it| {
            it.number(data::VERDICT_CODE, self.code() as u32);
            if let Verdict::Goto(chain) = self {
                it.text(data::VERDICT_CHAIN, chain);
            }
        });
    }
}

fn register(number: Register) -> u32 {
    FIRST_REGISTER + number
}

/// Writes it as one element of a rule's list of expressions.
pub(super) fn write(to: &mut Attributes, it: &Expression) {
    let mut named = |name: &str, body: &dyn Fn(&mut Attributes)| {
        to.nested(nf::LIST_ELEMENT, |element| {
            element.text(expression::NAME, name);
            element.nested(expression::DATA, body);
        });
    };
    match it {
        Expression::Meta { key, to } => named("meta", &|it| {
            it.number(1, register(*to)).number(2, *key);
        }),
        Expression::Ct { key, to } => named("ct", &|it| {
            it.number(1, register(*to)).number(2, *key);
        }),
        Expression::Payload {
            base,
            offset,
            length,
            to,
        } => named("payload", &|it| {
            it.number(1, register(*to)).number(2, *base);
            it.number(3, *offset).number(4, *length);
        }),
        Expression::DestinationKind { to } => named("fib", &|it| {
            it.number(1, register(*to));
            it.number(2, FIB_RESULT_KIND).number(3, FIB_DESTINATION);
        }),
        Expression::Load { value, to } => named("immediate", &|it| {
            it.number(1, register(*to));
            it.nested(2, |it| _ = it.bytes(data::VALUE, value));
        }),
        Expression::And { mask, register: at } => named("bitwise", &|it| {
            it.number(1, register(*at)).number(2, register(*at));
            it.number(3, mask.len() as u32);
            it.nested(4, |it| _ = it.bytes(data::VALUE, mask));
            it.nested(5, |it| _ = it.bytes(data::VALUE, &vec![0; mask.len()]));
        }),
        Expression::Compare {
            register: at,
            negated,
            value,
        } => named("cmp", &|it| {
            it.number(1, register(*at)).number(2, u32::from(*negated));
            it.nested(3, |it| _ = it.bytes(data::VALUE, value));
        }),
        Expression::Between {
            register: at,
            from,
            to,
        } => named("range", &|it| {
            it.number(1, register(*at)).number(2, RANGE_EQ);
            it.nested(3, |it| _ = it.bytes(data::VALUE, from));
            it.nested(4, |it| _ = it.bytes(data::VALUE, to));
        }),
        Expression::Lookup {
            set,
            register: at,
            to,
        } => named("lookup", &|it| {
            it.text(1, set).number(2, register(*at));
            if let Some(to) = to {
                it.number(3, register(*to));
            }
        }),
        Expression::Missing { set, register: at } => named("lookup", &|it| {
            it.text(1, set).number(2, register(*at));
            it.number(5, LOOKUP_INVERTED);
        }),
        Expression::Remember {
            set,
            register: at,
            timeout,
        } => named("dynset", &|it| {
            it.text(1, set).number(3, DYNSET_ADD);
            it.number(4, register(*at)).long(6, *timeout);
        }),
        Expression::CountOver {
            set,
            register: at,
            most,
        } => named("dynset", &|it| {
            it.text(1, set).number(3, DYNSET_ADD);
            it.number(4, register(*at));
            it.nested(7, |it| {
                it.text(expression::NAME, "connlimit");
                it.nested(expression::DATA, |it| {
                    it.number(1, *most).number(2, CONNLIMIT_OVER);
                });
            });
        }),
        Expression::NextHop { v4, to } => named("rt", &|it| {
            let key = if *v4 { RT_NEXT_HOP4 } else { RT_NEXT_HOP6 };
            it.number(1, register(*to)).number(2, key);
        }),
        Expression::VerdictMap { map, register: at } => named("lookup", &|it| {
            it.text(1, map).number(2, register(*at));
            it.number(3, VERDICT_REGISTER);
        }),
        Expression::Verdict(verdict) => named("immediate", &|it| {
            it.number(1, VERDICT_REGISTER);
            it.nested(2, |it| verdict.write(it));
        }),
        Expression::Masquerade => named("masq", &|_| {}),
        Expression::SourceNat { family, address } => named("nat", &|it| {
            it.number(1, NAT_SOURCE).number(2, *family);
            it.number(3, register(*address));
        }),
        Expression::DestinationNat {
            family,
            address,
            port,
        } => named("nat", &|it| {
            it.number(1, NAT_DESTINATION).number(2, *family);
            it.number(3, register(*address)).number(5, register(*port));
        }),
        Expression::Reset => named("reject", &|it| {
            it.number(1, REJECT_RESET).bytes(2, &[0]);
        }),
        Expression::Prohibit => named("reject", &|it| {
            it.number(1, REJECT_ICMPX).bytes(2, &[ICMPX_PROHIBITED]);
        }),
    }
}
