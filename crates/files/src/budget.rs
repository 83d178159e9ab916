//! Limits the number of descriptors that the server holds for a guest.

use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Descriptors that may still be opened.
#[derive(Debug)]
pub struct Budget {
    most: usize,
    used: AtomicUsize,
}

/// One descriptor of the budget, until this is dropped.
#[derive(Debug)]
pub struct Slot(Arc<Budget>);

impl Budget {
    /// A budget of so many descriptors.
    pub fn new(most: usize) -> Arc<Budget> {
        let used = AtomicUsize::new(0);
        Arc::new(Budget { most, used })
    }

    /// Takes one.
    ///
    /// # Errors
    ///
    /// `ENFILE` if all are used.
    pub fn take(self: &Arc<Budget>) -> Result<Slot, Errno> {
        let more = |used: usize| (used < self.most).then_some(used + 1);
        match self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
        {
            Ok(_) => Ok(Slot(Arc::clone(self))),
            Err(_) => Err(Errno::NFILE),
        }
    }

    /// Whether more than three quarters are used. Then listings add no nodes.
    pub fn is_short(&self) -> bool {
        self.used.load(Ordering::Relaxed) > self.most / 4 * 3
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_slot_can_be_taken_again() {
        let budget = Budget::new(4);
        let mut slots: Vec<_> = (0..4).map(|_| budget.take().unwrap()).collect();
        assert!(budget.is_short());
        assert_eq!(budget.take().unwrap_err(), Errno::NFILE);
        slots.pop();
        assert!(!budget.is_short());
        budget.take().unwrap();
    }
}
