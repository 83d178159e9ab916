//! Boot protocols: reading kernel files, filling guest memory, and the first vCPU's entry point.
//!
//! A loader first makes a [`Plan`] from the file's headers, every value of
//! which may be hostile. Nothing is written before the whole plan is checked
//! against the guest's RAM.
//!
//! * [`elf`]: ELF kernels with a PVH note (Linux, NetBSD, FreeBSD).
//! * [`calls`]: calls that a kernel notes while it boots.
//! * [`bzimage`]: Linux's compressed images, by its 32-bit boot protocol.
//! * [`preloaded`]: a kernel that is in RAM before its VM is known.
//! * [`startinfo`]: the PVH start info.
//! * [`mptable`]: processors and interrupts for a guest without ACPI.
//! * [`command_line`], [`initrd`]: the kernel's command line and initrd.

pub mod bzimage;
pub mod calls;
pub mod command_line;
pub mod elf;
mod error;
pub mod initrd;
pub mod mptable;
pub mod preloaded;
pub mod source;
pub mod startinfo;

pub use error::{BootError, KernelError};
pub use source::{OpenFile, Source};

use crate::layout;
use jiffy_devices::GuestMemory;
use std::io;
use std::path::Path;
use vm_memory::{Bytes, GuestAddress};

/// Where the parts of a kernel file are loaded. Checked: segments are in low RAM above the boot
/// structures, inside the file, and do not overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// By ascending address.
    pub segments: Vec<Segment>,
    /// How the kernel is entered.
    pub protocol: Protocol,
    /// Guest physical end of the memory from its load address on that the kernel needs before it
    /// knows its memory map, exclusive.
    pub end: u64,
    /// The highest end of an initrd, guest physical, exclusive.
    pub initrd_limit: u64,
    /// Longest command line with its zero, bytes.
    pub command_line_size: usize,
}

/// A range of the kernel file and its place in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Guest physical address.
    pub address: u64,
    /// Bytes in memory; those past `file_size` are zero.
    pub memory_size: u64,
    /// Offset in the file.
    pub file_offset: u64,
    /// Bytes in the file.
    pub file_size: u64,
}

/// How a kernel is entered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Protocol {
    /// Xen's PVH: 32-bit protected mode at this address, start info in EBX.
    Pvh {
        /// Guest physical address of the entry point.
        entry: u64,
    },
    /// Linux's 32-bit boot protocol: zero page in ESI.
    Linux {
        /// Guest physical address of the entry point.
        entry: u64,
        /// The setup header: the file's bytes from offset 0x1f1 on.
        setup_header: Vec<u8>,
    },
}

/// The first vCPU's entry state: 32-bit protected mode, paging off, flat segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// EIP.
    pub rip: u64,
    /// EBX: address of PVH's start info.
    pub rbx: u64,
    /// ESI: address of Linux's zero page.
    pub rsi: u64,
}

/// Reads the headers of `source` and plans its loading into `ram_size` bytes of guest RAM.
///
/// # Errors
///
/// If `source` is empty, can't be read, or is neither an ELF file nor a bzImage, or as of
/// [`elf::plan`] and [`bzimage::plan`].
pub fn plan(source: &(impl Source + ?Sized), ram_size: u64) -> Result<Plan, KernelError> {
    let low_ram_end = ram_size.min(layout::LOW_RAM_END);
    let mut head = [0; 1024];
    let length = source.len();
    if length == 0 {
        return Err(KernelError::Empty);
    }
    let known = &mut head[..length.min(1024) as usize];
    source.read_at(0, known)?;
    if known.starts_with(b"\x7fELF") {
        elf::plan(source, low_ram_end)
    } else if known.get(0x202..0x206) == Some(b"HdrS") {
        bzimage::plan(source, known, low_ram_end)
    } else {
        Err(KernelError::foreign(known))
    }
}

/// What is booted; a view of the configuration.
#[derive(Debug, Clone, Copy)]
pub struct Images<'a> {
    /// The kernel file.
    pub kernel: &'a Path,
    /// The initrd file.
    pub initrd: Option<&'a Path>,
    /// The user's part of the command line.
    pub command_line: &'a str,
    /// Parameters that name devices, appended.
    pub device_parameters: &'a str,
    /// Processors for the MP table.
    pub vcpus: u8,
}

/// Opens a kernel file.
///
/// # Errors
///
/// If it can't be opened, or is not a regular file.
pub fn open(kernel: &Path) -> Result<OpenFile, BootError> {
    source::open(kernel).map_err(|source| BootError::Open {
        what: "kernel",
        path: kernel.into(),
        source,
    })
}

/// Loads the opened kernel, initrd and boot structures into fresh (all zero) memory; the kernel's
/// segments may be there already.
///
/// # Errors
///
/// If the kernel can't be [planned](plan) or read, if the command line is too long or contains a
/// zero byte, or if the initrd can't be opened, does not fit into the RAM or can't be read. Memory
/// may be written to in part then.
pub fn load(
    kernel: &OpenFile,
    is_preloaded: bool,
    images: &Images<'_>,
    memory: &GuestMemory,
    ram_size: u64,
) -> Result<Entry, BootError> {
    let plan = plan(kernel, ram_size).map_err(|source| BootError::Kernel {
        path: images.kernel.into(),
        source,
    })?;
    let command_line = command_line::compose(
        images.command_line,
        images.device_parameters,
        plan.command_line_size,
    )?;
    let initrd = match images.initrd {
        None => None,
        Some(path) => Some(initrd::open_and_place(
            path,
            plan.end,
            plan.initrd_limit.min(ram_size.min(layout::LOW_RAM_END)),
        )?),
    };

    if !is_preloaded {
        copy_segments(kernel, &plan, memory).map_err(|source| BootError::Read {
            what: "kernel",
            path: images.kernel.into(),
            source,
        })?;
    }
    let module = match &initrd {
        None => None,
        Some(initrd) => {
            initrd.load(memory)?;
            Some(initrd.place)
        }
    };
    let write = |address: u64, bytes: &[u8]| {
        memory
            .write_slice(bytes, GuestAddress(address))
            .expect("low memory is RAM in every guest")
    };
    write(layout::COMMAND_LINE, &command_line);
    write(layout::MP_TABLE, &mptable::table(images.vcpus));
    Ok(match plan.protocol {
        Protocol::Pvh { entry } => {
            startinfo::write(ram_size, module, write);
            Entry {
                rip: entry,
                rbx: layout::START_INFO,
                rsi: 0,
            }
        }
        Protocol::Linux {
            entry,
            setup_header,
        } => {
            let page = bzimage::zero_page(&setup_header, ram_size, module);
            write(layout::START_INFO, &page);
            write(layout::GDT, &bzimage::gdt());
            Entry {
                rip: entry,
                rbx: 0,
                rsi: layout::START_INFO,
            }
        }
    })
}

fn copy_segments(kernel: &OpenFile, plan: &Plan, memory: &GuestMemory) -> io::Result<()> {
    for segment in &plan.segments {
        let (offset, size) = (segment.file_offset, segment.file_size);
        source::copy(kernel, offset, size, memory, segment.address)?;
    }
    Ok(())
}

/// A file placed in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Module {
    /// Guest physical address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
}

/// The memory map for the guest: (address, bytes, usable). Base memory ends where the MP table
/// begins.
pub fn memory_map(ram_size: u64) -> Vec<(u64, u64, bool)> {
    let mut map = vec![
        (0, layout::MP_TABLE, true),
        (
            layout::MP_TABLE,
            layout::BASE_MEMORY_END - layout::MP_TABLE,
            false,
        ),
    ];
    for (start, size) in layout::ram_ranges(ram_size) {
        let from = start.max(layout::KERNEL_START);
        map.push((from, start + size - from, true));
    }
    map
}

#[cfg(test)]
pub(crate) mod tests;
