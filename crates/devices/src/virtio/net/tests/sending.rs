use super::driver::*;
use crate::virtio::net::{ETHERNET, FRAME_MAX, header};
use crate::virtio::testing::{Buffer, TIMEOUT};
use std::time::Instant;

#[test]
fn frames_arrive_as_they_are_sent_and_in_order() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    for number in 0..600u32 {
        let bytes = with_header(&frame(number as u8, 60 + number as usize));
        guest.send(&bytes);
        assert_eq!(received_by(&hosts[0]), bytes);
    }
    let totals = guest.device.device.totals();
    assert_eq!(totals.sent_frames, 600);
    assert_eq!(totals.sent_bytes, (0..600).map(|n| 60 + n).sum::<u64>());
    assert_eq!((totals.sent_dropped, totals.sent_spoofed), (0, 0));
}

#[test]
fn a_transmitted_frame_may_be_split_anywhere() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    let mut bytes = with_header(&frame(7, 400));
    for (place, byte) in bytes.iter_mut().skip(26).enumerate() {
        *byte = place as u8;
    }
    for cut in [
        &[12][..],
        &[1, 1, 1, 0, 5],
        &[10, 4],
        &[12, 14],
        &[25, 1, 1],
        &[0, 0, 26],
        &[100, 100, 100, 112],
    ] {
        guest.send_in(&bytes, cut);
        assert_eq!(received_by(&hosts[0]), bytes, "{cut:?}");
        guest.queues[1].wait_used();
    }
}

#[test]
fn the_shortest_and_the_longest_frame_pass() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    for length in [ETHERNET, ETHERNET + 1, 1514, FRAME_MAX] {
        let bytes = with_header(&frame(1, length));
        guest.send(&bytes);
        assert_eq!(received_by(&hosts[0]).len(), header::BYTES + length);
    }
    for length in [0, 1, ETHERNET - 1, FRAME_MAX + 1, 2 * FRAME_MAX] {
        let mut bytes = with_header(&frame(1, length.max(ETHERNET)));
        bytes.truncate(header::BYTES + length);
        guest.send(&bytes);
    }
    assert_eq!(guest.device.device.totals().sent_dropped, 5);
}

#[test]
fn spoofed_frames_are_dropped_and_counted() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    for place in 6..12 {
        let mut spoofed = frame(1, 100);
        spoofed[place] ^= 0x10;
        guest.send(&with_header(&spoofed));
    }
    let honest = with_header(&frame(2, 100));
    guest.send(&honest);
    assert_eq!(received_by(&hosts[0]), honest);
    let totals = guest.device.device.totals();
    assert_eq!((totals.sent_spoofed, totals.sent_frames), (6, 1));
}

#[test]
fn segmentation_fields_reach_the_host_and_unused_ones_are_cleared() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    let mut bytes = with_header(&frame(1, 4000));
    // NEEDS_CSUM, TCPv4; 54 bytes of headers, segments of 1460, checksum at 34 + 16.
    bytes[..10].copy_from_slice(&[1, 1, 54, 0, 0xb4, 5, 34, 0, 16, 0]);
    guest.send(&bytes);
    assert_eq!(received_by(&hosts[0]), bytes);
    // DATA_VALID and unknown flags; lengths without a type; num_buffers.
    let mut odd = with_header(&frame(1, 4000));
    odd[..12].copy_from_slice(&[0xfe, 0, 54, 0, 0xb4, 5, 34, 0, 16, 0, 9, 9]);
    guest.send(&odd);
    assert_eq!(received_by(&hosts[0])[..12], [0; 12]);
}

#[test]
fn a_slow_host_gets_each_frame_once() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    const FRAMES: usize = 200;
    for number in 0..FRAMES {
        let address = SEND + number as u64 * 0x4000;
        let bytes = with_header(&frame(number as u8, 9000));
        guest.queues[1].store(address, &bytes);
        guest.queues[1].add(&[Buffer::readable(address, bytes.len() as u32)]);
    }
    guest.device.ring(1);
    // The socket is full long before that.
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(usize::from(guest.queues[1].used_index()) < FRAMES);
    for number in 0..FRAMES {
        assert_eq!(received_by(&hosts[0])[30], number as u8);
    }
    let start = Instant::now();
    while usize::from(guest.queues[1].used_index()) < FRAMES {
        assert!(start.elapsed() < TIMEOUT);
        std::thread::yield_now();
    }
    assert_eq!(guest.device.device.totals().sent_frames, FRAMES as u64);
}

#[test]
fn transmit_interrupts_follow_the_drivers_settings() {
    let (net, _hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    // An interrupt is wanted after the third frame.
    guest.queues[1].set_used_event(2);
    for _ in 0..2 {
        guest.send(&with_header(&frame(1, 60)));
    }
    guest.send(&with_header(&frame(1, 60)));
    guest
        .device
        .interrupt
        .wait(|counts| counts.used_buffers == 1);
    for _ in 0..20 {
        guest.send(&with_header(&frame(1, 60)));
    }
    let interrupt = guest.device.interrupt.clone();
    let (_, _) = guest.device.stop();
    assert_eq!(interrupt.counts().used_buffers, 1);
}

#[test]
fn an_interrupt_that_is_held_comes_when_nothing_else_does() {
    let (net, _hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    for number in 0..3 {
        guest.queues[1].set_used_event(number);
        guest.send(&with_header(&frame(1, 60)));
        guest
            .device
            .interrupt
            .wait(|counts| counts.used_buffers == u64::from(number) + 1);
    }
}

#[test]
fn an_interrupt_that_is_held_comes_before_the_device_stops() {
    for _ in 0..20 {
        let (net, _hosts) = on_datagrams(1);
        let mut guest = Guest::start(net, USUAL);
        guest.queues[1].set_used_event(0);
        guest.send(&with_header(&frame(1, 60)));
        let interrupt = guest.device.interrupt.clone();
        let (_, _) = guest.device.stop();
        assert_eq!(interrupt.counts().used_buffers, 1);
    }
}
