//! The selectable items of fw_cfg.

use std::collections::BTreeMap;
use thiserror::Error;

/// Longest name of a file, bytes; the directory stores a zero after it.
pub const NAME_MAX: usize = 55;
/// Most files: what a 14-bit selector leaves from the first file's on.
pub const FILES_MAX: usize = (ENTRY_MASK - FIRST_FILE + 1) as usize;

const SIGNATURE: u16 = 0x00;
const FEATURES: u16 = 0x01;
const DIRECTORY: u16 = 0x19;
const FIRST_FILE: u16 = 0x20;
/// Bits 14 (write) and 15 (architecture) do not belong to an entry's number.
const ENTRY_MASK: u16 = 0x3fff;
const DIRECTORY_ENTRY_BYTES: usize = 64;

/// The traditional interface and DMA are supported.
const FEATURE_BITS: u32 = 0b11;

/// A file for the guest to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FwCfgFile {
    /// The name, such as `opt/jiffy/config`; 1 to [`NAME_MAX`] bytes without a zero byte.
    pub name: String,
    /// Contents, less than 4 GiB.
    pub contents: Vec<u8>,
}

/// Why files are not valid.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum FwCfgError {
    /// A name is empty, too long or contains a zero byte.
    #[error("the fw_cfg file name {0:?} is not 1 to {NAME_MAX} bytes without a zero byte")]
    Name(String),
    /// Two files have the same name.
    #[error("there are two fw_cfg files named {0:?}")]
    Duplicate(String),
    /// A file's length does not fit the directory's 32 bits.
    #[error("the fw_cfg file {0:?} is 4 GiB or larger")]
    TooLarge(String),
    /// There are more files than selectors.
    #[error("there are {0} fw_cfg files, at most {FILES_MAX} fit")]
    TooMany(usize),
}

/// The selectable items.
#[derive(Debug)]
pub(super) struct Items {
    directory: Vec<u8>,
    /// Sorted by name; file `i` has selector `FIRST_FILE + i`.
    files: Vec<FwCfgFile>,
}

impl Items {
    pub(super) fn new(files: Vec<FwCfgFile>) -> Result<Items, FwCfgError> {
        if files.len() > FILES_MAX {
            return Err(FwCfgError::TooMany(files.len()));
        }
        let mut sorted = BTreeMap::new();
        for FwCfgFile { name, contents } in files {
            if name.is_empty() || name.len() > NAME_MAX || name.contains('\0') {
                return Err(FwCfgError::Name(name));
            }
            if u32::try_from(contents.len()).is_err() {
                return Err(FwCfgError::TooLarge(name));
            }
            if sorted.contains_key(&name) {
                return Err(FwCfgError::Duplicate(name));
            }
            sorted.insert(name, contents);
        }
        let files: Vec<FwCfgFile> = sorted
            .into_iter()
            .map(|(name, contents)| FwCfgFile { name, contents })
            .collect();
        Ok(Items {
            directory: directory(&files),
            files,
        })
    }

    /// The bytes of the item with this selector; empty for an unknown selector.
    pub(super) fn get(&self, selector: u16) -> &[u8] {
        // No item has the architecture bit.
        if selector & !(ENTRY_MASK | 1 << 14) != 0 {
            return &[];
        }
        match selector & ENTRY_MASK {
            SIGNATURE => b"QEMU",
            FEATURES => const { &FEATURE_BITS.to_le_bytes() },
            DIRECTORY => &self.directory,
            other => other
                .checked_sub(FIRST_FILE)
                .and_then(|index| self.files.get(usize::from(index)))
                .map_or(&[], |file| &file.contents),
        }
    }

    /// Replaces the contents of a file by others of the same length.
    pub(super) fn replace(&mut self, selector: u16, contents: Vec<u8>) {
        let file = (selector & ENTRY_MASK)
            .checked_sub(FIRST_FILE)
            .and_then(|index| self.files.get_mut(usize::from(index)));
        if let Some(file) = file
            && file.contents.len() == contents.len()
        {
            file.contents = contents;
        }
    }

    /// The selector of a file.
    pub(super) fn selector(&self, name: &str) -> Option<u16> {
        let index = self.files.iter().position(|file| file.name == name)?;
        Some(FIRST_FILE + index as u16)
    }

    pub(super) fn files(&self) -> &[FwCfgFile] {
        &self.files
    }
}

/// The directory: count (u32), then per file size (u32), selector (u16), two reserved bytes, and
/// name (56 bytes, zero-padded); numbers are big endian.
fn directory(files: &[FwCfgFile]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(4 + files.len() * DIRECTORY_ENTRY_BYTES);
    bytes.extend_from_slice(&(files.len() as u32).to_be_bytes());
    for (selector, file) in (FIRST_FILE..).zip(files) {
        let end = bytes.len() + DIRECTORY_ENTRY_BYTES;
        bytes.extend_from_slice(&(file.contents.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&selector.to_be_bytes());
        bytes.extend_from_slice(&[0; 2]);
        bytes.extend_from_slice(file.name.as_bytes());
        bytes.resize(end, 0);
    }
    bytes
}

/// The selected item and the offset of its next byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) selector: u16,
    pub(super) offset: u32,
}
