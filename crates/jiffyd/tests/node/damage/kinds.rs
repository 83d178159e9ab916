//! Kinds of damage to a file or a folder.

use rustix::fs::{CWD, FileType, Mode};
use std::fs;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::Path;

/// A version that no release has written.
const NEXT: u32 = 99;
/// Formats with 8 bytes of magic followed by the version, and their offset: from the start, or from
/// the end.
const BINARY: [(&[u8; 8], Place); 6] = [
    (&jiffy_wire::state::MAGIC, Place::Start),
    (b"JIFFYLOG", Place::Start),
    (b"\x89JIFFY\r\n", Place::Start),
    (b"\x89JIFREC\n", Place::Start),
    (b"\x89JIFMAP\n", Place::Start),
    (b"JIFFYEND", Place::BeforeEnd(256)),
];

#[derive(Clone, Copy)]
enum Place {
    Start,
    BeforeEnd(usize),
}

/// The state of a damaged file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    Missing,
    Empty,
    /// A file of noise; also in place of a folder.
    Garbage,
    /// A folder in place of a file.
    Folder,
    /// A symbolic link to itself: not even root can open it.
    Loop,
    /// A file whose open blocks forever.
    Fifo,
    /// A file of the next format version.
    Newer,
    /// One byte in the middle is changed.
    Flipped,
}

pub const ALL: [Damage; 8] = [
    Damage::Missing,
    Damage::Empty,
    Damage::Garbage,
    Damage::Folder,
    Damage::Loop,
    Damage::Fifo,
    Damage::Newer,
    Damage::Flipped,
];

impl Damage {
    /// Does the damage show only to a reader of the contents?
    pub fn is_within(self) -> bool {
        matches!(self, Damage::Garbage | Damage::Flipped)
    }

    /// Damages a path; false if this kind can't be applied to it. Other hard links to the file are
    /// not changed.
    pub fn damage_file(self, path: &Path) -> bool {
        let kind = fs::symlink_metadata(path).unwrap().file_type();
        let is_socket = kind.is_socket();
        match self {
            Damage::Folder if kind.is_dir() => return false,
            Damage::Empty | Damage::Newer | Damage::Flipped if is_socket => return false,
            Damage::Newer => return newer(path, kind.is_dir()),
            Damage::Flipped => return flipped(path, kind.is_dir()),
            _ => {}
        }
        let was_folder = kind.is_dir();
        match was_folder {
            true => fs::remove_dir_all(path).unwrap(),
            false => fs::remove_file(path).unwrap(),
        }
        match self {
            Damage::Missing => {}
            Damage::Empty if was_folder => fs::create_dir(path).unwrap(),
            Damage::Empty => fs::write(path, b"").unwrap(),
            Damage::Garbage => fs::write(path, noise()).unwrap(),
            Damage::Folder => {
                fs::create_dir(path).unwrap();
                fs::write(path.join("something"), b"in it").unwrap();
            }
            Damage::Loop => symlink(path.file_name().unwrap(), path).unwrap(),
            Damage::Fifo => {
                let mode = Mode::from_raw_mode(0o600);
                rustix::fs::mknodat(CWD, path, FileType::Fifo, mode, 0).unwrap();
            }
            Damage::Newer | Damage::Flipped => unreachable!(),
        }
        true
    }
}

/// A copy with another version.
fn newer(path: &Path, is_folder: bool) -> bool {
    if is_folder {
        return false;
    }
    let mut bytes = fs::read(path).unwrap();
    let mut changed = false;
    if bytes.starts_with(b"{\"format\":") {
        let text = String::from_utf8(bytes).unwrap();
        let (before, rest) = text.split_once("\"version\":").unwrap();
        let rest = rest.trim_start_matches(|digit: char| digit.is_ascii_digit());
        bytes = format!("{before}\"version\":{NEXT}{rest}").into_bytes();
        changed = true;
    }
    for (magic, place) in BINARY {
        let at = match place {
            Place::Start => Some(0),
            Place::BeforeEnd(length) => bytes.len().checked_sub(length),
        };
        let Some(at) = at.filter(|at| bytes[*at..].starts_with(magic)) else {
            continue;
        };
        bytes[at + 8..at + 12].copy_from_slice(&NEXT.to_le_bytes());
        changed = true;
    }
    if changed {
        fs::remove_file(path).unwrap();
        fs::write(path, bytes).unwrap();
    }
    changed
}

/// A copy with another byte in the middle.
fn flipped(path: &Path, is_folder: bool) -> bool {
    if is_folder {
        return false;
    }
    let mut bytes = fs::read(path).unwrap();
    if bytes.is_empty() {
        return false;
    }
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
    true
}

/// Invalid bytes, the same each time.
fn noise() -> Vec<u8> {
    crate::images::noise(5000)
}
