//! The initramfs of all VMMs: PID 1 writes [`MARKER`] to COM1 once and waits, or repeatedly, so
//! that a restore can be detected. It needs no console driver.

use crate::plan::MARKER;
use jiffy_machine::image::cpio::Archive;
use std::io;

const LOAD_ADDRESS: u64 = 0x40_0000;
const HEADERS: usize = 64 + 56;

/// `open("/dev/port")`, `pwrite(fd, "J", 1, 0x3f8)`, then `pause` forever.
const CODE: &[u8] = &[
    0xb8, 2, 0, 0, 0, // mov eax, open
    0x48, 0x8d, 0x3d, 43, 0, 0, 0, // lea rdi, [path]
    0xbe, 1, 0, 0, 0, // mov esi, O_WRONLY
    0x0f, 0x05, // syscall
    0x89, 0xc7, // mov edi, eax
    0xb8, 18, 0, 0, 0, // mov eax, pwrite64
    0x48, 0x8d, 0x35, 32, 0, 0, 0, // lea rsi, [marker]
    0xba, 1, 0, 0, 0, // mov edx, 1
    0x41, 0xba, 0xf8, 0x03, 0, 0, // mov r10d, 0x3f8
    0x0f, 0x05, // syscall
    0xb8, 34, 0, 0, 0, // mov eax, pause
    0x0f, 0x05, // syscall
    0xeb, 0xf7, // jmp to the pause
];

/// Offsets in [`CODE`]: the system call number of the write, and the code after the write.
const WRITE: usize = 21;
const AFTER_WRITE: usize = 46;

/// Replaces the pause by a short countdown and a jump to the write. The strings keep their
/// addresses.
fn repeating() -> Vec<u8> {
    let mut code = CODE.to_vec();
    let back = |end: usize| (WRITE as i64 - end as i64) as u8;
    let again = [
        0xb9,
        0x10,
        0x27,
        0,
        0, // mov ecx, 10000
        0xe2,
        0xfe, // loop to itself
        0xeb,
        back(AFTER_WRITE + 9), // jmp to the write
    ];
    code[AFTER_WRITE..][..again.len()].copy_from_slice(&again);
    code
}

/// A static x86-64 ELF program with one segment.
fn program(code: &[u8]) -> Vec<u8> {
    let mut body = code.to_vec();
    body.extend_from_slice(b"/dev/port\0");
    body.push(MARKER);
    let size = (HEADERS + body.len()) as u64;
    let mut elf = Vec::new();
    elf.extend_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    for half in [2u16, 62] {
        elf.extend_from_slice(&half.to_le_bytes()); // ET_EXEC, EM_X86_64
    }
    elf.extend_from_slice(&1u32.to_le_bytes());
    for word in [LOAD_ADDRESS + HEADERS as u64, 64, 0] {
        elf.extend_from_slice(&word.to_le_bytes()); // entry, program headers, sections
    }
    elf.extend_from_slice(&0u32.to_le_bytes());
    for half in [64u16, 56, 1, 0, 0, 0] {
        elf.extend_from_slice(&half.to_le_bytes());
    }
    for word in [1u32, 5] {
        elf.extend_from_slice(&word.to_le_bytes()); // PT_LOAD, read and execute
    }
    for word in [0, LOAD_ADDRESS, LOAD_ADDRESS, size, size, 0x1000] {
        elf.extend_from_slice(&word.to_le_bytes());
    }
    elf.extend_from_slice(&body);
    elf
}

/// The initramfs whose PID 1 writes once, as an uncompressed cpio.
pub fn initramfs() -> Vec<u8> {
    with_init(&program(CODE))
}

/// The initramfs whose PID 1 writes forever.
pub fn repeating_initramfs() -> Vec<u8> {
    with_init(&program(&repeating()))
}

fn with_init(program: &[u8]) -> Vec<u8> {
    let write = || {
        let mut archive = Archive::new(Vec::new());
        archive.folder("dev", 0o755)?;
        archive.character_device("dev/port", 0o600, 1, 4)?;
        archive.file("init", 0o755, program)?;
        archive.finish()
    };
    let written: io::Result<Vec<u8>> = write();
    written.expect("its entries are valid, and memory takes all bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_marker_program_addresses_its_strings() {
        let data = |instruction_end: usize, offset: u8| instruction_end + usize::from(offset);
        let body = &program(CODE)[HEADERS..];
        assert!(body[data(12, CODE[8])..].starts_with(b"/dev/port\0"));
        assert_eq!(body[data(33, CODE[29])], MARKER);
    }
}
