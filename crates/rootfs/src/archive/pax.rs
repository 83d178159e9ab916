//! PAX extended headers (POSIX `pax`, "pax Extended Header").

use super::Segment;
use std::collections::BTreeMap;

/// The records that are used, beside attributes and maps of holes.
const USED: [&[u8]; 6] = [b"path", b"linkpath", b"size", b"uid", b"gid", b"mtime"];
/// The longest value of a record that is no attribute, bytes.
const MAX_VALUE: usize = 8192;

/// Those that say what one entry is: from a global header they would give one name or
/// one length to all that follow, and contents would be read as headers.
const OF_ONE_ENTRY: [&[u8]; 3] = [b"path", b"linkpath", b"size"];

/// Records that hold for an entry.
#[derive(Debug, Clone, Default)]
pub(super) struct Pax {
    pub values: BTreeMap<Vec<u8>, Vec<u8>>,
    /// `GNU.sparse.offset` and `GNU.sparse.numbytes` come many times, in
    /// pairs: GNU sparse format 0.0.
    pub segments: Vec<Segment>,
    /// An offset whose length is still to come.
    offset: Option<u64>,
    /// They are for all entries to come.
    global: bool,
    /// Bytes of what is kept: headers are limited, their number is not.
    pub kept: u64,
}

impl Pax {
    /// Records of global headers.
    pub fn global() -> Pax {
        Pax {
            global: true,
            ..Pax::default()
        }
    }

    pub fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    /// Records: `LENGTH KEY=VALUE\n`, the length counting all of it.
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

    /// Keeps what an entry may need. The rest is left out: records of a global
    /// header are looked at again for every entry. Those are no attributes, which
    /// nobody writes there, and can't say what one entry is or where its holes are.
    fn add(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        let attribute = key.starts_with(b"SCHILY.xattr.");
        let sparse = key.starts_with(b"GNU.sparse.");
        let of_one_entry = attribute || sparse || OF_ONE_ENTRY.contains(&key);
        let is_used = attribute || sparse || USED.contains(&key);
        if !is_used || of_one_entry && self.global {
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
            // An empty value takes the key back, as POSIX has it; an empty
            // attribute is an attribute nevertheless.
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

    /// These records over those of a global header.
    pub fn over(mut self, global: &Pax) -> Pax {
        for (key, value) in &global.values {
            if !self.values.contains_key(key) {
                self.values.insert(key.clone(), value.clone());
            }
        }
        self
    }
}

/// Digits and nothing else.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    digits.then(|| std::str::from_utf8(text).ok()?.parse().ok())?
}
