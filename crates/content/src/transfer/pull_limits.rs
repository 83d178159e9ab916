//! Limits of simultaneous pulls, in all and for each registry: a slow registry can't use up all
//! threads.

use jiffy_sys::mutex::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most simultaneous pulls; each has a thread.
const MAX_PULLS: usize = 32;
/// Most simultaneous pulls from one registry.
const MAX_PULLS_PER_REGISTRY: usize = 4;

/// The limits, and the pulls that count against them.
#[derive(Debug)]
pub struct PullLimits {
    all: Arc<Semaphore>,
    registries: Mutex<HashMap<String, Weak<Semaphore>>>,
}

/// The place of one pull; dropping it lets the next one begin.
#[derive(Debug)]
pub struct PullSlot {
    _of_registry: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Default for PullLimits {
    fn default() -> Self {
        PullLimits {
            all: Arc::new(Semaphore::new(MAX_PULLS)),
            registries: Mutex::default(),
        }
    }
}

impl PullLimits {
    /// Waits until one more pull from this registry may begin.
    pub async fn acquire(&self, registry: &str) -> Option<PullSlot> {
        let of_registry = self.registry(registry).acquire_owned().await.ok()?;
        let of_all = self.all.clone().acquire_owned().await.ok()?;
        Some(PullSlot {
            _of_registry: of_registry,
            _of_all: of_all,
        })
    }

    fn registry(&self, name: &str) -> Arc<Semaphore> {
        let mut registries = lock(&self.registries);
        registries.retain(|_, slots| slots.strong_count() > 0);
        if let Some(slots) = registries.get(name).and_then(Weak::upgrade) {
            return slots;
        }
        let slots = Arc::new(Semaphore::new(MAX_PULLS_PER_REGISTRY));
        registries.insert(name.to_owned(), Arc::downgrade(&slots));
        slots
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[tokio::test]
    async fn pulls_are_limited_per_registry_and_in_all() {
        let slots = PullLimits::default();
        let mut slow = Vec::new();
        for _ in 0..MAX_PULLS_PER_REGISTRY {
            slow.push(slots.acquire("slow.example").await.unwrap());
        }
        assert!(slots.acquire("slow.example").now_or_never().is_none());
        let other = slots.acquire("other.example").now_or_never();
        assert!(other.flatten().is_some());
        slow.pop();
        assert!(slots.acquire("slow.example").now_or_never().is_some());
        // There is also a limit for all registries together.
        let mut all = Vec::new();
        for number in 0.. {
            match slots.acquire(&format!("{number}.example")).now_or_never() {
                Some(slot) => all.push(slot),
                None => break,
            }
        }
        assert_eq!(all.len() + slow.len(), MAX_PULLS);
    }
}
