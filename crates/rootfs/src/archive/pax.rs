//! PAX extended headers (POSIX `pax`, "pax Extended Header").

use super::Segment;
use std::collections::BTreeMap;

/// Keys that are used, in addition to attributes and maps of holes.
const USED_KEYS: [&[u8]; 6] = [b"path", b"linkpath", b"size", b"uid", b"gid", b"mtime"];
/// Longest value of a record that is not an attribute, bytes.
const MAX_VALUE: usize = 8192;

/// Keys that describe a single entry. A global header may not set them: it would give one name or
/// length to all later entries, and contents would be read as headers.
const PER_ENTRY_KEYS: [&[u8]; 3] = [b"path", b"linkpath", b"size"];

/// The PAX records that apply to an entry.
#[derive(Debug, Clone, Default)]
pub(super) struct Pax {
    pub values: BTreeMap<Vec<u8>, Vec<u8>>,
    /// GNU sparse format 0.0 repeats `GNU.sparse.offset` and `GNU.sparse.numbytes` in pairs.
    pub segments: Vec<Segment>,
    /// An offset whose length has not been read yet.
    offset: Option<u64>,
    /// Whether the records are of global headers, which apply to all later entries.
    global: bool,
    /// Bytes kept. One header is limited, but an entry may have any number of headers.
    pub kept: u64,
}

impl Pax {
    /// No records yet, of global headers.
    pub fn global() -> Pax {
        Pax {
            global: true,
            ..Pax::default()
        }
    }

    pub fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    /// Parses records of the form `LENGTH KEY=VALUE\n`, where the length counts the whole record.
    /// `None` if one is malformed.
    pub fn parse(&mut self, mut record: &[u8]) -> Option<()> {
        while !record.is_empty() {
            let space = record.iter().take(20).position(|byte| *byte == b' ')?;
            let length: usize = decimal(&record[..space])?.try_into().ok()?;
            let line = record.get(space + 1..length)?.strip_suffix(b"\n")?;
            let equals = line.iter().position(|byte| *byte == b'=')?;
            self.add(&line[..equals], &line[equals + 1..])?;
            record = &record[length..];
        }
        Some(())
    }

    /// Keeps only the records an entry may need, because those of a global header are copied to
    /// every entry. In a global header, attributes (which nobody writes there), maps of holes and
    /// keys that describe a single entry are ignored.
    fn add(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        let attribute = key.starts_with(b"SCHILY.xattr.");
        let sparse = key.starts_with(b"GNU.sparse.");
        let is_per_entry = attribute || sparse || PER_ENTRY_KEYS.contains(&key);
        let is_used = attribute || sparse || USED_KEYS.contains(&key);
        if !is_used || is_per_entry && self.global {
            return Some(());
        }
        if !attribute && key != b"GNU.sparse.map" && value.len() > MAX_VALUE {
            return None;
        }
        match key {
            b"GNU.sparse.offset" => self.offset = Some(decimal(value)?),
            b"GNU.sparse.numbytes" => {
                self.segments.push(Segment {
                    offset: self.offset.take()?,
                    len: decimal(value)?,
                });
                self.kept += size_of::<Segment>() as u64;
            }
            // POSIX: an empty value deletes the key. An attribute may be empty.
            _ if value.is_empty() && !attribute => {
                if let Some(old) = self.values.remove(key) {
                    self.kept -= (key.len() + old.len()) as u64;
                }
            }
            _ => {
                if let Some(old) = self.values.insert(key.to_vec(), value.to_vec()) {
                    self.kept -= (key.len() + old.len()) as u64;
                }
                self.kept += (key.len() + value.len()) as u64;
            }
        }
        Some(())
    }

    /// Adds the records of global headers for keys that this entry's own headers don't set.
    pub fn with_global(mut self, global: &Pax) -> Pax {
        for (key, value) in &global.values {
            if !self.values.contains_key(key) {
                self.values.insert(key.clone(), value.clone());
            }
        }
        self
    }
}

/// Parses a number that consists of digits only.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    digits.then(|| std::str::from_utf8(text).ok()?.parse().ok())?
}
