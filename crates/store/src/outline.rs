//! What the header, footer and manifest of an image say, without its chunks and parents.

use crate::error::{Fault, ImageError};
use crate::format::{
    BackingRef, Footer, Group, Header, IdHasher, ImageId, ParentRef, Section, footer, header,
};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use zstd::zstd_safe::DDict;

/// What header and footer say, and the parent's name.
#[derive(Debug, Clone)]
pub struct Outline {
    /// Where everything is.
    pub footer: Footer,
    /// The parent it names.
    pub parent: Option<ParentRef>,
    /// The backing file it names.
    pub backing: Option<BackingRef>,
}

impl Outline {
    /// Reads it from a file, without a lock.
    ///
    /// # Errors
    ///
    /// If the file can't be opened or read, is not an image, is truncated, or its header, footer or
    /// a name is damaged.
    pub fn read(path: &Path) -> Result<Outline, ImageError> {
        let outline = || {
            let file = jiffy_sys::regular::open(path).map_err(Fault::Open)?;
            let length = file.metadata().map_err(Fault::Open)?.len();
            Outline::of(&file, length)
        };
        outline().map_err(|fault| ImageError::new(path, fault))
    }

    pub(crate) fn of(file: &File, length: u64) -> Result<Outline, Fault> {
        let footer = read_ends(file, length)?;
        let mut parent = None;
        if footer.parent.length > 0 {
            let bytes = read_section(file, &footer.parent)?;
            parent = Some(ParentRef::decode(&bytes).ok_or(Fault::Damaged {
                offset: footer.parent.offset,
                what: "the parent's name is not valid",
            })?);
        }
        let mut backing = None;
        if footer.backing.length > 0 {
            let bytes = read_section(file, &footer.backing)?;
            backing = Some(BackingRef::decode(&bytes).ok_or(Fault::Damaged {
                offset: footer.backing.offset,
                what: "the backing file's name is not valid",
            })?);
        }
        Ok(Outline {
            footer,
            parent,
            backing,
        })
    }
}

fn read_ends(file: &File, length: u64) -> Result<Footer, Fault> {
    let at = length.saturating_sub(footer::BYTES as u64);
    let mut first = [0; header::BYTES];
    if length < (header::BYTES + footer::BYTES) as u64 {
        // Too short for an image; the first bytes still tell whether it is one.
        let there = first.len().min(length as usize);
        read_exact(file, 0, &mut first[..there])?;
        let whose = first.len().min(header::MAGIC.len());
        return Err(if there >= whose && first[..whose] == header::MAGIC {
            Fault::Truncated { length, offset: at }
        } else {
            Fault::NotAnImage
        });
    }
    read_exact(file, 0, &mut first)?;
    let header = Header::decode(&first)?;
    let mut last = [0; footer::BYTES];
    read_exact(file, at, &mut last)?;
    Footer::decode(&last, length, &header)
}

/// Computes the image id from the bitmaps and hashes of the manifest, reading all of them.
pub(crate) fn manifest_id(file: &File, footer: &Footer) -> Result<ImageId, Fault> {
    let mut id = IdHasher::new(footer.size, footer.chunk_size);
    each_piece(file, &footer.groups, |group| {
        id.bitmap(Group::decode(group).bitmap);
    })?;
    each_piece(file, &footer.hashes, |hash| {
        id.chunk(hash);
    })?;
    Ok(id.finish())
}

/// Reads a section of records of N bytes, many at once.
fn each_piece<const N: usize>(
    file: &File,
    section: &Section,
    mut each: impl FnMut(&[u8; N]),
) -> Result<(), Fault> {
    let mut buffer = vec![0; N << 12];
    let mut range = section.range();
    while !range.is_empty() {
        let count = (buffer.len() as u64).min(range.end - range.start);
        let bytes = &mut buffer[..count as usize];
        read_exact(file, range.start, bytes)?;
        let (records, _) = bytes.as_chunks();
        records.iter().for_each(&mut each);
        range.start += count;
    }
    Ok(())
}

/// The dictionary, if there is one: its bytes and the prepared form.
pub(crate) fn dictionary(
    file: &File,
    footer: &Footer,
) -> Result<Option<(Vec<u8>, DDict<'static>)>, Fault> {
    if footer.dictionary.length == 0 {
        return Ok(None);
    }
    let bytes = read_section(file, &footer.dictionary)?;
    let prepared = DDict::try_create(&bytes).ok_or(Fault::Damaged {
        offset: footer.dictionary.offset,
        what: "the dictionary is not valid",
    })?;
    Ok(Some((bytes, prepared)))
}

/// Reads a whole section. Its length was checked against the file's length and the number of
/// chunks.
pub(crate) fn read_section(file: &File, section: &Section) -> Result<Vec<u8>, Fault> {
    let mut bytes = vec![0; section.length as usize];
    read_exact(file, section.offset, &mut bytes)?;
    if crc_fast::crc32_iscsi(&bytes) != section.checksum {
        return Err(Fault::Damaged {
            offset: section.offset,
            what: "the checksum of a section is wrong",
        });
    }
    Ok(bytes)
}

pub(crate) fn read_exact(file: &File, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
    file.read_exact_at(bytes, offset)
        .map_err(|source| Fault::Read {
            offset,
            length: bytes.len() as u64,
            source,
        })
}
