//! Looking for a pager that is gone, or not there yet.

use std::io;
use std::time::{Duration, Instant};

/// How often a pager is looked for.
pub const INTERVAL: Duration = Duration::from_millis(20);

/// The search for a pager, which ends after a while.
#[derive(Debug, Clone, Copy)]
pub struct Reconnect {
    pub(super) until: Instant,
}

impl Reconnect {
    /// Looks for one for so long.
    pub fn within(patience: Duration) -> Reconnect {
        Reconnect {
            until: Instant::now() + patience,
        }
    }

    /// Tries once: the connection, or none if it is to be tried again after [`INTERVAL`].
    ///
    /// # Errors
    ///
    /// Why it failed, once the time is over.
    pub fn attempt<T>(self, connect: impl FnOnce() -> io::Result<T>) -> io::Result<Option<T>> {
        match connect() {
            Ok(connection) => Ok(Some(connection)),
            Err(_) if Instant::now() < self.until => Ok(None),
            Err(error) => Err(error),
        }
    }
}
