use crate::virtio::net::header::{BYTES, Refused, check};
use proptest::prelude::*;
use virtio_bindings::virtio_net::*;

const ALL: u64 = u64::MAX;

/// A header that asks for segments of TCP over IPv4.
const SEGMENTS: [u8; BYTES] = [1, 1, 54, 0, 0xb4, 5, 34, 0, 16, 0, 0, 0];

#[test]
fn negotiated_offloads_pass() {
    for kind in [0, 1, 3, 4, 5, 0x81, 0x84] {
        let mut header = SEGMENTS;
        header[1] = kind;
        let mut expected = header;
        if kind == 0 {
            expected[2..6].fill(0);
        }
        assert_eq!(check(&header, 4000, ALL), Ok(expected), "{kind:#x}");
    }
}

#[test]
fn each_offload_needs_its_feature() {
    for (kind, feature) in [
        (1, VIRTIO_NET_F_HOST_TSO4),
        (3, VIRTIO_NET_F_HOST_UFO),
        (4, VIRTIO_NET_F_HOST_TSO6),
        (5, VIRTIO_NET_F_HOST_USO),
        (0x81, VIRTIO_NET_F_HOST_ECN),
        (1, VIRTIO_NET_F_CSUM),
    ] {
        let mut header = SEGMENTS;
        header[1] = kind;
        let refused = Err(Refused::NotAgreed {
            flags: 1,
            gso_type: kind,
        });
        assert_eq!(check(&header, 4000, ALL & !(1 << feature)), refused);
    }
    for kind in [2, 6, 7, 0x80, 0x83, 0x85, 0xff] {
        let mut header = SEGMENTS;
        header[1] = kind;
        assert!(check(&header, 4000, ALL).is_err(), "{kind:#x}");
    }
}

#[test]
fn header_fields_outside_the_frame_are_refused() {
    let mut header = SEGMENTS;
    assert!(check(&header, 54, ALL).is_ok());
    assert_eq!(check(&header, 53, ALL), Err(Refused::Beyond { frame: 53 }));
    header[6..10].copy_from_slice(&[0xff; 4]);
    assert!(check(&header, 65_553, ALL).is_err());
    let mut header = SEGMENTS;
    header[2..4].copy_from_slice(&[0xff; 2]);
    assert!(check(&header, 4000, ALL).is_err());
}

#[test]
fn segments_have_a_size_and_a_checksum() {
    let mut header = SEGMENTS;
    header[4..6].fill(0);
    assert_eq!(check(&header, 4000, ALL), Err(Refused::Segments));
    let mut header = SEGMENTS;
    header[0] = 0;
    assert_eq!(check(&header, 4000, ALL), Err(Refused::Segments));
}

proptest! {
    #[test]
    fn checked_headers_are_consistent(
        header in any::<[u8; BYTES]>(),
        frame in 14u32..66_000,
        features in any::<u64>(),
    ) {
        if let Ok(checked) = check(&header, frame, features) {
            let word = |at: usize| u32::from(u16::from_le_bytes([checked[at], checked[at + 1]]));
            prop_assert!(checked[0] <= 1 && word(10) == 0);
            prop_assert!(word(6) + word(8) + 2 <= frame || checked[0] == 0);
            prop_assert!(checked[1] == 0 || (checked[0] == 1 && word(4) > 0));
            prop_assert!(word(2) <= frame);
            prop_assert_eq!(check(&checked, frame, features), Ok(checked));
        }
    }
}
