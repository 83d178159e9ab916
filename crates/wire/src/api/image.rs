//! Images of root file systems.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// An image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Name or reference.
    pub name: String,
    /// BLAKE3 of the file system image, hexadecimal; empty while only its chunks are known.
    pub digest: String,
    /// Bytes of the file system image.
    pub size: u64,
    /// Number of files, folders and links in it.
    pub entries: u64,
    /// Unix time of import, seconds.
    pub created: u64,
    /// Run configuration of its commands.
    #[serde(default)]
    pub config: ImageConfig,
    /// Where it came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<ImageSource>,
    /// Id of its image of chunks, hexadecimal, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunks: Option<String>,
    /// Bytes of `size` that are stored here; the rest is fetched when it is read.
    #[serde(default)]
    pub present: u64,
    /// Bytes on disk.
    #[serde(default)]
    pub stored: u64,
    /// Names of VMs that need it.
    #[serde(default)]
    pub used_by: Vec<String>,
    /// Path of the file system image on the node's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<std::path::PathBuf>,
    /// Why it can't be used, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Run configuration of an image's commands (OCI image configuration).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// Prefix of every command.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    /// Command if none is given.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    /// `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Working directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// `name`, `uid`, `name:group` or `uid:gid`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Signal that ends its command, such as `SIGINT` or `2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
    /// Ports that it exposes, such as `80/tcp`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exposed_ports: Vec<String>,
    /// Labels.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// Source of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSource {
    /// Reference from which it was pulled, or a description of the import.
    pub reference: String,
    /// Digest of the manifest that was used, `sha256:…`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// Keys whose signatures were verified: `sha256:…` of each key's DER.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signed_by: Vec<String>,
}

/// Format of an imported tar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportKind {
    /// A root file system.
    Root,
    /// An OCI image layout (`oci-layout`, `index.json`, `blobs/`).
    Layout,
    /// A `docker save` archive (`manifest.json`).
    Docker,
}

/// Body of `POST /v1/vms/{vm}/commit`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommitVm {
    /// Name of the new image.
    pub image: String,
}

/// Result of a commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    /// The image.
    pub image: Image,
    /// Time for which the VM's programs were frozen, nanoseconds.
    pub pause_ns: u64,
    /// Bytes of the changes.
    pub bytes: u64,
}
