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
    pub fn give_up(&self) {
        if let Some(given_up) = &self.0 {
            given_up.store(true, Ordering::Release);
        }
    }

    /// Whether the operation was cancelled.
    pub fn is_given_up(&self) -> bool {
        let given_up = self.0.as_ref();
        given_up.is_some_and(|given_up| given_up.load(Ordering::Acquire))
    }
}
