//! Digests of parts of local files.

use crate::error::Result;
use crate::{Digest, Progress, RegistryError};
use jiffy_oci::Hasher;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Digest of `size` bytes at `offset`. Outer error: cancelled; inner error: reading.
pub(super) fn hash(
    file: &File,
    offset: u64,
    size: u64,
    name: &str,
    progress: &dyn Progress,
) -> Result<std::io::Result<Digest>> {
    let mut hasher = Hasher::new();
    let mut piece = vec![0; 128 << 10];
    let mut done = 0;
    while done < size {
        if progress.cancelled() {
            return Err(RegistryError::Cancelled {
                what: format!("reading {name}"),
            });
        }
        let wanted = usize::try_from(size - done).map_or(piece.len(), |left| left.min(piece.len()));
        if let Err(error) = file.read_exact_at(&mut piece[..wanted], offset + done) {
            return Ok(Err(error));
        }
        hasher.update(&piece[..wanted]);
        done += wanted as u64;
    }
    Ok(Ok(hasher.finish()))
}
