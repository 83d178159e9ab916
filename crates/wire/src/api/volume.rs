//! Volumes, a VM's disks, and folders that it shares with the host.

use crate::vmm::DiskLimit;
use serde::{Deserialize, Serialize};

/// A volume attached to a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeUse {
    /// Name of the volume. It is created if it does not exist and a size is given.
    pub name: String,
    /// Size of a new volume in MiB.
    #[serde(default)]
    pub size_mib: Option<u64>,
    /// Attach it read-only.
    #[serde(default)]
    pub read_only: bool,
    /// Mount point of its ext4 file system in the guest; `None` leaves the mount to programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<String>,
    /// Limit on the guest's use.
    #[serde(default, skip_serializing_if = "DiskLimit::is_none")]
    pub limit: DiskLimit,
}

/// A folder of the node's host that a guest mounts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FolderUse {
    /// Absolute path on the node's host.
    pub source: String,
    /// Absolute path in the guest.
    pub mount: String,
    /// Share it read-only.
    #[serde(default)]
    pub read_only: bool,
    /// The VM may be captured, without the folder's files.
    #[serde(default, skip_serializing_if = "is_false")]
    pub capture: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// A disk for the VM's changes of its root file system. It is removed with the VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum RootDisk {
    /// The upper layer above the image, instead of the guest's memory.
    Layer {
        /// Size in MiB.
        size_mib: u64,
    },
    /// The whole image, as a clone that shares blocks with it. The image must be a writable file
    /// system.
    Copy {
        /// Copy the image's bytes if no clone can be made.
        #[serde(default)]
        plainly: bool,
    },
}

/// A volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// Name.
    pub name: String,
    /// Size in MiB.
    pub size_mib: u64,
    /// Bytes on the node's disk.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Names of the running VMs that use it.
    pub used_by: Vec<String>,
    /// Names of all VMs it belongs to, running or not.
    #[serde(default)]
    pub attached_to: Vec<String>,
    /// Why it can't be used, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Body of `POST /v1/volumes/{name}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MakeVolume {
    /// Size in MiB.
    pub size_mib: u64,
    /// Do not make an ext4 file system on it.
    #[serde(default)]
    pub raw: bool,
}

/// Body of `POST /v1/volumes/{name}/resize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeVolume {
    /// Size in MiB.
    pub size_mib: u64,
}

/// Result of a resize.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResizedVolume {
    /// The volume.
    pub volume: Volume,
    /// A note about its file system, as one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}
