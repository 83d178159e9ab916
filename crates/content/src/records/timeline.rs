//! `timeline.json`: measurements of a VM's last run.

use super::{both_ways, both_ways_enum};
use crate::durable::{self, LoadError};
use jiffy_wire::timeline as live;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

const FORMAT: &str = "jiffy-timeline";
const VERSION: u32 = 1;

/// See [`live::Timeline`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    clock: String,
    spans: Vec<Span>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    counters: Vec<Counter>,
}
both_ways!(
    Timeline,
    live::Timeline {
        clock: same,
        spans: list,
        counters: list,
    }
);

/// See [`live::Counter`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counter {
    track: Track,
    thread: String,
    name: String,
    points: Vec<(u64, u64)>,
}
both_ways!(
    Counter,
    live::Counter {
        track: into,
        thread: same,
        name: same,
        points: same,
    }
);

/// See [`live::Span`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    track: Track,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    thread: Option<String>,
    name: String,
    start_ns: u64,
    end_ns: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
}
both_ways!(
    Span,
    live::Span {
        track: into,
        thread: same,
        name: same,
        start_ns: same,
        end_ns: same,
        detail: same,
    }
);

/// See [`live::Track`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Track {
    /// The command line.
    Cli,
    /// The daemon.
    Node,
    /// The virtual machine monitor.
    Vmm,
    /// The guest's kernel.
    Kernel,
    /// PID 1 and the agent.
    Init,
    /// The user's own code.
    Guest,
}
both_ways_enum!(
    Track,
    live::Track {
        Cli,
        Node,
        Vmm,
        Kernel,
        Init,
        Guest
    }
);

/// Writes a timeline, not synced: it may be lost if the host crashes.
///
/// # Errors
///
/// If the file can't be written or renamed.
pub fn save(path: &Path, timeline: live::Timeline) -> io::Result<()> {
    durable::save(path, FORMAT, VERSION, &Timeline::from(timeline), false)
}

/// Reads what [`save`] wrote.
///
/// # Errors
///
/// If the file can't be read, is damaged, or is of another version.
pub fn load(path: &Path) -> Result<live::Timeline, LoadError> {
    durable::load::<Timeline>(path, FORMAT, VERSION).map(Into::into)
}
