//! Is there room for what a registry says that it has?

use crate::error::{Error, Result};
use std::path::Path;

/// Bytes of the file system that a pull leaves to others.
const LEFT: u64 = 0;

/// Refuses what does not fit on the file system of this path, before any of it is
/// fetched: blocking. What is written later, or by others meanwhile, may fill it yet.
pub fn check(path: &Path, bytes: u64) -> Result<()> {
    let there = path.ancestors().find(|folder| folder.exists());
    let space = rustix::fs::statvfs(there.unwrap_or(path))
        .map_err(|error| Error::io("look for room", path, &error.into()))?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if bytes.saturating_add(LEFT) <= free {
        return Ok(());
    }
    Err(Error::no_room(format!(
        "What is to be pulled takes {} MiB at least, and {} has {} MiB left.",
        bytes.div_ceil(1 << 20),
        there.unwrap_or(path).display(),
        free >> 20
    ))
    .hint("Make room: `jiffy image prune` removes what can be pulled again."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::api::ErrorKind;

    #[test]
    fn what_cannot_fit_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("not/there/yet");
        check(&path, 1).unwrap();
        for bytes in [1 << 60, u64::MAX] {
            let refused = check(&path, bytes).unwrap_err();
            assert_eq!(refused.0.kind, ErrorKind::NoRoom);
        }
    }
}
