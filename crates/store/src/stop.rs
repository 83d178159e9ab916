//! Whether something is still wanted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Asked by what takes its time; by default nothing is ever given up.
#[derive(Debug, Clone, Default)]
pub struct Stop(Option<Arc<AtomicBool>>);

impl Stop {
    /// What nobody can give up.
    pub const fn never() -> Stop {
        Stop(None)
    }

    /// One that can be given up, with all its copies.
    pub fn new() -> Stop {
        Stop(Some(Arc::default()))
    }

    /// Nobody wants it any more.
    pub fn give_up(&self) {
        if let Some(given_up) = &self.0 {
            given_up.store(true, Ordering::Release);
        }
    }

    /// Does nobody want it any more?
    pub fn is_given_up(&self) -> bool {
        let given_up = self.0.as_ref();
        given_up.is_some_and(|given_up| given_up.load(Ordering::Acquire))
    }
}
