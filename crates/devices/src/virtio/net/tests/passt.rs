use super::driver::*;
use super::saving::restart;
use crate::virtio::device::VirtioDevice;
use crate::virtio::net::{Backend, FRAME_MAX, Net};
use crate::virtio::testing::{Buffer, TIMEOUT};
use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::time::Instant;
use virtio_bindings::virtio_net::*;
use virtio_queue::QueueT;

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
    for length in [14, 60, 1514, 30_000, 65_535] {
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

#[test]
fn a_frame_that_passt_does_not_take_is_dropped() {
    let (net, mut passt) = on_passt();
    let mut guest = Guest::start(net, PLAIN);
    guest.send(&with_header(&frame(1, 65_536)));
    assert_eq!(guest.device.device.totals().sent_dropped, 1);
    guest.send(&with_header(&frame(2, 60)));
    assert_eq!(received(&mut passt), frame(2, 60));
}

#[test]
fn the_longest_frame_is_received() {
    let (net, mut passt) = on_passt();
    let mut guest = Guest::start(net, PLAIN);
    guest.offer_buffers(200, 4096);
    passt.write_all(&framed(&frame(7, FRAME_MAX))).unwrap();
    assert_eq!(guest.wait_received()[12..], frame(7, FRAME_MAX));
}

/// What passt has not taken of a frame when the VM is paused follows when it runs again.
#[test]
fn a_frame_sent_in_part_before_a_pause_arrives_whole() {
    const FRAMES: u8 = 60;
    let (net, mut passt) = on_passt();
    let mut guest = Guest::start(net, PLAIN);
    for number in 0..FRAMES {
        let address = SEND + u64::from(number) * 0x8000;
        let bytes = with_header(&frame(number, 30_001));
        guest.queues[1].store(address, &bytes);
        guest.queues[1].add(&[Buffer::readable(address, bytes.len() as u32)]);
    }
    guest.device.ring(1);
    let start = Instant::now();
    while guest.queues[1].used_index() == 0 {
        assert!(start.elapsed() < TIMEOUT);
        std::thread::yield_now();
    }
    // The socket is full soon.
    std::thread::sleep(std::time::Duration::from_millis(30));
    let (device, queues) = guest.device.stop();
    let sent = usize::from(queues[1].next_used());
    assert!(sent > 0 && sent < usize::from(FRAMES));
    guest.device = restart(device, &guest.memory, queues);
    for number in 0..FRAMES {
        assert_eq!(received(&mut passt), frame(number, 30_001));
    }
}

/// Every offload of a TAP interface, as Linux negotiates them.
const OFFLOADS: u64 = USUAL | 1 << VIRTIO_NET_F_HOST_USO;

/// A guest that was saved on a TAP interface, on passt.
fn from_a_tap() -> (Guest, UnixStream) {
    let (ours, _host) = UnixDatagram::pair().unwrap();
    let saved = Net::new(args(Backend::Datagrams(vec![ours]))).unwrap();
    let state = saved.save();
    let (ours, passt) = UnixStream::pair().unwrap();
    passt.set_read_timeout(Some(TIMEOUT)).unwrap();
    let net = Net::restore(args(Backend::Passt(ours)), &state).unwrap();
    assert_eq!(net.features() & saved.features(), saved.features());
    (Guest::start(net, OFFLOADS), passt)
}

/// A frame of a UDP datagram of `payload` over IPv4.
fn datagram(payload: &[u8]) -> Vec<u8> {
    let mut bytes = frame(0, 14);
    let (whole, datagram) = (28 + payload.len() as u16, 8 + payload.len() as u16);
    bytes.extend([0x45, 0]);
    bytes.extend(whole.to_be_bytes());
    bytes.extend([0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 2, 192, 0, 2, 1]);
    bytes.extend([0x30, 0x39, 0, 53]);
    bytes.extend(datagram.to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(payload);
    bytes
}

/// The header of a frame with segments of `segment` bytes.
fn segmented(kind: u32, segment: u16, frame: &[u8]) -> Vec<u8> {
    let mut header = [0; 12];
    header[0] = VIRTIO_NET_HDR_F_NEEDS_CSUM as u8;
    header[1] = kind as u8;
    header[2] = 42;
    header[4..6].copy_from_slice(&segment.to_le_bytes());
    header[6] = 34;
    header[8] = 6;
    [&header[..], frame].concat()
}

#[test]
fn a_guest_from_a_tap_keeps_its_offloads_on_passt() {
    let (mut guest, mut passt) = from_a_tap();
    // One large segment of TCP stays one: passt takes it as it is.
    let mut large = frame(5, 40_000);
    large[14] = 0x45;
    guest.send(&segmented(VIRTIO_NET_HDR_GSO_TCPV4, 1448, &large));
    assert_eq!(received(&mut passt), large);
    // Datagrams keep their boundaries.
    let payload: Vec<u8> = (0..5000).map(|byte| byte as u8).collect();
    guest.send(&segmented(
        VIRTIO_NET_HDR_GSO_UDP_L4,
        1200,
        &datagram(&payload),
    ));
    for part in payload.chunks(1200) {
        assert_eq!(received(&mut passt), datagram(part));
    }
    // It sees frames without offloads.
    guest.offer_buffers(8, 2048);
    passt.write_all(&framed(&frame(3, 900))).unwrap();
    let got = guest.wait_received();
    assert_eq!((&got[..10], &got[12..]), (&[0; 10][..], &frame(3, 900)[..]));
}

#[test]
fn datagrams_that_can_not_be_split_are_dropped() {
    let (mut guest, mut passt) = from_a_tap();
    let kind = VIRTIO_NET_HDR_GSO_UDP_L4;
    // More datagrams than Linux sends.
    guest.send(&segmented(kind, 1, &datagram(&[7; 129])));
    // No datagram, a header that ends in the frame, and one that is too short.
    let whole = datagram(&[7; 500]);
    for (at, byte) in [(23, 6), (14, 0x60), (14, 0x44), (13, 0x06)] {
        let mut other = whole.clone();
        other[at] = byte;
        guest.send(&segmented(kind, 100, &other));
    }
    let mut cut = datagram(&[7; 10]);
    cut[14] = 0x4f;
    guest.send(&segmented(kind, 100, &cut));
    assert_eq!(guest.device.device.totals().sent_dropped, 6);
    guest.send(&segmented(kind, 1, &datagram(&[7; 128])));
    for _ in 0..128 {
        assert_eq!(received(&mut passt), datagram(&[7]));
    }
}

#[test]
fn a_guest_from_passt_runs_on_a_tap() {
    let (net, _passt) = on_passt();
    let state = net.save();
    let (ours, host) = UnixDatagram::pair().unwrap();
    host.set_read_timeout(Some(TIMEOUT)).unwrap();
    let net = Net::restore(args(Backend::Datagrams(vec![ours])), &state).unwrap();
    let mut guest = Guest::start(net, PLAIN);
    guest.send(&with_header(&frame(1, 60)));
    assert_eq!(received_by(&host), with_header(&frame(1, 60)));
}
