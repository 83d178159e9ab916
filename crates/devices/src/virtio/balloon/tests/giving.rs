//! Inflating, deflating, reporting.

use super::*;

const FIRST: u32 = (FREE / PAGE) as u32;

#[test]
fn neighbouring_pages_are_released_as_one_range() {
    let mut guest = Guest::new();
    let pages = [5, 4, 3, 9, 0, 2, 9, 20, 21].map(|page| FIRST + page);
    guest.send(INFLATE, &pages);
    let first = u64::from(FIRST);
    assert_eq!(
        guest.host.take(),
        [(first, 1), (first + 2, 4), (first + 9, 1), (first + 20, 2)]
    );
    assert_eq!(guest.balloon().inflated_bytes(), 8 * PAGE);
    assert_eq!(guest.balloon().reported_bytes(), 0);
    assert_eq!(guest.device.interrupt.counts().used_buffers, 1);
}

#[test]
fn page_numbers_may_be_split_across_buffers() {
    let mut guest = Guest::new();
    let whole = guest.numbers(&[FIRST, FIRST + 1, FIRST + 7]);
    let parts = [
        Buffer::readable(whole.address, 5),
        Buffer::readable(whole.address + 5, 1),
        Buffer::readable(whole.address + 6, 6),
    ];
    guest.request(INFLATE, &parts);
    let first = u64::from(FIRST);
    assert_eq!(guest.host.take(), [(first, 2), (first + 7, 1)]);
}

#[test]
fn deflating_releases_nothing() {
    let mut guest = Guest::new();
    guest.send(DEFLATE, &[FIRST, FIRST + 1]);
    assert_eq!(guest.host.take(), []);
    assert_eq!(guest.device.interrupt.counts().used_buffers, 1);
}

#[test]
fn a_full_linux_request_of_adjacent_pages_is_one_range() {
    let mut guest = Guest::new();
    let pages: Vec<u32> = (0..256).rev().map(|page| FIRST + page).collect();
    guest.send(INFLATE, &pages);
    assert_eq!(guest.host.take(), [(u64::from(FIRST), 256)]);
}

#[test]
fn reported_free_pages_are_released() {
    let mut guest = Guest::new();
    let block = 2 << 20;
    let buffers: Vec<Buffer> = (0..4)
        .map(|n| Buffer::writable(FREE + n * block, block as u32))
        .collect();
    guest.request(REPORTING, &buffers);
    let first = FREE / PAGE;
    assert_eq!(
        guest.host.take(),
        [0, 1, 2, 3].map(|n| (first + 512 * n, 512))
    );
    assert_eq!(guest.balloon().reported_bytes(), 8 << 20);
    assert_eq!(guest.balloon().inflated_bytes(), 0);
}

#[test]
fn a_report_fills_the_whole_queue_as_linux_does() {
    let mut guest = Guest::new();
    for _ in 0..3 {
        let buffers: Vec<Buffer> = (0..32)
            .map(|n| Buffer::writable(FREE + n * 2 * PAGE, PAGE as u32))
            .collect();
        guest.request(REPORTING, &buffers);
        assert_eq!(guest.host.take().len(), 32);
    }
}

#[test]
fn reported_pages_are_kept_with_a_nonzero_poison_value() {
    let mut guest = Guest::with(memory(RAM as usize), ALL | F_PAGE_POISON);
    guest
        .balloon()
        .write_config(12, &0xaaaa_aaaau32.to_le_bytes());
    let buffer = Buffer::writable(FREE, 2 << 20);
    guest.request(REPORTING, &[buffer]);
    assert_eq!(guest.host.take(), []);
    assert_eq!(guest.balloon().reported_bytes(), 0);
    // With zeros as fill value pages are released.
    guest.balloon().write_config(12, &0u32.to_le_bytes());
    guest.request(REPORTING, &[buffer]);
    assert_eq!(guest.host.take(), [(FREE / PAGE, 512)]);
}

#[test]
fn a_driver_without_statistics_reports_on_the_third_queue() {
    let mut guest = Guest::with(memory(RAM as usize), F_REPORTING);
    guest.request(2, &[Buffer::writable(FREE, PAGE as u32)]);
    assert_eq!(guest.host.take(), [(FREE / PAGE, 1)]);
    assert!(!guest.balloon().request_statistics());
}

#[test]
fn a_plain_driver_has_two_queues() {
    let mut guest = Guest::with(memory(RAM as usize), 0);
    guest.send(INFLATE, &[FIRST]);
    assert_eq!(guest.host.take(), [(u64::from(FIRST), 1)]);
    assert!(!guest.balloon().request_statistics());
}

#[test]
fn only_guest_ram_is_released_and_region_by_region() {
    let low = 16 << 20;
    let high = 1 << 32;
    let ranges = [(0, low), (low, 1 << 20), (high, 1 << 20)]
        .map(|(start, length)| (GuestAddress(start), length as usize));
    let mut guest = Guest::with(Arc::new(GuestMemory::from_ranges(&ranges).unwrap()), ALL);
    let (low, high) = (low / PAGE, high / PAGE);
    // Across the border of two regions, and into the hole after the second.
    let numbers = [low - 1, low, low + 255, low + 256, high - 1, high];
    guest.send(INFLATE, &numbers.map(|n| n as u32));
    assert_eq!(
        guest.host.take(),
        [(low - 1, 1), (low, 1), (low + 255, 1), (high, 1)]
    );
    let start = (low - 1) * PAGE;
    guest.request(REPORTING, &[Buffer::writable(start, u32::MAX - 4095)]);
    assert_eq!(guest.host.take(), [(low - 1, 1), (low, 256), (high, 256)]);
}

#[test]
fn partial_pages_are_kept() {
    let mut guest = Guest::new();
    guest.request(
        REPORTING,
        &[
            Buffer::writable(FREE + 1, 2 * PAGE as u32),
            Buffer::writable(FREE + 100 * PAGE, PAGE as u32 - 1),
            Buffer::writable(FREE + 200 * PAGE, 0),
        ],
    );
    assert_eq!(guest.host.take(), [(FREE / PAGE + 1, 1)]);
}

#[test]
fn pages_that_the_host_failed_to_release_are_not_counted() {
    let host = Arc::new(Host {
        broken: true,
        ..Host::default()
    });
    let mut guest = Guest::made(memory(RAM as usize), ALL, host);
    guest.send(INFLATE, &[FIRST]);
    guest.request(REPORTING, &[Buffer::writable(FREE, PAGE as u32)]);
    assert_eq!(guest.host.take().len(), 2);
    assert_eq!(guest.balloon().inflated_bytes(), 0);
    assert_eq!(guest.balloon().reported_bytes(), 0);
}
