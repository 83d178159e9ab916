//! Counts who uses a VM through this node.
//!
//! A use is counted before it reads the VM's state, and then waits while the VM is marked as
//! hibernating. Hibernation of an idle VM first sets that mark
//! ([`crate::handle::VmHandle::begin_hibernation`]) and then reads the counts. So one of the two
//! always sees the other.

use jiffy_content::clock::monotonic_ns;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Kinds of use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// A command that was started by `exec`.
    Exec,
    /// A copy of files.
    Copy,
    /// A client of the first command.
    Attach,
    /// A connection that this process relays to a port of the VM.
    Connection,
}

const KINDS: [(Use, &str, &str); 4] = [
    (Use::Exec, "exec", "execs"),
    (Use::Copy, "copy", "copies"),
    (Use::Attach, "attached client", "attached clients"),
    (Use::Connection, "connection", "connections"),
];

/// The uses of one VM.
#[derive(Debug)]
pub struct Activity {
    counts: [AtomicUsize; KINDS.len()],
    /// When the last use began or ended (host CLOCK_MONOTONIC).
    last_ns: AtomicU64,
}

impl Default for Activity {
    fn default() -> Activity {
        Activity {
            counts: Default::default(),
            last_ns: AtomicU64::new(monotonic_ns()),
        }
    }
}

/// A use in progress; it ends when this is dropped.
#[derive(Debug)]
#[must_use = "the use is over when this is dropped"]
pub struct InUse {
    activity: Arc<Activity>,
    what: Use,
}

impl Activity {
    /// Begins a use.
    pub fn begin(self: &Arc<Self>, what: Use) -> InUse {
        self.counts[what as usize].fetch_add(1, Ordering::SeqCst);
        self.last_ns.store(monotonic_ns(), Ordering::SeqCst);
        InUse {
            activity: Arc::clone(self),
            what,
        }
    }

    /// When the last use began or ended (host CLOCK_MONOTONIC, nanoseconds); at first, when this
    /// was made.
    pub fn last_ns(&self) -> u64 {
        self.last_ns.load(Ordering::SeqCst)
    }

    /// The uses in progress, in words: `2 execs`.
    pub fn in_words(&self) -> Vec<String> {
        let counted = KINDS.iter().filter_map(|(what, one, many)| {
            match self.counts[*what as usize].load(Ordering::SeqCst) {
                0 => None,
                1 => Some(format!("1 {one}")),
                count => Some(format!("{count} {many}")),
            }
        });
        counted.collect()
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.activity
            .last_ns
            .store(monotonic_ns(), Ordering::SeqCst);
        self.activity.counts[self.what as usize].fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn active_uses_are_counted_until_dropped() {
        let activity = Arc::new(Activity::default());
        assert!(activity.in_words().is_empty());
        let first = activity.begin(Use::Exec);
        let second = activity.begin(Use::Exec);
        let third = activity.begin(Use::Connection);
        assert_eq!(activity.in_words(), ["2 execs", "1 connection"]);
        drop(first);
        drop(third);
        assert_eq!(activity.in_words(), ["1 exec"]);
        let before = activity.last_ns();
        drop(second);
        assert!(activity.in_words().is_empty());
        assert!(activity.last_ns() > before);
    }
}
