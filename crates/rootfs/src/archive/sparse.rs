//! Files with holes: GNU tar's sparse formats "old", 0.0, 0.1 and 1.0.
//!
//! Source: GNU tar manual, "Storing Sparse Files".

use super::pax::{Pax, decimal};
use super::{ArchiveError, BLOCK, Segment};

/// Most runs of one file.
const MAX_SEGMENTS: usize = 256 * 1024;

/// The size of a file with holes, and the runs that the archive holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sparse {
    /// Bytes of the file, holes included.
    pub size: u64,
    /// Its runs in order; none is empty.
    pub segments: Vec<Segment>,
}

impl Sparse {
    /// Checks that the runs are in order, don't overlap, lie within the file and have `stored`
    /// bytes in all.
    fn checked(size: u64, segments: Vec<Segment>, stored: u64) -> Option<Sparse> {
        let mut end = 0u64;
        let mut sum = 0u64;
        for segment in &segments {
            if segment.offset < end {
                return None;
            }
            end = segment.offset.checked_add(segment.len)?;
            sum += segment.len;
        }
        let segments: Vec<_> = segments.into_iter().filter(|run| run.len > 0).collect();
        (end <= size && sum == stored && segments.len() <= MAX_SEGMENTS)
            .then_some(Sparse { size, segments })
    }
}

/// Reads the map of an old GNU sparse file: four runs in the header, 21 in each extension block.
/// `next` reads an extension block.
pub(super) fn old(
    header: &tar::Header,
    stored: u64,
    mut next: impl FnMut() -> Result<[u8; BLOCK], ArchiveError>,
    bad: &dyn Fn(&'static str) -> ArchiveError,
) -> Result<Sparse, ArchiveError> {
    let malformed = || bad("its map of holes is malformed");
    let gnu = header.as_gnu().ok_or_else(malformed)?;
    let mut segments = Vec::new();
    let mut add = |runs: &[tar::GnuSparseHeader]| -> Result<(), ArchiveError> {
        for run in runs.iter().filter(|run| !run.is_empty()) {
            segments.push(Segment {
                offset: run.offset().map_err(|_| malformed())?,
                len: run.length().map_err(|_| malformed())?,
            });
        }
        if segments.len() > MAX_SEGMENTS {
            return Err(bad("its map of holes is too long"));
        }
        Ok(())
    };
    add(&gnu.sparse)?;
    let mut extended = gnu.is_extended();
    while extended {
        let block = next()?;
        let mut runs = tar::GnuExtSparseHeader::new();
        runs.as_mut_bytes().copy_from_slice(&block);
        add(&runs.sparse)?;
        extended = runs.is_extended();
    }
    let size = gnu.real_size().map_err(|_| malformed())?;
    Sparse::checked(size, segments, stored).ok_or_else(malformed)
}

/// The map of holes in PAX records.
pub(super) enum PaxSparse {
    /// No holes.
    None,
    /// Format 0.0 or 0.1: the map is in the records.
    Map(Sparse),
    /// Format 1.0: the map is at the beginning of the contents. The value is the file's size,
    /// bytes.
    InContents(u64),
}

pub(super) fn pax(pax: &Pax, stored: u64) -> Option<PaxSparse> {
    let number = |key: &[u8]| pax.get(key).map(decimal);
    if let Some(major) = number(b"GNU.sparse.major") {
        let version = (major?, number(b"GNU.sparse.minor").unwrap_or(Some(0))?);
        if version == (1, 0) {
            return Some(PaxSparse::InContents(number(b"GNU.sparse.realsize")??));
        }
        if version.0 != 0 {
            return None;
        }
    }
    let segments = match pax.get(b"GNU.sparse.map") {
        Some(map) => {
            let numbers: Vec<u64> = map
                .split(|byte| *byte == b',')
                .map(decimal)
                .collect::<Option<_>>()?;
            if !numbers.len().is_multiple_of(2) {
                return None;
            }
            numbers
                .chunks_exact(2)
                .map(|pair| Segment {
                    offset: pair[0],
                    len: pair[1],
                })
                .collect()
        }
        None if pax.get(b"GNU.sparse.size").is_none() => return Some(PaxSparse::None),
        None => pax.segments.clone(),
    };
    let size = number(b"GNU.sparse.size")??;
    Sparse::checked(size, segments, stored).map(PaxSparse::Map)
}

/// Reads the map at the beginning of the contents: decimal numbers, one per line, padded to a
/// block. Returns the map and its length, bytes.
pub(super) fn in_contents(
    size: u64,
    stored: u64,
    mut next: impl FnMut() -> Result<[u8; BLOCK], ArchiveError>,
    bad: &dyn Fn(&'static str) -> ArchiveError,
) -> Result<(Sparse, u64), ArchiveError> {
    let malformed = || bad("its map of holes is malformed");
    let mut numbers = Vec::new();
    let mut digits = Vec::new();
    let mut want = 1;
    let mut taken = 0;
    while numbers.len() < want {
        taken += BLOCK as u64;
        if taken > stored {
            return Err(malformed());
        }
        for byte in next()? {
            if byte != b'\n' {
                digits.push(byte);
                if digits.len() > 20 {
                    return Err(malformed());
                }
                continue;
            }
            numbers.push(decimal(&digits).ok_or_else(malformed)?);
            digits.clear();
            if numbers.len() == 1 {
                let count = usize::try_from(numbers[0]).unwrap_or(usize::MAX);
                if count > MAX_SEGMENTS {
                    return Err(bad("its map of holes is too long"));
                }
                want = 1 + 2 * count;
            }
            if numbers.len() == want {
                break;
            }
        }
    }
    let segments = numbers[1..]
        .chunks_exact(2)
        .map(|pair| Segment {
            offset: pair[0],
            len: pair[1],
        })
        .collect();
    let sparse = Sparse::checked(size, segments, stored - taken).ok_or_else(malformed)?;
    Ok((sparse, taken))
}
