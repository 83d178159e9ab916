//! Reports of what a snapshot's RAM consists of.

use super::memory;
use super::saved::Saved;
use crate::error::{Error, Result};
use jiffy_store::inspect::png;
use jiffy_store::inspect::summary::{Summary, ranges};
use jiffy_store::source::ChunkSource;
use jiffy_store::{ImageError, ImageReader, Kind};
use jiffy_sys::causes;
use jiffy_wire::api::{ChunkKind, ChunkRange, MemoryForm, MemoryReport};
use std::path::Path;

/// The sizes, and the ranges if `map`: blocking.
///
/// # Errors
///
/// If RAM's file can't be read or is damaged.
pub fn report(saved: &Saved, map: bool) -> Result<MemoryReport> {
    match saved.manifest.memory {
        MemoryForm::Image => image_report(&saved.memory(), map),
        MemoryForm::Raw => raw_report(&saved.memory(), map),
    }
}

/// A PNG of the address space: blocking.
///
/// # Errors
///
/// If RAM is stored as a raw file, or its image can't be read or is damaged.
pub fn picture(saved: &Saved) -> Result<Vec<u8>> {
    let path = saved.memory();
    if saved.manifest.memory == MemoryForm::Raw {
        return Err(Error::wrong_state(
            "A picture can't be made of memory that is stored as a raw file.",
        )
        .hint("`jiffy snapshot inspect --map` lists its ranges of data."));
    }
    let image = ImageReader::open(&path).map_err(|error| unreadable(&path, &error))?;
    png(&image).map_err(|error| unreadable(&path, &error))
}

fn image_report(path: &Path, map: bool) -> Result<MemoryReport> {
    let failed = |error: ImageError| unreadable(path, &error);
    let image = ImageReader::open(path).map_err(failed)?;
    let summary = Summary::of(&image).map_err(failed)?;
    let chunk = u64::from(summary.chunk_size);
    let mut shown = Vec::new();
    if map {
        for (range, kind) in ranges(&image).map_err(failed)? {
            let mut stored = 0;
            for index in range.clone() {
                let at = image.stored_range(index).map_err(failed)?;
                stored += at.map_or(0, |at| at.end - at.start);
            }
            let offset = u64::from(range.start) * chunk;
            let end = (u64::from(range.end) * chunk).min(summary.size);
            shown.push(ChunkRange {
                offset,
                length: end - offset,
                kind: name_of(kind).to_owned(),
                stored_bytes: stored,
            });
        }
    }
    let kinds = summary.kinds.iter().filter(|kind| kind.chunks > 0);
    Ok(MemoryReport {
        size: summary.size,
        chunk_bytes: chunk,
        file_bytes: summary.file_bytes,
        metadata_bytes: summary.metadata_bytes,
        load_ns: (summary.opened_in + summary.table_read_in)
            .as_nanos()
            .try_into()
            .unwrap_or(u64::MAX),
        kinds: kinds
            .map(|kind| ChunkKind {
                kind: name_of(kind.kind).to_owned(),
                chunks: kind.chunks.into(),
                bytes: kind.bytes,
                stored_bytes: kind.stored,
            })
            .collect(),
        ranges: shown,
    })
}

/// A raw file tells only which ranges are holes.
fn raw_report(path: &Path, map: bool) -> Result<MemoryReport> {
    const PAGE: u64 = 4096;
    let failed = |error: std::io::Error| Error::io("read a snapshot's memory", path, &error);
    let file = jiffy_sys::regular::open(path).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    let data = file.data_ranges().map_err(failed)?;
    let held: u64 = data.iter().map(|range| range.end - range.start).sum();
    let mut shown = Vec::new();
    let mut push = |from: u64, to: u64, kind: &str, stored: u64| {
        if from < to {
            shown.push(ChunkRange {
                offset: from,
                length: to - from,
                kind: kind.to_owned(),
                stored_bytes: stored,
            });
        }
    };
    if map {
        let mut at = 0;
        for range in &data {
            push(at, range.start, "zero", 0);
            push(range.start, range.end, "raw", range.end - range.start);
            at = range.end;
        }
        push(at, size, "zero", 0);
    }
    let kind = |kind: &str, bytes: u64, stored_bytes: u64| ChunkKind {
        kind: kind.to_owned(),
        chunks: bytes.div_ceil(PAGE),
        bytes,
        stored_bytes,
    };
    Ok(MemoryReport {
        size,
        chunk_bytes: PAGE,
        file_bytes: memory::bytes_of(path).map_err(failed)?,
        metadata_bytes: 0,
        load_ns: 0,
        kinds: vec![kind("zero", size - held, 0), kind("raw", held, held)],
        ranges: shown,
    })
}

fn name_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Zero => "zero",
        Kind::Raw => "raw",
        Kind::Lz4 => "lz4",
        Kind::Zstd => "zstd",
        Kind::ZstdDictionary => "zstd+dictionary",
        Kind::Parent => "parent",
        Kind::Backing => "root",
    }
}

fn unreadable(path: &Path, error: &ImageError) -> Error {
    let text = causes::sentence(error);
    Error::internal(format!(
        "The memory of the snapshot can't be read: {}: {text}.",
        path.display()
    ))
}
