//! `networks.json`: ranges of addresses, and networks that users made.

use super::both_ways;
use crate::durable::{self, LoadError};
use crate::model::network as live;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

const FORMAT: &str = "jiffy-networks";
const VERSION: u32 = 1;

/// See [`live::Networks`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Networks {
    v4: String,
    v6: String,
    names: BTreeSet<String>,
}
both_ways!(
    Networks,
    live::Networks {
        v4: same,
        v6: same,
        names: same,
    }
);

/// Writes them; they are on disk when this returns.
///
/// # Errors
///
/// If the file can't be written, synced or renamed.
pub fn save(path: &Path, networks: live::Networks) -> io::Result<()> {
    durable::save(path, FORMAT, VERSION, &Networks::from(networks), true)
}

/// Reads what [`save`] wrote.
///
/// # Errors
///
/// If the file can't be read, is damaged, or is of another version.
pub fn load(path: &Path) -> Result<live::Networks, LoadError> {
    durable::load::<Networks>(path, FORMAT, VERSION).map(Into::into)
}
