//! Packets that no honest driver sends.

use super::super::packet::{
    Buffers, HEADER_LEN, HOST_CID, Header, MAX_PAYLOAD, Malformed, Op, TYPE_STREAM, parse,
};
use super::super::testing::{GUEST_CID, Guest, run_scenario};
use super::Host;
use crate::virtio::queue::Chain;
use crate::virtio::testing::{self, Buffer, DriverQueue};
use proptest::prelude::*;
use std::io::Read;
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress, Permissions};

/// Parses one chain as the device does.
fn parse_chain(parts: &[(&[u8], bool)], access: Permissions) -> Result<Header, Malformed> {
    let memory = testing::memory(1 << 20);
    let mut driver = DriverQueue::new(memory.clone(), 0x1000, 128);
    let mut address = 0x1_0000;
    let mut buffers = Vec::new();
    for (bytes, writable) in parts {
        memory.write_slice(bytes, GuestAddress(address)).unwrap();
        buffers.push(Buffer {
            address,
            length: bytes.len() as u32,
            writable: *writable,
        });
        address += bytes.len() as u64;
    }
    driver.add(&buffers);
    let mut queue = driver.device_queue(false);
    let chain = queue.pop_descriptor_chain(&*memory).unwrap();
    let mut buffers = Buffers::new(&memory);
    buffers.load(Chain::of(&queue, &chain), access)?;
    parse(&buffers, &[GUEST_CID])
}

fn good(len: u32) -> Header {
    Header {
        src_cid: GUEST_CID,
        dst_cid: HOST_CID,
        src_port: 1,
        dst_port: 2,
        len,
        kind: TYPE_STREAM,
        op: Op::Rw as u16,
        ..Header::default()
    }
}

#[test]
fn each_kind_of_malformed_packet_has_its_error() {
    let read = Permissions::Read;
    let bytes = good(0).to_bytes();
    assert_eq!(parse_chain(&[(&bytes, false)], read), Ok(good(0)));
    assert_eq!(
        parse_chain(&[(&bytes[..9], false), (&bytes[9..], false)], read),
        Ok(good(0))
    );

    assert_eq!(
        parse_chain(&[(&bytes, true)], read),
        Err(Malformed::Direction)
    );
    assert_eq!(
        parse_chain(&[(&bytes, false), (&[0], true)], read),
        Err(Malformed::Direction)
    );
    assert_eq!(
        parse_chain(&[(&bytes[..43], false)], read),
        Err(Malformed::TooShort(43))
    );
    assert_eq!(
        parse_chain(&[(&[], false)], read),
        Err(Malformed::TooShort(0))
    );
    let truncated = good(5).to_bytes();
    assert_eq!(
        parse_chain(&[(&truncated, false), (&[0; 4], false)], read),
        Err(Malformed::Truncated {
            promised: 5,
            held: 4
        })
    );
    for len in [MAX_PAYLOAD + 1, u32::MAX] {
        assert_eq!(
            parse_chain(&[(&good(len).to_bytes(), false)], read),
            Err(Malformed::TooLong(len))
        );
    }
    for src_cid in [0, 2, 4, GUEST_CID | 1 << 32, u64::MAX] {
        let foreign = Header { src_cid, ..good(0) };
        assert_eq!(
            parse_chain(&[(&foreign.to_bytes(), false)], read),
            Err(Malformed::ForeignSource(src_cid))
        );
    }
}

#[test]
fn a_table_of_descriptors_cannot_be_longer_than_a_queue() {
    let memory = testing::memory(1 << 20);
    let part = Buffer::readable(0x1_0000, 1);
    for (count, verdict) in [
        (100, Err(Malformed::ForeignSource(0))),
        (128, Err(Malformed::ForeignSource(0))),
        (129, Err(Malformed::TooMany(128))),
        (4000, Err(Malformed::TooMany(128))),
    ] {
        let mut driver = DriverQueue::new(memory.clone(), 0x1000, 128);
        driver.add_indirect(0x8_0000, &vec![part; count]);
        let mut queue = driver.device_queue(false);
        let chain = queue.pop_descriptor_chain(&*memory).unwrap();
        let mut buffers = Buffers::new(&memory);
        let loaded = buffers.load(Chain::of(&queue, &chain), Permissions::Read);
        assert_eq!(loaded.and_then(|()| parse(&buffers, &[GUEST_CID])), verdict);
    }
}

/// Checks that the device still accepts connections.
fn assert_alive(host: &Host, guest: &mut Guest, port: u32) {
    let mut stream = host.guest_to_host(guest, (port, 1));
    guest.push((port, 1), b"alive");
    let mut bytes = [0; 5];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"alive");
}

#[test]
fn malformed_chains_are_returned_and_ignored() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let bytes = good(0).to_bytes();
    guest.send_chain(&[&bytes], true);
    guest.send_chain(&[&bytes[..10]], false);
    guest.send_chain(&[&good(1000).to_bytes()], false);
    for (address, length) in [
        (0xffff_ffff_ffff_fff0, 100),
        (u64::MAX, 1),
        (15 << 20, u32::MAX),
        (16 << 20, 44),
        ((16 << 20) - 43, 44),
        (0, 0),
    ] {
        guest.send_buffers(&[Buffer::readable(address, length)]);
        // A valid header, and a payload that does not exist.
        guest.send_chain(&[&bytes], false);
    }
    assert_alive(&host, &mut guest, 7);
    assert!(guest.interrupt.counts().needs_reset == 0);
}

#[test]
fn descriptor_loops_and_wild_heads_are_survived() {
    let host = Host::new();
    let mut guest = host.guest().start();
    guest.send_loop();
    guest.offer_wild_head(9999);
    assert_alive(&host, &mut guest, 7);
}

#[test]
fn unusable_receive_buffers_are_returned_empty() {
    let host = Host::new();
    let guest = host.guest_without_buffers();
    let mut guest = guest.start();
    guest.restocks = false;
    guest.add_receive_buffers(&[
        Buffer::writable(0x10_0000, 43),
        Buffer::writable(0x10_0000, 44),
        Buffer::readable(0x10_0000, 4096),
        Buffer::writable(u64::MAX - 10, 4096),
    ]);
    guest.send_op((5, 5), Op::Request, 0);
    guest.until("all returned", |guest| {
        guest.receive_buffers_returned() == 4
    });
    assert!(guest.seen.is_empty());
}

#[test]
fn a_broken_ring_asks_for_a_reset_and_does_not_spin() {
    let host = Host::new();
    let mut guest = host.guest().start();
    guest.until("idle", |_| true);
    guest.break_transmit_ring();
    guest.interrupt.wait(|counts| counts.needs_reset > 0);
    guest.reset_driver();
    assert_alive(&host, &mut guest, 7);
    assert_eq!(guest.interrupt.counts().needs_reset, 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_sequence_of_events_is_survived(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let host = Host::new();
        run_scenario(host.folder.path(), &bytes);
    }

    #[test]
    fn headers_round_trip_through_bytes(bytes in any::<[u8; HEADER_LEN]>()) {
        prop_assert_eq!(Header::from_bytes(&bytes).to_bytes(), bytes);
    }

    #[test]
    fn any_bytes_in_any_split_are_parsed_or_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        cuts in prop::collection::vec(0usize..200, 0..5),
        sound in any::<bool>(),
        len in 0u32..200,
    ) {
        let mut bytes = bytes;
        if sound && bytes.len() >= HEADER_LEN {
            bytes[..HEADER_LEN].copy_from_slice(&good(len).to_bytes());
        }
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
        cuts.sort_unstable();
        let mut parts = Vec::new();
        let mut from = 0;
        for cut in cuts {
            parts.push((&bytes[from..cut], false));
            from = cut;
        }
        parts.push((&bytes[from..], false));
        match parse_chain(&parts, Permissions::Read) {
            Ok(header) => {
                prop_assert!(header.len as usize + HEADER_LEN <= bytes.len());
                prop_assert_eq!(header.src_cid, GUEST_CID);
                prop_assert_eq!(&header.to_bytes()[..], &bytes[..HEADER_LEN]);
            }
            Err(_) => prop_assert!(!sound || bytes.len() < HEADER_LEN + len as usize),
        }
    }
}
