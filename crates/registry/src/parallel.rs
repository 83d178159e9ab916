//! Runs a few tasks in parallel.

use crate::error::Result;
use jiffy_sys::mutex::{lock, unpoisoned};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Connections that one transfer of many blobs uses.
pub(crate) const AT_ONCE: usize = 4;

/// Runs `act` for each item on up to [`AT_ONCE`] threads, in order. After a failure no further item
/// is begun, and the first failure is returned.
pub(crate) fn for_each<T: Sync>(items: &[T], act: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let first_failure = Mutex::new(None);
    let work = || {
        while !failed.load(Ordering::Relaxed) {
            let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) else {
                return;
            };
            if let Err(error) = act(item) {
                failed.store(true, Ordering::Relaxed);
                let mut first = lock(&first_failure);
                first.get_or_insert(error);
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..AT_ONCE.min(items.len()) {
            scope.spawn(work);
        }
        work();
    });
    match unpoisoned(first_failure.into_inner()) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RegistryError;

    #[test]
    fn every_item_is_processed_once_and_a_failure_is_reported() {
        let items: Vec<u32> = (0..100).collect();
        let seen = Mutex::new(Vec::new());
        for_each(&items, |&item| {
            seen.lock().unwrap().push(item);
            Ok(())
        })
        .unwrap();
        let mut seen = seen.into_inner().unwrap();
        seen.sort_unstable();
        assert_eq!(seen, items);

        let begun = AtomicUsize::new(0);
        let error = for_each(&items, |_| {
            begun.fetch_add(1, Ordering::Relaxed);
            Err(RegistryError::Options("no".into()))
        });
        assert_eq!(error.unwrap_err().to_string(), "no");
        assert!(begun.into_inner() <= AT_ONCE);
        for_each(&[] as &[u32], |_| unreachable!()).unwrap();
    }
}
