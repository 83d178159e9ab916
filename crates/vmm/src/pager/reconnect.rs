//! The search for a pager that is gone or not started yet.

use std::io;
use std::time::{Duration, Instant};

/// Interval between two attempts.
pub const INTERVAL: Duration = Duration::from_millis(20);

/// The search for a pager, which ends after some time.
#[derive(Debug, Clone, Copy)]
pub struct Reconnect {
    pub(super) until: Instant,
}

impl Reconnect {
    /// Starts a search that ends after `timeout`.
    pub fn within(timeout: Duration) -> Reconnect {
        Reconnect {
            until: Instant::now() + timeout,
        }
    }

    /// Tries once: returns the connection, or `None` if another attempt is to follow after
    /// [`INTERVAL`].
    ///
    /// # Errors
    ///
    /// If no attempt succeeds in time: the error of the last one.
    pub fn attempt<T>(self, connect: impl FnOnce() -> io::Result<T>) -> io::Result<Option<T>> {
        match connect() {
            Ok(connection) => Ok(Some(connection)),
            Err(_) if Instant::now() < self.until => Ok(None),
            Err(error) => Err(error),
        }
    }
}
