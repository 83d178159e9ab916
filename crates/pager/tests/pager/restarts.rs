//! VMMs and pagers that end.

use super::support::*;
use jiffy_wire::pager::{PagerRequest, PagerResponse};

#[test]
fn a_successor_serves_what_its_predecessor_left() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), 4 * MIB, |_| {});
    let memory = Memory::new(4 * MIB);
    let pager = Pager::start(folder.path(), &[]);
    let connection = memory.connect(&pager.serve("vm", &image));
    for number in [0, 1, 100, 200] {
        assert_page(memory.read_page(number).bytes(), page(number));
    }
    memory.arena.discard(100 * PAGE, 3 * PAGE).unwrap();
    // This fault is served after the removal was noted.
    assert_page(memory.read_page(100).bytes(), [0; PAGE]);
    pager.kill();
    // The VMM notices it at once.
    connection.set_nonblocking(false).unwrap();
    assert_eq!(
        std::io::Read::read(&mut &connection, &mut [0; 1]).unwrap(),
        0
    );
    // Faults occur while no pager runs.
    let waiting: Vec<_> = [3, 301, 502]
        .map(|number| (number, memory.read_page(number)))
        .into();
    assert!(waiting.iter().all(|(_, reading)| reading.is_stuck()));

    let pager = Pager::start(folder.path(), &[]);
    let _connection = memory.connect(&pager.serve("vm", &image));
    for (number, reading) in waiting {
        assert_page(reading.bytes(), page(number));
    }
    for number in [101, 102] {
        // These pages were given up before.
        assert_page(memory.read_page(number).bytes(), [0; PAGE]);
    }
    assert_page(memory.read_page(103).bytes(), page(103));
    assert_page(memory.read_page(200).bytes(), page(200));
    assert_eq!(pager.complete("vm"), PagerResponse::Ok);
}

/// The node connects for a VMM that may not connect by itself.
#[test]
fn given_up_pages_are_those_of_the_process_that_a_connection_is_made_for() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |_| {});
    let mut other = std::process::Command::new("sleep")
        .arg("60")
        .spawn()
        .unwrap();
    let for_other = format!("{{\"on_behalf_of\":{}}}\n", other.id());
    let memory = Memory::new(MIB);
    let mut read = Vec::new();
    for first_line in [&for_other, &for_other, ""] {
        let pager = Pager::start(folder.path(), &[]);
        let socket = pager.serve("vm", &image);
        let _connection = memory.connect_after(&socket, first_line);
        if read.is_empty() {
            memory.read_page(1).bytes();
            memory.arena.discard(100 * PAGE, 3 * PAGE).unwrap();
        }
        // Each page is missing at its first access only.
        read.push(memory.read_page(100 + read.len()).bytes());
        pager.kill();
    }
    assert_page(read.remove(0), [0; PAGE]);
    assert_page(read.remove(0), [0; PAGE]);
    assert_page(read.remove(0), page(102));
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn a_fault_read_by_a_pager_that_died_is_served_by_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |_| {});
    let memory = Memory::new(MIB);
    let stuck = memory.read_page(11);
    assert!(stuck.is_stuck());
    // Another process reads the event, so that the next pager does not get it.
    let uffd = jiffy_sys::userfaultfd::Userfaultfd::from_received(
        memory.uffd().try_clone_to_owned().unwrap(),
    )
    .unwrap();
    eventually("the fault is an event", || {
        uffd.next_event().unwrap().is_some()
    });
    assert!(uffd.next_event().unwrap().is_none());
    drop(uffd);
    let pager = Pager::start(folder.path(), &[]);
    let _connection = memory.connect(&pager.serve("vm", &image));
    assert_page(stuck.bytes(), page(11));
}

#[test]
fn nothing_is_lost_when_the_pager_is_killed_repeatedly() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), 8 * MIB, |_| {});
    let memory = Memory::new(8 * MIB);
    let checks: Vec<_> = (0..2).map(|seed| memory.check(seed)).collect();
    for _ in 0..8 {
        let pager = Pager::start(folder.path(), &[]);
        let _connection = memory.connect(&pager.serve("vm", &image));
        std::thread::sleep(std::time::Duration::from_millis(5));
        pager.kill();
    }
    let pager = Pager::start(folder.path(), &[]);
    let _connection = memory.connect(&pager.serve("vm", &image));
    checks.into_iter().for_each(join);
}

#[test]
fn an_order_to_complete_waits_for_a_vmm_that_connects_again() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |_| {});
    let memory = Memory::new(MIB);
    let pager = Pager::start(folder.path(), &[]);
    let connection = memory.connect(&pager.serve("vm", &image));
    assert_page(memory.read_page(1).bytes(), page(1));
    pager.kill();
    drop(connection);
    let pager = Pager::start(folder.path(), &[]);
    let socket = pager.serve("vm", &image);
    let mut waiting = Control::connect(&pager.control);
    let complete = PagerRequest::Complete { name: "vm".into() };
    waiting.begin(&complete);
    // This is answered after the order was read.
    pager.stats("vm");
    assert!(waiting.has_no_answer(), "the VMM is not there yet");
    let _connection = memory.connect(&socket);
    assert_eq!(waiting.receive(), PagerResponse::Ok);
    for number in 0..MIB / PAGE {
        assert_page(memory.read_page(number).bytes(), page(number));
    }
    // A wait ends when the VM is forgotten, or when its VMM does not come.
    pager.serve("gone", &image);
    for name in ["gone", "gone"] {
        waiting.begin(&PagerRequest::Complete { name: name.into() });
    }
    pager.stats("vm");
    assert_eq!(pager.forget("gone"), PagerResponse::Ok);
    let forgotten = waiting.receive();
    assert!(
        format!("{forgotten:?}").contains("was forgotten"),
        "{forgotten:?}"
    );
    let unknown = waiting.receive();
    assert!(
        format!("{unknown:?}").contains("no VM or disk"),
        "{unknown:?}"
    );
    pager.serve("late", &image);
    let late = pager.complete("late");
    assert!(format!("{late:?}").contains("is not connected"), "{late:?}");
}

/// Each phase has a system call: listening, requests, handshakes, waiting, reading faults, reading
/// the image, filling.
#[test]
fn nothing_is_lost_when_the_pager_is_killed_at_any_system_call() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), 32 * MIB, |options| {
        options.working_set = Some((0..400).collect());
    });
    let memory = Memory::new(32 * MIB);
    let mut pages = (0..).map(|step| step * 40503 % (32 * MIB / PAGE));
    let mut readings: Vec<(usize, Reading)> = Vec::new();
    let mut killed = Vec::new();
    for call in [
        "accept4",
        "recvmsg",
        "openat",
        "epoll_ctl",
        "epoll_pwait2",
        "poll",
        "read",
        "pread64",
        "ioctl",
    ] {
        for nth in 1..=5 {
            let mut pager = Pager::start_killed_at(folder.path(), call, nth);
            let socket = folder.path().join("vm.sock");
            let asked = pager.try_ask(&PagerRequest::Serve {
                name: "vm".into(),
                socket: socket.clone(),
                image: image.clone(),
                record: None,
                prefetch: nth % 2 == 0,
            });
            let _connection = asked.and_then(|_| memory.try_connect(&socket));
            let before = readings.len();
            readings.extend(
                pages
                    .by_ref()
                    .take(6)
                    .map(|number| (number, memory.read_page(number))),
            );
            eventually("it neither serves nor dies", || {
                let mut new = readings[before..].iter();
                pager.has_ended() || new.all(|(_, reading)| reading.is_over())
            });
            if pager.has_ended() {
                killed.push(format!("{call} {nth}"));
            }
        }
    }
    assert!(killed.len() >= 20, "killed at {killed:?} only");
    let pager = Pager::start(folder.path(), &[]);
    let _connection = memory.connect(&pager.serve("vm", &image));
    for (number, reading) in readings {
        assert_page(reading.bytes(), page(number));
    }
}

#[test]
fn vms_that_vanish_are_released() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let socket = pager.serve("vm", &image);
    let before = pager.count("fd");
    for round in 0..20 {
        let memory = Memory::new(MIB);
        let connection = memory.connect(&socket);
        assert_page(memory.read_page(round).bytes(), page(round));
        // Drops first the memory, then the connection; or the other way round.
        if round % 2 == 0 {
            drop(memory);
            drop(connection);
        } else {
            drop(connection);
            drop(memory);
        }
    }
    eventually("descriptors stay open", || pager.count("fd") <= before);
    let memory = Memory::new(MIB);
    let _connection = memory.connect(&socket);
    assert_page(memory.read_page(1).bytes(), page(1));
}

#[test]
fn a_forgotten_vm_is_released_and_can_be_served_again() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let socket = pager.serve("vm", &image);
    let memory = Memory::new(MIB);
    let connection = memory.connect(&socket);
    assert_page(memory.read_page(2).bytes(), page(2));
    memory.arena.discard(2 * PAGE, PAGE).unwrap();
    assert_eq!(pager.forget("vm"), PagerResponse::Ok);
    assert!(!socket.exists());
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        2,
        "image and control"
    );
    assert_eq!(
        std::io::Read::read(&mut &connection, &mut [0; 1]).unwrap(),
        0
    );
    let stuck = memory.read_page(50);
    assert!(stuck.is_stuck());
    let _connection = memory.connect(&pager.serve("vm", &image));
    assert_page(stuck.bytes(), page(50));
}
