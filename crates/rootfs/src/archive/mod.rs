//! Reads the headers of a tar stream: ustar, PAX, GNU long names and sparse files.
//!
//! The archive may be hostile: an extension is refused by its declared size before it is read.
//! Contents are skipped; an entry says at which offset they begin.

mod pax;
mod sparse;
#[cfg(test)]
mod tests;

use crate::tree::MAX_PATH;
use pax::Pax;
use sparse::PaxSparse;
use std::collections::BTreeMap;
use std::io::{self, Read};
use thiserror::Error;

pub use sparse::Sparse;

const BLOCK: usize = 512;
/// The largest PAX or long-name record, and the most that is kept of all PAX
/// records of one entry, bytes.
pub const MAX_EXTENSION: u64 = 1024 * 1024;

/// A run of bytes that the archive holds; holes are between runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
}

/// Type of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link to this target.
    Symlink(Vec<u8>),
    /// A hard link to this earlier entry.
    HardLink(Vec<u8>),
    /// A character device, major and minor.
    CharDevice(u32, u32),
    /// A block device, major and minor.
    BlockDevice(u32, u32),
    /// A named pipe.
    Fifo,
}

/// An entry's header, with its extensions applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Path as written in the archive.
    pub path: Vec<u8>,
    /// Its type.
    pub kind: EntryKind,
    /// Permission bits, 07777.
    pub mode: u16,
    /// Owner's user id.
    pub uid: u32,
    /// Owner's group id.
    pub gid: u32,
    /// Modification time, seconds since 1970; earlier times become 0.
    pub mtime: u64,
    /// Bytes of its contents in the archive.
    pub size: u64,
    /// Offset of these contents in the archive, bytes.
    pub offset: u64,
    /// Which parts of the file these contents are, if the file has holes.
    pub sparse: Option<Sparse>,
    /// Extended attributes (PAX `SCHILY.xattr.*`).
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Why an archive can't be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// Reading the stream failed.
    #[error("the archive can't be read at byte {offset}")]
    Read {
        /// Offset in the stream, bytes.
        offset: u64,
        /// The stream's error.
        #[source]
        source: io::Error,
    },
    /// The archive is empty, or ends in the middle of an entry.
    #[error("the archive is truncated at byte {0}")]
    Truncated(u64),
    /// A header's checksum or a number in it is wrong.
    #[error("byte {offset} of the archive is not a tar header: {what}")]
    BadHeader {
        /// Offset of the header, bytes.
        offset: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// An extension is larger than [`MAX_EXTENSION`].
    #[error("the extension header at byte {offset} has {size} bytes, the limit is {MAX_EXTENSION}")]
    ExtensionTooLarge {
        /// Offset of the header, bytes.
        offset: u64,
        /// Declared size, bytes.
        size: u64,
    },
    /// The extensions of one entry are larger than [`MAX_EXTENSION`] together.
    #[error(
        "the extension headers of one entry, up to byte {offset} of the archive, are larger than the limit of {MAX_EXTENSION} bytes"
    )]
    ExtensionsTooLarge {
        /// Offset of the last header read, bytes.
        offset: u64,
    },
    /// An entry has an unsupported type.
    #[error("\"{path}\" has the unsupported tar type '{kind}'")]
    Unsupported {
        /// The entry's path.
        path: String,
        /// The type byte of its header.
        kind: char,
    },
}

/// A stream that can skip bytes, without reading them where possible.
pub trait Skip {
    /// Skips at most `bytes`. Returns how many; fewer only at the end of the stream.
    ///
    /// # Errors
    ///
    /// If the stream can't be read.
    fn skip(&mut self, bytes: u64) -> io::Result<u64>;
}

impl<S: Skip> Skip for &mut S {
    fn skip(&mut self, bytes: u64) -> io::Result<u64> {
        (**self).skip(bytes)
    }
}

impl Skip for &[u8] {
    fn skip(&mut self, bytes: u64) -> io::Result<u64> {
        let most = bytes.min(self.len() as u64);
        *self = &self[most as usize..];
        Ok(most)
    }
}

/// Reads a tar stream entry by entry.
pub struct Archive<R> {
    reader: R,
    offset: u64,
    /// Bytes of the current entry that are not read yet, and the padding behind them.
    remaining: u64,
    padding: u64,
    global: Pax,
}

impl<R: Read + Skip> Archive<R> {
    /// Starts at the beginning of a stream.
    pub fn new(reader: R) -> Archive<R> {
        Archive {
            reader,
            offset: 0,
            remaining: 0,
            padding: 0,
            global: Pax::global(),
        }
    }

    /// Bytes of the stream that were read or skipped.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the stream at its current position.
    pub fn into_inner(self) -> R {
        self.reader
    }

    /// Reads the next entry and skips what is left of the one before. `None` at the end mark, or at
    /// the end of a stream without one.
    ///
    /// # Errors
    ///
    /// If the stream can't be read, is empty or ends within an entry, a header is malformed,
    /// extensions are larger than [`MAX_EXTENSION`], or the entry has an unsupported type.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, ArchiveError> {
        let mut local = Pax::default();
        let (mut long_name, mut long_link) = (None, None);
        loop {
            self.skip_rest()?;
            let at = self.offset;
            let Some(header) = self.read_header()? else {
                return Ok(None);
            };
            let bad = |what| ArchiveError::BadHeader { offset: at, what };
            let size = number_in(&header.as_old().size, header.entry_size())
                .map_err(|_| bad("its size is not a number"))?;
            let malformed = || bad("its PAX record is malformed");
            match header.entry_type().as_byte() {
                b'L' => long_name = Some(trim_nul(self.read_extension(at, size)?)),
                b'K' => long_link = Some(trim_nul(self.read_extension(at, size)?)),
                b'x' => {
                    let record = self.read_extension(at, size)?;
                    local.parse(&record).ok_or_else(malformed)?;
                    if local.kept > MAX_EXTENSION {
                        return Err(ArchiveError::ExtensionsTooLarge { offset: at });
                    }
                }
                b'g' => {
                    let record = self.read_extension(at, size)?;
                    self.global.parse(&record).ok_or_else(malformed)?;
                }
                _ => {
                    let pax = local.with_global(&self.global);
                    let mut entry = build_entry(&header, at, size, &pax, long_name, long_link)?;
                    self.find_contents(&header, at, &pax, &mut entry)?;
                    return Ok(Some(entry));
                }
            }
        }
    }

    /// Reads the map of a file with holes. The stream is then at the beginning of the contents.
    fn find_contents(
        &mut self,
        header: &tar::Header,
        at: u64,
        pax: &Pax,
        entry: &mut Entry,
    ) -> Result<(), ArchiveError> {
        let bad = |what| ArchiveError::BadHeader { offset: at, what };
        let mut next = || {
            let mut block = [0; BLOCK];
            match self.read_block(&mut block)? {
                true => Ok(block),
                false => Err(ArchiveError::Truncated(self.offset)),
            }
        };
        if entry.kind == EntryKind::File {
            if header.entry_type().as_byte() == b'S' {
                entry.sparse = Some(sparse::old(header, entry.size, next, &bad)?);
            } else {
                let found = sparse::pax(pax, entry.size)
                    .ok_or_else(|| bad("its map of holes is malformed"))?;
                entry.sparse = match found {
                    PaxSparse::None => None,
                    PaxSparse::Map(map) => Some(map),
                    PaxSparse::InContents(size) => {
                        let (map, taken) = sparse::in_contents(size, entry.size, &mut next, &bad)?;
                        entry.size -= taken;
                        Some(map)
                    }
                };
            }
        }
        entry.offset = self.offset;
        self.set_remaining(entry.size, at)
    }

    /// Reads contents of the current entry; returns 0 at their end.
    fn read_content(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        let most = usize::try_from(self.remaining)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let got = self.read_some(&mut buffer[..most])?;
        if got == 0 {
            return Err(ArchiveError::Truncated(self.offset));
        }
        self.remaining -= got as u64;
        Ok(got)
    }

    fn set_remaining(&mut self, size: u64, at: u64) -> Result<(), ArchiveError> {
        let padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
        size.checked_add(padding).ok_or(ArchiveError::BadHeader {
            offset: at,
            what: "its size is too large",
        })?;
        self.remaining = size;
        self.padding = padding;
        Ok(())
    }

    fn skip_rest(&mut self) -> Result<(), ArchiveError> {
        let want = self.remaining + self.padding;
        let got = self
            .reader
            .skip(want)
            .map_err(|source| ArchiveError::Read {
                offset: self.offset,
                source,
            })?;
        self.offset += got;
        if got < want {
            return Err(ArchiveError::Truncated(self.offset));
        }
        (self.remaining, self.padding) = (0, 0);
        Ok(())
    }

    /// Reads a header block and checks its checksum; `None` at the end mark or the stream's end.
    fn read_header(&mut self) -> Result<Option<tar::Header>, ArchiveError> {
        let at = self.offset;
        let mut block = [0; BLOCK];
        if !self.read_block(&mut block)? {
            // Many writers leave the end mark out: the archive is still complete.
            return if at == 0 {
                Err(ArchiveError::Truncated(0))
            } else {
                Ok(None)
            };
        }
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let header = tar::Header::from_byte_slice(&block).clone();
        let sum: u32 = block[..148]
            .iter()
            .chain(&block[156..])
            .map(|byte| u32::from(*byte))
            .sum::<u32>()
            + 8 * u32::from(b' ');
        if header.cksum().ok() != Some(sum) {
            return Err(ArchiveError::BadHeader {
                offset: at,
                what: "its checksum does not match",
            });
        }
        Ok(Some(header))
    }

    fn read_extension(&mut self, at: u64, size: u64) -> Result<Vec<u8>, ArchiveError> {
        if size > MAX_EXTENSION {
            return Err(ArchiveError::ExtensionTooLarge { offset: at, size });
        }
        self.set_remaining(size, at)?;
        let mut record = vec![0; size as usize];
        let mut filled = 0;
        while filled < record.len() {
            filled += self.read_content(&mut record[filled..])?;
        }
        Ok(record)
    }

    /// Fills a block. Returns false if the stream ends right before it.
    fn read_block(&mut self, block: &mut [u8; BLOCK]) -> Result<bool, ArchiveError> {
        let mut filled = 0;
        while filled < BLOCK {
            match self.read_some(&mut block[filled..])? {
                0 if filled == 0 => return Ok(false),
                0 => return Err(ArchiveError::Truncated(self.offset)),
                got => filled += got,
            }
        }
        Ok(true)
    }

    fn read_some(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        loop {
            match self.reader.read(buffer) {
                Ok(got) => {
                    self.offset += got as u64;
                    return Ok(got);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(ArchiveError::Read {
                        offset: self.offset,
                        source,
                    });
                }
            }
        }
    }
}

fn build_entry(
    header: &tar::Header,
    at: u64,
    size: u64,
    pax: &Pax,
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
) -> Result<Entry, ArchiveError> {
    let bad = |what| ArchiveError::BadHeader { offset: at, what };
    let number = |key: &[u8]| -> Result<Option<u64>, ArchiveError> {
        let number = |value| number_of(value).ok_or(bad("a PAX number is malformed"));
        pax.get(key).map(number).transpose()
    };
    let path = pax
        .get(b"GNU.sparse.name")
        .or(pax.get(b"path"))
        .map(<[u8]>::to_vec)
        .or(long_name)
        .unwrap_or_else(|| header.path_bytes().into_owned());
    let link = || {
        link_of(header, pax, long_link).ok_or(bad(
            "its link target is missing, too long, or contains a NUL byte",
        ))
    };
    let device = || device_of(header).map_err(bad);
    let type_byte = header.entry_type().as_byte();
    let kind = match type_byte {
        // Old archives mark a folder only by the slash at the end of its name.
        b'\0' | b'0' if path.ends_with(b"/") => Some(EntryKind::Folder),
        b'\0' | b'0' | b'7' | b'S' => Some(EntryKind::File),
        b'1' => Some(EntryKind::HardLink(link()?)),
        b'2' => Some(EntryKind::Symlink(link()?)),
        b'3' => device().map(|(major, minor)| Some(EntryKind::CharDevice(major, minor)))?,
        b'4' => device().map(|(major, minor)| Some(EntryKind::BlockDevice(major, minor)))?,
        b'5' => Some(EntryKind::Folder),
        b'6' => Some(EntryKind::Fifo),
        _ => None,
    };
    let kind = kind.ok_or_else(|| ArchiveError::Unsupported {
        path: String::from_utf8_lossy(&path).into_owned(),
        kind: char::from(type_byte),
    })?;
    let size = match kind {
        EntryKind::File => number(b"size")?.unwrap_or(size),
        // The other types have no contents, whatever size the header claims. GNU tar and Go read
        // archives the same way.
        _ => 0,
    };
    let id = |key: &[u8], field: io::Result<u64>| -> Result<u32, ArchiveError> {
        let value = match number(key)? {
            Some(value) => value,
            None => field.map_err(|_| bad("its owner is not a number"))?,
        };
        u32::try_from(value).map_err(|_| bad("its owner is out of range"))
    };
    let old = header.as_old();
    Ok(Entry {
        mode: (number_in(&old.mode, header.mode().map(u64::from))
            .map_err(|_| bad("its mode is not a number"))?
            & 0o7777) as u16,
        uid: id(b"uid", number_in(&old.uid, header.uid()))?,
        gid: id(b"gid", number_in(&old.gid, header.gid()))?,
        mtime: match number(b"mtime")? {
            Some(seconds) => seconds,
            // A negative time in base-256 reads as a huge number.
            None => header
                .mtime()
                .ok()
                .filter(|seconds| *seconds < 1 << 62)
                .unwrap_or(0),
        },
        xattrs: xattrs_of(pax),
        path,
        kind,
        size,
        offset: 0,
        sparse: None,
    })
}

/// The target of a link; `None` if there is none that can be used.
fn link_of(header: &tar::Header, pax: &Pax, long_link: Option<Vec<u8>>) -> Option<Vec<u8>> {
    pax.get(b"linkpath")
        .map(<[u8]>::to_vec)
        .or(long_link)
        .or_else(|| header.link_name_bytes().map(|name| name.into_owned()))
        .filter(|target| !target.is_empty() && target.len() <= MAX_PATH && !target.contains(&0))
}

fn xattrs_of(pax: &Pax) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let xattr = |(key, value): (&Vec<u8>, &Vec<u8>)| {
        let name = key.strip_prefix(b"SCHILY.xattr.")?;
        Some((name.to_vec(), value.clone()))
    };
    pax.values.iter().filter_map(xattr).collect()
}

/// A number in a PAX record. A time may have a fraction and a sign; a time before 1970 counts as 0.
fn number_of(value: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(value).ok()?;
    if text.starts_with('-') {
        return Some(0);
    }
    text.split('.').next()?.parse().ok()
}

/// The numbers of the device, or what is wrong with them.
fn device_of(header: &tar::Header) -> Result<(u32, u32), &'static str> {
    let field = |value: io::Result<Option<u32>>| {
        let value = value.ok().flatten();
        value.ok_or("its device number is malformed")
    };
    // Old headers lack these fields, and some writers leave them empty.
    let blank = header
        .as_ustar()
        .is_some_and(|ustar| is_blank(&ustar.dev_major))
        || header.as_gnu().is_some_and(|gnu| is_blank(&gnu.dev_major));
    if blank {
        return Ok((0, 0));
    }
    let (major, minor) = (field(header.device_major())?, field(header.device_minor())?);
    if major > 0xfff || minor > 0xf_ffff {
        return Err("its device number is out of range");
    }
    Ok((major, minor))
}

/// A number in a header; 0 if the field is empty, because some writers leave it so.
fn number_in(field: &[u8], read: io::Result<u64>) -> io::Result<u64> {
    if is_blank(field) { Ok(0) } else { read }
}

fn is_blank(field: &[u8]) -> bool {
    field.iter().all(|byte| [0, b' '].contains(byte))
}

fn trim_nul(mut name: Vec<u8>) -> Vec<u8> {
    if let Some(end) = name.iter().position(|byte| *byte == 0) {
        name.truncate(end);
    }
    name
}
