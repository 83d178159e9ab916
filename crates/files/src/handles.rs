//! Files and folders that the guest has open.

use crate::budget::{Budget, Slot};
use crate::protocol::Outcome;
use jiffy_sys::mutex::lock;
use rustix::fs::OFlags;
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
    /// Flags by which it can be opened again; a folder has `DIRECTORY`.
    pub flags: OFlags,
    _slot: Slot,
}

impl Handle {
    /// A handle that is not in a table yet.
    pub fn new(descriptor: OwnedFd, flags: OFlags, slot: Slot) -> Arc<Handle> {
        Arc::new(Handle {
            descriptor,
            position: Mutex::new(()),
            flags,
            _slot: slot,
        })
    }

    fn is_folder(&self) -> bool {
        self.flags.contains(OFlags::DIRECTORY)
    }
}

#[derive(Debug, Default)]
struct Table {
    /// `None` if the file could not be opened again after a capture.
    handles: HashMap<u64, Option<Arc<Handle>>>,
    last: u64,
}

/// All handles of a guest, for a capture.
#[derive(Debug)]
pub struct Listed {
    /// Each with its number.
    pub handles: Vec<(u64, Option<Arc<Handle>>)>,
    /// The last number that was given.
    pub last: u64,
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

    /// Takes a place for one more.
    ///
    /// # Errors
    ///
    /// `ENFILE` if the guest has too many.
    pub fn reserve(&self) -> Outcome<Slot> {
        self.budget.take()
    }

    /// Adds one that was opened with these flags; returns its number.
    pub fn add(&self, descriptor: OwnedFd, flags: OFlags, slot: Slot) -> u64 {
        let handle = Handle::new(descriptor, flags, slot);
        let mut table = lock(&self.table);
        table.last += 1;
        let number = table.last;
        table.handles.insert(number, Some(handle));
        number
    }

    fn get(&self, number: u64, is_folder: bool) -> Outcome<Arc<Handle>> {
        let table = lock(&self.table);
        let handle = table.handles.get(&number).ok_or(Errno::BADF)?;
        let handle = handle.as_ref().ok_or(Errno::STALE)?;
        match handle.is_folder() == is_folder {
            true => Ok(Arc::clone(handle)),
            false => Err(Errno::BADF),
        }
    }

    /// All of them.
    pub fn list(&self) -> Listed {
        let table = lock(&self.table);
        let handles = table.handles.iter();
        Listed {
            handles: handles
                .map(|(number, handle)| (*number, handle.clone()))
                .collect(),
            last: table.last,
        }
    }

    /// Adds one of a captured session; `None` if its file can't be opened again.
    pub fn restore(&self, number: u64, handle: Option<Arc<Handle>>) {
        lock(&self.table).handles.insert(number, handle);
    }

    /// New numbers follow this one.
    pub fn continue_after(&self, last: u64) {
        lock(&self.table).last = last;
    }

    /// The open file with this number.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is none, `ESTALE` if it was lost with a capture.
    pub fn file(&self, number: u64) -> Outcome<Arc<Handle>> {
        self.get(number, false)
    }

    /// The open folder with this number.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is none, `ESTALE` if it was lost with a capture.
    pub fn folder(&self, number: u64) -> Outcome<Arc<Handle>> {
        self.get(number, true)
    }

    /// Removes one; it is closed when the last request that uses it is done.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is none.
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
