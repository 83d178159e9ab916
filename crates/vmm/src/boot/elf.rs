//! ELF kernels with a PVH note.
//!
//! Sources: the ELF-64 object file format; Xen's `public/elfnote.h` and
//! `docs/misc/pvh`: the note `Xen`, type 18 (XEN_ELFNOTE_PHYS32_ENTRY), holds
//! the physical address of the 32-bit entry point.

use super::{KernelError, Plan, Protocol, Segment, Source};
use crate::layout;
use std::collections::{BTreeMap, BTreeSet};

const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const ELFCLASS64: u8 = 2;
const ELFDATA2LSB: u8 = 1;
const ET_EXEC: u16 = 2;
const ET_DYN: u16 = 3;
const EM_X86_64: u16 = 62;
const XEN_ELFNOTE_PHYS32_ENTRY: u32 = 18;

const SHT_SYMTAB: u32 = 2;
const STT_FUNC: u8 = 2;
const SECTION_HEADER_SIZE: usize = 64;
const SYMBOL_SIZE: usize = 24;
/// Longest name of a function that is read.
const MAX_SYMBOL: usize = 128;
/// Largest table of symbols, and of their names. A kernel with all its symbols has 2 MiB of each.
const MAX_SECTION: u64 = 16 << 20;

const HEADER_SIZE: u64 = 64;
const PROGRAM_HEADER_SIZE: usize = 56;
/// Kernels have fewer than ten; a file with more is damaged.
const MAX_PROGRAM_HEADERS: u16 = 128;
/// A kernel's notes have some hundred bytes.
const MAX_NOTES: u64 = 64 << 10;

#[derive(Debug, Clone, Copy)]
struct Section {
    kind: u32,
    offset: u64,
    size: u64,
    link: u32,
}

#[derive(Debug, Clone, Copy)]
struct ProgramHeader {
    kind: u32,
    offset: u64,
    address: u64,
    file_size: u64,
    memory_size: u64,
}

/// Plans an ELF kernel; `low_ram_end` is the guest physical end of the RAM below the hole.
///
/// # Errors
///
/// If the file is no executable for x86-64, has no PVH note, is cut short or damaged, or if a
/// segment is below 1 MiB, ends above `low_ram_end` or overlaps another, or if the entry point is
/// in none.
pub fn plan(source: &(impl Source + ?Sized), low_ram_end: u64) -> Result<Plan, KernelError> {
    let headers = program_headers(source)?;
    let entry = pvh_entry(source, &headers)?.ok_or(KernelError::NoPvhNote)?;
    let segments = segments(source, &headers, low_ram_end)?;
    let end = segments
        .last()
        .map(|segment| segment.address + segment.memory_size)
        .ok_or_else(|| KernelError::Damaged("there are no segments to load".into()))?;
    let inside = |segment: &Segment| {
        entry >= segment.address && entry < segment.address + segment.memory_size
    };
    if !segments.iter().any(inside) {
        return Err(KernelError::EntryOutside(entry));
    }
    Ok(Plan {
        segments,
        protocol: Protocol::Pvh { entry },
        end,
        initrd_limit: layout::LOW_RAM_END,
        command_line_size: layout::COMMAND_LINE_SIZE,
    })
}

fn program_headers(source: &(impl Source + ?Sized)) -> Result<Vec<ProgramHeader>, KernelError> {
    within(source, "the ELF header", 0, HEADER_SIZE)?;
    let mut header = [0; HEADER_SIZE as usize];
    source.read_at(0, &mut header)?;
    let machine = u16_at(&header, 18);
    if header[5] != ELFDATA2LSB {
        return Err(KernelError::WrongMachine("a big-endian machine".into()));
    }
    if header[4] != ELFCLASS64 || machine != EM_X86_64 {
        return Err(KernelError::WrongMachine(machine_name(machine)));
    }
    match u16_at(&header, 16) {
        ET_EXEC | ET_DYN => {}
        1 => return Err(KernelError::NotExecutable("object file or module")),
        4 => return Err(KernelError::NotExecutable("core dump")),
        _ => return Err(KernelError::NotExecutable("file of unknown type")),
    }
    let (table, entry_size, count) = (
        u64_at(&header, 32),
        u16_at(&header, 54),
        u16_at(&header, 56),
    );
    if count == 0 {
        return Err(KernelError::Damaged("there are no program headers".into()));
    }
    if entry_size as usize != PROGRAM_HEADER_SIZE || count > MAX_PROGRAM_HEADERS {
        return Err(KernelError::Damaged(format!(
            "{count} program headers of {entry_size} bytes"
        )));
    }
    let size = PROGRAM_HEADER_SIZE * count as usize;
    within(source, "the table of program headers", table, size as u64)?;
    let mut bytes = vec![0; size];
    source.read_at(table, &mut bytes)?;
    Ok(bytes
        .chunks_exact(PROGRAM_HEADER_SIZE)
        .map(|entry| ProgramHeader {
            kind: u32_at(entry, 0),
            offset: u64_at(entry, 8),
            address: u64_at(entry, 24),
            file_size: u64_at(entry, 32),
            memory_size: u64_at(entry, 40),
        })
        .collect())
}

fn segments(
    source: &(impl Source + ?Sized),
    headers: &[ProgramHeader],
    low_ram_end: u64,
) -> Result<Vec<Segment>, KernelError> {
    let mut segments = Vec::new();
    for (number, header) in headers.iter().enumerate() {
        if header.kind != PT_LOAD || header.memory_size == 0 {
            continue;
        }
        if header.file_size > header.memory_size {
            return Err(KernelError::Damaged(format!(
                "segment {number} has {} bytes in the file but {} in memory",
                header.file_size, header.memory_size
            )));
        }
        within(
            source,
            &format!("segment {number}"),
            header.offset,
            header.file_size,
        )?;
        if header.address < layout::KERNEL_START {
            return Err(KernelError::TooLow(header.address));
        }
        let end = header.address.checked_add(header.memory_size);
        if end.is_none_or(|end| end > low_ram_end) {
            return Err(KernelError::OutsideRam {
                end: end.unwrap_or(u64::MAX),
                ram_end: low_ram_end,
            });
        }
        segments.push(Segment {
            address: header.address,
            memory_size: header.memory_size,
            file_offset: header.offset,
            file_size: header.file_size,
        });
    }
    segments.sort_by_key(|segment| segment.address);
    for pair in segments.windows(2) {
        if pair[0].address + pair[0].memory_size > pair[1].address {
            return Err(KernelError::Overlap {
                first: pair[0].address,
                second: pair[1].address,
            });
        }
    }
    Ok(segments)
}

fn pvh_entry(
    source: &(impl Source + ?Sized),
    headers: &[ProgramHeader],
) -> Result<Option<u64>, KernelError> {
    for header in headers.iter().filter(|header| header.kind == PT_NOTE) {
        within(source, "a note segment", header.offset, header.file_size)?;
        if header.file_size > MAX_NOTES {
            return Err(KernelError::Damaged(format!(
                "a note segment of {} bytes",
                header.file_size
            )));
        }
        let mut notes = vec![0; header.file_size as usize];
        source.read_at(header.offset, &mut notes)?;
        if let Some(entry) = find_pvh_note(&notes) {
            return Ok(Some(entry));
        }
    }
    Ok(None)
}

/// Walks notes (name size, descriptor size, type, then name and descriptor padded to 4 bytes) until
/// the PVH note or the end, which may be damaged.
fn find_pvh_note(mut notes: &[u8]) -> Option<u64> {
    loop {
        let header = notes.get(..12)?;
        let name_size = u32_at(header, 0) as usize;
        let description_size = u32_at(header, 4) as usize;
        let name = notes.get(12..)?.get(..name_size)?;
        let rest = notes.get(12 + name_size.next_multiple_of(4)..)?;
        let description = rest.get(..description_size)?;
        if name == b"Xen\0" && u32_at(header, 8) == XEN_ELFNOTE_PHYS32_ENTRY {
            return match description_size {
                4 => Some(u32_at(description, 0).into()),
                8 => Some(u64_at(description, 0)),
                _ => None,
            };
        }
        notes = rest.get(description_size.next_multiple_of(4)..)?;
    }
}

/// The names of the functions at these addresses, from the symbol table; of those that it does not
/// have, none.
///
/// # Errors
///
/// If a table is beyond the end of the file or too large, or can't be read.
pub fn functions(
    source: &(impl Source + ?Sized),
    wanted: &BTreeSet<u64>,
) -> Result<BTreeMap<u64, String>, KernelError> {
    let mut names = BTreeMap::new();
    let sections = sections(source)?;
    let tables = sections.iter().filter(|section| section.kind == SHT_SYMTAB);
    for table in tables {
        let Some(strings) = sections.get(table.link as usize) else {
            continue;
        };
        let symbols = section_bytes(source, "the symbol table", table)?;
        let strings = section_bytes(source, "the symbols' names", strings)?;
        for symbol in symbols.chunks_exact(SYMBOL_SIZE) {
            let address = u64_at(symbol, 8);
            if symbol[4] & 15 != STT_FUNC || !wanted.contains(&address) {
                continue;
            }
            let name = strings.get(u32_at(symbol, 0) as usize..).unwrap_or(&[]);
            let name = &name[..name.len().min(MAX_SYMBOL)];
            let length = name.iter().position(|byte| *byte == 0);
            let name = &name[..length.unwrap_or(name.len())];
            if !name.is_empty() {
                names.insert(address, String::from_utf8_lossy(name).into_owned());
            }
        }
    }
    Ok(names)
}

fn sections(source: &(impl Source + ?Sized)) -> Result<Vec<Section>, KernelError> {
    within(source, "the ELF header", 0, HEADER_SIZE)?;
    let mut header = [0; HEADER_SIZE as usize];
    source.read_at(0, &mut header)?;
    let (table, entry_size, count) = (
        u64_at(&header, 40),
        u16_at(&header, 58),
        u16_at(&header, 60),
    );
    if entry_size as usize != SECTION_HEADER_SIZE {
        return Ok(Vec::new());
    }
    let size = SECTION_HEADER_SIZE * count as usize;
    within(source, "the table of sections", table, size as u64)?;
    let mut bytes = vec![0; size];
    source.read_at(table, &mut bytes)?;
    let section = |entry: &[u8]| Section {
        kind: u32_at(entry, 4),
        offset: u64_at(entry, 24),
        size: u64_at(entry, 32),
        link: u32_at(entry, 40),
    };
    Ok(bytes
        .chunks_exact(SECTION_HEADER_SIZE)
        .map(section)
        .collect())
}

fn section_bytes(
    source: &(impl Source + ?Sized),
    what: &str,
    section: &Section,
) -> Result<Vec<u8>, KernelError> {
    within(source, what, section.offset, section.size)?;
    if section.size > MAX_SECTION {
        return Err(KernelError::Damaged(format!(
            "{what} of {} bytes",
            section.size
        )));
    }
    let mut bytes = vec![0; section.size as usize];
    source.read_at(section.offset, &mut bytes)?;
    Ok(bytes)
}

pub(super) fn within(
    source: &(impl Source + ?Sized),
    what: &str,
    offset: u64,
    size: u64,
) -> Result<(), KernelError> {
    let end = offset.saturating_add(size);
    if end > source.len() {
        return Err(KernelError::CutShort {
            what: what.into(),
            end,
            length: source.len(),
        });
    }
    Ok(())
}

fn machine_name(machine: u16) -> String {
    match machine {
        3 => "32-bit x86".into(),
        40 => "32-bit ARM".into(),
        EM_X86_64 => "x86-64 in its 32-bit class".into(),
        183 => "arm64".into(),
        243 => "RISC-V".into(),
        other => format!("machine type {other}"),
    }
}

fn u16_at(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes([bytes[offset], bytes[offset + 1]])
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().expect("8 bytes"))
}
