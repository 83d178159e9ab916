//! Memory type range registers as a PC's firmware sets them: RAM is write-back, the video window
//! and the hole below 4 GiB are uncached, ROM is write-protected.
//!
//! If they are disabled, Linux assumes a broken machine and disables PAT, too. Source: Intel SDM
//! volume 3, 13.11; the values are SeaBIOS's.

use crate::layout;
use kvm_bindings::kvm_msr_entry;

/// IA32_MTRR_PHYSBASE0; base and mask registers alternate.
pub const PHYSICAL: u32 = 0x200;
/// Registers of KVM's eight pairs of base and mask.
pub const PHYSICAL_COUNT: u32 = 16;
/// IA32_MTRR_FIX64K_00000.
pub const FIXED_64K: u32 = 0x250;
/// IA32_MTRR_FIX16K_80000, followed by that of A0000.
pub const FIXED_16K: u32 = 0x258;
/// IA32_MTRR_FIX4K_C0000, followed by seven more up to 1 MiB.
pub const FIXED_4K: u32 = 0x268;
/// IA32_MTRR_DEF_TYPE.
pub const DEFAULT_TYPE: u32 = 0x2ff;

const UNCACHED: u64 = 0;
const WRITE_PROTECTED: u64 = 5;
const WRITE_BACK: u64 = 6;
const FIXED_ENABLED: u64 = 1 << 10;
const ENABLED: u64 = 1 << 11;
const MASK_VALID: u64 = 1 << 11;

/// The registers of a vCPU that is to boot; `address_bits` is the width of the guest's physical
/// addresses. The register that enables the others comes last.
pub fn at_boot(address_bits: u32) -> impl Iterator<Item = kvm_msr_entry> {
    let hole = layout::HIGH_RAM - layout::LOW_RAM_END;
    let mask = (1_u64 << address_bits.clamp(36, 52)) - hole;
    let all = [
        (FIXED_64K, in_all_fields(WRITE_BACK)),
        (FIXED_16K, in_all_fields(WRITE_BACK)),
        (FIXED_16K + 1, in_all_fields(UNCACHED)),
    ]
    .into_iter()
    .chain((FIXED_4K..FIXED_4K + 8).map(|index| (index, in_all_fields(WRITE_PROTECTED))))
    .chain([
        (PHYSICAL, layout::LOW_RAM_END | UNCACHED),
        (PHYSICAL + 1, mask | MASK_VALID),
        (DEFAULT_TYPE, ENABLED | FIXED_ENABLED | WRITE_BACK),
    ]);
    all.map(|(index, data)| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    })
}

/// The same memory type in all eight fields of a fixed register.
fn in_all_fields(kind: u64) -> u64 {
    kind * 0x0101_0101_0101_0101
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_is_write_back_and_the_hole_is_uncacheable() {
        let all: Vec<(u32, u64)> = at_boot(40).map(|msr| (msr.index, msr.data)).collect();
        let of = |wanted: u32| all.iter().find(|(index, _)| *index == wanted).unwrap().1;
        assert_eq!(all.len(), 14);
        assert_eq!(*all.last().unwrap(), (DEFAULT_TYPE, 0xc06));
        assert_eq!(of(FIXED_64K), 0x0606_0606_0606_0606);
        assert_eq!(of(0x259), 0, "the video window");
        assert_eq!(of(0x26f), 0x0505_0505_0505_0505);
        let (base, mask) = (of(0x200) & !0xfff, of(0x201) & !0xfff);
        let uncached = |address: u64| address & mask == base & mask;
        assert!(uncached(layout::MMIO_START) && uncached(layout::HIGH_RAM - 1));
        assert!(uncached(layout::IOAPIC.into()) && uncached(layout::LOW_RAM_END));
        for ram in [0, layout::LOW_RAM_END - 1, layout::HIGH_RAM, (1 << 40) - 1] {
            assert!(!uncached(ram), "{ram:#x}");
        }
        assert_eq!(
            of(0x201) >> 40,
            0,
            "no bits beyond the guest's address width"
        );
    }
}
