use super::driver::*;
use crate::virtio::block::SECTOR;
use crate::virtio::testing::{Buffer, INDIRECT, NEXT};
use proptest::prelude::*;

const SECTORS: u64 = 64;

/// Buffers of random lengths, some of them small.
fn pieces(total: u32) -> impl Strategy<Value = Vec<u32>> {
    proptest::collection::vec(0..=total, 0..8).prop_map(move |mut cuts| {
        cuts.extend([0, total]);
        cuts.sort_unstable();
        cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()
    })
}

fn buffers(start: u64, pieces: &[u32], writable: bool) -> Vec<Buffer> {
    let mut address = start;
    pieces
        .iter()
        .map(|length| {
            let buffer = Buffer {
                address,
                length: *length,
                writable,
            };
            address += u64::from(*length);
            buffer
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Reads and writes behave as on an array of bytes, however they are split.
    #[test]
    fn the_disk_is_an_array_of_sectors(
        operations in proptest::collection::vec(
            (any::<bool>(), 0..SECTORS + 2, 0u32..5, any::<u8>(), pieces(4 * 512), pieces(16)), 1..20),
    ) {
        let disk = Fixture::new(SECTORS);
        let mut model = disk.bytes(0, (SECTORS * SECTOR) as usize);
        let mut guest = Guest::start(&disk.options());
        for (is_write, sector, count, value, cuts, header_cuts) in operations {
            let bytes = count * 512;
            let mut data = buffers(DATA, &cuts, !is_write);
            // Shortens the pieces to the wanted length.
            let mut left = bytes;
            for buffer in &mut data {
                buffer.length = buffer.length.min(left);
                left -= buffer.length;
            }
            let bytes = bytes - left;
            prop_assume!(bytes % 512 == 0);
            let kind = if is_write { OUT } else { IN };
            guest.write_header(kind, sector);
            guest.driver.store(DATA, &vec![value; 4 * 512]);
            let mut chain = buffers(HEADER, &header_cuts, false);
            chain.extend(data);
            chain.push(Buffer::writable(STATUS, 1));
            guest.send(&chain);
            let start = (sector * SECTOR) as usize;
            let Some(expected) = model.get_mut(start..start + bytes as usize) else {
                prop_assert_eq!(guest.status(), IO_ERROR);
                continue;
            };
            prop_assert_eq!(guest.status(), OK);
            if is_write {
                expected.fill(value);
            } else {
                prop_assert_eq!(guest.load(DATA, bytes as usize), expected.to_vec());
            }
        }
        prop_assert_eq!(disk.bytes(0, model.len()), model);
    }

    /// With any descriptors, each request is returned once, or the queue is reported as broken.
    #[test]
    fn any_descriptors_are_survived(
        table in proptest::collection::vec(
            (prop_oneof![Just(HEADER), Just(STATUS), Just(DATA), DATA..MEMORY_BYTES, any::<u64>()],
             prop_oneof![Just(1u32), Just(16), Just(512), 0u32..5000, any::<u32>()],
             any::<bool>(),
             prop_oneof![Just(0), Just(NEXT), Just(INDIRECT), 0u16..16],
             0u16..70), 64),
        kind in prop_oneof![Just(IN), Just(OUT), Just(DISCARD), Just(WRITE_ZEROES), 0u32..32],
        sector in prop_oneof![0..SECTORS, any::<u64>()],
        heads in proptest::collection::vec(0u16..66, 1..20),
    ) {
        let disk = Fixture::new(SECTORS);
        let mut guest = Guest::start(&disk.options());
        guest.write_header(kind, sector);
        let base = guest.driver.descriptors();
        for (index, (address, length, writable, flags, next)) in (0u16..).zip(table) {
            let buffer = Buffer { address, length, writable };
            guest.driver.write_descriptor(base, index, buffer, flags, next);
        }
        for head in &heads {
            guest.driver.offer(*head);
        }
        guest.device.ring(0);
        if heads.iter().any(|head| *head >= 64) {
            guest.device.interrupt.wait(|counts| counts.needs_reset == 1);
        } else {
            for head in &heads {
                prop_assert_eq!(guest.driver.wait_used().head, u32::from(*head));
            }
        }
        let (_, queues) = guest.device.stop();
        prop_assert_eq!(queues.len(), 1);
        prop_assert_eq!(std::fs::metadata(&disk.path).unwrap().len(), SECTORS * SECTOR);
    }
}
