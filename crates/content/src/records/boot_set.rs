//! `boot.json`: what a guest that booted has read of its image.

use super::both_ways;
use crate::durable::{self, LoadError};
use crate::model::image as live;
use jiffy_wire::vmm;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

const FORMAT: &str = "jiffy-boot-set";
const VERSION: u32 = 1;

/// See [`live::BootSet`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootSet {
    digest: String,
    reads: ReadUnits,
}
both_ways!(
    BootSet,
    live::BootSet {
        digest: same,
        reads: into
    }
);

/// See [`vmm::ReadUnits`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadUnits {
    unit: u32,
    rows: Vec<(u32, u32)>,
}
both_ways!(
    ReadUnits,
    vmm::ReadUnits {
        unit: same,
        rows: same
    }
);

/// Writes a boot set, not synced: it is only a hint.
///
/// # Errors
///
/// If the file can't be written or renamed.
pub fn save(path: &Path, set: live::BootSet) -> io::Result<()> {
    durable::save(path, FORMAT, VERSION, &BootSet::from(set), false)
}

/// Reads what [`save`] wrote.
///
/// # Errors
///
/// If the file can't be read, is damaged, or is of another version.
pub fn load(path: &Path) -> Result<live::BootSet, LoadError> {
    durable::load::<BootSet>(path, FORMAT, VERSION).map(Into::into)
}
