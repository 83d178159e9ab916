//! Writable images: an ext4 image is stored as it is, for VMs that run on a copy of it.

use crate::clock::unix_seconds;
use crate::error::{Error, Result};
use crate::model::image::ImageRecord;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Bytes needed to recognise an image: up to the end of the superblock's magic.
pub(super) const HEAD: usize = 1082;
/// Bytes of a sector; a disk's size is a multiple of it.
const SECTOR: u64 = 512;
/// Unit of copying, bytes; a unit that is all zeros becomes a hole.
const PIECE: usize = 64 * 1024;

/// Whether this is the beginning of an ext4 image. A tar or a compressed stream that happens to
/// have the magic at this offset is not one.
pub(super) fn is_ext4(head: &[u8]) -> bool {
    let magic = head.get(1080..1082) == Some(&[0x53, 0xef]);
    let tar = head.get(257..262) == Some(b"ustar");
    let compressed = head.starts_with(&[0x1f, 0x8b]) || head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]);
    magic && !tar && !compressed
}

/// Writes an ext4 image to a file and returns its record: blocking.
pub(super) fn import(mut image: impl Read, out: &Path) -> Result<ImageRecord> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::ConnectionAborted => {
            Error::invalid("The image is incomplete: the client disconnected.")
        }
        _ => Error::io("write the image", out, &error),
    };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(out)
        .map_err(failed)?;
    let (size, digest) = copy(&mut image, &file).map_err(failed)?;
    let found = jiffy_ext4::inspect(&file).map_err(failed)?;
    let whole = found.is_some_and(|found| found.bytes <= size);
    if !whole || !size.is_multiple_of(SECTOR) {
        return Err(Error::invalid(format!(
            "The ext4 image of {size} bytes is not whole: its file system is larger, or its size is not a multiple of 512."
        )));
    }
    file.sync_all().map_err(failed)?;
    Ok(ImageRecord {
        digest: digest.to_hex().to_string(),
        size,
        created: unix_seconds(),
        ext4: true,
        ..ImageRecord::default()
    })
}

fn copy(image: &mut impl Read, file: &File) -> io::Result<(u64, blake3::Hash)> {
    let mut hasher = blake3::Hasher::new();
    let mut piece = vec![0; PIECE];
    let mut size = 0;
    loop {
        let mut got = 0;
        while got < PIECE {
            match image.read(&mut piece[got..])? {
                0 => break,
                more => got += more,
            }
        }
        let bytes = &piece[..got];
        hasher.update(bytes);
        if bytes.iter().any(|byte| *byte != 0) {
            file.write_all_at(bytes, size)?;
        }
        size += got as u64;
        if got < PIECE {
            file.set_len(size)?;
            return Ok((size, hasher.finalize()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn an_ext4_image_is_kept_as_it_is_with_its_holes() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        crate::roots::empty(&image, 64 << 20, "x", true).unwrap();
        let bytes = std::fs::read(&image).unwrap();
        assert!(is_ext4(&bytes[..HEAD]));
        let out = folder.path().join("out");
        let record = import(bytes.as_slice(), &out).unwrap();
        assert_eq!(record.size, 64 << 20);
        assert_eq!(record.digest, blake3::hash(&bytes).to_hex().to_string());
        assert!(std::fs::read(&out).unwrap() == bytes);
        assert!(std::fs::metadata(&out).unwrap().blocks() * 512 < 2 << 20);
    }

    #[test]
    fn a_truncated_ext4_image_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        crate::roots::empty(&image, 16 << 20, "x", true).unwrap();
        let bytes = std::fs::read(&image).unwrap();
        for (index, cut) in [bytes.len() / 2, bytes.len() - 1, HEAD]
            .into_iter()
            .enumerate()
        {
            let out = folder.path().join(format!("out-{index}"));
            let refused = import(&bytes[..cut], &out).unwrap_err();
            assert!(refused.0.message.contains("not whole"), "{refused}");
        }
    }

    #[test]
    fn archives_are_not_taken_for_ext4_images() {
        let mut head = vec![0; HEAD];
        assert!(!is_ext4(&head));
        head[1080..].copy_from_slice(&[0x53, 0xef]);
        assert!(is_ext4(&head));
        let mut tar = head.clone();
        tar[257..262].copy_from_slice(b"ustar");
        assert!(!is_ext4(&tar));
        head[..2].copy_from_slice(&[0x1f, 0x8b]);
        assert!(!is_ext4(&head));
        assert!(!is_ext4(&head[..100]));
    }
}
