//! `snapshot.json`: the manifest of a captured VM.

use super::image::ImageSource;
use super::spec::Spec;
use super::vm::{LazyDisk, Main};
use super::{both_ways, both_ways_enum};
use crate::digests;
use crate::durable::{self, LoadError};
use crate::model::snapshot::Manifest;
use jiffy_sys::stamp;
use jiffy_wire::api;
use jiffy_wire::cpu::Profile;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};

const FORMAT: &str = "jiffy-snapshot";
const VERSION: u32 = 1;
const FILE: &str = "snapshot.json";

/// See [`Manifest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    created: u64,
    jiffy: String,
    vm: String,
    parent: Option<String>,
    spec: Spec,
    main: Main,
    image_digest: String,
    kernel_digest: String,
    initramfs_digest: String,
    vmm_digest: String,
    cpu_features: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cpu: Option<Profile>,
    memory: MemoryForm,
    memory_bytes: u64,
    #[serde(default)]
    shared_bytes: u64,
    other_bytes: u64,
    #[serde(default)]
    optimised: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lazy_root: Option<LazyDisk>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    source: Option<ImageSource>,
    #[serde(default)]
    files: Vec<Known>,
}
both_ways!(
    Snapshot,
    Manifest {
        created: same,
        jiffy: same,
        vm: same,
        parent: same,
        spec: into,
        main: into,
        image_digest: same,
        kernel_digest: same,
        initramfs_digest: same,
        vmm_digest: same,
        cpu_features: same,
        cpu: same,
        memory: into,
        memory_bytes: same,
        shared_bytes: same,
        other_bytes: same,
        optimised: same,
        lazy_root: opt,
        source: opt,
        files: list,
    }
);

/// See [`api::MemoryForm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryForm {
    /// A sparse file.
    Raw,
    /// An image of chunks.
    Image,
}
both_ways_enum!(MemoryForm, api::MemoryForm { Raw, Image });

/// See [`digests::Known`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    path: PathBuf,
    stamp: Stamp,
    digest: String,
}
both_ways!(
    Known,
    digests::Known {
        path: same,
        stamp: into,
        digest: same
    }
);

/// See [`stamp::Stamp`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    times: [i64; 4],
}
both_ways!(
    Stamp,
    stamp::Stamp {
        device: same,
        inode: same,
        size: same,
        times: same
    }
);

impl Manifest {
    /// Writes it into the folder of a captured VM.
    ///
    /// # Errors
    ///
    /// If the file can't be written, synced or renamed.
    pub fn save(&self, folder: &Path) -> io::Result<()> {
        save(folder, self.clone())
    }

    /// Reads what [`Manifest::save`] wrote.
    ///
    /// # Errors
    ///
    /// If the file can't be read, is damaged, or is of another version.
    pub fn load(folder: &Path) -> Result<Manifest, LoadError> {
        load(folder)
    }
}

/// Writes a manifest into the folder of a captured VM.
///
/// # Errors
///
/// If the file can't be written, synced or renamed.
pub fn save(folder: &Path, manifest: Manifest) -> io::Result<()> {
    let saved = Snapshot::from(manifest);
    durable::save(&folder.join(FILE), FORMAT, VERSION, &saved, true)
}

/// Reads what [`save`] wrote.
///
/// # Errors
///
/// If the file can't be read, is damaged, or is of another version.
pub fn load(folder: &Path) -> Result<Manifest, LoadError> {
    durable::load::<Snapshot>(&folder.join(FILE), FORMAT, VERSION).map(Into::into)
}
