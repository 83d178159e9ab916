//! Locks that ignore poisoning: programs abort on a panic, and tests check the state afterwards.

use std::sync::{
    LockResult, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};

/// Locks a mutex, even if a thread panicked while it held the lock.
#[inline]
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// Locks for reading, even if a thread panicked while it held the lock.
#[inline]
pub fn read<T: ?Sized>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    unpoisoned(lock.read())
}

/// Locks for writing, even if a thread panicked while it held the lock.
#[inline]
pub fn write<T: ?Sized>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    unpoisoned(lock.write())
}

/// What a lock gives, even if a thread panicked while it held the lock: a guard, also after the wait
/// of a condition variable, or its content.
#[inline]
pub fn unpoisoned<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}
