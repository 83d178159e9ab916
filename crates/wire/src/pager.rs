//! How a VMM passes its userfaultfd to a pager, and how the node controls the pager.
//!
//! The handshake is the one that Firecracker documents for its UFFD back-end: the VMM connects to a
//! Unix stream socket and sends one message, a JSON array of [`Mapping`], with the userfaultfd
//! attached by `SCM_RIGHTS`. From then on the connection shows that both are alive. When the VMM
//! closes it, the pager forgets the VM. When the pager closes it, the VMM connects again, and the
//! new pager wakes all waiting threads, so that they fault again. If the pager can't serve a VM any
//! more (its image is damaged) or refuses the handshake, it sends one [`PagerMessage`] as a line of
//! JSON and closes the connection; the VMM must then end.
//!
//! `jiffy-vmm` may first ask, with [`WORKING_SET_QUESTION`], for the part of the working set that
//! the pager has in memory; the answer is [`PagerMessage::WorkingSet`]. The pager does not fill pages
//! that the VMM maps of it.
//!
//! The pager sends on that connection, one JSON object per line:
//!
//! * `{"working_set":{"ranges":[[offset,length],…],"written":null}}`: the answer. Attached is a
//!   sealed memfd as long as RAM that contains these ranges; without ranges there is no memfd. If
//!   `written` is null, the VMM reports with a [`VmmMessage`] which of these pages its guest wrote in
//!   its first moments.
//! * `{"failed":"…"}`: a chunk can't be read; the VM ends with this message.
//! * `{"complete":true}`: everything that is not zero is in memory. Sent before `Complete` is
//!   answered. The VMM unregisters its memory, so that missing pages read as zero.
//!
//! The node chooses the image of a socket, over the pager's control socket: one [`PagerRequest`]
//! per line as JSON, each answered with one [`PagerResponse`].

use crate::vmm::Extent;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The first line on a connection that the node has made for a VMM, which may not connect by itself: it
/// counts as that process's. The pager takes it from a process of its own user only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OnBehalf {
    /// The VMM's process id.
    pub on_behalf_of: u32,
}

/// Asks for the image's working set: a line before the handshake.
pub const WORKING_SET_QUESTION: &[u8] = b"{\"working_set\":true}\n";
/// Most ranges in a list.
pub const WORKING_SET_RANGES: usize = 1024;
/// Longest line with such lists, bytes.
pub const WORKING_SET_LINE: usize = 128 << 10;

/// A range of guest RAM in the VMM's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// Its address in the VMM's address space.
    pub base_host_virt_addr: u64,
    /// Its length, bytes.
    pub size: u64,
    /// Its offset in the image, bytes.
    pub offset: u64,
    /// Page size, bytes.
    #[serde(default)]
    pub page_size: u64,
    /// Firecracker's older name of `page_size`, in bytes as well.
    #[serde(default)]
    pub page_size_kib: u64,
}

/// Message of a VMM to the pager, a line after the handshake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmmMessage {
    /// These ranges of the working set were written; sorted, in whole pages, without overlap.
    Written(Vec<Extent>),
}

/// Message of the pager to a VMM, one per line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PagerMessage {
    /// The part of the working set that is in memory.
    WorkingSet {
        /// Ranges of RAM in the memfd that is attached to the line; sorted, in whole pages, without
        /// overlap.
        ranges: Vec<Extent>,
        /// The ranges of these that an earlier VM wrote in its first moments, if known.
        written: Option<Vec<Extent>>,
    },
    /// All nonzero memory is present: page faults need no pager any more.
    Complete(bool),
    /// A chunk can't be read; one sentence. This is the last line before the connection is closed.
    Failed(String),
}

/// Request of the node to the pager.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PagerRequest {
    /// Listen on `socket` for a VMM and serve it `image`.
    Serve {
        /// Name for messages and later requests: the VM's id.
        name: String,
        /// Path of the socket.
        socket: PathBuf,
        /// Path of an image in the store.
        image: PathBuf,
        /// File for a recording of the chunks that are touched, in order.
        record: Option<PathBuf>,
        /// Fetch the image's recorded working set in advance.
        prefetch: bool,
    },
    /// Sets the origins of an image's missing chunks, in the order to try them. Sent
    /// before `Serve` and `OpenDisk` for each incomplete image and parent; may also
    /// change the origins of an image in use.
    Origins {
        /// The image's file.
        image: PathBuf,
        /// Its origins. An empty list removes them.
        origins: Vec<Origin>,
    },
    /// Listen on `socket` for VMMs with this disk.
    OpenDisk(OpenDisk),
    /// Write the recording of a disk and stop recording: the VM has booted.
    EndRecording {
        /// As in `OpenDisk`.
        name: String,
    },
    /// Fetch all missing chunks of an image, verify it, and make it an ordinary image; then answer.
    CompleteImage {
        /// The image's file.
        image: PathBuf,
    },
    /// Fill all missing chunks of a VM or disk, then answer.
    Complete {
        /// As in `Serve` or `OpenDisk`.
        name: String,
    },
    /// Stop listening, and forget the VM or the disk.
    Forget {
        /// As in `Serve` or `OpenDisk`.
        name: String,
    },
    /// Figures of a VM or disk, answered with `Stats`.
    Stats {
        /// As in `Serve` or `OpenDisk`.
        name: String,
    },
    /// Checks that the pager is alive.
    Ping,
}

/// A disk that is filled on demand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenDisk {
    /// Name for messages and later requests; different from all VMs' and other disks' names.
    pub name: String,
    /// Path of the socket for VMMs ([`crate::disk`]).
    pub socket: PathBuf,
    /// The cache's folder. It and its files are created if they are missing.
    pub cache: PathBuf,
    /// The image with the disk's bytes.
    pub image: PathBuf,
    /// File for a recording of the chunks that are requested, in order.
    #[serde(default)]
    pub record: Option<PathBuf>,
    /// Fetch in advance what an earlier boot requested: this recording if the file exists, else the
    /// image's working set.
    #[serde(default)]
    pub prefetch: Option<PathBuf>,
}

/// Source of the missing bytes of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A folder of complete images named by their ids, `ID.jimg` with 32 lower-case hexadecimal
    /// digits, such as a peer's cache.
    Folder {
        /// The folder.
        folder: PathBuf,
    },
    /// A file of an artifact in a registry.
    Registry(RegistryOrigin),
}

/// A file of an artifact in a registry, read in ranges.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegistryOrigin {
    /// The artifact, by digest: `registry.example/team/app@sha256:…`.
    pub reference: String,
    /// Name of the file in the artifact.
    pub file: String,
    /// Docker configuration with the credentials; `None` means the user's own.
    #[serde(default)]
    pub docker_config: Option<PathBuf>,
    /// Plain HTTP, for registries that are not on loopback.
    #[serde(default)]
    pub plain_http: bool,
    /// PEM files of certificate authorities that are trusted besides the system's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub authorities: Vec<PathBuf>,
}

/// Answer of the pager to the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PagerResponse {
    /// Done.
    Ok,
    /// Figures of a VM or disk.
    Stats(PagerStats),
    /// It failed, for this reason.
    Error(String),
}

/// Figures of a VM or a disk. For a disk, `faults` counts requests of VMMs, `fault_ns` is their
/// total time, and `bytes_filled` counts bytes stored in its cache.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagerStats {
    /// Page faults served on demand.
    pub faults: u64,
    /// Total time from reading a fault until its page is filled, nanoseconds.
    pub fault_ns: u64,
    /// Chunks filled in advance.
    pub prefetched_chunks: u64,
    /// Bytes of the image's working set that the VM maps from the pager's memory and shares with
    /// other VMs.
    #[serde(default)]
    pub bytes_shared: u64,
    /// Bytes read from the image file.
    pub bytes_read: u64,
    /// Bytes filled into the guest's memory.
    pub bytes_filled: u64,
    /// Why it is not served any more: the chunk and the error.
    pub failed: Option<String>,
    /// Bytes fetched from origins for its image since the image was opened.
    #[serde(default)]
    pub bytes_fetched: u64,
    /// Time of the first fault, host CLOCK_MONOTONIC nanoseconds; 0 if there was none.
    pub first_fault_ns: u64,
}
