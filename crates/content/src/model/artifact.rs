//! The configurations of images and snapshots in registries (`docs/registry-artifacts.md`).

use super::snapshot::Manifest;
use jiffy_wire::api::ImageConfig;

/// The configuration blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageArtifact {
    /// `linux`.
    pub os: String,
    /// `amd64`.
    pub architecture: String,
    /// BLAKE3 of the file system, hexadecimal.
    pub digest: String,
    /// Bytes of the file system.
    pub size: u64,
    /// Files, folders and links in it.
    pub entries: u64,
    /// Unix time.
    pub created: u64,
    /// The file system is ext4, not EROFS.
    pub ext4: bool,
    /// How its commands are started.
    pub config: ImageConfig,
    /// Ids of the image of chunks and then of its parents. Each is the file
    /// `ID.jimg` of the artifact.
    pub chunks: Vec<String>,
}

/// The configuration blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotArtifact {
    /// The snapshot's manifest.
    pub manifest: Manifest,
    /// Id of the image of RAM.
    pub memory: String,
    /// Ids of the image of chunks of the root file system and of its parents.
    pub chunks: Vec<String>,
    /// Id of the image of the VM's own root disk, if it has one.
    pub root_disk: Option<String>,
    /// The VM's volumes, in its order.
    pub volumes: Vec<VolumeArtifact>,
}

/// A volume in an artifact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeArtifact {
    /// The name that its VM knows it by.
    pub name: String,
    /// Bytes of it.
    pub size: u64,
    /// Id of its image of chunks.
    pub image: String,
}
