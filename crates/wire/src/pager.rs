//! How a VMM hands its userfaultfd to a pager, and how the node controls the pager.
//!
//! The hand-over is the one Firecracker documents for its UFFD back-end: the
//! VMM connects to a Unix stream socket and sends one message, a JSON array of
//! [`Mapping`], with the userfaultfd attached by `SCM_RIGHTS`. From then on the
//! connection shows that both are alive: when the VMM closes it the pager forgets the
//! VM, and when the pager closes it the VMM connects again (a new pager wakes all
//! waiting threads, so that they fault again). If the pager can't serve a VM any more
//! (its image is damaged) or refuses the handshake, it sends one [`PagerWord`] as a line
//! of JSON and closes the connection: the VMM must end.
//!
//! `jiffy-vmm` may first ask, with [`WORKING_SET_QUESTION`], for the part of the working
//! set that the pager keeps in memory: the answer is [`PagerWord::WorkingSet`]. The pager
//! does not fill what the VMM maps of it.
//!
//! The pager sends on that connection, one JSON object a line:
//!
//! * `{"working_set":{"ranges":[[offset,length],…],"written":null}}`: the
//!   answer, with a sealed memfd as long as RAM attached that holds these ranges of
//!   it; no ranges without. If `written` is null, the VMM reports with a [`VmmWord`] which of
//!   these pages its guest wrote in its first moments.
//! * `{"failed":"…"}`: a chunk can't be read; the VM ends with this message.
//! * `{"complete":true}`: all that is not zero is in memory (`Complete` asked
//!   for it; it is said before that is answered). The VMM unregisters its
//!   memory, so that what is missing reads as zero.
//!
//! Which image a socket serves is the node's business, over the pager's
//! control socket: one [`PagerRequest`] a line as JSON, one [`PagerResponse`]
//! back.

use crate::vmm::Extent;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Asks for the image's working set: a line before the handshake.
pub const WORKING_SET_QUESTION: &[u8] = b"{\"working_set\":true}\n";
/// Ranges in one list, at most.
pub const WORKING_SET_RANGES: usize = 1024;
/// Bytes of a line with such lists, at most.
pub const WORKING_SET_LINE: usize = 128 << 10;

/// One range of guest RAM in the VMM's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// Where it begins in the VMM's address space.
    pub base_host_virt_addr: u64,
    /// Bytes.
    pub size: u64,
    /// Where it begins in the image, bytes.
    pub offset: u64,
    /// Bytes of a page.
    #[serde(default)]
    pub page_size: u64,
    /// Firecracker's older name for the same, also in bytes.
    #[serde(default)]
    pub page_size_kib: u64,
}

/// VMM to pager, a line after the handshake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmmWord {
    /// These ranges of the working set were written, sorted, in whole pages and
    /// apart from another.
    Written(Vec<Extent>),
}

/// Pager to VMM, one a line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PagerWord {
    /// What there is of the working set.
    WorkingSet {
        /// Ranges of RAM, sorted, in whole pages and apart from another, that are
        /// in the memfd that comes with the line.
        ranges: Vec<Extent>,
        /// What of these an earlier VM wrote at once, if that is known.
        written: Option<Vec<Extent>>,
    },
    /// All that is not zero is in memory: faults need no pager any more.
    Complete(bool),
    /// A chunk can't be read, in one sentence: the last line before the connection is
    /// closed.
    Failed(String),
}

/// Node to pager.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PagerRequest {
    /// Listen on `socket` for a VMM and serve it `image`.
    Serve {
        /// A name for messages and later requests: the VM's id.
        name: String,
        /// Where to listen.
        socket: PathBuf,
        /// An image of the store.
        image: PathBuf,
        /// Record which chunks are touched, in order, into this file.
        record: Option<PathBuf>,
        /// Fetch the image's recorded working set before it is asked for.
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
    /// Listen on `socket` for the VMMs that have this disk.
    OpenDisk(OpenDisk),
    /// Write the recording of a disk now, and record no more: the VM has
    /// booted.
    EndRecording {
        /// As in `OpenDisk`.
        name: String,
    },
    /// Fetch all that is missing of an image, check all of it, and make it an
    /// ordinary image; then answer.
    CompleteImage {
        /// The image's file.
        image: PathBuf,
    },
    /// Fill all missing chunks, then answer.
    Complete {
        /// As in `Serve` or `OpenDisk`.
        name: String,
    },
    /// Stop listening, and forget the VM or the disk.
    Forget {
        /// As in `Serve` or `OpenDisk`.
        name: String,
    },
    /// Figures. Answered with `Stats`.
    Stats {
        /// As in `Serve` or `OpenDisk`.
        name: String,
    },
    /// Is it alive?
    Ping,
}

/// A disk to be filled as its VMMs ask for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenDisk {
    /// A name for messages and later requests, of no VM and no other disk.
    pub name: String,
    /// Where to listen for VMMs ([`crate::disk`]).
    pub socket: PathBuf,
    /// The cache's folder; made if it is missing, and its files with it.
    pub cache: PathBuf,
    /// The image with the disk's bytes.
    pub image: PathBuf,
    /// Record which chunks are asked for, in order, into this file.
    #[serde(default)]
    pub record: Option<PathBuf>,
    /// Fetch what an earlier boot asked for, at once, before it is asked for:
    /// this recording if the file is there, else the image's working set.
    #[serde(default)]
    pub prefetch: Option<PathBuf>,
}

/// Where bytes of an image that is not all here can be had.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A folder of whole images named by their ids, `ID.jimg` with 32 small
    /// hexadecimal digits: a peer's cache, say.
    Folder {
        /// The folder.
        folder: PathBuf,
    },
    /// A file of an artifact in a registry.
    Registry(RegistryOrigin),
}

/// A file of an artifact in a registry, read by ranges.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegistryOrigin {
    /// The artifact, by digest: `registry.example/team/app@sha256:…`.
    pub reference: String,
    /// The name of the file in the artifact.
    pub file: String,
    /// A docker configuration with the credentials; the user's own if none.
    #[serde(default)]
    pub docker_config: Option<PathBuf>,
    /// Plain HTTP, for registries other than those on loopback.
    #[serde(default)]
    pub plain_http: bool,
    /// PEM files of authorities that are believed beside the system's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub authorities: Vec<PathBuf>,
}

/// Pager to node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PagerResponse {
    /// Done.
    Ok,
    /// Figures of one VM.
    Stats(PagerStats),
    /// Not done, and why.
    Error(String),
}

/// What a pager has done for one VM, or one disk: then `faults` are requests
/// of VMMs and `fault_ns` how long they took, and `bytes_filled` were put into
/// its cache.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagerStats {
    /// Demand faults served.
    pub faults: u64,
    /// Time from reading a fault to its page being there, summed, nanoseconds.
    pub fault_ns: u64,
    /// Chunks filled before they were asked for.
    pub prefetched_chunks: u64,
    /// Bytes that the VM maps of what the pager keeps in memory of the image's
    /// working set, and shares with others.
    #[serde(default)]
    pub bytes_shared: u64,
    /// Bytes read from the image file.
    pub bytes_read: u64,
    /// Bytes put into the guest's memory.
    pub bytes_filled: u64,
    /// Why it serves no more, if it does not: the chunk and what was wrong.
    pub failed: Option<String>,
    /// Bytes that came from origins for its image since that was opened.
    #[serde(default)]
    pub bytes_fetched: u64,
    /// The first fault, host CLOCK_MONOTONIC nanoseconds; 0 before it.
    pub first_fault_ns: u64,
}
