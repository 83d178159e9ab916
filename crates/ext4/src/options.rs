//! What is to be known of a new file system.

/// What is to be known of a new file system.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// Bytes of the disk.
    pub bytes: u64,
    /// Its identity.
    pub uuid: [u8; 16],
    /// Anything, of its own: folders of many entries are ordered by it.
    pub hash_seed: [u8; 16],
    /// A name; the first 16 bytes of it count.
    pub label: String,
    /// Unix time, seconds.
    pub created: u32,
    /// Keep copies of superblock and descriptors throughout the disk, by which
    /// a damaged file system can be mended. Without them there is less to
    /// write, but a mounted file system can't grow.
    pub copies: bool,
}
