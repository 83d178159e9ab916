//! Maps of what is there of a disk or an image, with any bytes: as they are, or
//! with the header's checksum made right.

use crate::Target;
use crate::scratch;
use jiffy_store::disk_cache;
use jiffy_store::presence::PresenceMap;
use jiffy_sys::memfd::{self, Pages};
use jiffy_wire::disk::{MAP_HEADER, MapHeader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// This target.
pub const TARGET: Target = Target {
    name: "disk_map",
    covers: &[
        "crates/store/src/disk_cache",
        "crates/store/src/partial",
        "crates/store/src/presence.rs",
        "crates/wire/src/disk.rs",
    ],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    let Some((how, bytes)) = data.split_first() else {
        return;
    };
    let mut bytes = bytes.to_vec();
    if *how % 2 == 1
        && let Some(head) = bytes.first_chunk_mut::<MAP_HEADER>()
    {
        // As the header states, whatever it was.
        *head = MapHeader::unchecked(head).encode();
    }
    let file = memfd::create("map", bytes.len() as u64, Pages::Small).expect("a memfd");
    file.write_all_at(&bytes, 0).expect("it is written");
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    if let Ok(map) = PresenceMap::open(&path) {
        assert_eq!(map.header().file_bytes(), bytes.len() as u64);
        let mut at = 0;
        while let Some(run) = map.next_missing(at..map.units()) {
            assert!(run.start >= at && run.end > run.start && run.end <= map.units());
            assert!(!map.get(run.start));
            at = run.end;
        }
        assert!(map.count() <= map.units());
    }
    cache(&bytes);
}

/// The same map in a disk's cache.
fn cache(map: &[u8]) {
    let folder = scratch::folder().join("cache");
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join("present"), map).expect("a map");
    let contents = std::fs::File::create(folder.join("contents")).expect("a file");
    contents.set_len(64 << 10).expect("a sparse file");
    let full = disk_cache::is_full(&folder);
    let known = disk_cache::image_of(&folder);
    assert!(!full || known.is_ok(), "a full cache is of an image");
    std::fs::remove_dir_all(&folder).expect("the folder is removed");
}

fn all_seeds() -> Vec<Vec<u8>> {
    let golden = include_bytes!("../../../crates/wire/golden/present-1");
    let mut full = golden.to_vec();
    full[MAP_HEADER..].fill(0xff);
    [0, 1]
        .iter()
        .flat_map(|how| [&golden[..], &full].map(|map| [&[*how], map].concat()))
        .collect()
}
