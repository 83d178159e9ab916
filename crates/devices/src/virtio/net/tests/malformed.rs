use super::driver::*;
use crate::virtio::testing::{Buffer, INDIRECT, NEXT};

/// A valid frame still arrives.
fn still_works(guest: &mut Guest, host: &std::os::unix::net::UnixDatagram) {
    let bytes = with_header(&frame(0x55, 99));
    guest.queues[1].store(SEND, &bytes);
    guest.queues[1].add(&[Buffer::readable(SEND, bytes.len() as u32)]);
    guest.device.ring(1);
    assert_eq!(received_by(host), bytes);
    assert_eq!(guest.device.interrupt.counts().needs_reset, 0);
}

#[test]
fn bad_chains_are_dropped_and_returned() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    let bytes = with_header(&frame(1, 200));
    guest.queues[1].store(SEND, &bytes);
    let length = bytes.len() as u32;
    // A buffer that the device would write; one outside memory; one at its end; one of no bytes.
    for buffers in [
        &[Buffer::writable(SEND, length)][..],
        &[Buffer::readable(SEND, length), Buffer::writable(SEND, 1)],
        &[Buffer::readable(MEMORY_BYTES, length)],
        &[Buffer::readable(MEMORY_BYTES - 10, length)],
        &[Buffer::readable(u64::MAX - 10, length)],
        &[Buffer::readable(SEND, u32::MAX)],
        &[Buffer::readable(SEND, 0)],
    ] {
        guest.queues[1].add(buffers);
        guest.device.ring(1);
        assert_eq!(guest.queues[1].wait_used().length, 0);
    }
    assert_eq!(guest.device.device.totals().sent_dropped, 7);
    still_works(&mut guest, &hosts[0]);
}

#[test]
fn a_descriptor_loop_ends() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    let queue = &guest.queues[1];
    let (table, one) = (queue.descriptors(), Buffer::readable(SEND, 1));
    queue.write_descriptor(table, 7, one, NEXT, 8);
    queue.write_descriptor(table, 8, one, NEXT, 7);
    guest.queues[1].offer(7);
    guest.device.ring(1);
    assert_eq!(guest.queues[1].wait_used().head, 7);
    let queue = &guest.queues[0];
    let (table, one) = (queue.descriptors(), Buffer::writable(RECEIVE, 1));
    queue.write_descriptor(table, 7, one, NEXT, 7);
    guest.queues[0].offer(7);
    guest.device.ring(0);
    assert_eq!(guest.queues[0].wait_used().head, 7);
    still_works(&mut guest, &hosts[0]);
}

#[test]
fn a_chain_that_leaves_its_descriptor_table_is_dropped() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    let queue = &guest.queues[1];
    let table = queue.descriptors();
    queue.store(SEND, &with_header(&frame(1, 100)));
    queue.write_descriptor(table, 7, Buffer::readable(SEND, 112), NEXT, 9999);
    guest.queues[1].offer(7);
    guest.device.ring(1);
    assert_eq!(guest.queues[1].wait_used().head, 7);
    assert_eq!(guest.device.device.totals().sent_dropped, 1);
    still_works(&mut guest, &hosts[0]);
}

#[test]
fn huge_indirect_tables_are_bounded() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    let many: Vec<Buffer> = (0..5000)
        .map(|number| Buffer::readable(SEND + number, 1))
        .collect();
    guest.queues[1].add_indirect(0x40_0000, &many);
    guest.device.ring(1);
    assert_eq!(guest.queues[1].wait_used().length, 0);
    let many: Vec<Buffer> = (0..5000)
        .map(|number| Buffer::writable(RECEIVE + number, 1))
        .collect();
    guest.queues[0].add_indirect(0x50_0000, &many);
    let inner = Buffer::readable(0x40_0000, 160);
    let table = guest.queues[0].descriptors();
    guest.queues[0].write_descriptor(table, 9, inner, INDIRECT, 0);
    guest.queues[0].offer(9);
    guest.device.ring(0);
    assert_eq!(guest.queues[0].wait_used().length, 0);
    still_works(&mut guest, &hosts[0]);
}

#[test]
fn bad_receive_buffers_are_returned_and_the_next_is_used() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    for buffers in [
        &[Buffer::readable(RECEIVE, 2048)][..],
        &[
            Buffer::writable(RECEIVE, 20),
            Buffer::readable(RECEIVE, 2000),
        ],
        &[Buffer::writable(MEMORY_BYTES, 2048)],
        &[Buffer::writable(RECEIVE, 11)],
        &[Buffer::writable(RECEIVE, 0)],
    ] {
        guest.queues[0].add(buffers);
        guest.device.ring(0);
        assert_eq!(guest.queues[0].wait_used().length, 0);
    }
    guest.offer_buffers(1, 2048);
    hosts[0].send(&with_header(&frame(3, 60))).unwrap();
    assert_eq!(guest.wait_received()[30], 3);
}

#[test]
fn an_available_index_out_of_range_needs_a_reset() {
    for queue in [0, 1, 2] {
        let (net, _hosts) = on_datagrams(1);
        let mut guest = Guest::start(net, USUAL);
        guest.queues[queue].set_avail_index(5000);
        guest.device.ring(queue as u16);
        guest.device.interrupt.wait(|counts| counts.needs_reset > 0);
        let (_, queues) = guest.device.stop();
        assert_eq!(queues.len(), 3);
    }
}
