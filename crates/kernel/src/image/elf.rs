//! The PVH entry note of an ELF kernel.
//!
//! Xen's `include/public/elfnote.h` and Linux's `arch/x86/platform/pvh/head.S`: a note with the
//! owner "Xen" and type 18 contains the 32-bit entry point.

use super::Malformed;
use super::bytes::{slice_at, u16_at, u32_at, u64_at};

pub const MAGIC: &[u8] = b"\x7fELF";

const CLASS_64_LITTLE_ENDIAN: &[u8] = b"\x7fELF\x02\x01";
const ET_EXEC: u16 = 2;
const ET_DYN: u16 = 3;
const EM_X86_64: u16 = 62;
const PT_NOTE: u32 = 4;
const PROGRAM_HEADER_SIZE: u16 = 56;
const MAX_PROGRAM_HEADERS: u16 = 128;
const XEN_ELFNOTE_PHYS32_ENTRY: u32 = 18;

/// Guest-physical address of an ELF kernel's PVH entry point; `None` if it has none.
///
/// # Errors
///
/// If `data` is not an ELF executable for x86-64, has too many program headers, or is cut short.
pub fn pvh_entry(data: &[u8]) -> Result<Option<u64>, Malformed> {
    if !data.starts_with(CLASS_64_LITTLE_ENDIAN) {
        return Err(Malformed::Machine);
    }
    let header = Header::parse(data).ok_or(Malformed::Truncated)?;
    if !matches!(header.kind, ET_EXEC | ET_DYN) || header.machine != EM_X86_64 {
        return Err(Malformed::Machine);
    }
    if header.phnum > MAX_PROGRAM_HEADERS {
        return Err(Malformed::ProgramHeaders);
    }
    if header.phnum > 0 && header.phentsize != PROGRAM_HEADER_SIZE {
        return Err(Malformed::Truncated);
    }
    for index in 0..header.phnum {
        let entry = header
            .phoff
            .checked_add(u64::from(index) * u64::from(PROGRAM_HEADER_SIZE))
            .and_then(|offset| slice_at(data, offset, PROGRAM_HEADER_SIZE.into()))
            .ok_or(Malformed::Truncated)?;
        if u32_at(entry, 0) != Some(PT_NOTE) {
            continue;
        }
        let notes = Option::zip(u64_at(entry, 8), u64_at(entry, 32))
            .and_then(|(offset, size)| slice_at(data, offset, size))
            .ok_or(Malformed::Truncated)?;
        if let Some(address) = entry_in_notes(notes) {
            return Ok(Some(address));
        }
    }
    Ok(None)
}

struct Header {
    kind: u16,
    machine: u16,
    phoff: u64,
    phentsize: u16,
    phnum: u16,
}

impl Header {
    fn parse(data: &[u8]) -> Option<Self> {
        Some(Self {
            kind: u16_at(data, 16)?,
            machine: u16_at(data, 18)?,
            phoff: u64_at(data, 32)?,
            phentsize: u16_at(data, 54)?,
            phnum: u16_at(data, 56)?,
        })
    }
}

/// Searches notes for the entry point; stops at a note that exceeds the segment.
fn entry_in_notes(mut notes: &[u8]) -> Option<u64> {
    loop {
        let name_size = u32_at(notes, 0)? as usize;
        let description_size = u32_at(notes, 4)? as usize;
        let kind = u32_at(notes, 8)?;
        let name_end = 12usize.checked_add(name_size)?;
        let description = name_end.checked_next_multiple_of(4)?;
        let end = description.checked_add(description_size)?;
        if kind == XEN_ELFNOTE_PHYS32_ENTRY && notes.get(12..name_end)? == b"Xen\0" {
            // Linux writes four bytes, other kernels eight.
            return match notes.get(description..end)?.len() {
                4 => u32_at(notes, description).map(u64::from),
                8 => u64_at(notes, description),
                _ => None,
            };
        }
        notes = notes.get(end.checked_next_multiple_of(4)?..)?;
    }
}
