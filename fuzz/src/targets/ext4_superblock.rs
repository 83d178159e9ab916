//! The superblock of a volume, which guests write.

use crate::Target;
use jiffy_sys::memfd::{self, Pages};
use std::os::unix::fs::FileExt;

/// This target.
pub const TARGET: Target = Target {
    name: "ext4_superblock",
    covers: &["crates/ext4/src/inspect.rs"],
    seeds: all_seeds,
    run,
};

/// Where a superblock is (Linux, Documentation/filesystems/ext4/super.rst).
const OFFSET: usize = 1024;

fn run(data: &[u8]) {
    let file = memfd::create("volume", (OFFSET + data.len()) as u64, Pages::Small);
    let file = file.expect("a memfd");
    file.write_all_at(data, OFFSET as u64).expect("memory");
    if let Some(found) = jiffy_ext4::inspect(&file).expect("a memfd is read") {
        assert!(found.bytes >= 1024 && found.bytes % 1024 == 0);
    }
}

fn all_seeds() -> Vec<Vec<u8>> {
    let mut superblock = vec![0; 1024];
    superblock[4..8].copy_from_slice(&16384u32.to_le_bytes());
    superblock[24..28].copy_from_slice(&2u32.to_le_bytes());
    superblock[56..58].copy_from_slice(&[0x53, 0xef]);
    let mut large = superblock.clone();
    large[96..100].copy_from_slice(&0x80u32.to_le_bytes());
    large[336..340].copy_from_slice(&1u32.to_le_bytes());
    vec![superblock, large]
}
