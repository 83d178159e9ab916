//! Serialises requests of each VM and each disk, independently of others.

use jiffy_sys::mutex::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use tokio::sync::OwnedMutexGuard;

type Turn = tokio::sync::Mutex<()>;

/// Locks by the name of the VM or disk.
#[derive(Debug, Default)]
pub(super) struct Orders {
    turns: Mutex<HashMap<String, Weak<Turn>>>,
}

impl Orders {
    /// Waits for earlier orders of this name; later ones wait until this is dropped.
    pub async fn turn(&self, name: &str) -> OwnedMutexGuard<()> {
        self.of(name).lock_owned().await
    }

    /// As [`Orders::turn`]; `None` if there are earlier orders of this name.
    pub fn try_turn(&self, name: &str) -> Option<OwnedMutexGuard<()>> {
        self.of(name).try_lock_owned().ok()
    }

    fn of(&self, name: &str) -> Arc<Turn> {
        let mut turns = lock(&self.turns);
        turns.retain(|_, turn| turn.strong_count() > 0);
        match turns.get(name).and_then(Weak::upgrade) {
            Some(turn) => turn,
            None => {
                let turn = Arc::<Turn>::default();
                turns.insert(name.to_owned(), Arc::downgrade(&turn));
                turn
            }
        }
    }
}
