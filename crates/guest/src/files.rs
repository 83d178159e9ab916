//! Reads and writes small files of /proc, /sys and /etc, with size limits.

use alloc::{string::String, vec::Vec};
use rustix::fd::OwnedFd;
use rustix::fs::{self, CWD, Mode, OFlags};
use rustix::io::{self, Errno, Result};
use rustix::path::Arg;

/// Opens a file for reading.
///
/// # Errors
///
/// If `open` fails.
pub fn open<P: Arg>(path: P) -> Result<OwnedFd> {
    fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// Whether a path exists; a dangling link does not.
pub fn exists<P: Arg>(path: P) -> bool {
    fs::access(path, fs::Access::EXISTS).is_ok()
}

/// Reads a whole file.
///
/// # Errors
///
/// `FBIG` if it is larger than `limit` bytes; otherwise that of `open` or `read`.
pub fn read<P: Arg>(path: P, limit: usize) -> Result<Vec<u8>> {
    read_all(&open(path)?, limit)
}

/// Reads the rest of an open file.
///
/// # Errors
///
/// `FBIG` if it is larger than `limit` bytes; otherwise that of `read`.
pub fn read_all(file: &OwnedFd, limit: usize) -> Result<Vec<u8>> {
    let mut content = Vec::new();
    loop {
        if content.capacity() - content.len() < 4096 {
            content.reserve(4096.max(content.len()));
        }
        let count = match io::read(file, rustix::buffer::spare_capacity(&mut content)) {
            Err(Errno::INTR) => continue,
            other => other?,
        };
        if content.len() > limit {
            return Err(Errno::FBIG);
        }
        if count == 0 {
            return Ok(content);
        }
    }
}

/// Reads a text file; invalid UTF-8 is replaced.
///
/// # Errors
///
/// `FBIG` if it is larger than `limit` bytes; otherwise that of `open` or `read`.
pub fn read_text<P: Arg>(path: P, limit: usize) -> Result<String> {
    let bytes = read(path, limit)?;
    Ok(String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// Writes to an existing file, such as a kernel parameter.
///
/// # Errors
///
/// If `open` or `write` fails.
pub fn write<P: Arg>(path: P, content: &[u8]) -> Result<()> {
    let file = fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    write_all(&file, content)
}

/// Creates or truncates a file and writes its content.
///
/// # Errors
///
/// If `open` or `write` fails; a part of the content may be there then.
pub fn create<P: Arg>(path: P, content: &[u8], mode: u32) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
    let file = fs::open(path, flags, Mode::from_raw_mode(mode))?;
    write_all(&file, content)
}

/// Writes all bytes; may block.
///
/// # Errors
///
/// If `write` fails; a part may be written then.
pub fn write_all(file: &OwnedFd, mut content: &[u8]) -> Result<()> {
    while !content.is_empty() {
        match io::write(file, content) {
            Ok(count) => content = &content[count..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Creates a folder, unless it exists.
///
/// # Errors
///
/// If `mkdir` fails, other than with `EEXIST`.
pub fn make_folder<P: Arg>(path: P, mode: u32) -> Result<()> {
    match fs::mkdirat(CWD, path, Mode::from_raw_mode(mode)) {
        Err(Errno::EXIST) => Ok(()),
        other => other,
    }
}

/// Creates a folder and its parents.
///
/// # Errors
///
/// If `mkdir` fails for one of them, other than with `EEXIST`.
pub fn make_folders(path: &str, mode: u32) -> Result<()> {
    match make_folder(path, mode) {
        Err(Errno::NOENT) => match path.trim_end_matches('/').rsplit_once('/') {
            Some((above, _)) if !above.is_empty() => {
                make_folders(above, mode)?;
                make_folder(path, mode)
            }
            _ => Err(Errno::NOENT),
        },
        other => other,
    }
}
