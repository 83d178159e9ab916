//! Pages that a VM gives up read as zero.

use super::support::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

#[test]
fn removed_pages_are_zero_and_their_neighbours_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |options| options.chunk_size = 16 << 10);
    let pager = Pager::start(folder.path(), &[]);
    let memory = Memory::new(MIB);
    let _connection = memory.connect(&pager.serve("vm", &image));
    // One page that was present, three that never were.
    assert_page(memory.read_page(9).bytes(), page(9));
    memory.arena.discard(9 * PAGE, PAGE).unwrap();
    memory.arena.discard(21 * PAGE, 3 * PAGE).unwrap();
    for number in [9, 21, 22, 23] {
        assert!(number % 5 != 0, "the image has contents here");
        assert_page(memory.read_page(number).bytes(), [0; PAGE]);
    }
    for number in [8, 11, 24] {
        assert_page(memory.read_page(number).bytes(), page(number));
    }
    // A new write is kept until the page is given up again.
    memory.arena.write(9 * PAGE, 7);
    assert_eq!(memory.read_page(9).bytes()[0], 7);
    memory.arena.discard(9 * PAGE, PAGE).unwrap();
    assert_page(memory.read_page(9).bytes(), [0; PAGE]);
    assert_eq!(pager.complete("vm"), jiffy_wire::pager::PagerResponse::Ok);
    memory.arena.discard(8 * PAGE, PAGE).unwrap();
    assert_page(memory.read_page(8).bytes(), [0; PAGE]);
}

#[test]
fn a_page_never_comes_back_while_others_fill_it() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = 8 * MIB;
    let image = image(folder.path(), bytes, |_| {});
    // Faults also fill pages around them, so that these fills race with removals.
    let pager = Pager::start(folder.path(), &["--workers", "4", "--fault-around", "128"]);
    let pages = bytes / PAGE;
    for round in 0..4 {
        let memory = Memory::new(bytes);
        let name = format!("vm{round}");
        let connection = memory.connect(&pager.serve(&name, &image));
        let ended = Arc::new(AtomicBool::new(false));
        let touchers: Vec<_> = (0..2)
            .map(|seed| {
                let (arena, ended) = (memory.arena.clone(), ended.clone());
                thread::spawn(move || {
                    let mut step = 0;
                    while !ended.load(Ordering::Relaxed) {
                        let number = (step * 40503 + seed * 977 + round) % pages;
                        let byte = arena.read(number * PAGE + 100);
                        assert!(byte == 0 || byte == page(number)[100], "page {number}");
                        step += 1;
                    }
                })
            })
            .collect();
        let arena = memory.arena.clone();
        let remover = thread::spawn(move || {
            let mut bytes = vec![0; PAGE];
            for step in 0..3000 {
                let number = (step * 7727 + round) % pages;
                arena.discard(number * PAGE, PAGE).unwrap();
                arena.read_into(number * PAGE, &mut bytes);
                assert!(bytes == [0; PAGE], "page {number} came back");
            }
            // No page has come back later.
            for step in 0..3000 {
                let number = (step * 7727 + round) % pages;
                arena.read_into(number * PAGE, &mut bytes);
                assert!(bytes == [0; PAGE], "page {number} came back later");
            }
        });
        join(remover);
        ended.store(true, Ordering::Relaxed);
        touchers.into_iter().for_each(join);
        drop(connection);
    }
}

#[test]
fn removals_race_with_a_completion() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = 16 * MIB;
    let image = image(folder.path(), bytes, |_| {});
    let pager = Pager::start(folder.path(), &["--workers", "3"]);
    let memory = Memory::new(bytes);
    let _connection = memory.connect(&pager.serve("vm", &image));
    pager.wait_for(&memory);
    let arena = memory.arena.clone();
    let remover = thread::spawn(move || {
        for number in (0..bytes / PAGE).step_by(3) {
            arena.discard(number * PAGE, PAGE).unwrap();
        }
    });
    assert_eq!(pager.complete("vm"), jiffy_wire::pager::PagerResponse::Ok);
    join(remover);
    let arena = memory.arena.clone();
    join(thread::spawn(move || {
        let mut bytes = vec![0; PAGE];
        for number in 0..arena.length() / PAGE {
            arena.read_into(number * PAGE, &mut bytes);
            let expected = if number % 3 == 0 {
                vec![0; PAGE]
            } else {
                page(number)
            };
            assert!(bytes == expected, "page {number}");
        }
    }));
}
