//! An image's reference to its backing file.

use super::{Fields, MAX_NAME, is_name};
use std::ops::RangeInclusive;

/// The file whose parts an image refers to instead of storing them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingRef {
    /// BLAKE3 of its contents.
    pub digest: [u8; 32],
    /// Its size, bytes.
    pub size: u64,
    /// Its name in the image's folder: 1 to 255 bytes, no `/`, not `.` or `..`.
    pub name: String,
}

impl BackingRef {
    /// How many bytes an encoded reference may have.
    pub(super) const LENGTHS: RangeInclusive<u64> = 41..=40 + MAX_NAME as u64;

    /// The encoded reference.
    pub fn encode(&self) -> Vec<u8> {
        [
            &self.digest[..],
            &self.size.to_le_bytes(),
            self.name.as_bytes(),
        ]
        .concat()
    }

    /// Decodes a reference; `None` if it is not valid.
    pub fn decode(bytes: &[u8]) -> Option<BackingRef> {
        let (head, name) = bytes.split_at_checked(40)?;
        let mut fields = Fields(head);
        let name = str::from_utf8(name).ok()?;
        is_name(name).then(|| BackingRef {
            digest: fields.array(),
            size: fields.u64(),
            name: name.to_owned(),
        })
    }
}
