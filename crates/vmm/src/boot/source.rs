//! Where kernel bytes come from: a file, or (in tests and fuzzing) a slice.

use jiffy_devices::GuestMemory;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

/// Bytes that can be read from any offset.
pub trait Source {
    /// How many there are.
    fn len(&self) -> u64;
    /// True if there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Fills `buffer` from `offset`; an error if the bytes end before.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
}

impl Source for [u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let bytes = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..start.checked_add(buffer.len())?))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(bytes);
        Ok(())
    }
}

/// An open regular file and its size when it was opened.
#[derive(Debug)]
pub struct OpenFile {
    file: File,
    length: u64,
}

impl Source for OpenFile {
    fn len(&self) -> u64 {
        self.length
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }
}

/// Opens a regular file for reading; anything else is an error, and a FIFO
/// does not block.
pub fn open(path: &Path) -> io::Result<OpenFile> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok(OpenFile {
        length: metadata.len(),
        file,
    })
}

/// Reads `size` bytes at `offset` straight into guest memory at `address`.
pub fn copy(
    source: &OpenFile,
    offset: u64,
    size: u64,
    memory: &GuestMemory,
    address: u64,
) -> io::Result<()> {
    let mut file = &source.file;
    file.seek(SeekFrom::Start(offset))?;
    memory
        .read_exact_volatile_from(GuestAddress(address), &mut file, size as usize)
        .map_err(|error| match error {
            GuestMemoryError::IOError(error) => error,
            other => io::Error::other(other),
        })
}
