//! A range of a file, and its compression.

use crate::archive::Skip;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// A range of a file: the whole file, or a member of an archive.
#[derive(Debug, Clone)]
pub struct Blob {
    /// The file.
    pub file: Arc<File>,
    /// Offset of the range in the file, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
}

impl Blob {
    /// The whole file.
    ///
    /// # Errors
    ///
    /// If `fstat` fails.
    pub fn whole(file: File) -> io::Result<Blob> {
        let len = size_of(&file)?;
        Ok(Blob {
            file: Arc::new(file),
            offset: 0,
            len,
        })
    }

    /// Reads its bytes as a stream.
    pub fn stream(&self) -> BlobStream {
        BlobStream {
            blob: self.clone(),
            at: 0,
        }
    }

    /// Reads all its bytes, at most `limit`.
    ///
    /// # Errors
    ///
    /// If there are more than `limit` bytes, or they can't be read.
    pub fn read(&self, limit: u64) -> io::Result<Vec<u8>> {
        if self.len > limit {
            let what = format!("it has {} bytes, the limit is {limit}", self.len);
            return Err(io::Error::other(what));
        }
        let mut bytes = vec![0; self.len as usize];
        self.file.read_exact_at(&mut bytes, self.offset)?;
        Ok(bytes)
    }

    /// Its compression, by its first bytes.
    ///
    /// # Errors
    ///
    /// If the first bytes can't be read.
    pub fn compression(&self) -> io::Result<Compression> {
        let mut head = [0; 6];
        let most = self.len.min(head.len() as u64) as usize;
        self.file.read_exact_at(&mut head[..most], self.offset)?;
        Ok(Compression::of(&head[..most]))
    }
}

/// Bytes of a file, by fstat(2): an import that is confined has no call that takes a path.
pub(crate) fn size_of(file: &File) -> io::Result<u64> {
    Ok(rustix::fs::fstat(file)?.st_size as u64)
}

/// Reads a blob from its beginning; skips without reading.
#[derive(Debug)]
pub struct BlobStream {
    blob: Blob,
    at: u64,
}

impl Read for BlobStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = (self.blob.len - self.at).min(buffer.len() as u64) as usize;
        let got = self
            .blob
            .file
            .read_at(&mut buffer[..most], self.blob.offset + self.at)?;
        self.at += got as u64;
        Ok(got)
    }
}

impl Skip for BlobStream {
    fn skip(&mut self, bytes: u64) -> io::Result<u64> {
        let most = bytes.min(self.blob.len - self.at);
        self.at += most;
        Ok(most)
    }
}

/// Compression of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// No known compression.
    Plain,
    /// gzip, RFC 1952.
    Gzip,
    /// zstd, RFC 8878.
    Zstd,
    /// The .xz file format.
    Xz,
    /// bzip2: recognised, but not supported, because layers don't use it.
    Bzip2,
}

impl Compression {
    /// Recognises it by the first bytes.
    pub fn of(head: &[u8]) -> Compression {
        match head {
            [0x1f, 0x8b, ..] => Compression::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Compression::Zstd,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Compression::Xz,
            [b'B', b'Z', b'h', b'1'..=b'9', ..] => Compression::Bzip2,
            _ => Compression::Plain,
        }
    }
}
