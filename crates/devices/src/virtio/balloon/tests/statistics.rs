//! Tests of the guest's memory statistics.

use super::*;
use crate::virtio::testing::TIMEOUT;
use std::time::Duration;

/// Entries as a driver writes them.
fn entries(figures: &[(u16, u64)]) -> Vec<u8> {
    figures
        .iter()
        .flat_map(|(tag, value)| {
            let tag = tag.to_le_bytes().into_iter();
            tag.chain(value.to_le_bytes())
        })
        .collect()
}

impl Guest {
    /// Gives the device a buffer with these bytes.
    fn send_statistics(&mut self, bytes: &[u8]) {
        self.queue(STATISTICS).store(NUMBERS, bytes);
        let buffer = Buffer::readable(NUMBERS, bytes.len() as u32);
        self.queue(STATISTICS).add(&[buffer]);
        self.device.ring(STATISTICS);
    }
}

#[test]
fn statistics_are_read_on_request_and_by_name() {
    let mut guest = Guest::new();
    let board = guest.balloon().statistics().clone();
    assert_eq!(board.latest().sequence, 0);
    assert!(!guest.balloon().request_statistics(), "no buffer yet");

    guest.send_statistics(&entries(&[
        (0, 1),
        (4, 1 << 30),
        (15, 7),
        (16, 9),
        (999, 9),
    ]));
    assert_eq!(
        guest.queue(STATISTICS).next_used(),
        None,
        "kept for the next request"
    );
    let first = board.latest();
    assert_eq!(first.sequence, 1);
    let named: Vec<_> = first.by_name().into_iter().collect();
    assert_eq!(
        named,
        [
            ("direct_reclaim", 7),
            ("free_memory", 1 << 30),
            ("swap_in", 1)
        ]
    );
    assert_eq!(
        (first.get("swap_in"), first.get("swap_out")),
        (Some(1), None)
    );

    assert!(guest.balloon().request_statistics());
    assert_eq!(guest.device.interrupt.counts().used_buffers, 1);
    assert_eq!(guest.queue(STATISTICS).next_used().unwrap().length, 0);
    assert!(guest.balloon().request_statistics(), "a request is pending");
    assert_eq!(guest.device.interrupt.counts().used_buffers, 1);
    guest.send_statistics(&entries(&[(4, 5), (4, 6)]));
    assert_eq!(board.latest().sequence, 2);
    assert_eq!(board.latest().get("free_memory"), Some(6));
    assert_eq!(board.latest().get("swap_in"), None);
}

#[test]
fn a_caller_can_wait_for_newer_statistics() {
    let mut guest = Guest::new();
    guest.send_statistics(&entries(&[(5, 1)]));
    let board = guest.balloon().statistics().clone();
    let known = board.latest().sequence;
    let soon = Duration::from_millis(1);
    assert_eq!(
        board.newer_than(known, soon).sequence,
        known,
        "no newer ones"
    );
    let waiter = std::thread::spawn(move || board.newer_than(known, TIMEOUT));
    assert!(guest.balloon().request_statistics());
    guest.send_statistics(&entries(&[(5, 2)]));
    assert_eq!(waiter.join().unwrap().get("total_memory"), Some(2));
}

#[test]
fn a_second_statistics_buffer_returns_the_first() {
    let mut guest = Guest::new();
    guest.send_statistics(&entries(&[(5, 1)]));
    guest.send_statistics(&entries(&[(5, 2)]));
    assert_eq!(guest.queue(STATISTICS).next_used().unwrap().head, 0);
    assert_eq!(guest.queue(STATISTICS).next_used(), None);
    let board = guest.balloon().statistics().clone();
    assert_eq!(board.latest().get("total_memory"), Some(2));
    assert!(guest.balloon().request_statistics());
    assert_eq!(guest.queue(STATISTICS).next_used().unwrap().head, 1);
}

#[test]
fn valid_entries_of_malformed_statistics_are_kept() {
    let mut guest = Guest::new();
    let board = guest.balloon().statistics().clone();
    let mut cut = entries(&[(4, 4), (5, 5)]);
    cut.pop();
    let many: Vec<(u16, u64)> = (0..1000).map(|n| (n, n.into())).collect();
    for (bytes, names) in [
        (cut, 1),
        (Vec::new(), 0),
        (entries(&[(77, 1)]), 0),
        (entries(&many), 16),
    ] {
        guest.send_statistics(&bytes);
        assert_eq!(board.latest().by_name().len(), names);
    }
    // A buffer outside memory.
    guest
        .queue(STATISTICS)
        .add(&[Buffer::readable(RAM - 4, 10)]);
    guest.device.ring(STATISTICS);
    assert_eq!(board.latest().by_name().len(), 0);
    assert_eq!(board.latest().sequence, 5);
    assert_eq!(guest.device.interrupt.counts().needs_reset, 0);
}

#[test]
fn statistics_are_cleared_when_the_driver_resets() {
    let mut guest = Guest::new();
    guest.send_statistics(&entries(&[(5, 1)]));
    guest.balloon().reset();
    assert_eq!(
        guest.balloon().statistics().latest().get("total_memory"),
        None
    );
}

#[test]
fn the_held_statistics_buffer_is_used_after_a_restore() {
    let mut guest = Guest::new();
    guest.send_statistics(&entries(&[(5, 1)]));
    guest.balloon().request_statistics();
    guest.queue(STATISTICS).next_used().unwrap();
    guest.send_statistics(&entries(&[(5, 2)]));
    let Guest {
        memory,
        device,
        mut queues,
        ..
    } = guest;
    let (balloon, places) = device.stop();
    let host = Arc::new(Host::default());
    let restored = Balloon::restore(args(&host), &balloon.save()).unwrap();
    let mut device = Running::start(restored, &memory, places, ALL);
    let queue = &mut queues[usize::from(STATISTICS)];
    assert_eq!(queue.next_used(), None);
    let board = device.device.statistics().clone();
    assert_eq!(board.latest().get("total_memory"), Some(2));
    assert!(device.device.request_statistics());
    assert_eq!(device.interrupt.counts().used_buffers, 1);
    assert_eq!(queue.next_used().unwrap().head, 1);
    assert_eq!(queue.next_used(), None);
}

#[test]
fn a_pending_statistics_request_is_answered_after_a_restore() {
    let mut guest = Guest::new();
    guest.send_statistics(&entries(&[(5, 1)]));
    assert!(guest.balloon().request_statistics());
    guest.queue(STATISTICS).next_used().unwrap();
    let memory = guest.memory.clone();
    let mut queue = guest.queues[usize::from(STATISTICS)].clone();
    let (balloon, places) = guest.stop();
    let mut device = Running::start(balloon, &memory, places, ALL);
    assert!(device.device.request_statistics(), "a request is pending");
    assert_eq!(device.interrupt.counts().used_buffers, 0);
    queue.store(NUMBERS, &entries(&[(5, 3)]));
    queue.add(&[Buffer::readable(NUMBERS, 10)]);
    device.ring(STATISTICS);
    assert_eq!(
        device.device.statistics().latest().get("total_memory"),
        Some(3)
    );
}
