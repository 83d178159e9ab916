//! The configuration space (Virtio 1.3 §5.2.4) and the features it depends on.

use super::disk::Disk;
use super::{DISCARD_SECTORS_MAX, RANGES_MAX, SECTOR, SEGMENTS_MAX, WRITE_ZEROES_SECTORS_MAX};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// Bytes up to `write_zeroes_may_unmap`, inclusive.
const BYTES: usize = 57;

const CAPACITY: usize = 0;
const SEG_MAX: usize = 12;
const BLK_SIZE: usize = 20;
const PHYSICAL_BLOCK_EXP: usize = 24;
const MAX_DISCARD_SECTORS: usize = 36;
const MAX_DISCARD_SEG: usize = 40;
const DISCARD_SECTOR_ALIGNMENT: usize = 44;
const MAX_WRITE_ZEROES_SECTORS: usize = 48;
const MAX_WRITE_ZEROES_SEG: usize = 52;
const WRITE_ZEROES_MAY_UNMAP: usize = 56;

/// The allocation unit of the host's file systems, bytes.
const PHYSICAL_BLOCK: u32 = 4096;

/// The offered features. For each, a booting guest needs a few exits to read its fields, so a disk
/// offers only what it needs: a read-only one has nothing to flush, to discard or to align writes
/// to.
pub(super) fn features(disk: &Disk) -> u64 {
    let mut bits = vec![
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_BLK_F_SEG_MAX,
    ];
    if disk.read_only() {
        bits.push(VIRTIO_BLK_F_RO);
    } else {
        bits.extend([
            VIRTIO_BLK_F_FLUSH,
            VIRTIO_BLK_F_TOPOLOGY,
            VIRTIO_BLK_F_DISCARD,
            VIRTIO_BLK_F_WRITE_ZEROES,
        ]);
    }
    if u64::from(disk.block_size()) != SECTOR {
        bits.push(VIRTIO_BLK_F_BLK_SIZE);
    }
    bits.iter().fold(0, |features, bit| features | 1 << bit)
}

/// The configuration space's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ConfigSpace([u8; BYTES]);

impl ConfigSpace {
    pub(super) fn new(disk: &Disk) -> ConfigSpace {
        let block_size = disk.block_size();
        let mut bytes = [0; BYTES];
        let mut put = |offset: usize, value: &[u8]| {
            bytes[offset..offset + value.len()].copy_from_slice(value);
        };
        put(CAPACITY, &(disk.bytes() / SECTOR).to_le_bytes());
        put(SEG_MAX, &(SEGMENTS_MAX as u32).to_le_bytes());
        put(BLK_SIZE, &block_size.to_le_bytes());
        let exponent = (PHYSICAL_BLOCK / block_size).max(1).ilog2();
        put(PHYSICAL_BLOCK_EXP, &[exponent as u8]);
        let discard_unit = PHYSICAL_BLOCK.max(block_size) / SECTOR as u32;
        put(MAX_DISCARD_SECTORS, &DISCARD_SECTORS_MAX.to_le_bytes());
        put(MAX_DISCARD_SEG, &(RANGES_MAX as u32).to_le_bytes());
        put(DISCARD_SECTOR_ALIGNMENT, &discard_unit.to_le_bytes());
        put(
            MAX_WRITE_ZEROES_SECTORS,
            &WRITE_ZEROES_SECTORS_MAX.to_le_bytes(),
        );
        put(MAX_WRITE_ZEROES_SEG, &(RANGES_MAX as u32).to_le_bytes());
        put(WRITE_ZEROES_MAY_UNMAP, &[1]);
        ConfigSpace(bytes)
    }

    /// Reads from `offset` into `data`; bytes past the end are zeros.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        let from = usize::try_from(offset)
            .ok()
            .and_then(|offset| self.0.get(offset..))
            .unwrap_or(&[]);
        let count = from.len().min(data.len());
        data[..count].copy_from_slice(&from[..count]);
        data[count..].fill(0);
    }
}
