//! Recognises a file system. Its bytes were written by a guest, so every value is checked before it
//! is used.

use crate::superblock::{INCOMPATIBLE_64BIT, MAGIC, OFFSET, SIZE, field};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// An ext2, ext3 or ext4 file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Its size, bytes; the disk may be larger.
    pub bytes: u64,
}

/// The file system at the beginning of a file, if one is there.
///
/// # Errors
///
/// If the file can't be read. A file that is too short is none.
pub fn inspect(file: &File) -> io::Result<Option<Found>> {
    let mut bytes = [0; SIZE];
    match file.read_exact_at(&mut bytes, OFFSET as u64) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    Ok(found(&bytes))
}

fn found(bytes: &[u8; SIZE]) -> Option<Found> {
    let read = |offset: usize| {
        let field = bytes[offset..offset + 4].try_into().expect("four bytes");
        u32::from_le_bytes(field)
    };
    if read(field::MAGIC) as u16 != MAGIC {
        return None;
    }
    let shift = read(field::LOG_BLOCK_SIZE);
    // 1 to 64 KiB.
    if shift > 6 {
        return None;
    }
    let high = match read(field::INCOMPATIBLE) & INCOMPATIBLE_64BIT {
        0 => 0,
        _ => read(field::BLOCKS_HIGH),
    };
    let blocks = u64::from(high) << 32 | u64::from(read(field::BLOCKS_LOW));
    let bytes = blocks.checked_mul(1024 << shift)?;
    (bytes > 0).then_some(Found { bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), SIZE)) {
            let mut bytes: [u8; SIZE] = bytes.try_into().unwrap();
            bytes[field::MAGIC..][..2].copy_from_slice(&MAGIC.to_le_bytes());
            let _ = found(&bytes);
        }
    }
}
