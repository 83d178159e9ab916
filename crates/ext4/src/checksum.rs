//! CRC-32C as ext4 uses it: without the inversions at its ends
//! (Documentation/filesystems/ext4/checksums.rst).

/// Goes on from `seed` over `data`.
pub(crate) fn chained(seed: u32, data: &[u8]) -> u32 {
    !crc32c::crc32c_append(!seed, data)
}

/// What all structures but the superblock begin from.
pub(crate) fn seed(uuid: &[u8; 16]) -> u32 {
    chained(!0, uuid)
}

/// What the structures of an inode of generation 0 begin from.
pub(crate) fn inode_seed(seed: u32, inode: u32) -> u32 {
    chained(chained(seed, &inode.to_le_bytes()), &[0; 4])
}
