//! The options of a new file system.

/// The options of a new file system.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// Bytes of the disk.
    pub bytes: u64,
    /// Its UUID.
    pub uuid: [u8; 16],
    /// The seed for the hashes of directory indexes; any unique value.
    pub hash_seed: [u8; 16],
    /// Its volume label; only the first 16 bytes are used.
    pub label: String,
    /// The time of creation: Unix time, seconds.
    pub created: u32,
    /// Whether copies of the superblock and descriptors are kept in other groups, from which a
    /// damaged file system can be repaired. Without them fewer bytes are written, but a mounted
    /// file system can't grow.
    pub copies: bool,
}
