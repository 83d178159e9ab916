//! The queue for memory and vCPUs.

use serde::{Deserialize, Serialize};

/// Priority of a request that waits for memory or vCPUs.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// Served after requests of the other priorities.
    Low,
    /// The default.
    #[default]
    Normal,
    /// Served first; after eight of these, one waiting request of another priority is served.
    High,
}

impl Priority {
    /// Whether this is the default.
    pub fn is_normal(&self) -> bool {
        *self == Priority::Normal
    }

    /// Its name in requests and answers.
    pub fn name(self) -> &'static str {
        match self {
            Priority::Low => "low",
            Priority::Normal => "normal",
            Priority::High => "high",
        }
    }
}

/// What a request does when it has memory and vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// It boots a VM or restores it from a snapshot.
    Start,
    /// It wakes a hibernated VM.
    Wake,
    /// It forks a running VM.
    Fork,
    /// It gives a running VM more memory.
    Grow,
}

impl Purpose {
    /// Its name in answers.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Start => "start",
            Purpose::Wake => "wake",
            Purpose::Fork => "fork",
            Purpose::Grow => "grow",
        }
    }
}

/// A request that waits for memory or vCPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queued {
    /// Its place in the order in which requests will be served, from 1. A request of a higher
    /// priority that arrives later is served before it.
    pub place: u32,
    /// Id of its VM; of a fork, the parent's.
    pub id: String,
    /// Name of that VM.
    pub name: String,
    /// What it waits for.
    pub purpose: Purpose,
    /// Whose request it is.
    pub owner: String,
    /// Its priority, as requested.
    pub priority: Priority,
    /// Number of VMs that it starts: the children of a fork.
    pub vms: u32,
    /// Memory that it needs for all of them, MiB.
    pub memory_mib: u64,
    /// vCPUs that it needs for all of them.
    pub cpus: u64,
    /// Unix time of its arrival, seconds.
    pub since: u64,
    /// Unix time at which it is refused, seconds.
    pub until: u64,
}
