//! Leases: nothing is removed or changed while something else uses it. One table for the volumes,
//! snapshots and images of chunks of a node.
//!
//! It is in memory: what a VM uses for longer than a daemon lives is in the VM's record, and the
//! next daemon takes the leases again.

use jiffy_sys::mutex::{lock, unpoisoned};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};

/// What a lease is on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Item {
    /// A volume, by its name.
    Volume(String),
    /// A snapshot, by its folder.
    Snapshot(PathBuf),
    /// An image of chunks, by its id.
    Chunks(String),
}

/// Whether others may use it at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// As long as they change nothing, too.
    Shared,
    /// Nobody.
    Exclusive,
}

/// Who has a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// The running VM with this name.
    Vm(String),
    /// An operation of the daemon, in a word that follows "is being".
    Operation(&'static str),
}

/// A lease that is held.
#[derive(Debug, PartialEq, Eq)]
pub struct Held {
    /// Who has it.
    pub holder: Holder,
    /// Whether others may have one as well.
    pub mode: Mode,
}

/// All leases of a node.
#[derive(Debug, Default)]
pub struct Leases {
    held: Mutex<HashMap<Item, Vec<Arc<Held>>>>,
    released: Condvar,
}

/// A lease; dropping it releases the item.
#[derive(Debug)]
pub struct Lease {
    leases: Arc<Leases>,
    item: Item,
    held: Arc<Held>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut all = lock(&self.leases.held);
        if let Some(holders) = all.get_mut(&self.item) {
            holders.retain(|other| !Arc::ptr_eq(other, &self.held));
            if holders.is_empty() {
                all.remove(&self.item);
            }
        }
        self.leases.released.notify_all();
    }
}

impl Leases {
    /// A lease on this item.
    ///
    /// # Errors
    ///
    /// If another lease excludes it: that lease.
    pub fn take(
        self: &Arc<Leases>,
        item: Item,
        mode: Mode,
        holder: Holder,
    ) -> Result<Lease, Arc<Held>> {
        let mut all = lock(&self.held);
        if let Some(other) = excluding(&all, &item, mode) {
            return Err(Arc::clone(other));
        }
        Ok(self.enter(&mut all, item, Held { holder, mode }))
    }

    /// A shared lease for an operation; waits for the end of an exclusive one: blocking.
    pub fn share(self: &Arc<Leases>, item: Item, operation: &'static str) -> Lease {
        let mode = Mode::Shared;
        let taken = |all: &mut HashMap<_, _>| excluding(all, &item, mode).is_some();
        let mut all = unpoisoned(self.released.wait_while(lock(&self.held), taken));
        let holder = Holder::Operation(operation);
        self.enter(&mut all, item, Held { holder, mode })
    }

    /// All leases on this item.
    pub fn of(&self, item: &Item) -> Vec<Arc<Held>> {
        lock(&self.held).get(item).cloned().unwrap_or_default()
    }

    /// What there are leases on.
    pub fn items(&self) -> Vec<Item> {
        lock(&self.held).keys().cloned().collect()
    }

    fn enter(
        self: &Arc<Leases>,
        all: &mut HashMap<Item, Vec<Arc<Held>>>,
        item: Item,
        held: Held,
    ) -> Lease {
        let held = Arc::new(held);
        all.entry(item.clone()).or_default().push(Arc::clone(&held));
        Lease {
            leases: Arc::clone(self),
            item,
            held,
        }
    }
}

/// A lease that excludes one with this mode.
fn excluding<'a>(
    all: &'a HashMap<Item, Vec<Arc<Held>>>,
    item: &Item,
    mode: Mode,
) -> Option<&'a Arc<Held>> {
    let excludes = |other: &&Arc<Held>| mode == Mode::Exclusive || other.mode == Mode::Exclusive;
    all.get(item)?.iter().find(excludes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Duration;

    fn volume() -> Item {
        Item::Volume("data".into())
    }

    #[test]
    fn one_exclusive_or_any_number_of_shared_leases_are_held() {
        let leases = Arc::<Leases>::default();
        let vm = |name: &str| Holder::Vm(name.into());
        let one = leases.take(volume(), Mode::Shared, vm("one")).unwrap();
        let again = leases.take(volume(), Mode::Shared, vm("one")).unwrap();
        let two = leases.take(volume(), Mode::Shared, vm("two")).unwrap();
        assert_eq!(leases.of(&volume()).len(), 3);
        drop((one, two));
        // Each lease is released by itself, also if its holder has several.
        let excluded = leases.take(volume(), Mode::Exclusive, vm("three"));
        assert_eq!(excluded.unwrap_err().holder, vm("one"));
        drop(again);
        let removed = Holder::Operation("removed");
        let writer = leases.take(volume(), Mode::Exclusive, removed.clone());
        let excluded = leases.take(volume(), Mode::Shared, vm("one")).unwrap_err();
        assert_eq!(
            (&excluded.holder, excluded.mode),
            (&removed, Mode::Exclusive)
        );
        // Other items are not concerned.
        let other = Item::Chunks("data".into());
        let chunks = leases
            .take(other.clone(), Mode::Exclusive, removed)
            .unwrap();
        drop(writer);
        assert_eq!(leases.items(), [other]);
        drop(chunks);
        assert!(leases.items().is_empty());
    }

    #[test]
    fn an_operation_waits_for_the_end_of_an_exclusive_lease() {
        let leases = Arc::<Leases>::default();
        let removed = Holder::Operation("removed");
        let removal = leases.take(volume(), Mode::Exclusive, removed).unwrap();
        let waiting = {
            let leases = Arc::clone(&leases);
            thread::spawn(move || leases.share(volume(), "stored"))
        };
        thread::sleep(Duration::from_millis(50));
        assert!(!waiting.is_finished());
        drop(removal);
        let lease = waiting.join().unwrap();
        assert_eq!(leases.of(&volume())[0].holder, Holder::Operation("stored"));
        drop(lease);
    }
}
