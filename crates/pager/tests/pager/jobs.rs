//! Prefetch and completion.

use super::support::*;
use jiffy_sys::fds::recv_with_fds;
use jiffy_wire::pager::{PagerMessage, PagerResponse, VmmMessage, WORKING_SET_QUESTION};
use jiffy_wire::vmm::Extent;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Chunks of 8 KiB.
const CHUNK: usize = 2 * PAGE;

#[test]
fn a_completed_vm_misses_no_page() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), 8 * MIB, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let memory = Memory::new(8 * MIB);
    let _connection = memory.connect(&pager.serve("vm", &image));
    pager.wait_for(&memory);
    let check = memory.check(1);
    assert_eq!(pager.complete("vm"), PagerResponse::Ok);
    join(check);
    let before = pager.filled("vm", 8 * MIB);
    assert_eq!(before.bytes_filled, 8 * MIB as u64);
    pager.kill();
    // No pager serves faults any more, and none occurs.
    join(memory.check(2));
}

#[test]
fn a_working_set_is_filled_before_it_faults() {
    let folder = tempfile::tempdir().unwrap();
    // Pieces that follow one another, single chunks, and chunks of zeros only
    // (25 pages: chunk 0 has pages 0 and 1; none is all zero), out of order.
    let set: Vec<u32> = (100..200).chain([7, 5, 900, 3]).chain(400..420).collect();
    let working_set = set.clone();
    let image = image(folder.path(), 8 * MIB, |options| {
        options.working_set = Some(working_set);
    });
    let pager = Pager::start(folder.path(), &[]);
    let memory = Memory::new(8 * MIB);
    let _connection = memory.connect(&pager.serve_as("vm", &image, None, true));
    eventually("it is not prefetched", || {
        pager.stats("vm").prefetched_chunks == set.len() as u64
    });
    let stats = pager.stats("vm");
    assert_eq!(stats.faults, 0);
    assert_eq!(stats.bytes_filled, (set.len() * CHUNK) as u64);
    pager.kill();
    for chunk in set {
        for number in [chunk as usize * 2, chunk as usize * 2 + 1] {
            assert_page(memory.read_page(number).bytes(), page(number));
        }
    }
    assert!(memory.read_page(0).is_stuck());
}

/// The working set that a VMM gets.
struct SharedSet {
    ranges: Vec<Extent>,
    written: Option<Vec<Extent>>,
    files: Vec<OwnedFd>,
    stream: UnixStream,
}

/// Asks for the working set as Jiffy's VMM does.
fn ask_for_working_set(memory: &Memory, socket: &Path) -> SharedSet {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(WORKING_SET_QUESTION).unwrap();
    let mut line = vec![0; 64 << 10];
    let mut files = Vec::new();
    let count = recv_with_fds(&stream, &mut line, &mut files).unwrap();
    let word = serde_json::from_slice(&line[..count]);
    let Ok(PagerMessage::WorkingSet { ranges, written }) = word else {
        panic!("{}", String::from_utf8_lossy(&line[..count]));
    };
    greet(
        &stream,
        &format!("[{}]", memory.mapping()),
        &[memory.uffd()],
    );
    SharedSet {
        ranges,
        written,
        files,
        stream,
    }
}

#[test]
fn a_working_set_is_kept_in_memory_once_for_all_later_vms() {
    let folder = tempfile::tempdir().unwrap();
    let set: Vec<u32> = (100..200).chain([7, 5, 900]).collect();
    let working_set = set.clone();
    let path = image(folder.path(), 8 * MIB, |options| {
        options.working_set = Some(working_set);
    });
    let pager = Pager::start(folder.path(), &[]);
    let first = Memory::new(8 * MIB);
    let socket = pager.serve_as("first", &path, None, true);
    let nothing = ask_for_working_set(&first, &socket);
    assert!(nothing.ranges.is_empty() && nothing.files.is_empty());
    // It is read after the first VM has been filled.
    let mut number = 0;
    let mut next = || {
        number += 1;
        let name = format!("later-{number}");
        let memory = Memory::new(8 * MIB);
        let socket = pager.serve_as(&name, &path, None, true);
        let shared_set = ask_for_working_set(&memory, &socket);
        pager.wait_for(&memory);
        (name, memory, shared_set)
    };
    let (name, memory, mut shared_set) = loop {
        let (name, memory, shared_set) = next();
        if !shared_set.ranges.is_empty() {
            break (name, memory, shared_set);
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    let covers = shared_set.ranges;
    let files = shared_set.files;
    let [file] = <[OwnedFd; 1]>::try_from(files).unwrap();
    let file = File::from(file);
    let mut bytes = vec![0; PAGE];
    for chunk in &set {
        let start = u64::from(*chunk) * CHUNK as u64;
        let holds = |extent: &&Extent| {
            extent.offset <= start && start + CHUNK as u64 <= extent.offset + extent.length
        };
        assert!(covers.iter().find(holds).is_some(), "chunk {chunk}");
        for number in [*chunk as usize * 2, *chunk as usize * 2 + 1] {
            file.read_exact_at(&mut bytes, (number * PAGE) as u64)
                .unwrap();
            assert_page(&bytes, page(number));
        }
    }
    assert!(file.write_all_at(b"x", 0).is_err(), "it is sealed");
    // The working set is not filled, everything else is.
    let shared: u64 = covers.iter().map(|extent| extent.length).sum();
    assert_eq!(pager.stats(&name).bytes_shared, shared);
    assert_eq!(pager.complete(&name), PagerResponse::Ok);
    let stats = pager.stats_once(&name, |stats| {
        stats.faults >= 1 && stats.bytes_filled + shared >= 8 * MIB as u64
    });
    assert_eq!((stats.prefetched_chunks, stats.faults), (0, 1));
    assert_eq!(stats.bytes_filled + shared, 8 * MIB as u64);

    // Later VMs are told which pages this guest wrote at once.
    assert_eq!(shared_set.written, None);
    let wrote = vec![Extent {
        offset: 200 * PAGE as u64,
        length: PAGE as u64,
    }];
    let word = VmmMessage::Written(wrote.clone());
    let line = format!("{}\n", serde_json::to_string(&word).unwrap());
    shared_set.stream.write_all(line.as_bytes()).unwrap();
    eventually("it is not heard", || {
        next().2.written == Some(wrote.clone())
    });
    drop(memory);

    // A recorded VM gets no working set, because it has to fault.
    let memory = Memory::new(8 * MIB);
    let record = folder.path().join("recording");
    let socket = pager.serve_as("recorded", &path, Some(record), true);
    let nothing = ask_for_working_set(&memory, &socket);
    assert!(nothing.ranges.is_empty() && nothing.files.is_empty());
}

#[test]
fn faults_are_served_while_a_working_set_is_fetched() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), 32 * MIB, |options| {
        options.working_set = Some((0..4096).rev().collect());
    });
    let pager = Pager::start(folder.path(), &["--workers", "1"]);
    for round in 0..3 {
        let memory = Memory::new(32 * MIB);
        let connection = memory.connect(&pager.serve_as(&format!("vm{round}"), &image, None, true));
        let checks: Vec<_> = (0..2).map(|seed| memory.check(seed)).collect();
        checks.into_iter().for_each(join);
        drop(connection);
    }
}

#[test]
fn prefetching_a_working_set_continues_between_faults() {
    let folder = tempfile::tempdir().unwrap();
    // No two chunks are adjacent.
    let set: Vec<u32> = (0..4096).step_by(2).collect();
    let working_set = set.clone();
    let image = image(folder.path(), 32 * MIB, |options| {
        options.working_set = Some(working_set);
        options.quick_working_set = true;
    });
    let pager = Pager::start(folder.path(), &["--workers", "1"]);
    let memory = Memory::new(32 * MIB);
    let _connection = memory.connect(&pager.serve_as("vm", &image, None, true));
    // The last chunk is touched first: it is not present before its fault is served.
    for chunk in set.iter().rev() {
        let number = *chunk as usize * 2;
        assert_page(memory.read_page(number).bytes(), page(number));
    }
    let stats = pager.filled("vm", set.len() * CHUNK);
    assert_eq!(stats.bytes_filled, (set.len() * CHUNK) as u64);
    // Each fault fills at least 64 KiB.
    let most = set.len() * CHUNK / (64 << 10) + 1;
    assert!(stats.faults as usize <= most, "{stats:?}");
}

#[test]
fn a_vm_that_vanishes_ends_its_completion() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), 32 * MIB, |_| {});
    let pager = Pager::start(folder.path(), &["--workers", "1"]);
    let memory = Memory::new(32 * MIB);
    let connection = memory.connect(&pager.serve("vm", &image));
    assert_page(memory.read_page(1).bytes(), page(1));
    let control = pager.control.clone();
    let completing = std::thread::spawn(move || {
        Control::connect(&control)
            .ask(&jiffy_wire::pager::PagerRequest::Complete { name: "vm".into() })
    });
    std::thread::sleep(std::time::Duration::from_millis(2));
    drop((connection, memory));
    match join(completing) {
        PagerResponse::Error(sentence) => assert!(
            sentence.contains("has ended") || sentence.contains("not connected"),
            "{sentence}"
        ),
        // The completion was quicker.
        other => assert_eq!(other, PagerResponse::Ok),
    }
    assert_eq!(
        pager.ask(&jiffy_wire::pager::PagerRequest::Ping),
        PagerResponse::Ok
    );
}
