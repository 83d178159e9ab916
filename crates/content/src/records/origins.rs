//! `origins.json`: where missing chunks of an image can be fetched.

use super::{both_ways, list};
use crate::durable::{self, LoadError};
use jiffy_wire::pager;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};

const FORMAT: &str = "jiffy-origins";
const VERSION: u32 = 1;

/// See [`pager::Origin`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A folder of images.
    Folder {
        /// The folder.
        folder: PathBuf,
    },
    /// A registry.
    Registry(RegistryOrigin),
}

impl From<pager::Origin> for Origin {
    fn from(live: pager::Origin) -> Origin {
        match live {
            pager::Origin::Folder { folder } => Origin::Folder { folder },
            pager::Origin::Registry(origin) => Origin::Registry(origin.into()),
        }
    }
}

impl From<Origin> for pager::Origin {
    fn from(saved: Origin) -> pager::Origin {
        match saved {
            Origin::Folder { folder } => pager::Origin::Folder { folder },
            Origin::Registry(origin) => pager::Origin::Registry(origin.into()),
        }
    }
}

/// See [`pager::RegistryOrigin`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegistryOrigin {
    reference: String,
    file: String,
    #[serde(default)]
    docker_config: Option<PathBuf>,
    #[serde(default)]
    plain_http: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    authorities: Vec<PathBuf>,
}
both_ways!(
    RegistryOrigin,
    pager::RegistryOrigin {
        reference: same,
        file: same,
        docker_config: same,
        plain_http: same,
        authorities: same,
    }
);

/// Writes the origins of an image.
///
/// # Errors
///
/// If the file can't be written, synced or renamed.
pub fn save(path: &Path, origins: &[pager::Origin]) -> io::Result<()> {
    let saved: Vec<Origin> = list(origins.to_vec());
    durable::save(path, FORMAT, VERSION, &saved, true)
}

/// Reads what [`save`] wrote.
///
/// # Errors
///
/// If the file can't be read, is damaged, or is of another version.
pub fn load(path: &Path) -> Result<Vec<pager::Origin>, LoadError> {
    durable::load::<Vec<Origin>>(path, FORMAT, VERSION).map(list)
}
