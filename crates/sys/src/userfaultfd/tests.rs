use super::*;
use crate::memfd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

fn served(pages: usize) -> (Arc<Arena>, Arc<Userfaultfd>) {
    let uffd = Userfaultfd::create(Features::GUEST_MEMORY).unwrap();
    let arena = Arena::anonymous(pages * PAGE).unwrap();
    arena.register(&uffd).unwrap();
    (Arc::new(arena), Arc::new(uffd))
}

fn wait_for_event(uffd: &Userfaultfd) -> Event {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(event) = uffd.next_event().unwrap() {
            return event;
        }
        assert!(Instant::now() < deadline, "no event came");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_fault_is_reported_and_a_copy_ends_it() {
    let (arena, uffd) = served(4);
    assert!(uffd.next_event().unwrap().is_none());
    let toucher = {
        let arena = arena.clone();
        thread::spawn(move || arena.read(2 * PAGE + 17))
    };
    let Event::Fault { address, write } = wait_for_event(&uffd) else {
        panic!("a fault was expected");
    };
    assert_eq!(
        address & !(PAGE as u64 - 1),
        arena.address() + 2 * PAGE as u64
    );
    assert!(!write);
    let page = [0x5a; PAGE];
    assert_eq!(
        uffd.copy(arena.address() + 2 * PAGE as u64, &page).unwrap(),
        PAGE as u64
    );
    assert_eq!(toucher.join().unwrap(), 0x5a);
}

#[test]
fn a_write_fault_says_so_and_zero_pages_end_it() {
    let (arena, uffd) = served(2);
    let toucher = {
        let arena = arena.clone();
        thread::spawn(move || {
            arena.write(1, 9);
            (arena.read(0), arena.read(1), arena.read(PAGE))
        })
    };
    assert!(matches!(
        wait_for_event(&uffd),
        Event::Fault { write: true, .. }
    ));
    assert_eq!(
        uffd.zero(arena.address(), 2 * PAGE as u64).unwrap(),
        2 * PAGE as u64
    );
    assert_eq!(toucher.join().unwrap(), (0, 9, 0));
}

#[test]
fn a_fill_stops_at_existing_pages_and_keeps_them() {
    let (arena, uffd) = served(4);
    let base = arena.address();
    uffd.copy(base + 2 * PAGE as u64, &[1; PAGE]).unwrap();
    assert_eq!(uffd.copy(base, &[2; 4 * PAGE]).unwrap(), 2 * PAGE as u64);
    assert!(matches!(
        uffd.copy(base, &[3; PAGE]),
        Err(FillError::Exists)
    ));
    assert!(matches!(
        uffd.zero(base, PAGE as u64),
        Err(FillError::Exists)
    ));
    assert_eq!((arena.read(0), arena.read(2 * PAGE)), (2, 1));
}

#[test]
fn unregistered_memory_is_not_filled() {
    let (arena, uffd) = served(1);
    let elsewhere = Arena::anonymous(PAGE).unwrap();
    assert!(matches!(
        uffd.copy(elsewhere.address(), &[1; PAGE]),
        Err(FillError::Unmapped)
    ));
    assert!(matches!(
        uffd.copy(arena.address() + 1, &[1; PAGE]),
        Err(FillError::Other(_))
    ));
}

#[test]
fn a_wake_makes_the_waiting_thread_fault_again() {
    let (arena, uffd) = served(1);
    let toucher = {
        let arena = arena.clone();
        thread::spawn(move || arena.read(0))
    };
    assert!(matches!(wait_for_event(&uffd), Event::Fault { .. }));
    // A pager that died has read the event and lost it.
    uffd.wake(arena.address(), PAGE as u64).unwrap();
    assert!(matches!(wait_for_event(&uffd), Event::Fault { .. }));
    uffd.copy(arena.address(), &[4; PAGE]).unwrap();
    assert_eq!(toucher.join().unwrap(), 4);
}

#[test]
fn a_removal_is_reported_before_it_happens() {
    let (arena, uffd) = served(2);
    uffd.copy(arena.address(), &[7; 2 * PAGE]).unwrap();
    let discarder = {
        let arena = arena.clone();
        thread::spawn(move || arena.discard(0, PAGE).unwrap())
    };
    while uffd
        .zero(arena.address(), PAGE as u64)
        .is_err_and(|error| !matches!(error, FillError::Changing))
    {
        thread::sleep(Duration::from_millis(1));
    }
    let Event::Remove { start, end } = wait_for_event(&uffd) else {
        panic!("a removal was expected");
    };
    assert_eq!(
        (start, end),
        (arena.address(), arena.address() + PAGE as u64)
    );
    discarder.join().unwrap();
    uffd.zero(arena.address(), PAGE as u64).unwrap();
    assert_eq!((arena.read(0), arena.read(PAGE)), (0, 7));
}

#[test]
fn memfds_can_be_paged() {
    let file = memfd::create("served", 4 * PAGE as u64, memfd::Pages::Small).unwrap();
    let arena = Arena::shared(&file, 4 * PAGE).unwrap();
    let uffd = Userfaultfd::create(Features::GUEST_MEMORY).unwrap();
    arena.register(&uffd).unwrap();
    uffd.copy(arena.address(), &[3; PAGE]).unwrap();
    uffd.zero(arena.address() + PAGE as u64, PAGE as u64)
        .unwrap();
    assert_eq!((arena.read(0), arena.read(PAGE)), (3, 0));
}

#[test]
fn unregistered_memory_is_ordinary_again() {
    let (arena, uffd) = served(1);
    uffd.unregister(arena.address(), PAGE as u64).unwrap();
    assert_eq!(arena.read(0), 0);
}

#[test]
fn other_descriptors_than_userfaultfds_are_refused() {
    let null = std::fs::File::open("/dev/null").unwrap();
    let error = Userfaultfd::from_received(null.into()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    let made = Userfaultfd::create(Features::GUEST_MEMORY).unwrap();
    let flags = rustix::fs::fcntl_getfl(&made).unwrap();
    rustix::fs::fcntl_setfl(&made, flags - OFlags::NONBLOCK).unwrap();
    let taken = Userfaultfd::from_received(made.into()).unwrap();
    assert!(taken.next_event().unwrap().is_none());
}

#[test]
fn a_read_never_blocks_even_without_o_nonblock() {
    let made = Userfaultfd::create(Features::GUEST_MEMORY).unwrap();
    let taken = Userfaultfd::from_received(made.try_clone().unwrap().into()).unwrap();
    let block = || rustix::fs::fcntl_setfl(&made, OFlags::empty()).unwrap();
    block();
    let (told, answer) = std::sync::mpsc::channel();
    let reader = thread::spawn(move || {
        told.send(taken.read_events(&mut Vec::new())).unwrap();
        taken
    });
    let timeout = Duration::from_secs(60);
    let read = answer
        .recv_timeout(timeout)
        .expect("the read does not block");
    assert_eq!(read.unwrap(), 0);
    // A kernel that supports only O_NONBLOCK behaves like this.
    block();
    let taken = reader.join().unwrap();
    let (told, answer) = std::sync::mpsc::channel();
    thread::spawn(move || told.send(taken.read_by_flag(&mut [0; ioctl::MESSAGE])));
    let read = answer
        .recv_timeout(timeout)
        .expect("the read does not block");
    assert_eq!(read, Err(Errno::AGAIN));
}

#[test]
fn unknown_features_are_refused() {
    let error = Userfaultfd::create(Features(1 << 60)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
}
