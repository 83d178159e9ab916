//! Where missing memory of a VM comes from, from its building to its end.

use super::{Attendant, PagedMemory, PagerError};
use crate::ending::Ending;
use crate::memory::GuestRam;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Where missing memory comes from.
#[derive(Debug, Default)]
pub enum Supply {
    /// None is missing: it has no pager.
    #[default]
    NoPager,
    /// A pager, which a thread attends to while the VM is built.
    Building(Attendant),
    /// A pager, which the main thread attends to.
    Pager(PagedMemory),
    /// It was lost while the VM was built, and reads as zero: devices would carry out
    /// requests with zeros for their data.
    Lost,
}

impl Supply {
    /// The VM is built: from here on the main thread attends to the pager, and looks into
    /// no RAM that may be missing.
    pub fn take_over(&mut self) -> Result<(), PagerError> {
        if let Supply::Building(attendant) = std::mem::replace(self, Supply::Lost) {
            *self = Supply::Pager(attendant.end()?);
            return Ok(());
        }
        *self = Supply::NoPager;
        Ok(())
    }

    /// None of the memory is missing.
    pub fn is_complete(&self) -> bool {
        match self {
            Supply::NoPager => true,
            Supply::Pager(memory) => memory.is_complete(),
            Supply::Building(_) | Supply::Lost => false,
        }
    }

    /// Some of it is missing for good: nothing may look at it again.
    pub fn is_lost(&self) -> bool {
        match self {
            Supply::Lost => true,
            Supply::Pager(memory) => memory.is_lost(),
            Supply::NoPager | Supply::Building(_) => false,
        }
    }

    /// The guest runs from now on.
    pub fn guest_runs(&mut self) {
        if let Supply::Pager(memory) = self {
            memory.guest_runs();
        }
    }

    /// Listens to the pager, and tells it what it is to know. The end of the VM, if its
    /// memory is lost.
    pub fn attend(&mut self, ram: &GuestRam) -> Option<Ending> {
        let Supply::Pager(memory) = self else {
            return None;
        };
        memory.tell_written(ram);
        memory.attend()
    }

    /// When to attend at the latest, from now.
    pub fn patience(&self) -> Option<Duration> {
        match self {
            Supply::Pager(memory) => memory.patience(),
            _ => None,
        }
    }

    /// Readable when there is something to attend to.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Supply::Pager(memory) => memory.descriptor(),
            _ => None,
        }
    }
}
