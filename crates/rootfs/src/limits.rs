//! What a source may grow to.

use crate::layer::Bounds;

/// What a source may grow to.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of the image.
    pub image_bytes: u64,
    /// Files, folders, links and whiteouts in all layers together.
    pub entries: u64,
    /// Bytes of names, link targets, attributes and maps of holes.
    pub metadata_bytes: u64,
    /// Bytes of all layers, unpacked.
    pub unpacked_bytes: u64,
    /// Times its packed size that a layer may unpack to, once it is larger
    /// than 1 GiB.
    pub ratio: u64,
}

impl Default for Limits {
    /// 64 GiB of image and as much again of layers, two million entries with
    /// 512 MiB of names and attributes (together up to 1.2 GB of memory), and
    /// 200 times.
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
