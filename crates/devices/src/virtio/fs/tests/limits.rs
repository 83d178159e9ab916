//! Requests at the limits.

use super::*;

#[test]
fn the_longest_request_and_answer_pass() {
    let (mut guest, server) = Guest::new();
    let arguments = vec![0xa5; MESSAGE_MAX - IN_HEADER];
    guest.send(
        REQUEST_QUEUE,
        0,
        &message(GETATTR, 7, &arguments),
        MESSAGE_MAX as u32,
    );
    let request = server.receive();
    assert_eq!(request[IN_HEADER..], arguments);
    let results = vec![0x5a; MESSAGE_MAX - OUT_HEADER];
    server.answer(&request, &results);
    let used = guest.queue(REQUEST_QUEUE).wait_used();
    assert_eq!(guest.answer(0, used), out(7, 0, &results));
}

#[test]
fn a_server_that_reads_slowly_gets_every_request_in_order() {
    let (mut guest, server) = Guest::new();
    // More bytes than the socket holds.
    let arguments = vec![0; MESSAGE_MAX - IN_HEADER];
    let mut text = message(GETATTR, 7, &arguments);
    let count = u64::from(QUEUE_SIZE / 2);
    let mut buffers = Vec::new();
    for number in 0..count {
        text[IN_HEADER] = number as u8;
        let place = BUFFERS + number * MESSAGE_MAX as u64;
        guest.queue(REQUEST_QUEUE).store(place, &text);
        let room = Buffer::writable(BUFFERS + count * MESSAGE_MAX as u64 + number * 16, 16);
        buffers.push([Buffer::readable(place, text.len() as u32), room]);
    }
    for pair in buffers {
        guest.offer(REQUEST_QUEUE, &pair);
    }
    for number in 0..count {
        let request = server.receive();
        assert_eq!(request[IN_HEADER], number as u8);
        server.answer(&request, b"");
    }
    for _ in 0..count {
        assert_eq!(guest.queue(REQUEST_QUEUE).wait_used().length, 16);
    }
}

#[test]
fn the_server_has_a_bounded_number_of_requests() {
    let (mut guest, server) = Guest::new();
    // A driver that uses one chain many times has more requests than the queue has entries.
    let place = BUFFERS;
    let queue = guest.queue(REQUEST_QUEUE);
    queue.store(place, &message(GETATTR, 7, b""));
    queue.add(&[
        Buffer::readable(place, IN_HEADER as u32),
        Buffer::writable(place + SLOT / 2, 16),
    ]);
    guest.running.ring(REQUEST_QUEUE);
    let mut requests = vec![server.receive()];
    while requests.len() < usize::from(QUEUE_SIZE) {
        guest.queue(REQUEST_QUEUE).offer(0);
        guest.running.ring(REQUEST_QUEUE);
        requests.push(server.receive());
    }
    guest.queue(REQUEST_QUEUE).offer(0);
    guest.running.ring(REQUEST_QUEUE);
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!server.has_message());
    // An answer makes room for the next.
    server.answer(&requests[0], b"");
    server.receive();
}
