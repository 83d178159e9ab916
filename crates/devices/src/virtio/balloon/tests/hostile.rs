//! Drivers that break the rules.

use super::super::PAGES_MAX;
use super::*;
use proptest::prelude::*;

#[test]
fn page_numbers_outside_ram_release_nothing() {
    let mut guest = Guest::new();
    guest.send(INFLATE, &[u32::MAX, (RAM / PAGE) as u32]);
    assert_eq!(guest.host.take(), []);
    let fine = guest.numbers(&[(FREE / PAGE) as u32]);
    for buffers in [
        vec![fine, Buffer::readable(RAM - 2, 4)],
        vec![fine, Buffer::readable(u64::MAX - 1, 4)],
        vec![Buffer::readable(NUMBERS, 3)],
        vec![Buffer::readable(NUMBERS, 0)],
        vec![Buffer::writable(NUMBERS, 4)],
    ] {
        guest.request(INFLATE, &buffers);
        assert_eq!(guest.host.take(), [], "{buffers:?}");
    }
    assert_eq!(guest.device.interrupt.counts().needs_reset, 0);
}

#[test]
fn an_endless_list_of_pages_is_truncated() {
    let mut guest = Guest::new();
    let pages: Vec<u8> = (0..4096u32)
        .flat_map(|n| ((FREE / PAGE) as u32 + n).to_le_bytes())
        .collect();
    guest.queue(INFLATE).store(NUMBERS, &pages);
    let all = RAM as u32 - NUMBERS as u32;
    guest.request(INFLATE, &[Buffer::readable(NUMBERS, all); 16]);
    assert_eq!(guest.host.take(), [(FREE / PAGE, PAGES_MAX as u64)]);
}

#[test]
fn one_notification_releases_no_more_than_all_memory() {
    let mut guest = Guest::new();
    // Thirty-two heads of one chain of 32 buffers, each of which is all of memory.
    let everything = Buffer::writable(0x10_0000, RAM as u32 - 0x10_0000);
    guest.queue(REPORTING).add(&[everything; 32]);
    for head in 1..32 {
        guest.queue(REPORTING).offer(head);
    }
    guest.device.ring(REPORTING);
    assert_eq!(guest.queue(REPORTING).used_index(), 32);
    let pages: u64 = guest.host.take().iter().map(|(_, pages)| pages).sum();
    assert!(pages * PAGE <= RAM, "{pages}");
    assert_eq!(guest.balloon().reported_bytes(), pages * PAGE);
}

#[test]
fn one_notification_makes_a_bounded_number_of_calls() {
    let mut guest = Guest::new();
    // No two pages are adjacent.
    let pages: Vec<u32> = (0..PAGES_MAX as u32).map(|n| 2048 + 2 * n).collect();
    let buffer = guest.numbers(&pages);
    guest.queue(INFLATE).add(&[buffer]);
    for _ in 1..16 {
        guest.queue(INFLATE).offer(0);
    }
    guest.device.ring(INFLATE);
    assert_eq!(guest.queue(INFLATE).used_index(), 16, "all are answered");
    assert_eq!(guest.host.take().len(), 4096);
}

#[test]
fn a_read_only_report_buffer_releases_nothing() {
    let mut guest = Guest::new();
    guest.request(REPORTING, &[Buffer::readable(FREE, 2 << 20)]);
    assert_eq!(guest.host.take(), []);
}

#[test]
fn broken_rings_need_a_reset() {
    for queue in [INFLATE, DEFLATE, STATISTICS, REPORTING] {
        let mut guest = Guest::new();
        let size = guest.queue(queue).size();
        guest.queue(queue).set_avail_index(size + 1);
        guest.device.ring(queue);
        assert_eq!(guest.device.interrupt.counts().needs_reset, 1, "{queue}");
        let mut guest = Guest::new();
        guest.queue(queue).offer(size);
        guest.queue(queue).offer(size);
        guest.device.ring(queue);
        assert_eq!(guest.device.interrupt.counts().needs_reset, 1, "{queue}");
    }
}

#[test]
fn a_statistics_head_outside_the_table_is_not_returned() {
    let mut guest = Guest::new();
    let size = guest.queue(STATISTICS).size();
    guest.queue(STATISTICS).offer(size);
    guest.device.ring(STATISTICS);
    assert!(!guest.balloon().request_statistics());
    assert_eq!(guest.queue(STATISTICS).used_index(), 0);
}

#[test]
fn rings_in_released_memory_are_survived() {
    let mut guest = Guest::new();
    guest.send(INFLATE, &[0, 1, 2, 3, 4, 5]);
    assert_eq!(guest.host.take(), [(0, 6)]);
    // The host's release leaves zeros.
    guest.queue(INFLATE).store(0x1000, &[0; 0x4000]);
    for queue in 0..8 {
        if queue < 4 {
            guest.device.ring(queue);
        } else {
            guest.balloon().notified(queue);
        }
    }
}

proptest! {
    #[test]
    fn any_descriptors_are_survived(
        queue in 0u16..4,
        table in proptest::collection::vec((prop_oneof![0..RAM + 4096, any::<u64>()], prop_oneof![0u32..5000, any::<u32>()], 0u16..8, 0u16..40), 32),
        heads in proptest::collection::vec(0u16..32, 1..32),
        contents in proptest::collection::vec(any::<u8>(), 0..64),
    ) {
        let mut guest = Guest::new();
        let size = guest.queue(queue).size();
        guest.queue(queue).store(NUMBERS, &contents);
        for (index, (address, length, flags, next)) in (0..size).zip(table) {
            let buffer = Buffer::readable(address, length);
            let place = guest.queue(queue).descriptors();
            guest.queue(queue).write_descriptor(place, index, buffer, flags, next);
        }
        let heads: Vec<u16> = heads.into_iter().take(size.into()).collect();
        for head in &heads {
            guest.queue(queue).offer(*head);
        }
        guest.device.ring(queue);
        let broken = heads.iter().any(|head| *head >= size);
        if queue != STATISTICS {
            prop_assert_eq!(guest.device.interrupt.counts().needs_reset > 0, broken);
            if !broken {
                prop_assert_eq!(usize::from(guest.queue(queue).used_index()), heads.len());
            }
        }
        let pages: u64 = guest.host.take().iter().map(|(_, pages)| pages).sum();
        prop_assert!(pages * PAGE <= RAM);
        guest.balloon().request_statistics();
        guest.stop();
    }
}
