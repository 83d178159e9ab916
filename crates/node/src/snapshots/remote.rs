//! Snapshots to and from registries (`docs/registry-artifacts.md`).
//!
//! A pulled snapshot has its state, and of RAM and root file system what tells
//! where each chunk is; the pager fetches the rest as the VM needs it, what the
//! first restore needed first.

use super::manifest::Manifest;
use super::memory;
use super::saved::{Saved, memory_in};
use crate::durable;
use crate::error::{Error, Result};
use crate::images::artifact::{self, json};
use crate::images::chunks::parse_id;
use crate::paths::Paths;
use jiffy_registry::artifact::{Config, FileToPush};
use jiffy_store::ImageReader;
use jiffy_store::partial::is_partial;
use jiffy_wire::api::MemoryForm;
use jiffy_wire::pager::Origin;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The media type of the configuration blob.
const CONFIG_TYPE: &str = "application/vnd.jiffy.snapshot.config.v1+json";
/// vCPUs, chips and devices.
pub const STATE: &str = "state";
/// RAM.
pub const MEMORY: &str = "ram.image";
/// Largest state that is taken, bytes.
pub const MAX_STATE: u64 = 64 << 20;
const FORMAT: &str = "jiffy-origins";
const VERSION: u32 = 1;

/// The configuration blob.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotArtifact {
    /// What it is and needs.
    pub manifest: Manifest,
    /// Id of the image of RAM.
    pub memory: String,
    /// Ids of the image of chunks of the root file system and of its parents.
    pub chunks: Vec<String>,
}

impl SnapshotArtifact {
    /// Of a snapshot whose root file system has these chunks.
    pub fn of(saved: &Saved, chunks: Vec<String>) -> Result<SnapshotArtifact> {
        let manifest = &saved.manifest;
        let spec = &manifest.spec;
        if !spec.disks.is_empty() || spec.root_disk.is_some() {
            return Err(Error::wrong_state(
                "A snapshot with volumes or a root disk of its own can't be pushed.",
            )
            .hint("Push a snapshot of a VM that keeps its changes in memory."));
        }
        if manifest.memory != MemoryForm::Image {
            return Err(Error::wrong_state("A golden snapshot can't be pushed."));
        }
        if is_partial(&saved.memory()) {
            return Err(Error::wrong_state(
                "A snapshot of which only parts are here can't be pushed.",
            )
            .hint("It is in a registry already: copy it there."));
        }
        let image = ImageReader::open(&saved.memory())
            .map_err(|error| Error::internal(format!("The snapshot can't be read: {error}.")))?;
        let mut manifest = manifest.clone();
        // Of this host.
        manifest.files.clear();
        manifest.source = None;
        manifest.lazy_root = None;
        Ok(SnapshotArtifact {
            manifest,
            memory: image.id().to_string(),
            chunks,
        })
    }

    /// Reads and checks what a registry gave.
    pub fn read(bytes: &[u8]) -> Result<SnapshotArtifact> {
        let read: SnapshotArtifact = serde_json::from_slice(bytes).map_err(|error| {
            Error::invalid(format!(
                "The artifact's configuration is no snapshot's: {error}."
            ))
        })?;
        let wrong = |what: &str| Err(Error::invalid(format!("The snapshot {what}.")));
        let spec = &read.manifest.spec;
        if !spec.disks.is_empty() || spec.root_disk.is_some() || spec.own_volumes {
            return wrong("has volumes that are not in it");
        }
        if spec.hidden || spec.from.is_some() || spec.init.is_some() {
            return wrong("is of a VM that can't be restored here");
        }
        if read.manifest.memory != MemoryForm::Image || read.manifest.lazy_root.is_some() {
            return wrong("does not say how its memory is kept");
        }
        if read.chunks.is_empty() || read.chunks.len() > 64 {
            return wrong("does not say what its root file system is");
        }
        parse_id(&read.memory)?;
        for id in &read.chunks {
            parse_id(id)?;
        }
        crate::spec::check_parts(spec)?;
        Ok(read)
    }

    /// The blob.
    pub fn blob(&self) -> Result<Config> {
        Ok(Config {
            media_type: CONFIG_TYPE.to_owned(),
            bytes: json(self)?,
        })
    }
}

/// The files of a snapshot, but for its root file system: blocking.
pub fn files(saved: &Saved) -> Result<Vec<FileToPush>> {
    let path = saved.memory();
    let image = ImageReader::open(&path)
        .map_err(|error| Error::internal(format!("The snapshot can't be read: {error}.")))?;
    let tail = image.file_bytes() + 64 - image.metadata_bytes();
    Ok(vec![
        FileToPush::local(STATE, saved.state(), artifact::DATA),
        artifact::cut(MEMORY, path, image.hot_range().end, tail),
    ])
}

/// Begins RAM in a folder that is to become this one: blocking.
pub fn begin_memory(
    folder: &Path,
    id: &str,
    length: u64,
    tail: &[u8],
    origins: &[Origin],
) -> Result<()> {
    let path = memory_in(folder, MemoryForm::Image);
    durable::save(&origins_file(&path), FORMAT, VERSION, &origins, true)
        .map_err(|error| Error::io("write where a snapshot's bytes are", &path, &error))?;
    jiffy_store::partial::create(&path, length, tail, parse_id(id)?)
        .map_err(|error| memory::write_failed(&path, &error))
}

/// Where what is missing of an image of RAM can be had; nothing if it is all
/// here.
pub fn origins(memory: &Path, paths: &Paths) -> Vec<Origin> {
    if !is_partial(memory) {
        return Vec::new();
    }
    let peer = paths.peer.clone().map(|folder| Origin::Folder { folder });
    let known: Vec<Origin> =
        durable::load(&origins_file(memory), FORMAT, VERSION).unwrap_or_default();
    peer.into_iter().chain(known).collect()
}

fn origins_file(memory: &Path) -> PathBuf {
    memory.with_file_name("origins.json")
}
