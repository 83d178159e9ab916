//! Contents for tests: every kind of chunk, the same every time.

use crate::backing::Backing;
use crate::reader::ImageReader;
use crate::writer::{WriteOptions, write_image};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Bytes of a chunk in tests.
pub(crate) const CHUNK: usize = 4096;

/// A chunk that does not compress.
pub(crate) fn noise(seed: u64) -> Vec<u8> {
    let mut state = seed;
    (0..CHUNK)
        .map(|_| {
            // SplitMix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) as u8
        })
        .collect()
}

/// A chunk that compresses well.
pub(crate) fn text(seed: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for line in 0_u64.. {
        bytes.extend(format!("{seed}: the line with the number {line}, of many\n").bytes());
        if bytes.len() >= CHUNK {
            break;
        }
    }
    bytes.truncate(CHUNK);
    bytes
}

/// Chunks by letters: `.` zero, `n` noise, `t` text, each different; a capital or a digit is always
/// the same text.
pub(crate) fn contents(letters: &str) -> Vec<u8> {
    (1_u64..)
        .zip(letters.bytes())
        .flat_map(|(number, letter)| match letter {
            b'.' => vec![0; CHUNK],
            b'n' => noise(number),
            b't' => text(number),
            other => text(1_000_000 + u64::from(other)),
        })
        .collect()
}

/// A file of these bytes, called `name`, as a backing file.
pub(crate) fn backing(folder: &Folder, name: &str, bytes: &[u8]) -> Backing {
    std::fs::write(folder.file(name), bytes).expect("a file is written");
    Backing::open(&folder.file(name)).expect("a file is read")
}

/// Options with small chunks and otherwise the defaults.
pub(crate) fn small() -> WriteOptions {
    WriteOptions {
        chunk_size: CHUNK as u32,
        ..WriteOptions::default()
    }
}

/// A folder for images.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Folder {
        Folder(tempfile::tempdir().expect("a temporary folder"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes an image and opens it.
    pub(crate) fn image(&self, name: &str, bytes: &[u8], options: &WriteOptions) -> ImageReader {
        write_image(&self.file(name), bytes, options).expect("an image is written");
        ImageReader::open(&self.file(name)).expect("an image opens")
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.path())
            .expect("the folder is there")
            .map(|entry| {
                let name = entry.expect("an entry").file_name();
                name.into_string().expect("names of ours")
            })
            .collect();
        names.sort();
        names
    }
}

/// All bytes of an image, padded to whole chunks.
pub(crate) fn read_all(image: &ImageReader) -> Vec<u8> {
    let chunk_size = image.chunk_size() as usize;
    let mut bytes = vec![0xee; chunk_size * image.chunks() as usize];
    for (index, chunk) in (0..).zip(bytes.chunks_mut(chunk_size)) {
        image.read_chunk(index, chunk).expect("a chunk is read");
    }
    bytes
}
