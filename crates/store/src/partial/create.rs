//! Creates a partial image, and drops what one has fetched.

use super::blocks::BLOCK;
use super::map_path;
use crate::error::{Fault, ImageError, WriteError};
use crate::format::manifest::ENTRY_BYTES;
use crate::format::{Fields, Footer, Header, ImageId, footer, header};
use crate::outline::manifest_id;
use crate::presence::{PresenceFault, PresenceMap};
use crate::sparse::SparseFile;
use crate::temporary::{Existing, Temporary};
use jiffy_sys::locked::Locked;
use jiffy_wire::disk::MapHeader;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::slice;

/// The latest offset of the first chunk; each chunk follows the one before.
const FIRST_CHUNK: u64 = 4096;

/// Creates a partial image at `path`: a sparse file as long as the whole image, with its header and
/// its last bytes, `tail`, which must contain the whole manifest. The manifest is checked against
/// `id`, which must come from a trusted source.
///
/// # Errors
///
/// If `tail` is not the end of an image of this id and length, lacks a part of the manifest, or
/// names a backing file; if `path` exists, its map is in use, or a file can't be written. No files
/// are left behind.
pub fn create(path: &Path, length: u64, tail: &[u8], id: ImageId) -> Result<(), WriteError> {
    let failed = |fault: Fault| WriteError::Image(ImageError::new(path, fault));
    let (header, footer) = read_ends(length, tail).map_err(failed)?;
    if footer.backing.length > 0 {
        return Err(failed(super::with_backing(&footer)));
    }
    let start = length - tail.len() as u64;
    if footer.data_end() < start {
        return Err(WriteError::Options(format!(
            "the last {} bytes of {} do not contain its whole manifest, which begins {} bytes \
             before the end",
            tail.len(),
            path.display(),
            length - footer.data_end()
        )));
    }
    // The map is as long as the file says it is. The entries are in the tail.
    let entries = footer.entries.length / ENTRY_BYTES as u64;
    if footer.data_end() > FIRST_CHUNK + entries * u64::from(footer.chunk_size) {
        return Err(failed(Fault::Damaged {
            offset: length - footer::BYTES as u64,
            what: "the file has more space for chunks than its chunks can fill",
        }));
    }
    // Locked until the image has its name, because two processes may create the same image at once.
    let map = MapHeader {
        unit: BLOCK,
        length,
        tail: start.max(header::BYTES as u64),
        image: id.0,
        boot: [0; 16],
    };
    if path.exists() {
        return Err(WriteError::Target {
            path: path.to_owned(),
            source: io::ErrorKind::AlreadyExists.into(),
        });
    }
    let map = PresenceMap::create(&map_path(path), map).map_err(|error| match error.fault {
        PresenceFault::Io(source) => WriteError::Target {
            path: error.path,
            source,
        },
        other => WriteError::Options(format!("{}: {other}", error.path.display())),
    })?;
    let written = || {
        let temporary = Temporary::create(path)?;
        let file = temporary.file();
        file.set_len(length)
            .and_then(|()| file.write_all_at(&header.encode(), 0))
            .and_then(|()| file.write_all_at(tail, start))
            .map_err(|error| temporary.failed(error))?;
        if footer.id != id || manifest_id(file, &footer).map_err(failed)? != id {
            return Err(failed(Fault::Damaged {
                offset: length - footer::BYTES as u64,
                what: "its manifest is not that of the requested image",
            }));
        }
        // A sparse file without its map would be taken for a whole image, so the map is synced
        // first.
        map.sync().map_err(|source| WriteError::Target {
            path: map.path().to_owned(),
            source,
        })?;
        temporary.commit(Existing::Keep)
    };
    let written = written();
    if written.is_err() && !path.exists() {
        let _ = fs::remove_file(map.path());
    }
    written
}

/// Header and footer of a file of which only the last bytes are known.
fn read_ends(length: u64, tail: &[u8]) -> Result<(Header, Footer), Fault> {
    let truncated = Fault::Truncated {
        length,
        offset: length.saturating_sub(footer::BYTES as u64),
    };
    let least = (header::BYTES + footer::BYTES) as u64;
    let Some(last) = tail
        .last_chunk()
        .filter(|_| length >= least.max(tail.len() as u64))
    else {
        return Err(truncated);
    };
    // The header can be derived from the footer.
    let mut fields = Fields(&last[12..]);
    let header = Header {
        chunk_size: fields.u32(),
        size: fields.u64(),
    };
    let header = Header::decode(&header.encode())?;
    let footer = Footer::decode(last, length, &header)?;
    Ok((header, footer))
}

/// Drops all chunks of a partial image that is not open; they are fetched again when they are
/// read. Returns the bytes that were freed; `None` if it is in use, or not partial.
///
/// # Errors
///
/// If the files can't be opened, locked or changed. `InvalidData` if the map is not valid, or is
/// that of another file.
pub fn shrink(path: &Path) -> io::Result<Option<u64>> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let Some(file) = Locked::try_exclusive(file)? else {
        return Ok(None);
    };
    if !super::is_partial(path) {
        return Ok(None);
    }
    let map = match PresenceMap::open(&map_path(path)) {
        Ok(map) => map,
        Err(error) => {
            return match error.fault {
                PresenceFault::InUse => Ok(None),
                PresenceFault::Io(error) => Err(error),
                fault => Err(io::Error::new(io::ErrorKind::InvalidData, fault)),
            };
        }
    };
    let head = *map.header();
    if head.length != file.metadata()?.len() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the map is that of another file",
        ));
    }
    let sparse = SparseFile::<()>::new(file, map, header::BYTES as u64..head.tail);
    // All units, also those that are header and tables alone: they are always here.
    let all = 0..sparse.map().units();
    sparse.drop_units(slice::from_ref(&all), false).map(Some)
}
