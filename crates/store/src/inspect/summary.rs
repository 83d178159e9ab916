//! Figures of an image, by kind of chunk.

use crate::error::ImageError;
use crate::format::{BackingRef, ImageId, Kind, ParentRef};
use crate::reader::{ImageReader, Place};
use std::collections::HashSet;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Figures of an image.
#[derive(Debug, Clone)]
pub struct Summary {
    /// The id of its contents.
    pub id: ImageId,
    /// Bytes of the contents.
    pub size: u64,
    /// Bytes of a chunk.
    pub chunk_size: u32,
    /// How many chunks it has.
    pub chunks: u32,
    /// One entry for every kind, also for those without chunks.
    pub kinds: Vec<KindSummary>,
    /// Chunks with the bytes of an earlier one, stored once.
    pub duplicates: u32,
    /// How many ranges of chunks of the same kind there are.
    pub ranges: u32,
    /// How many chunks are in the working set.
    pub working_set: u32,
    /// Bytes of the working set's chunks, which are contiguous.
    pub hot_bytes: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Bytes of the file that are not chunks.
    pub metadata_bytes: u64,
    /// Bytes of the dictionary, which is part of the metadata.
    pub dictionary_bytes: u64,
    /// Its parent.
    pub parent: Option<ParentRef>,
    /// Its backing file.
    pub backing: Option<BackingRef>,
    /// How long it took to open it and its parents.
    pub opened_in: Duration,
    /// How long it took to read and check the whole table of chunks.
    pub table_read_in: Duration,
}

/// The chunks of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KindSummary {
    /// The kind.
    pub kind: Kind,
    /// How many chunks.
    pub chunks: u32,
    /// Their bytes, uncompressed.
    pub bytes: u64,
    /// Their bytes in the file; bytes that several chunks share count once.
    pub stored: u64,
}

impl KindSummary {
    /// Stored bytes divided by uncompressed bytes; `None` without chunks.
    pub fn ratio(&self) -> Option<f64> {
        (self.bytes > 0).then(|| self.stored as f64 / self.bytes as f64)
    }
}

impl Summary {
    /// Reads the whole table of chunks, but no chunk.
    ///
    /// # Errors
    ///
    /// If the table of chunks or the working set can't be read or is damaged.
    pub fn of(image: &ImageReader) -> Result<Summary, ImageError> {
        let begun = Instant::now();
        let mut kinds = Kind::ALL.map(|kind| KindSummary {
            kind,
            chunks: 0,
            bytes: 0,
            stored: 0,
        });
        let (mut duplicates, mut ranges, mut last) = (0, 0, None);
        let mut seen = HashSet::new();
        for index in 0..image.chunks() {
            let place = image.place(index)?;
            let kind = place.kind();
            ranges += u32::from(last.replace(kind) != Some(kind));
            for summary in kinds.iter_mut().filter(|summary| summary.kind == kind) {
                summary.chunks += 1;
                summary.bytes += u64::from(image.chunk_size());
                if let Place::Entry(entry) = place
                    && kind.is_stored()
                {
                    if seen.insert(entry.offset) {
                        summary.stored += u64::from(entry.length);
                    } else {
                        duplicates += 1;
                    }
                }
            }
        }
        let table_read_in = begun.elapsed();
        let hot = image.hot_range();
        Ok(Summary {
            id: image.id(),
            size: image.size(),
            chunk_size: image.chunk_size(),
            chunks: image.chunks(),
            kinds: kinds.to_vec(),
            duplicates,
            ranges,
            working_set: image
                .working_set()?
                .iter()
                .map(|range| range.end - range.start)
                .sum(),
            hot_bytes: hot.end - hot.start,
            file_bytes: image.file_bytes(),
            metadata_bytes: image.metadata_bytes(),
            dictionary_bytes: image.dictionary().map_or(0, |bytes| bytes.len() as u64),
            parent: image.parent().map(|(reference, _)| reference.clone()),
            backing: image.backing().map(|backing| backing.reference().clone()),
            opened_in: image.opened_in(),
            table_read_in,
        })
    }

    /// Bytes of the file divided by bytes of the contents; `None` without contents.
    pub fn ratio(&self) -> Option<f64> {
        (self.size > 0).then(|| self.file_bytes as f64 / self.size as f64)
    }
}

/// Ranges of chunks of one kind, in order.
///
/// # Errors
///
/// If the table of chunks can't be read or is damaged.
pub fn ranges(image: &ImageReader) -> Result<Vec<(Range<u32>, Kind)>, ImageError> {
    let mut ranges: Vec<(Range<u32>, Kind)> = Vec::new();
    for index in 0..image.chunks() {
        let kind = image.kind(index)?;
        match ranges.last_mut() {
            Some((range, last)) if *last == kind => range.end = index + 1,
            _ => ranges.push((index..index + 1, kind)),
        }
    }
    Ok(ranges)
}

/// For each `step` chunks, the most frequent kind other than zero, and how many of the chunks are
/// not zero.
pub(super) fn cells(
    image: &ImageReader,
    step: u32,
) -> impl Iterator<Item = Result<(Kind, u32), ImageError>> {
    let chunks = image.chunks();
    (0..chunks).step_by(step as usize).map(move |first| {
        let mut counts = [0_u32; Kind::ALL.len()];
        for index in first..chunks.min(first.saturating_add(step)) {
            counts[image.kind(index)? as usize] += 1;
        }
        let (kinds, counts) = (&Kind::ALL[1..], &counts[1..]);
        let (kind, count) = kinds
            .iter()
            .zip(counts)
            .max_by_key(|(_, count)| **count)
            .map_or((Kind::Zero, 0), |(kind, count)| (*kind, *count));
        let filled = counts.iter().sum();
        Ok((if count == 0 { Kind::Zero } else { kind }, filled))
    })
}
