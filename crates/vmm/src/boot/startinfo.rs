//! The PVH start info, version 1.
//!
//! Source: Xen's `public/arch-x86/hvm/start_info.h`.

use super::{Module, memory_map};
use crate::layout;

const MAGIC: u32 = 0x336e_c578;
const VERSION: u32 = 1;
const RAM: u32 = 1;
const RESERVED: u32 = 2;

/// Writes start info, memory map and module list for `ram_size` bytes of RAM through
/// `write(address, bytes)`; the address is guest physical.
pub fn write(ram_size: u64, module: Option<Module>, write: impl Fn(u64, &[u8])) {
    let map = memory_map(ram_size);
    let mut info = Vec::with_capacity(56);
    for word in [MAGIC, VERSION, 0, module.is_some() as u32] {
        info.extend(word.to_le_bytes());
    }
    let modules = if module.is_some() {
        layout::MODULE_LIST
    } else {
        0
    };
    // The RSDP's address is zero: there is no ACPI.
    for address in [modules, layout::COMMAND_LINE, 0, layout::MEMORY_MAP] {
        info.extend(address.to_le_bytes());
    }
    info.extend((map.len() as u32).to_le_bytes());
    info.extend(0u32.to_le_bytes());
    write(layout::START_INFO, &info);

    let mut entries = Vec::with_capacity(24 * map.len());
    for (address, size, usable) in map {
        entries.extend(address.to_le_bytes());
        entries.extend(size.to_le_bytes());
        entries.extend(if usable { RAM } else { RESERVED }.to_le_bytes());
        entries.extend(0u32.to_le_bytes());
    }
    write(layout::MEMORY_MAP, &entries);

    if let Some(module) = module {
        let mut entry = [0; 32];
        entry[..8].copy_from_slice(&module.address.to_le_bytes());
        entry[8..16].copy_from_slice(&module.size.to_le_bytes());
        write(layout::MODULE_LIST, &entry);
    }
}
