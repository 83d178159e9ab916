//! Limits of simultaneous pulls, in all and for each registry: a slow registry can't use up all
//! threads.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most simultaneous pulls; each has a thread.
const MAX_PULLS: usize = 32;
/// Most simultaneous pulls from one registry.
const MAX_PULLS_PER_REGISTRY: usize = 4;

/// The limits, and the pulls that count against them.
#[derive(Debug)]
pub struct Turns {
    all: Arc<Semaphore>,
    registries: Mutex<HashMap<String, Weak<Semaphore>>>,
}

/// The place of one pull; dropping it lets the next one begin.
#[derive(Debug)]
pub struct Turn {
    _of_registry: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Default for Turns {
    fn default() -> Self {
        Turns {
            all: Arc::new(Semaphore::new(MAX_PULLS)),
            registries: Mutex::default(),
        }
    }
}

impl Turns {
    /// Waits until one more pull from this registry may begin.
    pub async fn turn(&self, registry: &str) -> Option<Turn> {
        let of_registry = self.registry(registry).acquire_owned().await.ok()?;
        let of_all = self.all.clone().acquire_owned().await.ok()?;
        Some(Turn {
            _of_registry: of_registry,
            _of_all: of_all,
        })
    }

    fn registry(&self, name: &str) -> Arc<Semaphore> {
        let registries = self.registries.lock();
        let mut registries = registries.unwrap_or_else(PoisonError::into_inner);
        registries.retain(|_, turns| turns.strong_count() > 0);
        if let Some(turns) = registries.get(name).and_then(Weak::upgrade) {
            return turns;
        }
        let turns = Arc::new(Semaphore::new(MAX_PULLS_PER_REGISTRY));
        registries.insert(name.to_owned(), Arc::downgrade(&turns));
        turns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[tokio::test]
    async fn pulls_are_limited_per_registry_and_in_all() {
        let turns = Turns::default();
        let mut slow = Vec::new();
        for _ in 0..MAX_PULLS_PER_REGISTRY {
            slow.push(turns.turn("slow.example").await.unwrap());
        }
        assert!(turns.turn("slow.example").now_or_never().is_none());
        let other = turns.turn("other.example").now_or_never();
        assert!(other.flatten().is_some());
        slow.pop();
        assert!(turns.turn("slow.example").now_or_never().is_some());
        // There is also a limit for all registries together.
        let mut all = Vec::new();
        for number in 0.. {
            match turns.turn(&format!("{number}.example")).now_or_never() {
                Some(turn) => all.push(turn),
                None => break,
            }
        }
        assert_eq!(all.len() + slow.len(), MAX_PULLS);
    }
}
