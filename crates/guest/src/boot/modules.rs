//! Loads kernel modules, if the initramfs lists any (only the machine's does).

use crate::files;
use crate::program::prepare::reason;
use alloc::{format, string::String, vec::Vec};
use core::ffi::CStr;
use rustix::io::Errno;

/// Paths of uncompressed modules, one per line, in load order.
pub const LIST: &CStr = c"/etc/jiffy/modules";

const LARGEST_LIST: usize = 64 * 1024;

/// Loads all modules; continues after a failure.
///
/// # Errors
///
/// If the list can't be read, or a module can't be loaded; names all of these.
pub fn load() -> Result<(), String> {
    let list = files::read_text(LIST, LARGEST_LIST).map_err(|error| {
        format!(
            "{} cannot be read: {}",
            LIST.to_string_lossy(),
            reason(error)
        )
    })?;
    let failures: Vec<String> = list
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .filter_map(|path| {
            load_one(path)
                .err()
                .map(|e| format!("{path}: {}", reason(e)))
        })
        .collect();
    if failures.is_empty() {
        Ok(())
    } else {
        Err(failures.join("; "))
    }
}

fn load_one(path: &str) -> Result<(), Errno> {
    let file = files::open(path)?;
    match rustix::system::finit_module(&file, c"", 0) {
        // NOSYS: this kernel has no modules, and what it needs built in.
        Err(Errno::EXIST | Errno::NOSYS) => Ok(()),
        other => other,
    }
}
