//! Sources of kernel bytes: a file, or (in tests and fuzzing) a slice.

use jiffy_devices::GuestMemory;
use jiffy_sys::handed;
use jiffy_sys::stamp::Stamp;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, ReadVolatile};

/// Most bytes that are read at once. Each piece is one read(2), which Linux limits to 2 GiB less a
/// page.
const PIECE: u64 = 1 << 30;

/// Bytes that can be read from any offset.
pub trait Source {
    /// The number of bytes.
    fn len(&self) -> u64;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Fills `buffer` with the bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// `UnexpectedEof` if there are too few. Otherwise if they can't be read.
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

/// An open regular file, and its stamp when it was opened.
#[derive(Debug)]
pub struct OpenFile {
    file: File,
    stamp: Stamp,
}

impl OpenFile {
    /// Takes an open regular file, and notes its stamp.
    ///
    /// # Errors
    ///
    /// If fstat(2) fails, or it is not a regular file.
    pub fn of(file: File) -> io::Result<OpenFile> {
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        let stamp = Stamp::of(&metadata);
        Ok(OpenFile { file, stamp })
    }

    /// Its stamp when it was opened.
    pub fn stamp(&self) -> Stamp {
        self.stamp
    }
}

impl Source for OpenFile {
    fn len(&self) -> u64 {
        self.stamp.size
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }
}

/// Opens a regular file for reading. A FIFO does not block.
///
/// # Errors
///
/// If open(2) fails, or it is not a regular file.
pub fn open(path: &Path) -> io::Result<OpenFile> {
    let file = match handed::take(path) {
        Some(file) => file.into(),
        None => OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?,
    };
    OpenFile::of(file)
}

/// Reads `size` bytes at `offset` straight into guest memory at `address` (guest physical).
///
/// # Errors
///
/// If the file ends before, can't be read, or the range is outside of guest memory. A part may be
/// written then.
pub fn copy(
    source: &OpenFile,
    offset: u64,
    size: u64,
    memory: &GuestMemory,
    address: u64,
) -> io::Result<()> {
    let mut file = &source.file;
    file.seek(SeekFrom::Start(offset))?;
    copy_in_pieces(&mut file, size, memory, address, PIECE)
}

fn copy_in_pieces(
    from: &mut impl ReadVolatile,
    size: u64,
    memory: &GuestMemory,
    address: u64,
    piece: u64,
) -> io::Result<()> {
    let mut done = 0;
    while done < size {
        let length = piece.min(size - done);
        memory
            .read_exact_volatile_from(GuestAddress(address + done), from, length as usize)
            .map_err(|error| match error {
                GuestMemoryError::IOError(error) => error,
                other => io::Error::other(other),
            })?;
        done += length;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::bitmap::BitmapSlice;
    use vm_memory::{VolatileMemoryError, VolatileSlice};

    /// A source whose single reads are limited, as the kernel limits them.
    struct AtMost(File, usize);

    impl ReadVolatile for AtMost {
        fn read_volatile<B: BitmapSlice>(
            &mut self,
            buffer: &mut VolatileSlice<'_, B>,
        ) -> Result<usize, VolatileMemoryError> {
            let most = buffer.len().min(self.1);
            self.0.read_volatile(&mut buffer.subslice(0, most)?)
        }
    }

    #[test]
    fn copying_continues_after_short_reads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("initrd");
        let bytes: Vec<u8> = (0..10_000u32).map(|at| (at % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let copied = |piece| {
            let mut file = AtMost(File::open(&path).unwrap(), 4096);
            copy_in_pieces(&mut file, 10_000, &memory, 4000, piece)
        };
        assert!(copied(10_000).is_err());
        copied(4096).unwrap();
        let mut found = vec![0; 10_000];
        memory.read_slice(&mut found, GuestAddress(4000)).unwrap();
        assert!(found == bytes);
    }
}
