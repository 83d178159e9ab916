//! Linux's compressed images, entered by the 32-bit boot protocol.
//!
//! Source: Linux `Documentation/arch/x86/boot.rst` and `zero-page.rst`.

use super::{KernelError, Module, Plan, Protocol, Segment, Source, elf::within, memory_map};
use crate::layout;

const SETUP_HEADER: usize = 0x1f1;
/// Protocol 2.10 (Linux 2.6.31) introduced `init_size`: how much memory the kernel needs.
const OLDEST_PROTOCOL: u16 = 0x020a;
const LOADED_HIGH: u8 = 1;
const SECTOR: u64 = 512;
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// Plans a bzImage whose first KiB is `head`. `low_ram_end` is the guest physical end of the RAM
/// below the hole.
///
/// # Errors
///
/// If its boot protocol is older than 2.10 or it has to be loaded below 1 MiB, if the file is cut
/// short or its header damaged, or if it does not fit below `low_ram_end`.
pub fn plan(
    source: &(impl Source + ?Sized),
    head: &[u8],
    low_ram_end: u64,
) -> Result<Plan, KernelError> {
    within(source, "the setup header", 0, 0x268)?;
    let u32_at =
        |offset: usize| u32::from_le_bytes(head[offset..offset + 4].try_into().expect("4 bytes"));
    let version = u16::from_le_bytes([head[0x206], head[0x207]]);
    if version < OLDEST_PROTOCOL {
        return Err(KernelError::OldBzImage(format!(
            "uses boot protocol {}.{:02}; 2.10 (Linux 2.6.31) or newer is needed",
            version >> 8,
            version & 0xff
        )));
    }
    if head[0x211] & LOADED_HIGH == 0 {
        return Err(KernelError::OldBzImage("must be loaded below 1 MiB".into()));
    }
    let setup_sectors = match head[0x1f1] {
        0 => 4,
        sectors => u64::from(sectors),
    };
    let payload = (setup_sectors + 1) * SECTOR;
    within(source, "the setup code", 0, payload)?;
    let file_size = source.len() - payload;
    if file_size == 0 {
        return Err(KernelError::CutShort {
            what: "the compressed kernel".into(),
            end: payload + u64::from(u32_at(0x1f4)) * 16,
            length: source.len(),
        });
    }
    // The protected-mode code's size is given in units of 16 bytes, rounded up;
    // signed kernels have more after it.
    let announced = u64::from(u32_at(0x1f4)) * 16;
    if announced > file_size.next_multiple_of(16) {
        return Err(KernelError::CutShort {
            what: "the compressed kernel".into(),
            end: payload + announced,
            length: source.len(),
        });
    }
    let address = layout::KERNEL_START;
    let preferred = u64::from_le_bytes(head[0x258..0x260].try_into().expect("8 bytes"));
    let end = preferred
        .max(address)
        .saturating_add(u32_at(0x260).into())
        .max(address.saturating_add(file_size));
    if end > low_ram_end {
        return Err(KernelError::OutsideRam {
            end,
            ram_end: low_ram_end,
        });
    }
    let header_end = 0x202 + usize::from(head[0x201]);
    let setup_header = head
        .get(SETUP_HEADER..header_end.min(0x290))
        .ok_or_else(|| KernelError::Damaged(format!("a setup header up to {header_end:#x}")))?;
    Ok(Plan {
        segments: vec![Segment {
            address,
            memory_size: file_size,
            file_offset: payload,
            file_size,
        }],
        protocol: Protocol::Linux {
            entry: address,
            setup_header: setup_header.to_vec(),
        },
        end,
        initrd_limit: u64::from(u32_at(0x22c)) + 1,
        command_line_size: layout::COMMAND_LINE_SIZE.min(u32_at(0x238) as usize + 1),
    })
}

/// Linux's `boot_params` (one page) for `ram_size` bytes of RAM.
pub fn zero_page(setup_header: &[u8], ram_size: u64, initrd: Option<Module>) -> Vec<u8> {
    let mut page = vec![0; 4096];
    page[SETUP_HEADER..SETUP_HEADER + setup_header.len()].copy_from_slice(setup_header);
    let mut put = |offset: usize, bytes: &[u8]| {
        page[offset..offset + bytes.len()].copy_from_slice(bytes);
    };
    // The type of boot loaders without a number of their own.
    put(0x210, &[0xff]);
    put(0x228, &(layout::COMMAND_LINE as u32).to_le_bytes());
    if let Some(initrd) = initrd {
        put(0x218, &(initrd.address as u32).to_le_bytes());
        put(0x21c, &(initrd.size as u32).to_le_bytes());
    }
    let map = memory_map(ram_size);
    put(0x1e8, &[map.len() as u8]);
    for (number, (address, size, usable)) in map.into_iter().enumerate() {
        let at = 0x2d0 + number * 20;
        let kind = if usable { E820_RAM } else { E820_RESERVED };
        put(at, &address.to_le_bytes());
        put(at + 8, &size.to_le_bytes());
        put(at + 16, &kind.to_le_bytes());
    }
    page
}

/// Descriptors 0x10 (code) and 0x18 (data), flat, as the protocol requires.
pub fn gdt() -> Vec<u8> {
    [0u64, 0, 0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff]
        .iter()
        .flat_map(|entry| entry.to_le_bytes())
        .collect()
}
