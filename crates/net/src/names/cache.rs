//! A cache of answers, with bounded memory.

use super::message::Resolved;
use domain::base::iana::Rtype;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most answers, and the most bytes of all answers.
const ANSWERS: usize = 4096;
const BYTES: usize = 4 << 20;

type Key = (String, Rtype);

/// Answers by name and type. The oldest are evicted first.
#[derive(Debug, Default)]
pub struct Cache {
    answers: HashMap<Key, Kept>,
    /// Keys in the order of insertion, with a sequence number. If a key was inserted again, its
    /// older entry is ignored.
    order: VecDeque<(Key, u64)>,
    next: u64,
    bytes: usize,
}

#[derive(Debug, Clone)]
struct Kept {
    resolved: Arc<Resolved>,
    since: Instant,
    number: u64,
}

impl Cache {
    /// An answer whose TTL has not expired, and its age.
    pub fn get(&self, name: &str, kind: Rtype, now: Instant) -> Option<(Arc<Resolved>, Duration)> {
        let kept = self.answers.get(&(name.to_owned(), kind))?;
        let age = now.saturating_duration_since(kept.since);
        (age < kept.resolved.ttl).then(|| (kept.resolved.clone(), age))
    }

    /// Caches an answer, unless its TTL is 0, or it is an error, truncated or too large.
    pub fn put(&mut self, name: &str, kind: Rtype, resolved: Arc<Resolved>, now: Instant) {
        if resolved.ttl.is_zero() || resolved.failed || resolved.cut || resolved.len() > BYTES {
            return;
        }
        let key = (name.to_owned(), kind);
        self.bytes += cost(&key, &resolved);
        let kept = Kept {
            resolved,
            since: now,
            number: self.next,
        };
        if let Some(old) = self.answers.insert(key.clone(), kept) {
            self.bytes -= cost(&key, &old.resolved);
        }
        self.order.push_back((key, self.next));
        self.next += 1;
        while self.bytes > BYTES || self.order.len() > ANSWERS {
            let Some((key, number)) = self.order.pop_front() else {
                break;
            };
            if self.answers.get(&key).is_some_and(|it| it.number == number)
                && let Some(old) = self.answers.remove(&key)
            {
                self.bytes -= cost(&key, &old.resolved);
            }
        }
    }

    /// Number of cached answers.
    pub fn len(&self) -> usize {
        self.answers.len()
    }

    /// Is the cache empty?
    pub fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }
}

/// Bytes that an answer takes; its key is stored twice.
fn cost(key: &Key, resolved: &Resolved) -> usize {
    2 * key.0.len() + resolved.len() + 200
}
