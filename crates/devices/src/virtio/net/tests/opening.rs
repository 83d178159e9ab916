use super::driver::*;
use crate::virtio::device::{ActivateError, Activation, VirtioDevice};
use crate::virtio::net::{Backend, Mac, Net, NetError};
use crate::virtio::testing::{TestInterrupt, ThreadWorkers, memory};
use std::fs::File;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use virtio_bindings::virtio_net::*;

#[test]
fn invalid_arguments_are_refused() {
    let with = |change: fn(&mut crate::virtio::net::NetArgs)| {
        let mut args = args(Backend::None);
        change(&mut args);
        Net::new(args).unwrap_err()
    };
    let error = with(|args| args.mac = Mac([1, 0, 0, 0, 0, 1]));
    assert_eq!(
        error.to_string(),
        "01:00:00:00:00:01 is not a unicast MAC address"
    );
    assert!(matches!(
        with(|args| args.mac = Mac([0; 6])),
        NetError::Mac(_)
    ));
    assert!(matches!(
        with(|args| args.mtu = Some(67)),
        NetError::Mtu(67)
    ));
    assert!(matches!(
        with(|args| args.backend = Backend::Tap(Vec::new())),
        NetError::Pairs(0)
    ));
    let null = || File::open("/dev/null").unwrap().into();
    let error = Net::new(args(Backend::Tap(vec![null()]))).unwrap_err();
    assert!(matches!(error, NetError::NotATap { number: 0, .. }));
    let nine = (0..9).map(|_| UnixDatagram::unbound().unwrap()).collect();
    let error = Net::new(args(Backend::Datagrams(nine))).unwrap_err();
    assert!(matches!(error, NetError::Pairs(9)));
}

#[test]
fn the_configuration_has_address_link_pairs_and_mtu() {
    let mut args = args(Backend::None);
    args.mtu = Some(9000);
    let net = Net::new(args).unwrap();
    assert_ne!(net.features() & (1 << VIRTIO_NET_F_MTU), 0);
    assert_eq!(net.features() & (1 << VIRTIO_NET_F_MQ), 0);
    let mut config = [0xee; 16];
    net.read_config(0, &mut config);
    assert_eq!(config[..6], MAC.0);
    // The link is down, one pair, 9000 bytes, and nothing beyond.
    assert_eq!(config[6..], [0, 0, 1, 0, 0x28, 0x23, 0, 0, 0, 0]);
    let mut byte = [7];
    net.read_config(u64::MAX, &mut byte);
    assert_eq!(byte, [0]);
}

#[test]
fn transmitted_frames_are_dropped_without_a_backend() {
    let net = Net::new(args(Backend::None)).unwrap();
    let mut guest = Guest::start(net, USUAL);
    guest.send(&with_header(&frame(1, 60)));
    assert_eq!(guest.device.device.totals().sent_dropped, 1);
}

#[test]
fn a_driver_without_the_first_queues_is_refused() {
    let (mut net, _hosts) = on_datagrams(1);
    let error = net
        .activate(Activation {
            memory: memory(4096),
            queues: vec![None, None, None],
            interrupt: TestInterrupt::new(),
            features: USUAL,
            workers: Arc::new(ThreadWorkers),
        })
        .unwrap_err();
    assert!(matches!(error, ActivateError::MissingQueue(0)));
}
