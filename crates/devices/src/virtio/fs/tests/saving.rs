//! Pauses, saved devices and devices without a server.

use super::super::{FsState, RestoreError, TAG_MAX};
use super::*;
use crate::virtio::device::VirtioDevice;

#[test]
fn a_pause_waits_for_answers_and_then_passes_no_request() {
    let (mut guest, server) = Guest::new();
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
