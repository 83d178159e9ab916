//! Attached clients and their positions in the log. The guest waits for the slowest, within
//! limits.

use jiffy_sys::mutex::lock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// How far the log may run ahead of the slowest attached client, in bytes;
/// then the guest waits, as a writer to a full pipe does. Less than a
/// segment ([`super::log::SEGMENT`]), so that what an attached client still needs is never dropped.
pub const MAX_LAG: u64 = 16 << 20;

/// The clients attached to a VM, and how far each has read.
#[derive(Debug, Default)]
pub struct Clients {
    cursors: Mutex<Vec<Arc<AtomicU64>>>,
    /// Notifies when a client has advanced or left.
    pub progress: Notify,
}

impl Clients {
    /// Is no client attached?
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Does some client lag behind this end of the log by more than [`MAX_LAG`]?
    pub fn is_lagging(&self, end: u64) -> bool {
        self.lock()
            .iter()
            .any(|cursor| end.saturating_sub(cursor.load(Ordering::Relaxed)) > MAX_LAG)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<AtomicU64>>> {
        lock(&self.cursors)
    }
}

/// An attached client's position in the log; dropping it detaches the client.
#[derive(Debug)]
pub struct Cursor {
    clients: Arc<Clients>,
    position: Arc<AtomicU64>,
}

impl Cursor {
    /// Attaches a client that has read nothing. It delays the guest only after the first
    /// [`Cursor::advance`].
    pub fn new(clients: &Arc<Clients>) -> Cursor {
        let position = Arc::new(AtomicU64::new(u64::MAX));
        clients.lock().push(Arc::clone(&position));
        Cursor {
            clients: Arc::clone(clients),
            position,
        }
    }

    /// The client has read up to here.
    pub fn advance(&self, position: u64) {
        self.position.store(position, Ordering::Relaxed);
        self.clients.progress.notify_one();
    }
}

impl Drop for Cursor {
    fn drop(&mut self) {
        self.clients
            .lock()
            .retain(|position| !Arc::ptr_eq(position, &self.position));
        self.clients.progress.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_client_limits_the_log_until_it_leaves() {
        let clients = Arc::new(Clients::default());
        let slow = Cursor::new(&clients);
        assert!(!clients.is_lagging(MAX_LAG + 1), "it has not begun to read");
        slow.advance(0);
        assert!(!clients.is_lagging(MAX_LAG));
        assert!(clients.is_lagging(MAX_LAG + 1));
        drop(slow);
        assert!(!clients.is_lagging(u64::MAX));
        assert!(clients.is_empty());
    }
}
