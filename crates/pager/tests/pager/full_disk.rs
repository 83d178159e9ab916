//! Disks that are filled on demand where the host's disk is full.

use super::disks::*;
use super::small_disk::SmallDisk;
use super::support::*;
use jiffy_wire::disk::{ANSWER_BYTES_MAX, ChunkAnswer, ChunkRequest};
use jiffy_wire::pager::OpenDisk;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

#[test]
fn on_a_full_disk_a_vmm_that_accepts_bytes_gets_them() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let small = SmallDisk::mount(&folder.path().join("small"), MIB);
    let pager = Pager::start(folder.path(), &[]);
    let disk = OpenDisk {
        cache: small.0.join("cache"),
        ..request(folder.path(), &image)
    };
    let mut vmm = open(&pager, &disk);
    vmm.have(0, CHUNK);
    small.fill();
    let takes = serde_json::to_string(&ChunkRequest::TAKES_BYTES).unwrap();
    vmm.send_line(&format!("{takes}\n"));
    // Begins with present chunks; an answer has a part of the request at most.
    let mut at = 0;
    while at < SIZE {
        match vmm.fill(at as u64, (SIZE - at) as u64) {
            ChunkAnswer::Bytes { length, .. } => {
                assert!(length <= ANSWER_BYTES_MAX);
                let mut bytes = vec![0; length];
                vmm.stream.read_exact(&mut bytes).unwrap();
                assert!(bytes == contents(SIZE)[at..at + length], "{at}");
                at += length;
            }
            ChunkAnswer::Present { .. } => {
                check(&disk.cache, at as u64, (SIZE - at) as u64);
                break;
            }
            answer => panic!("{answer:?}"),
        }
    }
    assert!(at >= SIZE - ANSWER_BYTES_MAX, "it had room for {at}");
    // A VMM that sends requests and reads no answers delays no other.
    let deaf = UnixStream::connect(&disk.socket).unwrap();
    deaf.set_nonblocking(true).unwrap();
    (&deaf).write_all(format!("{takes}\n").as_bytes()).unwrap();
    for id in 1..1000 {
        let line = format!("{{\"id\":{id},\"offset\":{},\"length\":{MIB}}}\n", MIB / 2);
        if (&deaf).write(line.as_bytes()).is_err() {
            break;
        }
    }
    let answer = vmm.fill(MIB as u64, CHUNK);
    assert!(matches!(answer, ChunkAnswer::Bytes { .. }), "{answer:?}");
    vmm.stream.read_exact(&mut [0; CHUNK as usize]).unwrap();
    drop(deaf);
    small.make_room();
    vmm.have(MIB as u64 / 2, 4 * CHUNK);
    check(&disk.cache, MIB as u64 / 2, 4 * CHUNK);
}
