//! Reads a VM's configuration from its file.

use jiffy_sys::{contents, handed};
use jiffy_wire::vmm::{VERSION, VmmConfig};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Largest configuration, bytes: a fw_cfg file may be text.
const SIZE_MAX: u64 = 64 << 20;

/// Why a configuration can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file can't be read.
    #[error("the configuration {} can't be read", .0.display())]
    Read(PathBuf, #[source] io::Error),
    /// It is not JSON, or has another structure.
    #[error("the configuration {} is not valid", .0.display())]
    Invalid(PathBuf, #[source] serde_json::Error),
    /// It was written by another release.
    #[error("the configuration {} has version {version}, this jiffy-vmm reads version {VERSION}", path.display())]
    Version {
        /// The file's path.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
}

/// Reads and checks the configuration at `path`.
///
/// # Errors
///
/// If the file can't be read, is not JSON of this structure, or is of another version.
pub fn read(path: &Path) -> Result<VmmConfig, ConfigError> {
    let text = contents(path).map_err(|error| ConfigError::Read(path.into(), error))?;
    let config: VmmConfig =
        serde_json::from_slice(&text).map_err(|error| ConfigError::Invalid(path.into(), error))?;
    if config.version != VERSION {
        return Err(ConfigError::Version {
            path: path.into(),
            version: config.version,
        });
    }
    Ok(config)
}

/// The file may be read more than once, because a file that was handed over stays open.
fn contents(path: &Path) -> io::Result<Vec<u8>> {
    let file = match handed::copy(path) {
        Some(file) => file?.into(),
        None => File::open(path)?,
    };
    contents::of(&file, SIZE_MAX)
}
