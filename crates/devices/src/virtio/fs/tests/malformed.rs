//! What a hostile driver or a broken server does.

use super::*;

/// What the device answers to a chain that is no request: nothing.
fn assert_returned_empty(buffers: &[Buffer]) {
    let (mut guest, server) = Guest::new();
    guest
        .queue(REQUEST_QUEUE)
        .store(BUFFERS, &message(GETATTR, 7, b""));
    guest.offer(REQUEST_QUEUE, buffers);
    assert_eq!(guest.queue(REQUEST_QUEUE).wait_used().length, 0);
    assert!(!server.has_message());
    // The next request is served.
    guest.send(REQUEST_QUEUE, 1, &message(GETATTR, 8, b""), 16);
    server.answer(&server.receive(), b"");
    assert_eq!(guest.queue(REQUEST_QUEUE).wait_used().length, 16);
}

#[test]
fn chains_that_are_no_request_are_returned_empty() {
    let header = Buffer::readable(BUFFERS, IN_HEADER as u32);
    let room = Buffer::writable(BUFFERS + SLOT / 2, 64);
    // Too short.
    assert_returned_empty(&[Buffer::readable(BUFFERS, 39), room]);
    assert_returned_empty(&[room]);
    // The length in the header is another one.
    assert_returned_empty(&[Buffer::readable(BUFFERS, 41), room]);
    // No room for an answer.
    assert_returned_empty(&[header]);
    assert_returned_empty(&[header, Buffer::writable(BUFFERS + SLOT / 2, 15)]);
    // Readable after writable.
    assert_returned_empty(&[room, header]);
    // Outside of memory.
    assert_returned_empty(&[header, Buffer::writable(MEMORY as u64 - 8, 64)]);
    assert_returned_empty(&[header, Buffer::writable(u64::MAX - 8, 64)]);
    // Too much room, and a message that is too long.
    assert_returned_empty(&[header, Buffer::writable(BUFFERS, MESSAGE_MAX as u32 + 1)]);
    assert_returned_empty(&[Buffer::readable(BUFFERS, MESSAGE_MAX as u32 + 1), room]);
}

#[test]
fn a_chain_with_a_loop_is_returned_empty() {
    let (mut guest, server) = Guest::new();
    let queue = guest.queue(REQUEST_QUEUE);
    queue.store(BUFFERS, &message(GETATTR, 7, b""));
    let header = Buffer::readable(BUFFERS, IN_HEADER as u32);
    queue.write_descriptor(queue.descriptors(), 0, header, testing::NEXT, 0);
    queue.offer(0);
    guest.running.ring(REQUEST_QUEUE);
    assert_eq!(guest.queue(REQUEST_QUEUE).wait_used().length, 0);
    assert!(!server.has_message());
}

#[test]
fn a_broken_available_ring_stops_only_this_queue() {
    let (mut guest, server) = Guest::new();
    guest.queue(PRIORITY_QUEUE).set_avail_index(QUEUE_SIZE + 1);
    guest.running.ring(PRIORITY_QUEUE);
    guest
        .running
        .interrupt
        .wait(|counts| counts.needs_reset == 1);
    guest.send(REQUEST_QUEUE, 1, &message(GETATTR, 8, b""), 16);
    server.answer(&server.receive(), b"");
    assert_eq!(guest.queue(REQUEST_QUEUE).wait_used().length, 16);
}

#[test]
fn an_answer_that_is_longer_than_its_room_becomes_an_error() {
    let (mut guest, server) = Guest::new();
    guest.send(REQUEST_QUEUE, 0, &message(GETATTR, 7, b""), 20);
    server.answer(&server.receive(), b"12345");
    let used = guest.queue(REQUEST_QUEUE).wait_used();
    assert_eq!(guest.answer(0, used), out(7, -22, b""));
}

#[test]
fn malformed_answers_become_errors() {
    let answers: [fn(u64) -> Vec<u8>; 3] = [
        // Only a part of a header, with the id.
        |id| [0, id].map(u64::to_le_bytes).concat()[..15].to_vec(),
        // Another length in the header.
        |id| [out(id, 0, b""), vec![0]].concat(),
        // Longer than any message.
        |id| out(id, 0, &[0; MESSAGE_MAX]),
    ];
    for (number, answer) in answers.into_iter().enumerate() {
        let (mut guest, server) = Guest::new();
        guest.send(REQUEST_QUEUE, 0, &message(GETATTR, 7, b""), 64);
        let request = server.receive();
        server.send(&answer(id(&request)));
        if number == 0 {
            // An id that is cut short belongs to no request.
            server.answer(&request, b"");
        }
        let used = guest.queue(REQUEST_QUEUE).wait_used();
        let error = if number == 0 { 0 } else { -5 };
        assert_eq!(guest.answer(0, used), out(7, error, b""), "answer {number}");
    }
}

#[test]
fn answers_to_no_request_are_dropped() {
    let (mut guest, server) = Guest::new();
    for id in [0, 1, 127, 128, u64::MAX] {
        server.send(&out(id, 0, b"forged"));
    }
    guest.send(REQUEST_QUEUE, 0, &message(GETATTR, 7, b""), 64);
    let request = server.receive();
    server.answer(&request, b"");
    let used = guest.queue(REQUEST_QUEUE).wait_used();
    assert_eq!(guest.answer(0, used), out(7, 0, b""));
    // A second answer to the same request.
    server.answer(&request, b"again");
    guest.send(REQUEST_QUEUE, 1, &message(GETATTR, 8, b""), 64);
    server.answer(&server.receive(), b"");
    let used = guest.queue(REQUEST_QUEUE).wait_used();
    assert_eq!(guest.answer(1, used), out(8, 0, b""));
}

#[test]
fn a_server_that_ends_leaves_errors() {
    let (mut guest, server) = Guest::new();
    guest.send(REQUEST_QUEUE, 0, &message(GETATTR, 7, b""), 64);
    server.receive();
    drop(server);
    let used = guest.queue(REQUEST_QUEUE).wait_used();
    assert_eq!(guest.answer(0, used), out(7, -107, b""));
    assert_eq!(
        guest.refused(&message(GETATTR, 8, b""), 64),
        out(8, -107, b"")
    );
}
