//! The node itself, its kernels, and requests that were begun.

use serde::{Deserialize, Serialize};

/// What a node knows of a request with a [`REQUEST_HEADER`](super::REQUEST_HEADER).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestState {
    /// This daemon, or an earlier one since the host started, has begun it; it may have failed.
    /// `None` if the daemon can't know. Only the last 32,768 requests are known.
    pub begun: Option<bool>,
}

/// The node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Package version of the daemon.
    pub version: String,
    /// [`VERSION`](super::VERSION).
    pub api: u32,
    /// The daemon's process id.
    pub pid: u32,
    /// Boot id, which identifies the clock of this node's timelines.
    pub clock: String,
    /// CLOCK_MONOTONIC now, nanoseconds.
    pub now_ns: u64,
    /// The data folder.
    pub data: String,
    /// Number of running VMs.
    pub running: u32,
    /// Number of all VMs.
    pub vms: u32,
    /// Ids of standbys.
    #[serde(default)]
    pub standbys: Vec<String>,
    /// Containment of VMMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub containment: Option<Containment>,
}

/// How VMMs are contained.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Containment {
    /// Each has its own namespaces and an empty root.
    pub jailed: bool,
    /// Each also has its own user and group id, which needs root.
    pub own_user: bool,
    /// A control group limits each.
    pub cgroups: bool,
    /// The kernel has Landlock, which bounds the files of `jiffy-pager` and `jiffy-disk`; `None` of a
    /// node of an earlier release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub landlock: Option<bool>,
    /// One sentence without a full stop for each of these that is missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
}

/// A kernel that the node can boot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelInfo {
    /// Name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// BLAKE3, hexadecimal.
    pub digest: String,
    /// Why it can't be used, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
