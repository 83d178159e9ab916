//! Reads files into memory in advance.
//!
//! A restored guest has the page cache of the captured one. If its first command was read before
//! the capture, it starts without reading the disk.

use crate::files;
use crate::program::prepare::{DEFAULT_PATH, candidates, reason};
use alloc::{boxed::Box, format, string::String, vec::Vec};
use core::mem::MaybeUninit;
use rustix::io::Errno;

/// Most bytes of one file.
const LARGEST: u64 = 64 * 1024 * 1024;
const PIECE: usize = 64 * 1024;
/// Deepest chain of interpreters: a script's interpreter may be a script, whose interpreter has a
/// loader.
const DEEPEST: u32 = 4;

/// Reads all files; continues after one that can't be read.
///
/// # Errors
///
/// If a file can't be read; names all of these.
pub fn read_all(names: &[String]) -> Result<(), String> {
    let mut space = Box::new_uninit_slice(PIECE);
    let failures: Vec<String> = names
        .iter()
        .filter_map(|name| {
            let found = candidates(name, DEFAULT_PATH)
                .into_iter()
                .find(|path| files::exists(path.as_str()));
            let path = found.unwrap_or_else(|| name.clone());
            let error = read(&path, &mut space, 0).err()?;
            Some(format!("{path}: {}", reason(error)))
        })
        .collect();
    if failures.is_empty() {
        Ok(())
    } else {
        Err(failures.join("; "))
    }
}

fn read(path: &str, space: &mut [MaybeUninit<u8>], depth: u32) -> Result<(), Errno> {
    let file = files::open(path)?;
    let mut next = None;
    let mut at = 0;
    while at < LARGEST {
        let (bytes, _) = rustix::io::pread(&file, &mut *space, at)?;
        if bytes.is_empty() {
            break;
        }
        if at == 0 {
            next = interpreter(bytes);
        }
        at += bytes.len() as u64;
    }
    match next {
        Some(next) if depth < DEEPEST => read(&next, space, depth + 1),
        _ => Ok(()),
    }
}

/// The program that the kernel executes for a file with this beginning: a script's interpreter or a
/// dynamic program's loader.
pub fn interpreter(start: &[u8]) -> Option<String> {
    let path = match start {
        [b'#', b'!', line @ ..] => line
            .split(|byte| *byte == b'\n')
            .next()?
            .split(|byte| matches!(byte, b' ' | b'\t' | b'\r'))
            .find(|word| !word.is_empty())?,
        _ => loader(start)?,
    };
    let path = core::str::from_utf8(path).ok()?;
    path.starts_with('/').then(|| path.into())
}

/// PT_INTERP of a 64-bit ELF file (elf(5)).
fn loader(elf: &[u8]) -> Option<&[u8]> {
    const PT_INTERP: u32 = 3;
    const MOST_HEADERS: u16 = 64;
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let word = |at: usize| Some(u16::from_le_bytes(*elf.get(at..)?.first_chunk()?));
    let long = |at: usize| {
        let value = u64::from_le_bytes(*elf.get(at..)?.first_chunk()?);
        usize::try_from(value).ok()
    };
    let (table, size, count) = (long(32)?, word(54)?, word(56)?.min(MOST_HEADERS));
    (0..count).find_map(|index| {
        let header = table.checked_add(usize::from(index) * usize::from(size))?;
        let kind = u32::from_le_bytes(*elf.get(header..)?.first_chunk()?);
        if kind != PT_INTERP {
            return None;
        }
        let start = long(header.checked_add(8)?)?;
        let length = long(header.checked_add(32)?)?;
        let text = elf.get(start..start.checked_add(length)?)?;
        text.split(|byte| *byte == 0).next()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec;

    #[test]
    fn scripts_name_their_interpreter() {
        let name = |text: &str| interpreter(text.as_bytes());
        assert_eq!(name("#!/bin/sh\necho"), Some("/bin/sh".into()));
        assert_eq!(
            name("#! /usr/bin/env python3\n"),
            Some("/usr/bin/env".into())
        );
        for none in ["#!\n/bin/sh", "#!sh\n", "echo", "", "#!"] {
            assert_eq!(name(none), None, "{none:?}");
        }
    }

    #[test]
    fn programs_name_their_loader() {
        // The host's own shell is a dynamic program.
        let shell = std::fs::read("/bin/sh").unwrap();
        let loader = interpreter(&shell).unwrap();
        assert!(loader.contains("ld-linux"), "{loader}");
    }

    #[test]
    fn a_loader_offset_beyond_the_file_is_ignored() {
        let mut elf = vec![0u8; 64 + 56];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[32] = 64;
        (elf[54], elf[56]) = (56, 1);
        elf[64] = 3;
        elf[72..80].copy_from_slice(&u64::MAX.to_le_bytes());
        elf[96..104].copy_from_slice(&8u64.to_le_bytes());
        assert_eq!(interpreter(&elf), None);
    }

    #[test]
    fn missing_files_are_reported_and_the_others_preloaded() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
        let names = [
            "sh".into(),
            script.to_str().unwrap().into(),
            "nowhere".into(),
        ];
        let error = read_all(&names).unwrap_err();
        assert!(error.contains("nowhere: no such file"), "{error}");
        assert_eq!(error.matches("; ").count(), 1, "{error}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_searched_for_an_interpreter_without_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), elf: bool) {
            if elf && bytes.len() > 6 {
                bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
            }
            let _ = interpreter(&bytes);
        }
    }
}
