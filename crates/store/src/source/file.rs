//! Any file; holes are skipped.

use super::ChunkSource;
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

impl ChunkSource for File {
    fn size(&self) -> u64 {
        self.metadata().map_or(0, |metadata| metadata.len())
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        read_or_zero(self, offset, buffer)
    }

    /// Moves the file's position, which is shared with all processes that inherited it.
    fn data_ranges(&self) -> io::Result<Vec<Range<u64>>> {
        data_within(self, 0..self.size())
    }
}

/// Reads; bytes past the end are zeros.
pub(super) fn read_or_zero(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        match FileExt::read_at(file, &mut buffer[done..], offset + done as u64) {
            Ok(0) => {
                buffer[done..].fill(0);
                break;
            }
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The parts of `range` that are not holes. A file system without `SEEK_DATA` has no holes.
pub(super) fn data_within(file: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut found = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            // A descriptor of another process may be of no regular file, and say anything.
            Ok(start) if start < range.end => start.max(at),
            // No data up to the end.
            Ok(_) | Err(Errno::NXIO) => break,
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::SPIPE) => at,
            Err(error) => return Err(error.into()),
        };
        let end = match rustix::fs::seek(file, SeekFrom::Hole(start)) {
            Ok(end) if end > start => end.min(range.end),
            _ => range.end,
        };
        found.push(start..end);
        at = end;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_that_ignores_seeks_is_data() {
        let null = File::open("/dev/null").unwrap();
        let range = 4096..8192;
        assert_eq!(data_within(&null, range.clone()).unwrap(), [range]);
    }

    #[test]
    fn holes_are_not_data_and_read_as_zeros() {
        let file = jiffy_sys::memfd::create("test", 1 << 20, jiffy_sys::memfd::Pages::Small)
            .expect("a memfd");
        assert_eq!(file.data_ranges().unwrap(), []);
        file.write_all_at(b"x", 5 << 12).unwrap();
        file.write_all_at(b"y", (1 << 20) - 1).unwrap();
        let page = 4096;
        assert_eq!(
            file.data_ranges().unwrap(),
            [5 * page..6 * page, (1 << 20) - page..1 << 20]
        );
        let mut buffer = [9; 3];
        ChunkSource::read_at(&file, (1 << 20) - 2, &mut buffer).unwrap();
        assert_eq!(&buffer, b"\0y\0");
    }
}
