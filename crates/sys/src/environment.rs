//! The environment variables of this process.
#![allow(unsafe_code)] // Removing one has no safe wrapper.

use std::env;
use std::ffi::OsString;

/// Removes Jiffy's variables that are empty: empty counts as unset, but clap takes it as a value.
/// Programs that this one starts don't get them either. To be called when main begins: if there are
/// other threads, which might be reading variables, they stay.
pub fn unset_empty() {
    let empty: Vec<OsString> = env::vars_os()
        .filter(|(name, value)| value.is_empty() && name.as_encoded_bytes().starts_with(b"JIFFY_"))
        .map(|(name, _)| name)
        .collect();
    if empty.is_empty() || !has_one_thread() {
        return;
    }
    for name in empty {
        // SAFETY: no other thread exists that could be reading the environment.
        unsafe { env::remove_var(name) };
    }
}

fn has_one_thread() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}
