//! A request for memory and vCPUs: its owner, priority and time limit.

use jiffy_wire::api::{Priority, Purpose};
use std::sync::Arc;
use std::time::Duration;

/// The owner of requests without a known owner.
pub const DEFAULT_OWNER: &str = "default";

/// A request, apart from the amount that it needs.
#[derive(Debug, Clone)]
pub struct Request {
    /// Whose request it is: owners take turns.
    pub owner: Arc<str>,
    /// Its priority.
    pub priority: Priority,
    /// How long it may wait; `None`: as long as the ledger allows by default.
    pub wait: Option<Duration>,
    /// Id of its VM.
    pub id: String,
    /// Name of its VM.
    pub name: String,
    /// What it waits for.
    pub purpose: Purpose,
    /// The id that its client has given to it.
    pub request_id: Option<Arc<str>>,
}
