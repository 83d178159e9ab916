//! Deadlines by token.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// At most one deadline per token.
#[derive(Default)]
pub struct Deadlines {
    by_token: HashMap<u64, Instant>,
    in_order: BTreeSet<(Instant, u64)>,
}

impl Deadlines {
    /// Sets or moves the deadline of `token`.
    pub fn set(&mut self, token: u64, at: Instant) {
        self.cancel(token);
        self.by_token.insert(token, at);
        self.in_order.insert((at, token));
    }

    /// Removes the deadline of `token`.
    pub fn cancel(&mut self, token: u64) {
        if let Some(at) = self.by_token.remove(&token) {
            self.in_order.remove(&(at, token));
        }
    }

    /// The next deadline.
    pub fn next(&self) -> Option<Instant> {
        self.in_order.first().map(|(at, _)| *at)
    }

    /// Removes one token whose deadline is over, and returns it.
    pub fn take_expired(&mut self, now: Instant) -> Option<u64> {
        let (at, token) = *self.in_order.first()?;
        (at <= now).then(|| {
            self.cancel(token);
            token
        })
    }

    /// Moves all deadlines, because time that the device spent paused does not count.
    pub fn shift(&mut self, by: Duration) {
        for at in self.by_token.values_mut() {
            *at += by;
        }
        self.in_order = self
            .by_token
            .iter()
            .map(|(token, at)| (*at, *token))
            .collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_deadline_expires_first_and_once() {
        let start = Instant::now();
        let after = |ms| start + Duration::from_millis(ms);
        let mut deadlines = Deadlines::default();
        deadlines.set(1, after(30));
        deadlines.set(2, after(10));
        deadlines.set(3, after(20));
        deadlines.set(2, after(40));
        deadlines.cancel(3);
        assert_eq!(deadlines.next(), Some(after(30)));
        assert_eq!(deadlines.take_expired(after(29)), None);
        assert_eq!(deadlines.take_expired(after(30)), Some(1));
        deadlines.shift(Duration::from_millis(5));
        assert_eq!(deadlines.take_expired(after(44)), None);
        assert_eq!(deadlines.take_expired(after(45)), Some(2));
        assert_eq!(deadlines.next(), None);
    }
}
