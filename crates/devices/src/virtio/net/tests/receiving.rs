use super::driver::*;
use crate::virtio::net::{FRAME_MAX, header};
use crate::virtio::testing::Buffer;
use crate::write_log::WriteLog;
use vm_memory::GuestMemoryBackend as _;

#[test]
fn frames_are_received_in_order() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    for round in 0..5u8 {
        guest.offer_buffers(100, 2048);
        for number in 0..100 {
            let mut bytes = with_header(&frame(number ^ round, 60 + usize::from(number)));
            bytes[0] = 2;
            hosts[0].send(&bytes).unwrap();
            let received = guest.wait_received();
            assert_eq!(received[..10], bytes[..10]);
            assert_eq!(received[10..12], [1, 0]);
            assert_eq!(received[12..], bytes[12..]);
        }
    }
    let totals = guest.device.device.totals();
    assert_eq!((totals.received_frames, totals.received_dropped), (500, 0));
}

#[test]
fn a_large_frame_takes_as_many_buffers_as_it_needs() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    guest.offer_buffers(250, 1536);
    for (length, buffers) in [
        (1536 - 12, 1),
        (1536 - 11, 2),
        (3 * 1536 - 12, 3),
        (FRAME_MAX, FRAME_MAX.div_ceil(1536) as u16),
    ] {
        let mut bytes = with_header(&frame(0, length));
        for (place, byte) in bytes.iter_mut().enumerate().skip(26) {
            *byte = (place / 7) as u8;
        }
        hosts[0].send(&bytes).unwrap();
        let received = guest.wait_received();
        assert_eq!(received[10..12], buffers.to_le_bytes());
        assert_eq!(received[12..], bytes[12..]);
    }
}

#[test]
fn frames_wait_for_buffers() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    for number in 0..4 {
        hosts[0].send(&with_header(&frame(number, 60))).unwrap();
    }
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(guest.queues[0].used_index(), 0);
    guest.offer_buffers(4, 2048);
    for number in 0..4 {
        assert_eq!(guest.wait_received()[30], number);
    }
}

#[test]
fn a_frame_is_not_delivered_until_all_of_it_fits() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    guest.offer_buffers(2, 1536);
    let bytes = with_header(&frame(9, 30_000));
    hosts[0].send(&bytes).unwrap();
    hosts[0].send(&with_header(&frame(1, 60))).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(guest.queues[0].used_index(), 0);
    for number in 2..40 {
        guest.queues[0].add(&[Buffer::writable(RECEIVE + number * 1536, 1536)]);
    }
    guest.device.ring(0);
    assert_eq!(guest.wait_received()[12..], bytes[12..]);
    assert_eq!(guest.wait_received()[30], 1);
}

#[test]
fn a_frame_that_can_never_fit_is_dropped_and_the_next_received() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::with_queue_size(net, USUAL, 16);
    guest.offer_buffers(16, 1536);
    hosts[0].send(&with_header(&frame(9, 60_000))).unwrap();
    hosts[0].send(&with_header(&frame(1, 60))).unwrap();
    let received = guest.wait_received();
    assert_eq!((received.len(), received[30]), (72, 1));
    assert_eq!(guest.device.device.totals().received_dropped, 1);
}

#[test]
fn a_frame_needs_one_chain_without_mergeable_buffers() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, 0);
    for number in 0..8 {
        let address = RECEIVE + number * 4096;
        guest.queues[0].add(&[
            Buffer::writable(address, 12),
            Buffer::writable(address + 12, 1514),
        ]);
    }
    guest.device.ring(0);
    for (fill, length) in [(1, 1514), (2, 1515), (3, 60_000), (4, 60)] {
        hosts[0].send(&with_header(&frame(fill, length))).unwrap();
    }
    assert_eq!(guest.queues[0].wait_used().length, 12 + 1514);
    assert_eq!(guest.queues[0].wait_used().length, 12 + 60);
    assert_eq!(guest.device.device.totals().received_dropped, 2);
}

#[test]
fn too_short_frames_are_dropped() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    guest.offer_buffers(4, 2048);
    hosts[0].send(&[0; header::BYTES + 13]).unwrap();
    hosts[0].send(&[0; 3]).unwrap();
    hosts[0].send(&with_header(&frame(5, 14))).unwrap();
    assert_eq!(guest.wait_received().len(), 26);
    assert_eq!(guest.device.device.totals().received_dropped, 2);
}

#[test]
fn a_header_may_be_spread_over_buffers() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    for number in 0..40 {
        let address = RECEIVE + number * 4096;
        guest.queues[0].add(&[
            Buffer::writable(address, 11),
            Buffer::writable(address + 100, 1),
            Buffer::writable(address + 200, 2000),
        ]);
    }
    guest.device.ring(0);
    hosts[0].send(&with_header(&frame(5, 3000))).unwrap();
    assert_eq!(guest.queues[0].wait_used().length, 2012);
    let mut byte = [0; 1];
    guest.queues[0].load(RECEIVE + 10, &mut byte);
    assert_eq!(byte, [2]);
}

#[test]
fn only_written_pages_are_in_the_dirty_log() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    let memory = guest.memory.clone();
    let region = memory.iter().next().unwrap();
    WriteLog::of(region).keep();
    guest.offer_buffers(20, 4096);
    WriteLog::of(region).take();
    hosts[0].send(&with_header(&frame(1, 6000))).unwrap();
    guest.wait_received();
    let pages = WriteLog::of(region).take();
    let written = |page: u64| pages[(page / 64) as usize] & (1 << (page % 64)) != 0;
    let first = RECEIVE / 4096;
    assert!(written(first) && written(first + 1));
    assert!((2..20).all(|page| !written(first + page)));
}

#[test]
fn receive_interrupts_follow_the_drivers_settings() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    guest.queues[0].set_used_event(9);
    guest.offer_buffers(64, 2048);
    for number in 0..10 {
        hosts[0].send(&with_header(&frame(number, 60))).unwrap();
        guest.wait_received();
    }
    guest
        .device
        .interrupt
        .wait(|counts| counts.used_buffers == 1);

    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL & !EVENT_IDX);
    guest.queues[0].set_avail_flags(1);
    guest.offer_buffers(64, 2048);
    hosts[0].send(&with_header(&frame(1, 60))).unwrap();
    guest.wait_received();
    assert_eq!(guest.device.interrupt.counts().used_buffers, 0);
}
