//! Requests and answers that are as they should be.

use super::*;
use crate::virtio::device::VirtioDevice;

#[test]
fn the_driver_reads_tag_and_queues() {
    let device = Fs::new(args(None)).unwrap();
    assert_eq!(device.device_type(), 26);
    assert_eq!(device.queue_max_sizes().len(), 2);
    let mut config = [0xff; 48];
    device.read_config(0, &mut config);
    assert_eq!(&config[..3], b"src");
    assert!(config[3..36].iter().all(|byte| *byte == 0));
    assert_eq!(config[36..40], 1u32.to_le_bytes());
    assert!(config[40..].iter().all(|byte| *byte == 0));
    device.read_config(u64::MAX, &mut config[..1]);
    assert_eq!(config[0], 0);
}

#[test]
fn a_request_is_answered_under_the_guests_id() {
    let (mut guest, server) = Guest::new();
    let head = guest.send(REQUEST_QUEUE, 0, &message(GETATTR, 7, b"arguments"), 100);
    let request = server.receive();
    assert_eq!(&request[..8], &message(GETATTR, 7, b"arguments")[..8]);
    assert_eq!(&request[16..], &message(GETATTR, 7, b"arguments")[16..]);
    server.answer(&request, b"results");
    let used = guest.queue(REQUEST_QUEUE).wait_used();
    assert_eq!(used.head, u32::from(head));
    assert_eq!(guest.answer(0, used), out(7, 0, b"results"));
    guest
        .running
        .interrupt
        .wait(|counts| counts.used_buffers == 1);
}

#[test]
fn answers_may_come_in_any_order() {
    let (mut guest, server) = Guest::new();
    // All guests' ids are equal, which must not matter.
    for slot in 0..10 {
        guest.send(
            REQUEST_QUEUE,
            slot,
            &message(GETATTR, 7, &[slot as u8]),
            100,
        );
    }
    let mut requests: Vec<_> = (0..10).map(|_| server.receive()).collect();
    requests.reverse();
    for request in requests {
        server.answer(&request, &request[IN_HEADER..]);
        let used = guest.queue(REQUEST_QUEUE).wait_used();
        // Each request takes two descriptors.
        let slot = u64::from(used.head / 2);
        assert_eq!(guest.answer(slot, used), out(7, 0, &[slot as u8]));
    }
}

#[test]
fn requests_without_an_answer_are_returned_at_once() {
    let (mut guest, server) = Guest::new();
    for (opcode, queue) in [(2, PRIORITY_QUEUE), (42, REQUEST_QUEUE)] {
        guest.send(queue, 0, &message(opcode, 1, b"nodes"), 0);
        assert_eq!(server.receive()[4..8], u32::to_le_bytes(opcode));
        assert_eq!(guest.queue(queue).wait_used().length, 0);
    }
}

#[test]
fn an_interrupt_is_not_passed_on() {
    let (mut guest, server) = Guest::new();
    guest.send(PRIORITY_QUEUE, 0, &message(36, 1, &7u64.to_le_bytes()), 0);
    assert_eq!(guest.queue(PRIORITY_QUEUE).wait_used().length, 0);
    assert!(!server.has_message());
}

#[test]
fn a_request_in_many_buffers_is_one_message() {
    let (mut guest, server) = Guest::new();
    let text = message(GETATTR, 7, b"arguments");
    guest.queue(REQUEST_QUEUE).store(BUFFERS, &text);
    let byte = |index| Buffer::readable(BUFFERS + index as u64, 1);
    let mut buffers: Vec<_> = (0..text.len()).map(byte).collect();
    buffers.extend((0..40).map(|index| Buffer::writable(BUFFERS + SLOT / 2 + index, 1)));
    let table = BUFFERS + 2 * SLOT;
    guest.queue(REQUEST_QUEUE).add_indirect(table, &buffers);
    guest.running.ring(REQUEST_QUEUE);
    let request = server.receive();
    assert_eq!(request[16..], text[16..]);
    server.answer(&request, b"results");
    let used = guest.queue(REQUEST_QUEUE).wait_used();
    assert_eq!(guest.answer(0, used), out(7, 0, b"results"));
}

#[test]
fn requests_that_wait_when_the_device_starts_are_served() {
    let (socket, server) = sockets();
    let device = Fs::new(args(Some(socket))).unwrap();
    let memory = testing::memory(MEMORY);
    let next = RINGS + DriverQueue::ring_bytes(QUEUE_SIZE).next_multiple_of(16);
    let mut queues = [RINGS, next].map(|base| DriverQueue::new(memory.clone(), base, QUEUE_SIZE));
    queues[1].store(BUFFERS, &message(GETATTR, 7, b""));
    let room = Buffer::writable(BUFFERS + SLOT / 2, 16);
    queues[1].add(&[Buffer::readable(BUFFERS, IN_HEADER as u32), room]);
    let rings = queues.each_ref().map(|queue| queue.device_queue(false));
    let mut guest = Guest::over(device, memory, queues, rings.into());
    server.answer(&server.receive(), b"");
    let used = guest.queue(REQUEST_QUEUE).wait_used();
    assert_eq!(guest.answer(0, used), out(7, 0, b""));
}
