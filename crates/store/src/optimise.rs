//! Rewrites an image with its working set first.

use crate::backing::Backing;
use crate::codec::{Codec, Decoder};
use crate::error::{ImageError, WriteError};
use crate::format::Kind;
use crate::reader::{ImageReader, Place};
use crate::recording::Recording;
use crate::runs;
use crate::source::ChunkSource;
use crate::writer::{WriteOptions, Written, write_image};
use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The contents of an image, as a source of another.
#[derive(Debug)]
pub struct Contents<'a>(pub &'a ImageReader);

thread_local! {
    static DECODER: RefCell<(Decoder, Vec<u8>)> = const { RefCell::new((Decoder::new(), Vec::new())) };
}

impl ChunkSource for Contents<'_> {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let chunk_size = self.0.chunk_size() as usize;
        DECODER.with_borrow_mut(|(decoder, chunk)| {
            chunk.resize(chunk_size, 0);
            let mut done = 0;
            while done < buffer.len() {
                let at = offset + done as u64;
                let within = (at % chunk_size as u64) as usize;
                let count = (buffer.len() - done).min(chunk_size - within);
                let part = &mut buffer[done..done + count];
                match u32::try_from(at / chunk_size as u64) {
                    Ok(index) if index < self.0.chunks() => {
                        self.0
                            .read_chunk_with(decoder, index, chunk)
                            .map_err(io::Error::other)?;
                        part.copy_from_slice(&chunk[within..within + count]);
                    }
                    _ => part.fill(0),
                }
                done += count;
            }
            Ok(())
        })
    }

    fn data_ranges(&self) -> io::Result<Vec<Range<u64>>> {
        let chunk_size = u64::from(self.0.chunk_size());
        let mut ranges = Vec::new();
        for index in 0..self.0.chunks() {
            if self.0.kind(index).map_err(io::Error::other)? != Kind::Zero {
                let start = u64::from(index) * chunk_size;
                ranges.push(start..(start + chunk_size).min(self.0.size()));
            }
        }
        Ok(runs::join_touching(ranges))
    }
}

/// Options that store an image as it is stored now: with the same chunk size, parent, backing file
/// and codec.
///
/// # Errors
///
/// If the image's table of chunks can't be read or is damaged.
pub fn options_of(image: &ImageReader) -> Result<WriteOptions, WriteError> {
    let mut options = WriteOptions {
        chunk_size: image.chunk_size(),
        codec: Codec::None,
        ..WriteOptions::default()
    };
    if let Some((reference, parent)) = image.parent() {
        options.parent = Some(Arc::clone(parent));
        options.parent_name = Some(reference.name.clone());
    }
    options.backing = backing_of(image)?;
    for index in 0..image.chunks() {
        match image.kind(index)? {
            Kind::Zero | Kind::Raw | Kind::Parent | Kind::Backing => {}
            // The working set of a zstd image may be in LZ4.
            Kind::Lz4 => options.codec = Codec::Lz4,
            Kind::Zstd => {
                options.codec = Codec::Zstd(zstd::DEFAULT_COMPRESSION_LEVEL);
                break;
            }
            Kind::ZstdDictionary => {
                options.codec = Codec::Zstd(zstd::DEFAULT_COMPRESSION_LEVEL);
                options.dictionary = true;
                break;
            }
        }
    }
    Ok(options)
}

/// The backing file of an image, with the offsets that its chunks have there.
fn backing_of(image: &ImageReader) -> Result<Option<Backing>, ImageError> {
    let Some(backing) = image.backing() else {
        return Ok(None);
    };
    let mut places = HashMap::new();
    for index in 0..image.chunks() {
        if let Place::Entry(entry) = image.place(index)?
            && entry.kind == Kind::Backing
        {
            places.insert(index, entry.offset);
        }
    }
    Ok(Some(Backing::known(backing.reference().clone(), places)))
}

/// Rewrites `image` as `target`, with the recorded chunks first and contiguous, including those of
/// the parent and the backing file, so that they are read quickly
/// ([`WriteOptions::quick_working_set`]). The id does not change, so children of the image stay
/// valid. `target` may be the image itself. Therefore a partial image is completed first: its map
/// would not fit the new file.
///
/// # Errors
///
/// If the recording is of another image, the image can't be completed or read, or `target` can't be
/// written.
pub fn optimise(
    image: &ImageReader,
    recording: &Recording,
    target: &Path,
) -> Result<Written, WriteError> {
    let mut options = options_of(image)?;
    if recording.image != image.id() {
        return Err(WriteError::Options(format!(
            "the recording is of the image with the id {}; {} has the id {}",
            recording.image,
            image.path().display(),
            image.id()
        )));
    }
    image.complete()?;
    options.working_set = Some(recording.chunks.clone());
    options.quick_working_set = true;
    write_image(target, &Contents(image), &options)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{Folder, contents, read_all, small};

    #[test]
    fn the_recorded_chunks_come_first_and_nothing_else_changes() {
        let folder = Folder::new();
        let bytes = contents("tntXt.n");
        let parent = Arc::new(folder.image("base", &contents("tnt"), &small()));
        for codec in [Codec::None, Codec::Lz4, Codec::Zstd(3)] {
            let options = WriteOptions {
                codec,
                parent: Some(Arc::clone(&parent)),
                ..small()
            };
            let image = folder.image("a", &bytes, &options);
            assert_eq!(options_of(&image).unwrap().codec, codec);
            let before = image.id();
            let recording = Recording {
                image: before,
                chunk_size: image.chunk_size(),
                chunks: vec![4, 1, 5],
            };
            // The target is the image itself, which is read meanwhile.
            optimise(&image, &recording, &folder.file("a")).unwrap();
            assert!(read_all(&image) == bytes);
            let better = ImageReader::open(&folder.file("a")).unwrap();
            assert_eq!(better.id(), before);
            assert!(read_all(&better) == bytes);
            better.verify().unwrap();
            assert_eq!(better.kind(2).unwrap(), Kind::Parent);
            for chunk in [4, 1] {
                assert_eq!(
                    better.kind(chunk).unwrap(),
                    Kind::Raw,
                    "stored raw for quick reads"
                );
            }
            let stored: Vec<Kind> = (0..7).map(|n| better.kind(n).unwrap()).collect();
            let before: Vec<Kind> = (0..7).map(|n| image.kind(n).unwrap()).collect();
            for chunk in [0, 3, 6] {
                assert_eq!(stored[chunk], before[chunk], "chunk {chunk}");
            }
            let (four, one) = (
                better.stored_range(4).unwrap(),
                better.stored_range(1).unwrap(),
            );
            let (four, one) = (four.unwrap(), one.unwrap());
            assert_eq!(
                (better.hot_range(), four.end),
                (four.start..one.end, one.start)
            );

            let other = Recording {
                image: parent.id(),
                ..recording
            };
            optimise(&image, &other, &folder.file("a")).unwrap_err();
        }
    }
}
