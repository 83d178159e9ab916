//! Mutexes without poison: the programs abort on panic, and tests look at what is left.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks it, even if a thread panicked while it had the lock.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
