//! Addresses of a guest's physical address space.
//!
//! `docs/guest-interface.md` documents these numbers for users.

/// Smallest guest RAM, bytes.
pub const MIN_RAM: u64 = 64 << 20;
/// Largest guest RAM, bytes: what fits into 40 address bits with the hole.
pub const MAX_RAM: u64 = 1 << 39;

/// RAM below this address is mapped one to one; the rest begins at [`HIGH_RAM`].
pub const LOW_RAM_END: u64 = 0xc000_0000;
/// Where RAM continues above the hole for devices.
pub const HIGH_RAM: u64 = 0x1_0000_0000;

/// First register page of the virtio-mmio devices.
pub const MMIO_START: u64 = 0xd000_0000;
/// Bytes of each virtio-mmio device's window.
pub const MMIO_SIZE: u64 = 0x1000;

/// The IOAPIC's registers (KVM's default).
pub const IOAPIC: u32 = 0xfec0_0000;
/// The local APICs' registers.
pub const LOCAL_APIC: u32 = 0xfee0_0000;
/// Three pages that KVM needs on Intel processors for real mode.
pub const KVM_TSS: usize = 0xfffb_d000;

/// The descriptor table that the 32-bit entry points use.
pub const GDT: u64 = 0x500;
/// PVH start info, or Linux's zero page.
pub const START_INFO: u64 = 0x6000;
/// PVH memory map.
pub const MEMORY_MAP: u64 = 0x7000;
/// PVH module list.
pub const MODULE_LIST: u64 = 0x8000;
/// The command line.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Longest command line with its terminating zero: Linux's COMMAND_LINE_SIZE.
pub const COMMAND_LINE_SIZE: usize = 2048;
/// Where a kernel may note the calls of its boot.
pub const BOOT_CALLS: u64 = 0x3_0000;
/// Bytes for that.
pub const BOOT_CALLS_SIZE: u64 = 0x1_0000;
/// MP floating pointer and table: the last KiB of base memory.
pub const MP_TABLE: u64 = 0x9_fc00;
/// End of the MP table, and of base memory.
pub const BASE_MEMORY_END: u64 = 0xa_0000;
/// Lowest address at which kernels and initrds are loaded.
pub const KERNEL_START: u64 = 0x10_0000;

/// fw_cfg: selector, data and DMA registers.
pub const FW_CFG_PORT: u16 = 0x510;
/// COM1.
pub const SERIAL_PORT: u16 = 0x3f8;
/// COM1's interrupt.
pub const SERIAL_IRQ: u32 = 4;

/// Interrupts of virtio-mmio devices, in the order in which they are assigned; further devices
/// share them.
pub const VIRTIO_IRQS: [u32; 17] = [
    5, 6, 7, 9, 10, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23,
];

/// The one or two ranges of guest memory that `size` bytes of RAM have: (guest address, bytes).
pub fn ram_ranges(size: u64) -> Vec<(u64, u64)> {
    if size <= LOW_RAM_END {
        vec![(0, size)]
    } else {
        vec![(0, LOW_RAM_END), (HIGH_RAM, size - LOW_RAM_END)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_above_3_gib_goes_above_4_gib() {
        assert_eq!(ram_ranges(64 << 20), [(0, 64 << 20)]);
        assert_eq!(ram_ranges(3 << 30), [(0, 3 << 30)]);
        assert_eq!(
            ram_ranges((3 << 30) + (1 << 20)),
            [(0, 3 << 30), (4 << 30, 1 << 20)]
        );
    }
}
