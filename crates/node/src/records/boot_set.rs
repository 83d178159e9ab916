//! `boot.json`: what a guest that booted has read of its image.

use super::both_ways;
use crate::durable::{self, LoadError};
use crate::images::boot;
use jiffy_wire::vmm;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

const FORMAT: &str = "jiffy-boot-set";
const VERSION: u32 = 1;

/// See [`boot::BootSet`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootSet {
    digest: String,
    reads: ReadUnits,
}
both_ways!(
    BootSet,
    boot::BootSet {
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

/// Writes a boot set. Lost with the host, it is not missed.
pub fn save(path: &Path, set: boot::BootSet) -> io::Result<()> {
    durable::save(path, FORMAT, VERSION, &BootSet::from(set), false)
}

/// Reads what [`save`] wrote.
pub fn load(path: &Path) -> Result<boot::BootSet, LoadError> {
    durable::load::<BootSet>(path, FORMAT, VERSION).map(Into::into)
}
