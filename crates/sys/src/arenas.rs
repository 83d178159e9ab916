//! Heaps of the C library's allocator.
#![allow(unsafe_code)] // mallopt(3).

/// Has all threads of this process share one heap. Otherwise each thread may get one of its own, an
/// arena, whose freed memory is kept for the threads that use it. Call it before other threads
/// exist.
pub fn share_one() {
    // SAFETY: changes a setting of the allocator.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}
