//! One image in several artifacts, each with another packing.

use super::disks::{CHUNK, SIZE, check, open, peer, request, set_origins, without_chunks};
use super::support::*;
use jiffy_store::{ImageReader, partial};
use std::fs;

#[test]
fn chunks_missing_in_one_artifact_come_from_another_packing() {
    let folder = tempfile::tempdir().unwrap();
    let one = image(folder.path(), SIZE, |_| {});
    let beside = tempfile::tempdir().unwrap();
    let last_first = (0..(SIZE as u64 / CHUNK) as u32).rev().collect();
    let other = image(beside.path(), SIZE, |options| {
        options.working_set = Some(last_first);
    });
    let ids = [&one, &other].map(|path| ImageReader::open(path).unwrap().id());
    assert_eq!(ids[0], ids[1]);
    assert_ne!(fs::read(&one).unwrap(), fs::read(&other).unwrap());
    // The first packing has only its tables, and its origin lies.
    let first = without_chunks(&one);
    let pager = Pager::start(folder.path(), &[]);
    let liar = peer(folder.path(), "liar", &one, |bytes| {
        let chunks = bytes.len() - 256;
        bytes[..chunks].iter_mut().for_each(|byte| *byte ^= 1);
    });
    set_origins(&pager, &first, vec![liar]);
    let disk = request(folder.path(), &first);
    let mut vmm = open(&pager, &disk);
    vmm.refused(20 * CHUNK, CHUNK);
    // Another packing is pulled while a VM uses the disk.
    let elsewhere = without_chunks(&other);
    let second = &partial::packings(&first)[0];
    fs::rename(&elsewhere, second).unwrap();
    fs::rename(partial::map_path(&elsewhere), partial::map_path(second)).unwrap();
    let honest = peer(folder.path(), "honest", &other, |_| {});
    set_origins(&pager, second, vec![honest]);
    vmm.have(0, SIZE as u64);
    check(&disk.cache, 0, SIZE as u64);
    // A disk that is opened with both packings.
    drop(vmm);
    assert_eq!(pager.forget("root"), jiffy_wire::pager::PagerResponse::Ok);
    fs::remove_dir_all(&disk.cache).unwrap();
    open(&pager, &disk).have(0, SIZE as u64);
    check(&disk.cache, 0, SIZE as u64);
}
