//! A socket device, its guest and host programs, deed by deed: the same story
//! always goes the same way.

#![no_main]

use jiffy_devices::virtio::vsock::testing;
use jiffy_fuzz::seeds;
use libfuzzer_sys::fuzz_target;
use std::path::PathBuf;
use std::sync::LazyLock;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = std::env::temp_dir().join(format!("jiffy-story-{}", std::process::id()));
    std::fs::create_dir_all(&path).expect("a folder for sockets");
    path
});

fuzz_target!(
    init: seeds::write(all_seeds()),
    |story: &[u8]| testing::play(&FOLDER, story)
);

/// Each deed, with small and with large numbers after it.
fn all_seeds() -> Vec<Vec<u8>> {
    let tail = [0, 1, 2, 3, 4, 100, 200, 255];
    let one = |deed: u8| [&[deed][..], &tail, &[deed], &[0; 8]].concat();
    (0..32).map(one).collect()
}
