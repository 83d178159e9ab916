//! Recordings of the chunks that a VM touched.

use super::support::*;
use jiffy_store::{ImageReader, Recording, optimise};
use jiffy_wire::pager::PagerResponse;

#[test]
fn the_recorded_order_of_chunks_optimises_an_image() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 4 * MIB, |_| {});
    let record = folder.path().join("touched");
    let pager = Pager::start(folder.path(), &[]);
    let memory = Memory::new(4 * MIB);
    let connection = memory.connect(&pager.serve_as("vm", &path, Some(record.clone()), false));
    for number in [40, 41, 7, 900, 6, 40] {
        assert_page(memory.read_page(number).bytes(), page(number));
    }
    assert_eq!(pager.forget("vm"), PagerResponse::Ok);
    drop(connection);
    let recording = Recording::read(&record).unwrap();
    let reader = ImageReader::open(&path).unwrap();
    assert_eq!(recording.chunks, [20, 3, 450]);
    assert_eq!((recording.image, recording.chunk_size), (reader.id(), 8192));

    let better = folder.path().join("better.img");
    optimise(&reader, &recording, &better).unwrap();
    let memory = Memory::new(4 * MIB);
    let _connection = memory.connect(&pager.serve_as("again", &better, None, true));
    eventually("it is not prefetched", || {
        pager.stats("again").prefetched_chunks == 3
    });
    join(memory.check(0));
}

#[test]
fn a_recording_is_written_when_the_vm_or_the_pager_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), MIB, |_| {});
    let record = folder.path().join("touched");
    let pager = Pager::start(folder.path(), &[]);
    let socket = pager.serve_as("vm", &path, Some(record.clone()), false);
    let memory = Memory::new(MIB);
    let connection = memory.connect(&socket);
    assert_page(memory.read_page(9).bytes(), page(9));
    drop((connection, memory));
    eventually("nothing was recorded", || record.exists());
    assert_eq!(Recording::read(&record).unwrap().chunks, [4]);

    let memory = Memory::new(MIB);
    let _connection = memory.connect(&socket);
    assert_page(memory.read_page(31).bytes(), page(31));
    assert!(pager.terminate().success());
    assert_eq!(Recording::read(&record).unwrap().chunks, [4, 15]);
}
