//! Changes to one table, applied atomically.

use super::constants::{
    self as nf, FAMILY_INET, SUBSYSTEM, chain, data, element, rule, set, table,
};
use super::expression::{self, Expression, Verdict};
use crate::netlink::{Attributes, Batch, Channel, Refusal, flags};

/// Bytes of elements in one message: an attribute has at most 64 KiB.
const ELEMENT_BYTES: usize = 32 << 10;

/// Where a base chain is hooked (nft(8), "CHAINS").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hook {
    /// `filter` or `nat`.
    pub kind: &'static str,
    /// `NF_INET_*`.
    pub hook: u32,
    /// Chains with a lower priority are called first.
    pub priority: i32,
}

/// The properties of a set or map.
#[derive(Debug, Clone, Copy, Default)]
pub struct Set {
    /// `SetFlag::*`.
    pub flags: u32,
    /// Data type and length in bytes of a key.
    pub key: (u32, u32),
    /// Data type and length in bytes of a map's values.
    pub value: Option<(u32, u32)>,
    /// What each element has, evaluated at each lookup that finds it.
    pub each: Option<Each>,
    /// The maximum number of elements.
    pub most: Option<u32>,
}

/// The state of each element of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Each {
    /// A counter of lookups.
    Counter,
    /// A token bucket: lookups succeed only beyond this rate.
    Over {
        /// Lookups each second.
        rate: u64,
        /// Lookups that may come at once.
        burst: u32,
    },
}

/// An element of a set or map.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Element {
    /// Its key.
    pub key: Vec<u8>,
    /// Its value in a map.
    pub value: Option<Vec<u8>>,
    /// Its verdict in a verdict map.
    pub verdict: Option<Verdict>,
    /// Milliseconds until it expires.
    pub timeout: Option<u64>,
    /// It is the exclusive end of an interval (`NFT_SET_ELEM_INTERVAL_END`).
    pub interval_end: bool,
    /// The initial values of its counter: bytes and packets.
    pub counted: Option<(u64, u64)>,
}

impl Element {
    /// An element of a plain set.
    pub fn new(key: impl Into<Vec<u8>>) -> Element {
        Element {
            key: key.into(),
            ..Element::default()
        }
    }
}

/// Changes to one table of the family `inet`.
#[derive(Debug)]
pub struct Transaction {
    batch: Batch,
    table: &'static str,
    sets: u32,
}

impl Transaction {
    /// An empty transaction.
    pub fn new(table: &'static str) -> Transaction {
        let mut batch = Batch::new();
        limit(&mut batch, nf::BATCH_BEGIN);
        Transaction {
            batch,
            table,
            sets: 0,
        }
    }

    /// Whether there are no changes.
    pub fn is_empty(&self) -> bool {
        self.batch.len() == 1
    }

    /// Applies all changes, or none.
    ///
    /// # Errors
    ///
    /// If the kernel refuses one of them; nothing is changed then.
    pub fn commit(mut self, netfilter: &mut Channel) -> Result<(), Refusal> {
        if self.is_empty() {
            return Ok(());
        }
        let last = self.batch.len() - 1;
        limit(&mut self.batch, nf::BATCH_END);
        netfilter.transact(self.batch, last)
    }

    fn message(&mut self, kind: u16, flags: u16, write: impl FnOnce(&mut Attributes)) {
        self.batch.message(SUBSYSTEM << 8 | kind, flags, |it| {
            it.fixed(&[FAMILY_INET, 0, 0, 0]);
            write(it);
        });
    }

    /// Creates the table, unless it exists.
    pub fn add_table(&mut self, userdata: &[u8]) {
        let name = self.table;
        self.message(nf::NEW_TABLE, flags::CREATE, |it| {
            it.text(table::NAME, name).bytes(table::USERDATA, userdata);
        });
    }

    /// Deletes the table with all its contents. It must exist.
    pub fn delete_table(&mut self) {
        let name = self.table;
        self.message(nf::DEL_TABLE, 0, |it| _ = it.text(table::NAME, name));
    }

    /// Creates a chain; one with a hook has the policy `accept`.
    pub fn add_chain(&mut self, name: &str, hook: Option<Hook>) {
        let table = self.table;
        self.message(nf::NEW_CHAIN, flags::CREATE, |it| {
            it.text(chain::TABLE, table).text(chain::NAME, name);
            if let Some(hook) = hook {
                it.nested(chain::HOOK, |it| {
                    it.number(chain::HOOK_NUMBER, hook.hook);
                    it.number(chain::HOOK_PRIORITY, hook.priority as u32);
                });
                it.number(chain::POLICY, 1).text(chain::TYPE, hook.kind);
            }
        });
    }

    /// Deletes a chain that no rule jumps to, with its rules.
    pub fn delete_chain(&mut self, name: &str) {
        let table = self.table;
        self.message(nf::DEL_CHAIN, 0, |it| {
            it.text(chain::TABLE, table).text(chain::NAME, name);
        });
    }

    /// Adds a rule at the end of a chain.
    pub fn add_rule(&mut self, chain: &str, expressions: &[Expression]) {
        let table = self.table;
        self.message(nf::NEW_RULE, flags::CREATE | flags::APPEND, |it| {
            it.text(rule::TABLE, table).text(rule::CHAIN, chain);
            it.nested(rule::EXPRESSIONS, |it| {
                for one in expressions {
                    expression::write(it, one);
                }
            });
        });
    }

    /// Deletes the rules of a chain.
    #[cfg(test)]
    pub fn flush_chain(&mut self, chain: &str) {
        let table = self.table;
        self.message(nf::DEL_RULE, 0, |it| {
            it.text(rule::TABLE, table).text(rule::CHAIN, chain);
        });
    }

    /// Creates a set.
    pub fn add_set(&mut self, name: &str, like: &Set) {
        self.sets += 1;
        let (table, id) = (self.table, self.sets);
        self.message(nf::NEW_SET, flags::CREATE, |it| {
            it.text(set::TABLE, table).text(set::NAME, name);
            let map = if like.value.is_some() {
                set::FLAG_MAP
            } else {
                0
            };
            it.number(set::FLAGS, like.flags | map);
            it.number(set::KEY_TYPE, like.key.0);
            it.number(set::KEY_LENGTH, like.key.1);
            if let Some((kind, length)) = like.value {
                it.number(set::DATA_TYPE, kind);
                it.number(set::DATA_LENGTH, length);
            }
            if let Some(most) = like.most {
                it.nested(set::DESCRIPTION, |it| {
                    it.number(set::DESCRIPTION_SIZE, most);
                });
            }
            it.number(set::ID, id);
            if let Some(each) = like.each {
                it.nested(set::EXPRESSION, |it| match each {
                    Each::Counter => counter(it, 0, 0),
                    Each::Over { rate, burst } => over(it, rate, burst),
                });
            }
        });
    }

    /// Deletes a set that no rule uses.
    pub fn delete_set(&mut self, name: &str) {
        let table = self.table;
        self.message(nf::DEL_SET, 0, |it| {
            it.text(set::TABLE, table).text(set::NAME, name);
        });
    }

    /// Adds elements. An existing element with the same value does not change.
    pub fn add_elements(&mut self, set: &str, elements: &[Element]) {
        self.elements(nf::NEW_ELEMENT, flags::CREATE, set, elements);
    }

    /// Deletes elements, which must exist.
    pub fn delete_elements(&mut self, set: &str, elements: &[Element]) {
        self.elements(nf::DEL_ELEMENT, 0, set, elements);
    }

    fn elements(&mut self, kind: u16, flags: u16, set: &str, elements: &[Element]) {
        let table = self.table;
        let mut left = elements;
        while !left.is_empty() {
            self.message(kind, flags, |it| {
                it.text(element::TABLE, table).text(element::SET, set);
                it.nested(element::ELEMENTS, |it| {
                    let start = it.written();
                    // The two bounds of an interval must be in one message.
                    while let Some((one, rest)) = left.split_first()
                        && (it.written() - start < ELEMENT_BYTES || one.interval_end)
                    {
                        it.nested(nf::LIST_ELEMENT, |it| write_element(it, one));
                        left = rest;
                    }
                });
            });
        }
    }
}

fn write_element(to: &mut Attributes, it: &Element) {
    to.nested(element::KEY, |to| _ = to.bytes(data::VALUE, &it.key));
    if let Some(value) = &it.value {
        to.nested(element::DATA, |to| _ = to.bytes(data::VALUE, value));
    }
    if let Some(verdict) = &it.verdict {
        to.nested(element::DATA, |to| verdict.write(to));
    }
    if it.interval_end {
        to.number(element::FLAGS, element::FLAG_INTERVAL_END);
    }
    if let Some(timeout) = it.timeout {
        to.long(element::TIMEOUT, timeout);
    }
    if let Some((bytes, packets)) = it.counted {
        to.nested(element::EXPRESSION, |to| counter(to, bytes, packets));
    }
}

fn counter(to: &mut Attributes, bytes: u64, packets: u64) {
    to.text(nf::expression::NAME, "counter");
    to.nested(nf::expression::DATA, |it| {
        it.long(1, bytes).long(2, packets);
    });
}

fn over(to: &mut Attributes, rate: u64, burst: u32) {
    const SECOND: u64 = 1;
    const OF_PACKETS: u32 = 0;
    const INVERTED: u32 = 1;
    to.text(nf::expression::NAME, "limit");
    to.nested(nf::expression::DATA, |it| {
        it.long(1, rate).long(2, SECOND).number(3, burst);
        it.number(4, OF_PACKETS).number(5, INVERTED);
    });
}

/// The messages that begin and end a batch.
fn limit(batch: &mut Batch, kind: u16) {
    batch.message(kind, 0, |it| {
        let [high, low] = SUBSYSTEM.to_be_bytes();
        it.fixed(&[0, 0, high, low]);
    });
}
