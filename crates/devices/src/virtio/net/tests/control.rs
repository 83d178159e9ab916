use super::driver::*;
use crate::virtio::device::VirtioDevice;
use crate::virtio::net::{Net, NetState};
use crate::virtio::testing::Buffer;
use virtio_bindings::virtio_net::*;

const MQ: u64 = 1 << VIRTIO_NET_F_MQ;

#[test]
fn the_driver_sets_the_number_of_queue_pairs() {
    let (net, hosts) = on_datagrams(4);
    assert_eq!(net.queue_max_sizes().len(), 9);
    assert_ne!(net.features() & MQ, 0);
    let mut guest = Guest::start(net, USUAL | MQ);
    assert_eq!(guest.config()[8..10], [4, 0]);
    assert_eq!(guest.device.device.save().used_pairs, 1);
    assert_eq!(guest.command(&[4, 0, 4, 0]), 0);
    assert_eq!(guest.device.device.save().used_pairs, 4);
    for pairs in [0u16, 5, 0x8000, u16::MAX] {
        let [low, high] = pairs.to_le_bytes();
        assert_eq!(guest.command(&[4, 0, low, high]), 1, "{pairs}");
    }
    // Each pair has its own frames.
    for (pair, host) in hosts.iter().enumerate() {
        let bytes = with_header(&frame(pair as u8, 60));
        let (receive, send) = (2 * pair, 2 * pair + 1);
        let address = SEND + 4096 * pair as u64;
        guest.queues[send].store(address, &bytes);
        guest.queues[send].add(&[Buffer::readable(address, bytes.len() as u32)]);
        guest.device.ring(send as u16);
        assert_eq!(received_by(host), bytes);
        let address = RECEIVE + 0x20000 * pair as u64;
        guest.queues[receive].add(&[Buffer::writable(address, 4096)]);
        guest.device.ring(receive as u16);
        host.send(&bytes).unwrap();
        assert_eq!(guest.queues[receive].wait_used().length, 72);
    }
}

#[test]
fn without_multiqueue_the_control_queue_is_the_third() {
    let (net, hosts) = on_datagrams(2);
    let mut guest = Guest::start(net, USUAL);
    let control = &mut guest.queues[2];
    control.store(COMMAND, &[3, 0]);
    control.add(&[
        Buffer::readable(COMMAND, 2),
        Buffer::writable(COMMAND + 8, 1),
    ]);
    guest.device.ring(2);
    assert_eq!(guest.queues[2].wait_used().length, 1);
    let bytes = with_header(&frame(1, 60));
    guest.send(&bytes);
    assert_eq!(received_by(&hosts[0]), bytes);
    // All queues are returned.
    let (_, queues) = guest.device.stop();
    assert_eq!(queues.len(), 5);
}

#[test]
fn unknown_and_truncated_commands_fail() {
    let (net, _hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    for command in [
        &[0, 0, 1][..],
        &[1, 1, 1, 2, 3, 4, 5, 6],
        &[3, 1],
        &[4, 0, 1, 0],
        &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[3],
        &[],
    ] {
        assert_eq!(guest.command(command), 1, "{command:?}");
    }
    // A command without a buffer for its answer.
    guest.queues[2].add(&[Buffer::readable(COMMAND, 2)]);
    guest.queues[2].add(&[
        Buffer::readable(u64::MAX - 1, 2),
        Buffer::writable(COMMAND + 64, 1),
    ]);
    guest.queues[2].add(&[
        Buffer::readable(COMMAND, 2),
        Buffer::writable(MEMORY_BYTES, 1),
    ]);
    guest.device.ring(2);
    for _ in 0..3 {
        assert_eq!(guest.queues[2].wait_used().length, 0);
    }
    assert_eq!(guest.command(&[3, 0]), 0);
}

#[test]
fn an_announcement_is_requested_until_acknowledged() {
    let (net, _hosts) = on_datagrams(1);
    let state = net.save();
    let (_, restored) = again(&state);
    let mut guest = Guest::start(restored, USUAL);
    guest
        .device
        .interrupt
        .wait(|counts| counts.config_changed == 1);
    assert_eq!(guest.config()[6], 3);
    assert!(guest.device.device.save().announce);
    assert_eq!(guest.command(&[3, 0]), 0);
    assert_eq!(guest.config()[6], 1);

    // A guest with a new address is not asked, nor is one whose driver can't announce.
    let mut other = state.clone();
    other.mac.0[5] ^= 1;
    let (_, restored) = again(&other);
    assert_eq!(Guest::start(restored, USUAL).config()[6], 1);
    let (_, restored) = again(&state);
    let features = USUAL & !(1 << VIRTIO_NET_F_GUEST_ANNOUNCE);
    let mut guest = Guest::start(restored, features);
    assert_eq!(guest.config()[6], 1);
    assert_eq!(guest.command(&[3, 0]), 1);
}

fn again(state: &NetState) -> (std::os::unix::net::UnixDatagram, Net) {
    let (ours, theirs) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let backend = crate::virtio::net::Backend::Datagrams(vec![ours]);
    (theirs, Net::restore(args(backend), state).unwrap())
}
