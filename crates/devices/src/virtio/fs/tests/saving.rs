//! Pauses, saved devices and devices without a server.

use super::super::{ExchangeError, FsState, RestoreError, TAG_MAX};
use super::*;
use crate::virtio::device::VirtioDevice;
use std::sync::atomic::Ordering;

#[test]
fn a_pause_waits_for_answers_and_then_passes_no_request() {
    let (mut guest, server) = Guest::patient();
    guest.send(REQUEST_QUEUE, 0, &message(GETATTR, 7, b""), 64);
    let request = server.receive();
    let Guest {
        memory,
        queues,
        running,
    } = guest;
    let stopping = std::thread::spawn(move || running.stop());
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!stopping.is_finished());
    server.answer(&request, b"");
    let (device, rings) = stopping.join().unwrap();

    // What the guest offers now is served after the pause.
    let mut guest_queues = queues;
    guest_queues[1].store(BUFFERS + SLOT, &message(GETATTR, 8, b""));
    let room = Buffer::writable(BUFFERS + SLOT + SLOT / 2, 16);
    guest_queues[1].add(&[Buffer::readable(BUFFERS + SLOT, IN_HEADER as u32), room]);
    assert!(!server.has_message());
    let mut guest = Guest::over(device, memory, guest_queues, rings);
    let used = guest.queue(REQUEST_QUEUE).wait_used();
    assert_eq!(guest.answer(0, used), out(7, 0, b""));
    server.answer(&server.receive(), b"");
    let used = guest.queue(REQUEST_QUEUE).wait_used();
    assert_eq!(guest.answer(1, used), out(8, 0, b""));
}

#[test]
fn a_restored_device_without_a_server_answers_that_it_is_not_connected() {
    let (guest, server) = Guest::new();
    let (device, rings) = guest.running.stop();
    let state = device.save();
    let state: FsState = serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();
    let memory = testing::copy_of(&guest.memory);
    let queues = guest
        .queues
        .each_ref()
        .map(|queue| queue.over(memory.clone()));
    let restored = Fs::restore(args(None), &state).unwrap();
    let mut guest = Guest::over(restored, memory, queues, rings);
    assert_eq!(
        guest.refused(&message(GETATTR, 9, b""), 64),
        out(9, -107, b"")
    );
    guest.send(PRIORITY_QUEUE, 0, &message(2, 1, b"nodes"), 0);
    assert_eq!(guest.queue(PRIORITY_QUEUE).wait_used().length, 0);
    assert!(!server.has_message());
}

/// A request without an answer.
const FORGET: u32 = 2;

#[test]
fn a_guest_that_is_saved_in_the_middle_of_requests_gets_each_answer_once() {
    let (mut guest, server) = Guest::patient();
    guest.send(PRIORITY_QUEUE, 3, &message(FORGET, 1, b"node"), 0);
    server.receive();
    guest.send(REQUEST_QUEUE, 0, &message(GETATTR, 7, b""), 64);
    let request = server.receive();
    let Guest {
        memory,
        mut queues,
        running,
    } = guest;
    // The device asks for notifications once it has taken all requests.
    let mut flags = [1; 2];
    while flags != [0; 2] {
        queues[1].load(queues[1].used(), &mut flags);
    }
    let stop = running.device.stop_flag().unwrap();
    let stopping = std::thread::spawn(move || running.stop());
    while !stop.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
    // One that comes while the device stops: a doorbell that still rang let it look once more.
    std::thread::sleep(std::time::Duration::from_millis(50));
    queues[1].store(BUFFERS + SLOT, &message(GETATTR, 8, b""));
    let room = Buffer::writable(BUFFERS + SLOT + SLOT / 2, 64);
    queues[1].add(&[Buffer::readable(BUFFERS + SLOT, IN_HEADER as u32), room]);
    server.answer(&request, b"first");
    let (mut device, rings) = stopping.join().unwrap();
    assert_eq!(device.sent(), Some(2));

    let saving = std::thread::spawn(move || {
        let session = device.exchange(77, &[b"arg", b"uments"]).unwrap();
        (device.save(), session)
    });
    let asked = server.receive();
    assert_eq!(asked, message(77, 0, b"arguments"));
    // An answer that comes too late is no answer to it.
    server.send(&out(id(&request), 0, b"again"));
    server.answer(&asked, b"session");
    let (state, session) = saving.join().unwrap();
    assert_eq!(session, b"session");

    let memory = testing::copy_of(&memory);
    let queues = queues.each_ref().map(|queue| queue.over(memory.clone()));
    let (socket, other) = sockets();
    let mut restored = Fs::restore(args(Some(socket)), &state).unwrap();
    let told = std::thread::spawn(move || {
        let told = other.receive();
        other.answer(&told, b"");
        (other, told)
    });
    restored.exchange(78, &[&session]).unwrap();
    let (other, told) = told.join().unwrap();
    assert_eq!(told, message(78, 0, b"session"));
    let mut guest = Guest::over(restored, memory, queues, rings);
    let used = guest.queue(REQUEST_QUEUE).wait_used();
    assert_eq!(guest.answer(0, used), out(7, 0, b"first"));
    let request = other.receive();
    assert_ne!(id(&request), 0);
    other.answer(&request, b"second");
    let used = guest.queue(REQUEST_QUEUE).wait_used();
    assert_eq!(guest.answer(1, used), out(8, 0, b"second"));
    assert!(!other.has_message() && !server.has_message());
}

#[test]
fn a_message_of_the_monitor_is_refused_by_a_device_that_runs_or_has_no_server() {
    let (mut guest, server) = Guest::new();
    let running = guest.running.device.exchange(77, &[]);
    assert!(
        matches!(running, Err(ExchangeError::Running)),
        "{running:?}"
    );
    assert_eq!(guest.running.device.sent(), None);
    let (mut device, _) = guest.running.stop();
    let long = device.exchange(77, &[&[0; MESSAGE_MAX]]);
    assert!(matches!(long, Err(ExchangeError::Malformed)), "{long:?}");
    let refusing = std::thread::spawn(move || {
        let id = id(&server.receive());
        server.send(&out(id, -22, b""));
        let id = self::id(&server.receive());
        server.send(&out(id, 0, b"")[..15]);
        server.send(&vec![0; MESSAGE_MAX + 1]);
        server.receive();
    });
    let refused = device.exchange(77, &[]);
    assert!(
        matches!(refused, Err(ExchangeError::Refused(22))),
        "{refused:?}"
    );
    let malformed = device.exchange(77, &[]);
    assert!(
        matches!(malformed, Err(ExchangeError::Malformed)),
        "{malformed:?}"
    );
    let too_long = device.exchange(77, &[]);
    assert!(
        matches!(too_long, Err(ExchangeError::Malformed)),
        "{too_long:?}"
    );
    refusing.join().unwrap();
    let gone = device.exchange(77, &[]);
    assert!(matches!(gone, Err(ExchangeError::NoServer)), "{gone:?}");
    let mut alone = Fs::new(args(None)).unwrap();
    let gone = alone.exchange(77, &[]);
    assert!(matches!(gone, Err(ExchangeError::NoServer)), "{gone:?}");
}

#[test]
fn another_tag_is_not_restored() {
    let state = FsState {
        tag: "other".into(),
    };
    let error = Fs::restore(args(None), &state).unwrap_err();
    assert!(matches!(error, RestoreError::Tag { .. }), "{error}");
}

#[test]
fn a_tag_that_no_driver_can_read_is_refused() {
    for tag in ["", "a\0b", &"x".repeat(TAG_MAX + 1)] {
        let args = FsArgs {
            tag: tag.into(),
            ..args(None)
        };
        assert!(
            Fs::new(args).unwrap_err().to_string().contains(tag),
            "{tag}"
        );
    }
    let longest = FsArgs {
        tag: "x".repeat(TAG_MAX),
        ..args(None)
    };
    Fs::new(longest).unwrap();
}

#[test]
fn a_device_is_activated_only_with_both_queues() {
    let (guest, _server) = Guest::new();
    let memory = guest.memory.clone();
    let (mut device, mut rings) = guest.running.stop();
    rings.truncate(1);
    let queues = rings.into_iter().map(|queue| {
        Some(crate::virtio::device::ActiveQueue {
            index: 0,
            queue,
            doorbell: vmm_sys_util::eventfd::EventFd::new(0).unwrap(),
        })
    });
    let error = device
        .activate(crate::virtio::device::Activation {
            memory,
            queues: queues.collect(),
            interrupt: testing::TestInterrupt::new(),
            features: 0,
            workers: Arc::new(testing::ThreadWorkers),
        })
        .unwrap_err();
    assert!(error.to_string().contains("queue 1"), "{error}");
}
