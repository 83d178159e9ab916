//! Prefetch and completion.

use super::support::*;
use jiffy_wire::pager::PagerResponse;

/// Chunks of 8 KiB.
const CHUNK: usize = 2 * PAGE;

#[test]
fn completed_means_that_no_page_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), 8 * MIB, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let memory = Memory::new(8 * MIB);
    let _connection = memory.connect(&pager.serve("vm", &image));
    pager.wait_for(&memory);
    let check = memory.check(1);
    assert_eq!(pager.complete("vm"), PagerResponse::Ok);
    join(check);
    let before = pager.stats("vm");
    assert_eq!(before.bytes_filled, 8 * MIB as u64);
    pager.kill();
    // Nobody serves faults any more, and none comes.
    join(memory.check(2));
}

#[test]
fn a_working_set_is_there_before_it_is_asked_for() {
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
fn a_working_set_goes_on_with_every_fault() {
    let folder = tempfile::tempdir().unwrap();
    // None of it is next to another.
    let set: Vec<u32> = (0..4096).step_by(2).collect();
    let working_set = set.clone();
    let image = image(folder.path(), 32 * MIB, |options| {
        options.working_set = Some(working_set);
        options.quick_working_set = true;
    });
    let pager = Pager::start(folder.path(), &["--workers", "1"]);
    let memory = Memory::new(32 * MIB);
    let _connection = memory.connect(&pager.serve_as("vm", &image, None, true));
    // The last is asked for first: nothing is there before it is served.
    for chunk in set.iter().rev() {
        let number = *chunk as usize * 2;
        assert_page(memory.read_page(number).bytes(), page(number));
    }
    let stats = pager.stats("vm");
    assert_eq!(stats.bytes_filled, (set.len() * CHUNK) as u64);
    // At least 64 KiB come with each fault.
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
            sentence.contains("gone") || sentence.contains("not connected"),
            "{sentence}"
        ),
        // It was quicker.
        other => assert_eq!(other, PagerResponse::Ok),
    }
    assert_eq!(
        pager.ask(&jiffy_wire::pager::PagerRequest::Ping),
        PagerResponse::Ok
    );
}
