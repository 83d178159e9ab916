//! The MP table: processors and interrupts for a guest without ACPI.
//!
//! Source: Intel MultiProcessor Specification 1.4.

use crate::layout;

/// Interrupt pins of the IOAPIC.
pub const IOAPIC_PINS: u8 = 24;

const LOCAL_APIC_VERSION: u8 = 0x14;
const IOAPIC_VERSION: u8 = 0x11;
const ISA_BUS: u8 = 0;
const ENABLED: u8 = 1;
const BOOT_PROCESSOR: u8 = 2;
const INTERRUPT: u8 = 0;
const NMI: u8 = 1;
const EXTERNAL: u8 = 3;
const ALL_LOCAL_APICS: u8 = 0xff;

/// The id of the IOAPIC: the first that no processor has.
pub fn ioapic_id(vcpus: u8) -> u8 {
    vcpus
}

/// Floating pointer and configuration table, to be placed at [`layout::MP_TABLE`].
pub fn table(vcpus: u8) -> Vec<u8> {
    let mut entries = Vec::new();
    let mut count = 0u16;
    let mut add = |entry: &[u8]| {
        entries.extend_from_slice(entry);
        count += 1;
    };
    for id in 0..vcpus {
        let boot = if id == 0 { BOOT_PROCESSOR } else { 0 };
        // Signature: family 6; features: FPU, APIC. Kernels use CPUID instead.
        let mut processor = [0; 20];
        processor[..4].copy_from_slice(&[0, id, LOCAL_APIC_VERSION, ENABLED | boot]);
        processor[4..8].copy_from_slice(&0x600u32.to_le_bytes());
        processor[8..12].copy_from_slice(&0x201u32.to_le_bytes());
        add(&processor);
    }
    add(b"\x01\x00ISA   ");
    let mut ioapic = [2, ioapic_id(vcpus), IOAPIC_VERSION, ENABLED, 0, 0, 0, 0];
    ioapic[4..].copy_from_slice(&layout::IOAPIC.to_le_bytes());
    add(&ioapic);
    // Every pin is connected to the ISA interrupt of its number, with the bus's polarity and
    // trigger: active high, edge.
    for pin in 0..IOAPIC_PINS {
        add(&[3, INTERRUPT, 0, 0, ISA_BUS, pin, ioapic_id(vcpus), pin]);
    }
    add(&[4, EXTERNAL, 0, 0, ISA_BUS, 0, 0, 0]);
    add(&[4, NMI, 0, 0, ISA_BUS, 0, ALL_LOCAL_APICS, 1]);

    let mut header = Vec::with_capacity(44);
    header.extend(b"PCMP");
    header.extend((44 + entries.len() as u16).to_le_bytes());
    header.extend([4, 0]);
    header.extend(b"JIFFY   ");
    header.extend(b"microVM     ");
    header.extend([0; 6]);
    header.extend(count.to_le_bytes());
    header.extend(layout::LOCAL_APIC.to_le_bytes());
    header.extend([0; 4]);
    header[7] = checksum(&[&header, &entries]);

    let mut pointer = Vec::with_capacity(16);
    pointer.extend(b"_MP_");
    pointer.extend((layout::MP_TABLE as u32 + 16).to_le_bytes());
    pointer.extend([1, 4, 0, 0, 0, 0, 0, 0]);
    pointer[10] = checksum(&[&pointer]);

    [pointer, header, entries].concat()
}

/// The byte that makes the sum of all bytes zero.
fn checksum(parts: &[&[u8]]) -> u8 {
    parts
        .iter()
        .flat_map(|part| part.iter())
        .fold(0u8, |sum, byte| sum.wrapping_sub(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_table_fits_into_its_kib_and_sums_to_zero() {
        for vcpus in [1, 2, 32] {
            let table = table(vcpus);
            assert!(table.len() as u64 <= layout::BASE_MEMORY_END - layout::MP_TABLE);
            assert_eq!(&table[..4], b"_MP_");
            assert_eq!(checksum(&[&table[..16]]), 0);
            let length = u16::from_le_bytes([table[20], table[21]]) as usize;
            assert_eq!(table.len(), 16 + length);
            assert_eq!(checksum(&[&table[16..]]), 0);
        }
    }

    #[test]
    fn entries_are_counted_and_each_vcpu_is_listed() {
        let table = table(3);
        let count = u16::from_le_bytes([table[50], table[51]]);
        let mut at = 60;
        let mut processors = Vec::new();
        for _ in 0..count {
            if table[at] == 0 {
                processors.push((table[at + 1], table[at + 3]));
                at += 20;
            } else {
                at += 8;
            }
        }
        assert_eq!(at, table.len());
        assert_eq!(processors, [(0, 3), (1, 1), (2, 1)]);
    }
}
