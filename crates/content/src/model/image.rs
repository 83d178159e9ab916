//! The record of an image.

use jiffy_wire::api::{ImageConfig, ImageSource};
use jiffy_wire::vmm::ReadUnits;

/// The record of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageRecord {
    /// BLAKE3 of the file system image, hexadecimal.
    pub digest: String,
    /// Bytes of it.
    pub size: u64,
    /// Files, folders and links in it.
    pub entries: u64,
    /// Unix time.
    pub created: u64,
    /// Size and modification time of the file that `base` was made from.
    pub built_in: Option<(u64, i64)>,
    /// Its file system is ext4, not EROFS.
    pub ext4: bool,
    /// How its commands are started.
    pub config: ImageConfig,
    /// Where it came from.
    pub source: Option<ImageSource>,
    /// Ids of its image of chunks and of that one's parents, once there is
    /// one.
    pub chunks: Vec<String>,
    /// The image whose file system is the beginning of this one's, by the
    /// digest of its file system image.
    pub parent: Option<String>,
}

/// A disk of a VM that is filled on demand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LazyDisk {
    /// The image of chunks, and then its parents, by their ids.
    pub chunks: Vec<String>,
    /// The file system is ext4, not EROFS. It can't be inspected before it has been fetched.
    pub ext4: bool,
}

/// The reads of a boot, and the file system they were made on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootSet {
    /// Digest of that file system.
    pub digest: String,
    /// The units that were read, in order.
    pub reads: ReadUnits,
}
