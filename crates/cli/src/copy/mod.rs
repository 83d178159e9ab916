//! Copies trees of files to and from a VM.
//!
//! * [`source`]: reads a file or folder on this host as frames.
//! * [`sink`]: writes frames to a file or folder on this host; the frames come from a guest and are
//!   hostile.
//! * [`archive`]: tar archives on stdin and stdout.

mod archive;
mod sink;
mod source;

pub use archive::{TarReader, TarWriter};
pub use sink::{Goal, Sink};
pub use source::send_tree;

use crate::failure::{Failure, Result};
use jiffy_wire::agent::CopyEntry;

/// The longest path below the root of a copy, in bytes (PATH_MAX).
const MAX_PATH: usize = 4095;
/// The longest name of one entry, in bytes (NAME_MAX).
const MAX_NAME: usize = 255;

/// Checks that an entry's path stays below the root: no `..`, not absolute, no empty part, not too
/// long. The root itself has the empty path.
fn check_path(entry: &CopyEntry) -> Result<()> {
    let path = &entry.path;
    let good = path.len() <= MAX_PATH
        && !path.contains('\0')
        && (path.is_empty() || path.split('/').all(is_name));
    match good {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "the VM sent an entry with a path outside the copy: {path:?}"
        ))
        .hint("nothing was written for it; the VM may be malicious")),
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && name.len() <= MAX_NAME
}

/// The bits of a mode that a copy gets. Set-user-ID and set-group-ID are kept only if owners are
/// kept, too: otherwise a program would run as the user who owns the copy instead of its own.
fn mode(mode: u32, keep_owners: bool) -> u32 {
    mode & if keep_owners { 0o7777 } else { 0o1777 }
}

/// The owner of a copy, a user or a group: root, unless owners are kept.
fn owner(id: u32, keep_owners: bool) -> u32 {
    if keep_owners { id } else { 0 }
}

/// The last part of a path as the user wrote it; `None` for `/`, `.` and `..`.
pub fn base_name(path: &str) -> Option<&str> {
    path.trim_end_matches('/')
        .rsplit('/')
        .next()
        .filter(|name| is_name(name))
}

#[cfg(test)]
mod tests;
