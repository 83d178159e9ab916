//! `prefault.json`: ranges that a guest writes to soon after a restore of a golden snapshot.

use super::{both_ways, list};
use crate::durable::{self, LoadError};
use jiffy_wire::vmm::Extent;
use serde::{Deserialize, Serialize, Serializer};
use std::io;
use std::path::Path;

const FORMAT: &str = "jiffy-prefault";
const VERSION: u32 = 1;

/// See [`Extent`]. Written as `[offset, length]`; an object with names is read, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Range {
    offset: u64,
    length: u64,
}
both_ways!(
    Range,
    Extent {
        offset: same,
        length: same
    }
);

impl Serialize for Range {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.offset, self.length).serialize(serializer)
    }
}

/// Writes the ranges.
///
/// # Errors
///
/// If the file can't be written, synced or renamed.
pub fn save(path: &Path, ranges: &[Extent]) -> io::Result<()> {
    let saved: Vec<Range> = list(ranges.to_vec());
    durable::save(path, FORMAT, VERSION, &saved, true)
}

/// Reads what [`save`] wrote.
///
/// # Errors
///
/// If the file can't be read, is damaged, or is of another version.
pub fn load(path: &Path) -> Result<Vec<Extent>, LoadError> {
    durable::load::<Vec<Range>>(path, FORMAT, VERSION).map(list)
}
