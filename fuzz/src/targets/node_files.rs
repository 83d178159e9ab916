//! The daemon's own files with any bytes: records of each kind, artifacts'
//! configurations, a VM's log.

use crate::Target;
use crate::input::Input;
use crate::scratch;
use std::fs;

/// This target.
pub const TARGET: Target = Target {
    name: "node_files",
    covers: &[
        "crates/content/src/durable.rs",
        "crates/content/src/images/artifact.rs",
        "crates/content/src/images/chunks.rs",
        "crates/content/src/records",
        "crates/content/src/snapshots/remote.rs",
        "crates/vmhost/src/log.rs",
    ],
    seeds: all_seeds,
    run,
};

const RECORD: u8 = 0;
const ARTIFACT: u8 = 1;
const LOG: u8 = 2;
const SEALED_LOG: u8 = 3;

/// Bytes of a segment's header, of which the last four are their checksum.
const SEGMENT_HEADER: usize = 48;
/// Bytes of a record's header: length, kind, checksum of all of it.
const RECORD_HEADER: usize = 12;

fn run(data: &[u8]) {
    let folder = scratch::folder().join("node");
    fs::create_dir_all(&folder).expect("a folder");
    let mut input = Input(data);
    match input.u8() % 4 {
        RECORD => {
            let kind = input.u8();
            let content = String::from_utf8_lossy(input.rest());
            jiffy_content::testing::record(kind, &content, &folder);
        }
        ARTIFACT => jiffy_content::testing::artifact(input.rest()),
        LOG => jiffy_vmhost::testing::command_log(input.rest(), &folder),
        _ => {
            let mut log = input.rest().to_vec();
            seal(&mut log);
            jiffy_vmhost::testing::command_log(&log, &folder);
        }
    }
    fs::remove_dir_all(&folder).expect("the folder is removed");
}

/// All checksums are right.
fn seal(log: &mut [u8]) {
    let Some((header, mut rest)) = log.split_at_mut_checked(SEGMENT_HEADER) else {
        return;
    };
    let end = SEGMENT_HEADER - 4;
    let sum = crc_fast::crc32_iscsi(&header[..end]);
    header[end..].copy_from_slice(&sum.to_le_bytes());
    while let Some((header, after)) = rest.split_at_mut_checked(RECORD_HEADER) {
        let length = u32::from_le_bytes(header[..4].try_into().expect("four bytes"));
        let Some((data, after)) = after.split_at_mut_checked(length as usize) else {
            return;
        };
        let sum = crc_fast::crc32_iscsi(&[&header[..8], data].concat());
        header[8..].copy_from_slice(&sum.to_le_bytes());
        rest = after;
    }
}

fn all_seeds() -> Vec<Vec<u8>> {
    let golden = [
        include_str!("../../../crates/content/golden/vm-1.json"),
        include_str!("../../../crates/content/golden/snapshot-1.json"),
        include_str!("../../../crates/content/golden/image-1.json"),
        include_str!("../../../crates/content/golden/image-2.json"),
        include_str!("../../../crates/content/golden/boot-1.json"),
        include_str!("../../../crates/content/golden/origins-1.json"),
        include_str!("../../../crates/content/golden/prefault-1.json"),
        include_str!("../../../crates/content/golden/timeline-1.json"),
    ];
    let mut seeds: Vec<Vec<u8>> = (0u8..)
        .zip(golden)
        .map(|(kind, text)| {
            // What is in the envelope.
            let start = text.find("\"content\":").expect("an envelope") + 10;
            let content = text.trim_end();
            [
                &[RECORD, kind],
                &content.as_bytes()[start..content.len() - 1],
            ]
            .concat()
        })
        .collect();
    for artifact in [
        include_str!("../../../crates/content/golden/image-artifact-1.json"),
        include_str!("../../../crates/content/golden/snapshot-artifact-1.json"),
    ] {
        seeds.push([&[ARTIFACT], artifact.as_bytes()].concat());
    }
    let mut log = vec![0; SEGMENT_HEADER];
    log[..8].copy_from_slice(b"JIFFYLOG");
    log[8] = 1;
    for (kind, text) in [(0, &b""[..]), (1, b"out\n"), (2, b"err\n"), (3, b"note")] {
        log.extend((text.len() as u32).to_le_bytes());
        log.extend([kind, 0, 0, 0]);
        log.extend([0; 4]);
        log.extend(text);
    }
    seal(&mut log);
    seeds.push([&[LOG], &log[..]].concat());
    seeds.push([&[SEALED_LOG], &log[..]].concat());
    // As far as positions can be counted.
    log[16..24].copy_from_slice(&(u64::MAX - 5).to_le_bytes());
    seeds.push([&[SEALED_LOG], &log[..]].concat());
    seeds
}
