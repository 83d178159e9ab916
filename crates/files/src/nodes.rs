//! The files and folders that the guest's kernel knows, each with a descriptor that can't read or
//! write (`O_PATH`).

use crate::budget::{Budget, Slot};
use crate::protocol::Outcome;
use jiffy_sys::mutex::lock;
use rustix::fs::{FileType, Statx};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

/// Number of the shared folder itself (`FUSE_ROOT_ID`).
pub const ROOT: u64 = 1;

/// A file, a folder, a symbolic link or something else with a name.
#[derive(Debug)]
pub struct Node {
    /// `O_PATH` descriptor; a symbolic link's own, not that of its target.
    pub descriptor: OwnedFd,
    /// Which of them; it never changes.
    pub kind: FileType,
    _slot: Option<Slot>,
}

/// What distinguishes two files: mount, device and inode number. The descriptor that a node holds
/// keeps the inode number in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Identifier(u64, u32, u32, u64);

impl Identifier {
    fn of(facts: &Statx) -> Identifier {
        Identifier(
            facts.stx_mnt_id,
            facts.stx_dev_major,
            facts.stx_dev_minor,
            facts.stx_ino,
        )
    }
}

/// The kind of a file.
pub fn kind_of(facts: &Statx) -> FileType {
    FileType::from_raw_mode(facts.stx_mode.into())
}

#[derive(Debug)]
struct Entry {
    node: Arc<Node>,
    identifier: Identifier,
    /// How many answers named the node since it was last forgotten.
    lookups: u64,
}

#[derive(Debug)]
struct Table {
    entries: HashMap<u64, Entry>,
    numbers: HashMap<Identifier, u64>,
    next: u64,
}

/// All nodes of a guest but the root, for a capture.
#[derive(Debug)]
pub struct Listed {
    /// Each with its number and lookups.
    pub nodes: Vec<(u64, u64, Arc<Node>)>,
    /// The number of the next node.
    pub next: u64,
}

/// All nodes of a guest.
#[derive(Debug)]
pub struct Nodes {
    root: Arc<Node>,
    budget: Arc<Budget>,
    table: Mutex<Table>,
}

impl Nodes {
    /// The nodes below this folder.
    pub fn new(root: OwnedFd, budget: Arc<Budget>) -> Nodes {
        let root = Node {
            descriptor: root,
            kind: FileType::Directory,
            _slot: None,
        };
        Nodes {
            root: Arc::new(root),
            budget,
            table: Mutex::new(Table {
                entries: HashMap::new(),
                numbers: HashMap::new(),
                next: ROOT + 1,
            }),
        }
    }

    /// The node with this number.
    ///
    /// # Errors
    ///
    /// `ESTALE` if there is none.
    pub fn get(&self, number: u64) -> Outcome<Arc<Node>> {
        if number == ROOT {
            return Ok(Arc::clone(&self.root));
        }
        let table = lock(&self.table);
        let entry = table.entries.get(&number).ok_or(Errno::STALE)?;
        Ok(Arc::clone(&entry.node))
    }

    /// The number of this file, which an answer will name: an existing one, or a new one.
    ///
    /// # Errors
    ///
    /// `ENFILE` if the guest has too many.
    pub fn remember(&self, descriptor: OwnedFd, facts: &Statx) -> Outcome<u64> {
        let identifier = Identifier::of(facts);
        let mut table = lock(&self.table);
        let table = &mut *table;
        if let Some(number) = table.numbers.get(&identifier)
            && let Some(entry) = table.entries.get_mut(number)
        {
            entry.lookups = entry.lookups.saturating_add(1);
            return Ok(*number);
        }
        let node = Node {
            descriptor,
            kind: kind_of(facts),
            _slot: Some(self.budget.take()?),
        };
        let number = table.next;
        table.next += 1;
        table.numbers.insert(identifier, number);
        let entry = Entry {
            node: Arc::new(node),
            identifier,
            lookups: 1,
        };
        table.entries.insert(number, entry);
        Ok(number)
    }

    /// All of them.
    pub fn list(&self) -> Listed {
        let table = lock(&self.table);
        let entries = table.entries.iter();
        let listed =
            |(number, entry): (&u64, &Entry)| (*number, entry.lookups, Arc::clone(&entry.node));
        Listed {
            nodes: entries.map(listed).collect(),
            next: table.next,
        }
    }

    /// Adds a node of a captured session. Of two numbers for one file, the first one counts.
    ///
    /// # Errors
    ///
    /// `ESTALE` for the second number of a file, `ENFILE` if the guest has too many.
    pub fn restore(
        &self,
        number: u64,
        lookups: u64,
        descriptor: OwnedFd,
        facts: &Statx,
    ) -> Outcome<()> {
        let identifier = Identifier::of(facts);
        let mut table = lock(&self.table);
        if table.numbers.contains_key(&identifier) {
            return Err(Errno::STALE);
        }
        let node = Node {
            descriptor,
            kind: kind_of(facts),
            _slot: Some(self.budget.take()?),
        };
        table.numbers.insert(identifier, number);
        let entry = Entry {
            node: Arc::new(node),
            identifier,
            lookups,
        };
        table.entries.insert(number, entry);
        Ok(())
    }

    /// New nodes get numbers from this one on.
    pub fn continue_with(&self, next: u64) {
        lock(&self.table).next = next;
    }

    /// Takes back as many lookups; a node without any is gone. Unknown numbers are ignored.
    pub fn forget(&self, number: u64, lookups: u64) {
        let mut table = lock(&self.table);
        let Some(entry) = table.entries.get_mut(&number) else {
            return;
        };
        entry.lookups = entry.lookups.saturating_sub(lookups);
        if entry.lookups == 0 {
            let identifier = entry.identifier;
            table.numbers.remove(&identifier);
            let gone = table.entries.remove(&number);
            // Closing can take long.
            drop(table);
            drop(gone);
        }
    }

    /// Forgets all nodes except the root.
    pub fn clear(&self) {
        let mut table = lock(&self.table);
        table.numbers.clear();
        let gone = std::mem::take(&mut table.entries);
        drop(table);
        drop(gone);
    }
}
