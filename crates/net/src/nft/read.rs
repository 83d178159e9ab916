//! Reads tables, sets and chains as the kernel lists them.

use super::constants::{
    self as nf, FAMILY_INET, SUBSYSTEM, chain, data, element, rule, set, table,
};
use crate::netlink::channel::{AttributeIter, find};
use crate::netlink::{Batch, Channel, Refusal, flags};

/// Bytes of the fixed structure before the attributes.
const NFGENMSG: usize = 4;
const HOOK_FORWARD: u32 = 2;
const POLICY_DROP: u32 = 0;

/// An element of a set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundElement {
    /// Its key.
    pub key: Vec<u8>,
    /// The values of its counter: bytes and packets.
    pub counted: (u64, u64),
    /// Milliseconds until it expires.
    pub expires: Option<u64>,
}

/// The user data of a table; `None` if the table does not exist.
///
/// # Errors
///
/// If the kernel refuses, for a reason other than that the table does not exist.
pub fn userdata(netfilter: &mut Channel, name: &str) -> Result<Option<Vec<u8>>, Refusal> {
    let request = request(nf::GET_TABLE, 0, FAMILY_INET, |it| {
        it.text(table::NAME, name);
    });
    netfilter.get(request, |_, body| {
        let attributes = body.get(NFGENMSG..).unwrap_or(&[]);
        Ok(find(attributes, table::USERDATA).unwrap_or(&[]).to_vec())
    })
}

/// The names of a table's sets.
///
/// # Errors
///
/// If the kernel refuses.
pub fn sets(netfilter: &mut Channel, table: &str) -> Result<Vec<String>, Refusal> {
    let request = || {
        request(nf::GET_SET, flags::DUMP, FAMILY_INET, |it| {
            it.text(set::TABLE, table);
        })
    };
    netfilter.dump(request, |_, body| {
        Ok(text(body.get(NFGENMSG..).unwrap_or(&[]), set::NAME))
    })
}

/// The elements of a set.
///
/// # Errors
///
/// If the set does not exist (ENOENT), or the kernel refuses for another reason.
pub fn elements(
    netfilter: &mut Channel,
    table: &str,
    set: &str,
) -> Result<Vec<FoundElement>, Refusal> {
    let request = || {
        request(nf::GET_ELEMENT, flags::DUMP, FAMILY_INET, |it| {
            it.text(element::TABLE, table).text(element::SET, set);
        })
    };
    let lists = netfilter.dump(request, |_, body| {
        let attributes = body.get(NFGENMSG..).unwrap_or(&[]);
        Ok(find(attributes, element::ELEMENTS).map(list))
    })?;
    Ok(lists.into_iter().flatten().collect())
}

/// One element of a set; `None` if it does not exist.
///
/// # Errors
///
/// If the kernel refuses, for a reason other than that the element or its set does not exist.
pub fn element(
    netfilter: &mut Channel,
    table: &str,
    set: &str,
    key: &[u8],
) -> Result<Option<FoundElement>, Refusal> {
    let request = request(nf::GET_ELEMENT, 0, FAMILY_INET, |it| {
        it.text(element::TABLE, table).text(element::SET, set);
        it.nested(element::ELEMENTS, |it| {
            it.nested(nf::LIST_ELEMENT, |it| {
                it.nested(element::KEY, |it| _ = it.bytes(data::VALUE, key));
            });
        });
    });
    let found = netfilter.get(request, |_, body| {
        let attributes = body.get(NFGENMSG..).unwrap_or(&[]);
        Ok(find(attributes, element::ELEMENTS).map(list))
    })?;
    Ok(found.flatten().and_then(|it| it.into_iter().next()))
}

fn list(elements: &[u8]) -> Vec<FoundElement> {
    let one = |(_, attributes): (u16, &[u8])| {
        let key = find(find(attributes, element::KEY)?, data::VALUE)?.to_vec();
        let counter = find(attributes, element::EXPRESSION)
            .and_then(|it| find(it, nf::expression::DATA))
            .unwrap_or(&[]);
        let counted = |kind| find(counter, kind).and_then(long).unwrap_or(0);
        Some(FoundElement {
            key,
            counted: (counted(1), counted(2)),
            expires: find(attributes, element::EXPIRATION).and_then(long),
        })
    };
    AttributeIter(elements).filter_map(one).collect()
}

/// A chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundChain {
    /// `NFPROTO_*`.
    pub family: u8,
    /// Its table.
    pub table: String,
    /// Its name.
    pub name: String,
    /// Whether it is at the forward hook with the policy `drop`.
    pub drops_forwarded: bool,
}

/// The chains of all tables.
///
/// # Errors
///
/// If the kernel refuses.
pub fn chains(netfilter: &mut Channel) -> Result<Vec<FoundChain>, Refusal> {
    let request = || request(nf::GET_CHAIN, flags::DUMP, 0, |_| {});
    netfilter.dump(request, |_, body| {
        let Some((header, attributes)) = body.split_at_checked(NFGENMSG) else {
            return Ok(None);
        };
        let hook = find(attributes, chain::HOOK)
            .and_then(|it| find(it, chain::HOOK_NUMBER))
            .and_then(number);
        let policy = find(attributes, chain::POLICY).and_then(number);
        let chain = || {
            Some(FoundChain {
                family: header[0],
                table: text(attributes, chain::TABLE)?,
                name: text(attributes, chain::NAME)?,
                drops_forwarded: hook == Some(HOOK_FORWARD) && policy == Some(POLICY_DROP),
            })
        };
        Ok(chain())
    })
}

/// Number of rules in a chain.
///
/// # Errors
///
/// If the kernel refuses.
pub fn rules(netfilter: &mut Channel, table: &str, chain: &str) -> Result<usize, Refusal> {
    let request = || {
        request(nf::GET_RULE, flags::DUMP, FAMILY_INET, |it| {
            it.text(rule::TABLE, table).text(rule::CHAIN, chain);
        })
    };
    let found = netfilter.dump(request, |_, body| {
        let attributes = body.get(NFGENMSG..).unwrap_or(&[]);
        let of = find(attributes, rule::CHAIN).and_then(|it| it.strip_suffix(&[0]));
        Ok((of == Some(chain.as_bytes())).then_some(()))
    })?;
    Ok(found.len())
}

fn request(
    kind: u16,
    flags: u16,
    family: u8,
    write: impl FnOnce(&mut crate::netlink::Attributes),
) -> Batch {
    let mut batch = Batch::new();
    batch.message(SUBSYSTEM << 8 | kind, flags, |it| {
        it.fixed(&[family, 0, 0, 0]);
        write(it);
    });
    batch
}

fn text(attributes: &[u8], kind: u16) -> Option<String> {
    let bytes = find(attributes, kind)?;
    let bytes = bytes.strip_suffix(&[0]).unwrap_or(bytes);
    Some(String::from_utf8_lossy(bytes).into_owned())
}

fn number(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

fn long(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}
