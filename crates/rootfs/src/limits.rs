//! Limits on the size of a source and its image.

use crate::layer::Bounds;

/// Limits on the size of a source and its image.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of the image.
    pub image_bytes: u64,
    /// Files, folders, links and whiteouts in all layers.
    pub entries: u64,
    /// Bytes of names, link targets, attributes and maps of holes.
    pub metadata_bytes: u64,
    /// Unpacked bytes of all layers.
    pub unpacked_bytes: u64,
    /// Unpacked bytes per compressed byte of a layer larger than 1 GiB.
    pub ratio: u64,
}

impl Default for Limits {
    /// An image of 64 GiB, 128 GiB of unpacked layers, two million entries with 512 MiB of names
    /// and attributes (up to 1.2 GB of memory for both), and a ratio of 200.
    fn default() -> Limits {
        Limits {
            image_bytes: 64 << 30,
            entries: 2_000_000,
            metadata_bytes: 512 << 20,
            unpacked_bytes: 128 << 30,
            ratio: 200,
        }
    }
}

impl Limits {
    pub(crate) fn bounds(&self) -> Bounds {
        Bounds {
            bytes: self.unpacked_bytes,
            ratio: self.ratio,
        }
    }
}
