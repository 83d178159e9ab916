//! Reads small files.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

/// Reads a whole file. Neither uses nor changes the file offset, which other processes may share.
///
/// # Errors
///
/// `InvalidData` if the file has more than `most` bytes: then nothing is allocated for it.
/// Otherwise if fstat(2) or pread(2) fails.
pub fn of(file: &File, most: u64) -> io::Result<Vec<u8>> {
    let length = file.metadata()?.len();
    if length > most {
        let problem = format!("it has {length} bytes, more than the limit of {most}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    let mut bytes = Vec::with_capacity(length as usize);
    Positioned { file, at: 0 }
        .take(most)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads with pread(2) from its own offset.
struct Positioned<'a> {
    file: &'a File,
    at: u64,
}

impl Read for Positioned<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, Write};

    #[test]
    fn the_whole_file_is_read_at_any_file_position() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"all of it").unwrap();
        assert_eq!(of(&file, 9).unwrap(), b"all of it");
        assert_eq!(file.stream_position().unwrap(), 9);
        assert_eq!(of(&file, 8).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
