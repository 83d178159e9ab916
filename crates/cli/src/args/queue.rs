//! How requests wait for memory and vCPUs.

use super::{ListFormat, seconds};
use clap::{Args, ValueEnum};
use jiffy_wire::api::Priority;

/// Priorities in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PriorityChoice {
    Low,
    Normal,
    High,
}

impl From<PriorityChoice> for Priority {
    fn from(choice: PriorityChoice) -> Priority {
        match choice {
            PriorityChoice::Low => Priority::Low,
            PriorityChoice::Normal => Priority::Normal,
            PriorityChoice::High => Priority::High,
        }
    }
}

/// `--wait`
#[derive(Debug, Clone, Copy, Args)]
pub struct WaitTime {
    /// How long to wait for memory and vCPUs (30s, 5m, at most 1d); 0 to fail at once
    /// if there are not enough [default: the node's --memory-wait]
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    pub wait: Option<u32>,
}

impl WaitTime {
    /// The query of a request that waits like this; empty if nothing was chosen.
    pub fn query(self) -> String {
        self.after("")
    }

    /// Appends it to a query.
    pub fn after(self, query: &str) -> String {
        let separator = if query.is_empty() { '?' } else { '&' };
        match self.wait {
            Some(wait_s) => format!("{query}{separator}wait_s={wait_s}"),
            None => query.to_owned(),
        }
    }
}

/// `--priority` and `--wait`, of a VM that exists.
#[derive(Debug, Args)]
pub struct WaitOptions {
    /// Priority among requests that wait for memory and vCPUs [default: the VM's]
    #[arg(long, value_enum, value_name = "PRIORITY")]
    pub priority: Option<PriorityChoice>,
    #[command(flatten)]
    pub time: WaitTime,
}

impl WaitOptions {
    /// The query of a request that waits like this; empty if nothing was chosen.
    pub fn query(&self) -> String {
        let priority = self.priority.map(Priority::from);
        let query = priority.map(|priority| format!("?priority={}", priority.name()));
        self.time.after(&query.unwrap_or_default())
    }
}

/// `jiffy queue`
#[derive(Debug, Args)]
pub struct Queue {
    /// Output format
    #[arg(long, value_enum, default_value = "table")]
    pub format: ListFormat,
}
