//! Who asks for memory and vCPUs, and how long the request may wait.

use jiffy_wire::api::{Priority, Purpose};
use std::sync::Arc;
use std::time::Duration;

/// The owner of requests of which no owner is known.
pub const DEFAULT_OWNER: &str = "default";

/// A request, apart from the amount that it needs.
#[derive(Debug, Clone)]
pub struct Asking {
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
    pub request: Option<Arc<str>>,
}
