//! A disk whose driver does anything.

use crate::Target;
use crate::queue::{CONTENTS, Script};
use crate::scratch;
use jiffy_devices::virtio::block::{Block, BlockOptions};
use jiffy_devices::virtio::queue::RateLimit;
use std::path::PathBuf;
use std::sync::LazyLock;

const READ_ONLY: u8 = 1;
const EVENT_IDX: u8 = 2;
const NO_FLUSH: u8 = 4;

const FEATURE_FLUSH: u64 = 1 << 9;
const SECTORS: u64 = 128;
const DATA: u64 = 0x10000;
const STATUS: u64 = 0x9000;

/// A disk of 64 KiB, for other targets, too.
pub(super) static DISK: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = scratch::folder().join("disk");
    std::fs::write(&path, vec![0x5a; (SECTORS * 512) as usize]).expect("the disk can be written");
    path
});

/// This target.
pub const TARGET: Target = Target {
    name: "block_queue",
    covers: &[
        "crates/devices/src/virtio/block",
        "crates/devices/src/virtio/queue",
    ],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    let script = Script::read(data);
    let options = BlockOptions {
        path: DISK.clone(),
        read_only: script.switches & READ_ONLY != 0,
        direct: false,
        id: "fuzz".into(),
        limit: RateLimit::default(),
    };
    let block = Block::open(&options).expect("the disk opens");
    let features = if script.switches & NO_FLUSH != 0 {
        0
    } else {
        FEATURE_FLUSH
    };
    script.play(block, 64, features, script.switches & EVENT_IDX != 0);
    check_disk();
}

pub(super) fn check_disk() {
    let bytes = std::fs::metadata(&*DISK).expect("the disk is there").len();
    assert_eq!(bytes, SECTORS * 512, "a disk never changes its size");
}

/// Kind, sector, data buffers, payload.
type Seed = (u32, u64, &'static [(u64, u32, bool)], &'static [u8]);

/// Every kind of request once, alone and together.
pub(super) fn all_seeds() -> Vec<Vec<u8>> {
    let kinds: [Seed; 7] = [
        (0, 3, &[(DATA, 1024, true)], &[]),
        (1, 5, &[(DATA, 512, false)], &[]),
        (4, 0, &[], &[]),
        (8, 0, &[(DATA, 20, true)], &[]),
        (
            11,
            0,
            &[(CONTENTS + 16, 16, false)],
            &[8, 0, 0, 0, 0, 0, 0, 0, 8],
        ),
        (
            13,
            0,
            &[(CONTENTS + 16, 16, false)],
            &[1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1],
        ),
        (99, 0, &[], &[]),
    ];
    let mut seeds = Vec::new();
    for switches in [0, READ_ONLY, EVENT_IDX, NO_FLUSH] {
        for (kind, sector, data, payload) in kinds {
            let mut script = Script {
                switches,
                ..Script::default()
            };
            script.contents.extend(kind.to_le_bytes());
            script.contents.extend([0; 4]);
            script.contents.extend(sector.to_le_bytes());
            script.contents.extend(payload);
            script.contents.resize(64, 0);
            let mut buffers = vec![(CONTENTS, 16, false)];
            buffers.extend(data);
            buffers.push((STATUS, 1, true));
            script.chain(&buffers);
            script.chain(&buffers);
            seeds.push(script.write());
        }
    }
    seeds
}
