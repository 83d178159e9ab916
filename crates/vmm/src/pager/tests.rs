use super::*;
use jiffy_devices::virtio::balloon::Reclaim;
use jiffy_sys::memfd::{self, Pages};
use jiffy_sys::userfaultfd::FillError;
use jiffy_wire::vmm::{Memory, PageSize};
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixListener;
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

fn ram() -> GuestRam {
    GuestRam::create(&Memory {
        size_mib: 64,
        pages: PageSize::Small,
        prefault: false,
    })
    .unwrap()
}

/// RAM that was handed to a pager, whose socket is in the folder.
fn attached() -> (TempDir, UnixListener, GuestRam, PagedMemory) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("pager.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let ram = ram();
    let (memory, _) = PagedMemory::attach(&ram, &socket, false).unwrap();
    (folder, listener, ram, memory)
}

fn accept(listener: &UnixListener) -> (UnixStream, Userfaultfd, Vec<Mapping>) {
    let stream = listener.accept().unwrap().0;
    let (uffd, mappings) = receive_uffd(&stream);
    (stream, uffd, mappings)
}

fn receive_uffd(stream: &UnixStream) -> (Userfaultfd, Vec<Mapping>) {
    let (mut message, mut received) = (vec![0; 4096], Vec::new());
    let count = fds::recv_with_fds(stream, &mut message, &mut received).unwrap();
    let mappings = serde_json::from_slice(&message[..count]).unwrap();
    (
        Userfaultfd::from_received(received.remove(0)).unwrap(),
        mappings,
    )
}

#[test]
fn a_pager_fills_memory_and_is_detached_when_complete() {
    let (_folder, listener, ram, mut memory) = attached();
    let (mut stream, uffd, mappings) = accept(&listener);
    assert_eq!((mappings.len(), mappings[0].size), (1, 64 << 20));
    let base = mappings[0].base_host_virt_addr;
    uffd.copy(base + 8192, &[7; 4096]).unwrap();
    stream.write_all(b"{\"complete\":true}\n").unwrap();
    assert!(memory.process_events().is_none());
    assert!(memory.is_complete() && memory.descriptor().is_none());
    let word = |page: u64| -> u8 { ram.memory().read_obj(GuestAddress(page * 4096)).unwrap() };
    assert_eq!((word(2), word(3)), (7, 0), "what is missing is zero now");
}

#[test]
fn the_pager_is_not_told_of_dropped_working_set_pages() {
    const SHARED: u64 = 512 << 10;
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("pager.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let ram = GuestRam::to_be_paged(64 << 20).unwrap();
    let working_set = memfd::create("test", ram.size(), Pages::Small).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&working_set, &[9; SHARED as usize], 0).unwrap();
    let (mut memory, mut stream, uffd, base) = std::thread::scope(|scope| {
        let pager = scope.spawn(|| {
            let mut stream = listener.accept().unwrap().0;
            let mut question = [0; WORKING_SET_QUESTION.len()];
            stream.read_exact(&mut question).unwrap();
            let answer =
                format!("{{\"working_set\":{{\"ranges\":[[0,{SHARED}]],\"written\":[]}}}}\n");
            fds::send_with_fds(&stream, answer.as_bytes(), &[working_set.as_fd()]).unwrap();
            let (uffd, mappings) = receive_uffd(&stream);
            (stream, uffd, mappings[0].base_host_virt_addr)
        });
        let (memory, _) = PagedMemory::attach(&ram, &socket, true).unwrap();
        let (stream, uffd, base) = pager.join().unwrap();
        (memory, stream, uffd, base)
    });
    let word = |at| -> u8 { ram.memory().read_obj(GuestAddress(at)).unwrap() };
    assert_eq!((word(0), word(SHARED - 1)), (9, 9));
    ram.release(GuestAddress(0), SHARED / 2).unwrap();
    assert_eq!((word(0), word(SHARED / 2)), (0, 9));
    ram.memory().write_obj(3_u8, GuestAddress(4096)).unwrap();
    assert!(uffd.next_event().unwrap().is_none());
    // As another pager would try later.
    for at in [4096, 8192, SHARED - 4096] {
        let filled = uffd.copy(base + at, &[7; 4096]);
        assert!(matches!(filled, Err(FillError::Unmapped)), "{filled:?}");
    }
    stream.write_all(b"{\"complete\":true}\n").unwrap();
    assert!(memory.process_events().is_none() && memory.is_complete());
    assert_eq!([0, 4096, SHARED].map(word), [0, 3, 0]);
}

/// A vCPU holds the lock that `written` needs until its event is read.
#[test]
fn reporting_written_pages_does_not_wait_for_a_release() {
    let (_folder, listener, ram, mut memory) = attached();
    let (_stream, uffd, _) = accept(&listener);
    memory.written_report = WrittenReport::At(Instant::now());
    let (tell, told) = std::sync::mpsc::channel();
    let told = std::thread::scope(|scope| {
        scope.spawn(|| ram.release(GuestAddress(0), 4096).unwrap());
        let mut event = [PollFd::new(&uffd, PollFlags::IN)];
        poll(&mut event, None).unwrap();
        scope.spawn(|| {
            memory.report_written(&ram);
            tell.send(()).unwrap();
        });
        let told = told.recv_timeout(Duration::from_secs(60));
        assert!(uffd.next_event().unwrap().is_some());
        told
    });
    told.expect("it waits for the lock");
    assert!(ram.written_at_once().is_ok());
}

#[test]
fn a_busy_pager_may_answer_late() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("pager.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let ram = GuestRam::to_be_paged(64 << 20).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = listener.accept().unwrap().0;
            let mut question = [0; WORKING_SET_QUESTION.len()];
            stream.read_exact(&mut question).unwrap();
            std::thread::sleep(TIMEOUT + Duration::from_millis(300));
            let answer = b"{\"working_set\":{\"ranges\":[]}}\n";
            let _ = fds::send_with_fds(&stream, answer, &[]);
            let _ = stream.read(&mut question);
        });
        PagedMemory::attach(&ram, &socket, true).unwrap();
    });
}

#[test]
fn a_new_pager_is_connected_and_a_missing_one_ends_the_vm() {
    let (_folder, listener, _ram, mut memory) = attached();
    assert_eq!(memory.timeout, TIMEOUT);
    memory.timeout = Duration::from_secs(600);
    // Closing is not sufficient: between fork and exec, a child of another test has the
    // connections, too.
    let hang_up = || accept(&listener).0.shutdown(Shutdown::Both).unwrap();
    hang_up();
    assert!(memory.process_events().is_none(), "another pager listens");
    hang_up();
    rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
    assert!(
        memory.process_events().is_none(),
        "the search has not timed out yet"
    );
    assert!(memory.timeout().is_some() && !memory.is_lost());
    let Link::Down(search) = &mut memory.link else {
        panic!("it does not search for another pager")
    };
    assert!(search.until <= Instant::now() + Duration::from_secs(600));
    search.until = Instant::now();
    let ending = memory.process_events().expect("the search has timed out");
    assert!(ending.message.contains("is gone"), "{}", ending.message);
    assert!(memory.is_lost());
}

#[test]
fn building_a_vm_waits_for_the_next_pager() {
    let (_folder, listener, ram, mut memory) = attached();
    memory.timeout = Duration::from_secs(600);
    let thread = PagerThread::start(memory).unwrap();
    let seen: u8 = std::thread::scope(|scope| {
        let builder = scope.spawn(|| ram.memory().read_obj(GuestAddress(8192)).unwrap());
        accept(&listener).0.shutdown(Shutdown::Both).unwrap();
        let (_stream, uffd, mappings) = accept(&listener);
        let base = mappings[0].base_host_virt_addr;
        uffd.copy(base + 8192, &[7; 4096]).unwrap();
        builder.join().unwrap()
    });
    assert_eq!(seen, 7);
    let memory = thread.stop().unwrap();
    assert!(!memory.is_lost() && !memory.is_complete());
}

#[test]
fn building_a_vm_does_not_wait_forever_for_a_pager() {
    let (_folder, listener, ram, mut memory) = attached();
    memory.timeout = Duration::from_millis(50);
    let thread = PagerThread::start(memory).unwrap();
    let first = accept(&listener).0;
    rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
    first.shutdown(Shutdown::Both).unwrap();
    let seen: u8 = ram.memory().read_obj(GuestAddress(8192)).unwrap();
    assert_eq!(seen, 0, "lost memory reads as zero, so the reader can end");
    let error = thread.stop().unwrap_err();
    assert!(matches!(&error, PagerError::Lost(why) if why.contains("is gone")));
}

#[test]
fn a_pagers_failure_ends_the_vm_with_its_message() {
    for (said, expected) in [
        (
            &b"{\"failed\":\"chunk 9 is damaged\"}\n"[..],
            "chunk 9 is damaged",
        ),
        (b"hello\n", "protocol"),
        (&[b'x'; LINE_MAX + 1], "protocol"),
    ] {
        let (_folder, listener, _ram, mut memory) = attached();
        let (mut stream, ..) = accept(&listener);
        stream.write_all(said).unwrap();
        let ending = memory.process_events().unwrap();
        assert!(ending.message.contains(expected), "{}", ending.message);
        assert!(memory.is_lost() && memory.process_events().is_none());
    }
}
