use super::driver::*;
use crate::virtio::device::VirtioDevice;
use crate::virtio::net::{Backend, FRAME_MAX, Net};
use crate::virtio::testing::{Buffer, TIMEOUT};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

fn on_passt() -> (Net, UnixStream) {
    let (ours, passt) = UnixStream::pair().unwrap();
    passt.set_read_timeout(Some(TIMEOUT)).unwrap();
    (Net::new(args(Backend::Passt(ours))).unwrap(), passt)
}

fn framed(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes()[..], frame].concat()
}

fn received(passt: &mut UnixStream) -> Vec<u8> {
    let mut length = [0; 4];
    passt.read_exact(&mut length).unwrap();
    let mut frame = vec![0; u32::from_be_bytes(length) as usize];
    passt.read_exact(&mut frame).unwrap();
    frame
}

/// The features that Linux negotiates with a device without offloads.
const PLAIN: u64 = MERGEABLE | CONTROL | EVENT_IDX;

#[test]
fn passt_offers_no_offloads() {
    let (net, _passt) = on_passt();
    assert_eq!(net.features() & SEGMENTS, 0);
    assert_ne!(net.features() & MERGEABLE, 0);
}

#[test]
fn frames_are_prefixed_with_their_length_both_ways() {
    let (net, mut passt) = on_passt();
    let mut guest = Guest::start(net, PLAIN);
    guest.offer_buffers(200, 4096);
    for length in [14, 60, 1514, 30_000, FRAME_MAX] {
        let bytes = frame(length as u8, length);
        guest.send_in(&with_header(&bytes), &[]);
        assert_eq!(received(&mut passt), bytes);
        guest.queues[1].wait_used();
        passt.write_all(&framed(&bytes)).unwrap();
        let got = guest.wait_received();
        assert_eq!(got[..10], [0; 10]);
        assert_eq!(got[12..], bytes);
    }
}

#[test]
fn frames_may_arrive_in_any_pieces() {
    let (net, mut passt) = on_passt();
    let mut guest = Guest::start(net, PLAIN);
    guest.offer_buffers(200, 4096);
    let frames: Vec<_> = (0..20u8)
        .map(|n| frame(n, 60 + 50 * usize::from(n)))
        .collect();
    let stream: Vec<u8> = frames.iter().flat_map(|frame| framed(frame)).collect();
    for piece in stream.chunks(333) {
        passt.write_all(piece).unwrap();
        std::thread::sleep(std::time::Duration::from_micros(300));
    }
    for frame in frames {
        assert_eq!(guest.wait_received()[12..], frame);
    }
}

#[test]
fn a_slow_passt_gets_each_frame_once_and_whole() {
    const FRAMES: usize = 150;
    let (net, mut passt) = on_passt();
    let mut guest = Guest::start(net, PLAIN);
    for number in 0..FRAMES {
        let address = SEND + number as u64 * 0x8000;
        let bytes = with_header(&frame(number as u8, 20_001));
        guest.queues[1].store(address, &bytes);
        guest.queues[1].add(&[Buffer::readable(address, bytes.len() as u32)]);
    }
    guest.device.ring(1);
    std::thread::sleep(std::time::Duration::from_millis(30));
    assert!(usize::from(guest.queues[1].used_index()) < FRAMES);
    for number in 0..FRAMES {
        assert_eq!(received(&mut passt), frame(number as u8, 20_001));
    }
}

#[test]
fn the_link_goes_down_with_passt() {
    let (net, passt) = on_passt();
    let mut guest = Guest::start(net, PLAIN);
    guest.offer_buffers(8, 2048);
    assert_eq!(guest.config()[6], 1);
    drop(passt);
    guest
        .device
        .interrupt
        .wait(|counts| counts.config_changed == 1);
    assert_eq!(guest.config()[6], 0);
    guest.send(&with_header(&frame(1, 60)));
    assert_eq!(guest.device.device.totals().sent_dropped, 1);
}

#[test]
fn an_invalid_frame_length_ends_the_connection() {
    let (net, mut passt) = on_passt();
    let mut guest = Guest::start(net, PLAIN);
    guest.offer_buffers(8, 2048);
    passt
        .write_all(&(FRAME_MAX as u32 + 1).to_be_bytes())
        .unwrap();
    guest
        .device
        .interrupt
        .wait(|counts| counts.config_changed == 1);
    let start = Instant::now();
    while passt.read(&mut [0; 8]).map_or(true, |count| count > 0) {
        assert!(start.elapsed() < TIMEOUT);
    }
}
