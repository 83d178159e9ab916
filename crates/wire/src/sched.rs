//! Messages between the node and `jiffy-sched`, which loads the scheduling policy: lines of JSON on
//! its stdin ([`SetClass`]) and its stdout ([`PolicyEvent`]).

use serde::{Deserialize, Serialize};
use std::string::String;

/// Longest line, bytes without the newline.
pub const LONGEST_LINE: usize = 4096;

/// How urgent a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Others wait for it.
    Urgent,
    /// A VM that starts.
    Launch,
    /// Everything else, and what was not told.
    Steady,
    /// Work that nobody waits for.
    Background,
}

impl Class {
    /// Its name, as in messages.
    pub fn name(self) -> &'static str {
        match self {
            Class::Urgent => "urgent",
            Class::Launch => "launch",
            Class::Steady => "steady",
            Class::Background => "background",
        }
    }
}

/// The class of a process from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetClass {
    /// Its process id.
    pub pid: u32,
    /// Its class.
    pub class: Class,
}

/// What becomes of the policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyEvent {
    /// It schedules this host from now on.
    Loaded,
    /// The kernel's own scheduler does, for this reason. The process ends.
    Ended {
        /// A sentence without its period.
        reason: String,
    },
}
