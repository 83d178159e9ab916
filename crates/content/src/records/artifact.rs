//! The configuration blobs of artifacts in registries
//! (`docs/registry-artifacts.md`). Their version is in the media type.

use super::both_ways;
use super::snapshot::Snapshot;
use super::spec::ImageConfig;
use crate::model::artifact as live;
use serde::{Deserialize, Serialize};

/// See [`live::ImageArtifact`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageArtifact {
    os: String,
    architecture: String,
    digest: String,
    size: u64,
    entries: u64,
    created: u64,
    #[serde(default)]
    ext4: bool,
    #[serde(default)]
    config: ImageConfig,
    chunks: Vec<String>,
}
both_ways!(
    ImageArtifact,
    live::ImageArtifact {
        os: same,
        architecture: same,
        digest: same,
        size: same,
        entries: same,
        created: same,
        ext4: same,
        config: into,
        chunks: same,
    }
);

/// See [`live::SnapshotArtifact`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotArtifact {
    manifest: Snapshot,
    memory: String,
    chunks: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    root_disk: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    volumes: Vec<VolumeArtifact>,
}
both_ways!(
    SnapshotArtifact,
    live::SnapshotArtifact {
        manifest: into,
        memory: same,
        chunks: same,
        root_disk: same,
        volumes: list,
    }
);

/// See [`live::VolumeArtifact`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeArtifact {
    name: String,
    size: u64,
    image: String,
}
both_ways!(
    VolumeArtifact,
    live::VolumeArtifact {
        name: same,
        size: same,
        image: same
    }
);
