use super::driver::*;
use crate::virtio::net::{Backend, Net};
use crate::virtio::queue::RateLimit;
use crate::virtio::testing::TIMEOUT;
use std::num::NonZeroU64;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

/// Ten frames at once, then a hundred per second.
fn frames() -> RateLimit {
    RateLimit {
        operations_per_second: NonZeroU64::new(100),
        operations_burst: NonZeroU64::new(10),
        ..RateLimit::default()
    }
}

fn limited(receive: RateLimit, send: RateLimit) -> (Guest, UnixDatagram) {
    let (ours, host) = UnixDatagram::pair().unwrap();
    host.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut args = args(Backend::Datagrams(vec![ours]));
    (args.receive_limit, args.send_limit) = (receive, send);
    (Guest::start(Net::new(args).unwrap(), USUAL), host)
}

#[test]
fn transmission_is_limited_without_loss() {
    let (mut guest, host) = limited(RateLimit::default(), frames());
    let start = Instant::now();
    for number in 0..30 {
        guest.send_in(&with_header(&frame(number, 60)), &[]);
        assert_eq!(received_by(&host)[30], number);
    }
    assert!(start.elapsed() >= Duration::from_millis(190));
}

#[test]
fn reception_is_limited_without_loss() {
    let (mut guest, host) = limited(frames(), RateLimit::default());
    guest.offer_buffers(100, 2048);
    let start = Instant::now();
    for number in 0..30 {
        host.send(&with_header(&frame(number, 60))).unwrap();
        assert_eq!(guest.wait_received()[30], number);
    }
    assert!(start.elapsed() >= Duration::from_millis(190));
}

#[test]
fn a_limited_direction_delays_neither_the_other_nor_a_stop() {
    let one = NonZeroU64::new(1);
    let slow = RateLimit {
        bytes_per_second: one,
        bytes_burst: one,
        ..RateLimit::default()
    };
    let (mut guest, host) = limited(slow, RateLimit::default());
    guest.offer_buffers(10, 2048);
    // The second frame has to wait for a minute.
    host.send(&with_header(&frame(1, 60))).unwrap();
    host.send(&with_header(&frame(2, 60))).unwrap();
    guest.wait_received();
    let start = Instant::now();
    for number in 0..100 {
        let bytes = with_header(&frame(number, 60));
        guest.send(&bytes);
        assert_eq!(received_by(&host), bytes);
    }
    let (device, _) = guest.device.stop();
    assert!(start.elapsed() < Duration::from_secs(30));
    assert_eq!(device.totals().received_frames, 1);
}

#[test]
fn new_limits_apply_to_waiting_frames() {
    let one = NonZeroU64::new(1);
    let slow = RateLimit {
        bytes_per_second: one,
        bytes_burst: one,
        ..RateLimit::default()
    };
    let (mut guest, host) = limited(slow, slow);
    guest.offer_buffers(10, 2048);
    // The second frame of each direction has to wait for a minute.
    for number in 0..2 {
        host.send(&with_header(&frame(number, 60))).unwrap();
        guest.send_in(&with_header(&frame(number, 60)), &[]);
    }
    guest.wait_received();
    received_by(&host);
    let start = Instant::now();
    let none = RateLimit::default();
    guest.device.device.set_limits(none, none);
    assert_eq!(received_by(&host)[30], 1);
    assert_eq!(guest.wait_received()[30], 1);
    assert!(start.elapsed() < Duration::from_secs(30));
}
