//! Writes chunks in order, then the manifest, without seeking.

use super::workers::{Batch, Item};
use super::{WriteOptions, Written, plan};
use crate::codec::Codec;
use crate::error::WriteError;
use crate::format::{
    self, BackingRef, ContentHash, Entry, Footer, GROUP, Group, Header, IdHasher, ImageId, Kind,
    ParentRef, Section, header, manifest::ENTRY_BYTES,
};
use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;

/// How many different chunks are remembered to find equal ones: 48 MiB of memory at most, all
/// chunks of 8 GiB in chunks of 8 KiB.
const MAX_REMEMBERED: usize = 1 << 20;
/// Offsets have 48 bits.
const MAX_FILE: u64 = 1 << 48;
/// Raw chunks begin at page boundaries if nothing is compressed.
const PAGE: u64 = 4096;

/// An image that is being written.
pub(super) struct Stream<W> {
    output: W,
    at: u64,
    header: Header,
    working_set: Vec<u8>,
    known: HashMap<ContentHash, Entry>,
    chunks: Vec<(u32, Entry, ContentHash)>,
    hot: std::ops::Range<u64>,
    written: Written,
}

impl<W: Write> Stream<W> {
    pub(super) fn begin(
        output: W,
        size: u64,
        options: &WriteOptions,
    ) -> Result<Stream<W>, WriteError> {
        let chunk_size = options.chunk_size;
        let header = Header { chunk_size, size };
        let working_set = options.working_set.as_deref().unwrap_or_default();
        let chunks = format::chunks(size, chunk_size).unwrap_or(0);
        let mut stream = Stream {
            output,
            at: 0,
            header,
            working_set: plan::ranges_of(working_set)
                .iter()
                .flat_map(|range| [range.start, range.end - range.start])
                .flat_map(u32::to_le_bytes)
                .collect(),
            known: HashMap::new(),
            chunks: Vec::new(),
            hot: 0..0,
            written: Written {
                id: ImageId([0; 16]),
                size,
                chunk_size,
                chunks,
                zero: chunks,
                raw: 0,
                compressed: 0,
                in_parent: 0,
                in_backing: 0,
                duplicates: 0,
                stored_bytes: 0,
                file_bytes: 0,
            },
        };
        stream.put(&header.encode())?;
        if options.codec == Codec::None {
            stream.put(&[0; PAGE as usize - header::BYTES])?;
        }
        Ok(stream)
    }

    pub(super) fn add(&mut self, batch: Batch) -> Result<(), WriteError> {
        let Batch { items, bytes } = batch;
        let mut place = self.at;
        // Bytes up to `kept` are written; bytes up to `seen` were examined.
        let (mut kept, mut seen) = (0, 0);
        for item in items {
            let length = item.length as usize;
            seen += length;
            let known = self.known.get(&item.hash).copied();
            let entry = match known {
                _ if !item.kind.is_stored() => entry(&item, item.in_backing),
                Some(earlier) => {
                    self.put(&bytes[kept..seen - length])?;
                    kept = seen;
                    self.written.duplicates += 1;
                    earlier
                }
                None => {
                    let entry = entry(&item, place);
                    place = entry.range().end;
                    if place >= MAX_FILE {
                        return Err(WriteError::Options(
                            "the image would be larger than 256 TiB".into(),
                        ));
                    }
                    if self.known.len() < MAX_REMEMBERED {
                        self.known.insert(item.hash, entry);
                    }
                    if item.hot {
                        self.hot = match self.hot.is_empty() {
                            true => entry.range(),
                            false => self.hot.start..place,
                        };
                    }
                    entry
                }
            };
            let count = match item.kind {
                Kind::Parent => &mut self.written.in_parent,
                Kind::Backing => &mut self.written.in_backing,
                Kind::Raw => &mut self.written.raw,
                _ => &mut self.written.compressed,
            };
            *count += 1;
            self.written.zero -= 1;
            self.chunks.push((item.index, entry, item.hash));
        }
        self.put(&bytes[kept..])?;
        debug_assert_eq!(self.at, place);
        Ok(())
    }

    pub(super) fn finish(
        mut self,
        dictionary: &[u8],
        parent: Option<ParentRef>,
        backing: Option<&BackingRef>,
    ) -> Result<Written, WriteError> {
        self.written.stored_bytes = self.at - header::BYTES as u64;
        self.known = HashMap::new();
        let mut chunks = std::mem::take(&mut self.chunks);
        chunks.sort_unstable_by_key(|(index, ..)| *index);
        let working_set = std::mem::take(&mut self.working_set);
        let parent = parent.map(|parent| parent.encode()).unwrap_or_default();
        // These sections are always read whole, so each has one checksum.
        let [dictionary, parent, working_set] =
            [dictionary, &parent, &working_set].map(|bytes| (crc_fast::crc32_iscsi(bytes), bytes));
        let dictionary = self.section(dictionary.0, dictionary.1)?;
        let parent = self.section(parent.0, parent.1)?;
        let working_set = self.section(working_set.0, working_set.1)?;
        let (table, entries, id) = self.manifest(&chunks);
        let groups = self.section(0, &table)?;
        let entries = self.section(0, &entries)?;
        let hashes: Vec<u8> = chunks.iter().flat_map(|(.., hash)| *hash).collect();
        let hashes = self.section(0, &hashes)?;
        // An image without chunks in the backing file does not refer to it.
        let backing = backing
            .filter(|_| self.written.in_backing > 0)
            .map(BackingRef::encode)
            .unwrap_or_default();
        let backing = self.section(crc_fast::crc32_iscsi(&backing), &backing)?;
        let footer = Footer {
            chunk_size: self.header.chunk_size,
            size: self.header.size,
            id,
            hot: self.hot.clone(),
            dictionary,
            parent,
            working_set,
            groups,
            entries,
            hashes,
            backing,
        };
        self.put(&footer.encode())?;
        self.output.flush().map_err(failed)?;
        Ok(Written {
            id,
            file_bytes: self.at,
            ..self.written
        })
    }

    /// The groups, the entries, and the id.
    fn manifest(&self, chunks: &[(u32, Entry, ContentHash)]) -> (Vec<u8>, Vec<u8>, ImageId) {
        let mut id = IdHasher::new(self.header.size, self.header.chunk_size);
        let mut table = Vec::new();
        let mut entries: Vec<u8> = Vec::with_capacity(chunks.len() * ENTRY_BYTES);
        let mut left = chunks;
        for number in 0..self.written.chunks.div_ceil(GROUP) {
            let count = left.partition_point(|(index, ..)| index / GROUP == number);
            let (members, others) = left.split_at(count);
            left = others;
            let start = entries.len();
            let mut group = Group {
                bitmap: 0,
                first: (start / ENTRY_BYTES) as u32,
                checksum: 0,
            };
            for (index, entry, _) in members {
                group.bitmap |= 1 << (index % GROUP);
                entries.extend(entry.encode());
            }
            group.checksum = group.checksum(number, &entries[start..]);
            id.bitmap(group.bitmap);
            table.extend(group.encode());
        }
        chunks.iter().for_each(|(.., hash)| id.chunk(hash));
        (table, entries, id.finish())
    }

    fn section(&mut self, checksum: u32, bytes: &[u8]) -> Result<Section, WriteError> {
        let section = Section {
            offset: self.at,
            length: bytes.len() as u64,
            checksum,
        };
        self.put(bytes)?;
        Ok(section)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.output.write_all(bytes).map_err(failed)?;
        self.at += bytes.len() as u64;
        Ok(())
    }
}

fn entry(item: &Item, offset: u64) -> Entry {
    Entry {
        checksum: item.checksum,
        length: item.length,
        offset,
        kind: item.kind,
    }
}

/// The caller adds the path.
fn failed(source: std::io::Error) -> WriteError {
    WriteError::Target {
        path: PathBuf::new(),
        source,
    }
}
