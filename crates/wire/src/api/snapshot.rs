//! Snapshots.

use super::VolumeUse;
use serde::{Deserialize, Serialize};

/// Body of `POST /v1/vms/{vm}/snapshots`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MakeSnapshot {
    /// Name of the snapshot.
    pub name: String,
    /// Stop the VM once it is captured.
    #[serde(default)]
    pub stop: bool,
}

/// Result of a snapshot request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotMade {
    /// The snapshot.
    pub snapshot: Snapshot,
    /// Pause of the VM's vCPUs, nanoseconds.
    pub pause_ns: u64,
    /// Timeline of the capture.
    pub timeline: crate::timeline::Timeline,
}

/// A captured VM on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its name.
    pub name: String,
    /// Made by the node for later runs; `jiffy snapshot prune` removes it.
    #[serde(default)]
    pub golden: bool,
    /// Unix time, seconds.
    pub created: u64,
    /// Name of the captured VM.
    pub vm: String,
    /// The snapshot from which that VM was started.
    #[serde(default)]
    pub parent: Option<String>,
    /// Name of the image.
    pub image: String,
    /// BLAKE3 of the image, hexadecimal.
    pub image_digest: String,
    /// Name of the kernel.
    pub kernel: String,
    /// BLAKE3 of the kernel's file, hexadecimal.
    pub kernel_digest: String,
    /// BLAKE3 of the guests' initramfs, hexadecimal.
    pub initramfs_digest: String,
    /// vCPUs.
    pub cpus: u8,
    /// RAM in MiB.
    pub memory_mib: u32,
    /// Argv of the first command, if it was running.
    pub command: Option<Vec<String>>,
    /// That command runs on a pseudo-terminal.
    #[serde(default)]
    pub tty: bool,
    /// Volumes that were captured as well.
    #[serde(default)]
    pub volumes: Vec<VolumeUse>,
    /// Features of its processor; a host needs all of them to restore it.
    pub cpu_features: Vec<String>,
    /// How RAM is stored.
    pub memory: MemoryForm,
    /// Bytes of RAM on disk.
    pub memory_bytes: u64,
    /// Bytes of RAM that are shared with the snapshots on which it is built, as stored there. They
    /// are kept as long as this snapshot.
    #[serde(default)]
    pub shared_bytes: u64,
    /// Bytes of state and volumes on disk.
    pub other_bytes: u64,
    /// Its working set is stored first and fetched in advance.
    #[serde(default)]
    pub optimised: bool,
    /// Names of VMs that need it.
    #[serde(default)]
    pub used_by: Vec<String>,
    /// Names of the snapshots that are built on its RAM. If it is removed before them, its RAM is
    /// kept for them.
    #[serde(default)]
    pub children: Vec<String>,
    /// Why it can't be used, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// How a snapshot stores RAM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryForm {
    /// In a sparse file that VMs map.
    Raw,
    /// In an image of chunks that the pager serves.
    #[default]
    Image,
}

/// Contents of a snapshot's RAM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Bytes of RAM.
    pub size: u64,
    /// Size of a chunk, bytes.
    pub chunk_bytes: u64,
    /// Bytes of the file on disk.
    pub file_bytes: u64,
    /// Bytes of the image's tables.
    pub metadata_bytes: u64,
    /// Time to read the tables, nanoseconds.
    pub load_ns: u64,
    /// Totals by kind of chunk.
    pub kinds: Vec<ChunkKind>,
    /// Ranges of chunks of one kind, in order; only if requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<ChunkRange>,
}

/// Totals of one kind of chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkKind {
    /// `zero`, `raw`, `lz4`, `zstd`, `zstd+dictionary`, `parent` (stored in the snapshot below) or
    /// `root` (stored in the root file system).
    pub kind: String,
    /// Number of chunks.
    pub chunks: u64,
    /// Their bytes of RAM.
    pub bytes: u64,
    /// Their bytes in the file.
    pub stored_bytes: u64,
}

/// A range of RAM whose chunks are of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkRange {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length, bytes.
    pub length: u64,
    /// As in [`ChunkKind`].
    pub kind: String,
    /// Bytes in the file.
    pub stored_bytes: u64,
}

/// Golden snapshots or images that were removed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pruned {
    /// Their names.
    pub names: Vec<String>,
    /// Bytes that were freed.
    pub bytes: u64,
}
