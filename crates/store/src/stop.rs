//! Cancellation of reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Checked by operations that may take long; the default can't be cancelled.
#[derive(Debug, Clone, Default)]
pub struct Stop(Option<Arc<AtomicBool>>);

impl Stop {
    /// A `Stop` that can't be cancelled.
    pub const fn never() -> Stop {
        Stop(None)
    }

    /// A `Stop` that can be cancelled; its clones share the state.
    pub fn new() -> Stop {
        Stop(Some(Arc::default()))
    }

    /// Cancels the operation: all clones report it.
    pub fn cancel(&self) {
        if let Some(cancelled) = &self.0 {
            cancelled.store(true, Ordering::Release);
        }
    }

    /// Whether the operation was cancelled.
    pub fn is_cancelled(&self) -> bool {
        let cancelled = self.0.as_ref();
        cancelled.is_some_and(|cancelled| cancelled.load(Ordering::Acquire))
    }
}
