//! Files and folders that the guest has open.

use crate::budget::{Budget, Slot};
use crate::protocol::Outcome;
use jiffy_sys::mutex::lock;
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

/// Something that is open.
#[derive(Debug)]
pub struct Handle {
    /// Its descriptor.
    pub descriptor: OwnedFd,
    /// Held while a folder's position is used. A file's position never is.
    pub position: Mutex<()>,
    is_folder: bool,
    _slot: Slot,
}

#[derive(Debug, Default)]
struct Table {
    handles: HashMap<u64, Arc<Handle>>,
    last: u64,
}

/// All handles of a guest.
#[derive(Debug)]
pub struct Handles {
    budget: Arc<Budget>,
    table: Mutex<Table>,
}

impl Handles {
    /// None yet.
    pub fn new(budget: Arc<Budget>) -> Handles {
        Handles {
            budget,
            table: Mutex::default(),
        }
    }

    /// Takes a place for one more. `ENFILE` if the guest has too many.
    pub fn reserve(&self) -> Outcome<Slot> {
        self.budget.take()
    }

    /// Adds one; returns its number.
    pub fn add(&self, descriptor: OwnedFd, is_folder: bool, slot: Slot) -> u64 {
        let handle = Handle {
            descriptor,
            position: Mutex::new(()),
            is_folder,
            _slot: slot,
        };
        let mut table = lock(&self.table);
        table.last += 1;
        let number = table.last;
        table.handles.insert(number, Arc::new(handle));
        number
    }

    fn get(&self, number: u64, is_folder: bool) -> Outcome<Arc<Handle>> {
        let table = lock(&self.table);
        let handle = table.handles.get(&number);
        let handle = handle.filter(|handle| handle.is_folder == is_folder);
        handle.map(Arc::clone).ok_or(Errno::BADF)
    }

    /// The open file with this number. `EBADF` if there is none.
    pub fn file(&self, number: u64) -> Outcome<Arc<Handle>> {
        self.get(number, false)
    }

    /// The open folder with this number. `EBADF` if there is none.
    pub fn folder(&self, number: u64) -> Outcome<Arc<Handle>> {
        self.get(number, true)
    }

    /// Removes one; it is closed when the last request that uses it is done. `EBADF` if there is
    /// none.
    pub fn remove(&self, number: u64) -> Outcome<()> {
        let gone = lock(&self.table).handles.remove(&number);
        gone.map(drop).ok_or(Errno::BADF)
    }

    /// Removes all.
    pub fn clear(&self) {
        let gone = std::mem::take(&mut lock(&self.table).handles);
        drop(gone);
    }
}
