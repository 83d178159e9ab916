//! Disks of a VM, and their limits.

use serde::{Deserialize, Serialize};
use std::num::NonZeroU64;
use std::path::PathBuf;

/// A disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// A raw file or block device.
    pub path: PathBuf,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// Bypass the host's page cache (O_DIRECT).
    #[serde(default)]
    pub direct: bool,
    /// Serial number that the guest reads, at most 20 bytes.
    #[serde(default)]
    pub serial: Option<String>,
    /// Limit on the guest's use.
    #[serde(default, skip_serializing_if = "DiskLimit::is_none")]
    pub limit: DiskLimit,
    /// The file is a cache that is filled on demand. Only for read-only disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<Residency>,
    /// Record the guest's reads, for [`ControlRequest::Reads`](super::ControlRequest::Reads). Not for a disk with a residency,
    /// whose pager records them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub note_reads: bool,
}

/// How missing bytes of a disk are put into its file ([`crate::disk`]). The disk's `path` is then
/// the cache's `contents`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residency {
    /// The map of present chunks: the cache's `present`.
    pub present: PathBuf,
    /// Socket on which the pager listens for VMMs with this disk.
    pub pager_socket: PathBuf,
}

/// Limits on a guest's use of a disk. Up to one second's worth can be used in a burst.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskLimit {
    /// Bytes read and written per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<NonZeroU64>,
    /// Requests per second: reads, writes, flushes, discards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations_per_second: Option<NonZeroU64>,
}

impl DiskLimit {
    /// Whether there is no limit.
    pub fn is_none(&self) -> bool {
        *self == DiskLimit::default()
    }
}
