//! CRC-32C as ext4 uses it: without the initial and final inversion
//! (Documentation/filesystems/ext4/checksums.rst).

use crc_fast::{CrcAlgorithm, Digest};

/// Continues a checksum from `seed` over `data`.
pub(crate) fn chained(seed: u32, data: &[u8]) -> u32 {
    let mut sum = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(seed));
    sum.update(data);
    sum.get_state() as u32
}

/// The seed for all structures but the superblock.
pub(crate) fn seed(uuid: &[u8; 16]) -> u32 {
    chained(!0, uuid)
}

/// The seed for the structures of an inode of generation 0.
pub(crate) fn inode_seed(seed: u32, inode: u32) -> u32 {
    chained(chained(seed, &inode.to_le_bytes()), &[0; 4])
}
