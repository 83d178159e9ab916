//! Limits the log messages that a guest or its monitor can cause.

use std::sync::atomic::{AtomicU64, Ordering};

/// How many messages of one device or peer are logged.
const ADMITTED: u64 = 8;

/// Lets the first messages about a device or a peer through and counts the rest, so that none can
/// fill the host's log. When it is dropped, the number of suppressed messages is logged.
#[derive(Debug, Default)]
pub struct LogLimit(AtomicU64);

impl LogLimit {
    /// A limit without messages so far.
    pub const fn new() -> LogLimit {
        LogLimit(AtomicU64::new(0))
    }

    /// Whether the next message may be written; counts it if not.
    pub fn admits(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) < ADMITTED
    }

    /// How many messages were suppressed.
    pub fn suppressed(&self) -> u64 {
        self.0.load(Ordering::Relaxed).saturating_sub(ADMITTED)
    }
}

impl Drop for LogLimit {
    fn drop(&mut self) {
        let count = self.suppressed();
        if count > 0 {
            tracing::warn!(
                count,
                "further messages about one device or peer were suppressed"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_above_the_limit_are_only_counted() {
        let limit = LogLimit::new();
        let passed = (0..1000).filter(|_| limit.admits()).count();
        assert_eq!(passed as u64, ADMITTED);
        assert_eq!(limit.suppressed(), 1000 - ADMITTED);
    }
}
