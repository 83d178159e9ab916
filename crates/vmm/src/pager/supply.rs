//! Where missing memory of a VM comes from, from its building to its end.

use super::{PagedMemory, PagerError, PagerThread};
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
    /// A pager, whose connection a thread serves while the VM is built.
    Building(PagerThread),
    /// A pager, whose connection the main thread serves.
    Pager(PagedMemory),
    /// It was lost while the VM was built, and reads as zero: devices would carry out
    /// requests with zeros for their data.
    Lost,
}

impl Supply {
    /// The VM is built: from now on the main thread serves the connection, and must not
    /// touch RAM that may be missing.
    ///
    /// # Errors
    ///
    /// Memory was lost while the VM was built.
    pub fn take_over(&mut self) -> Result<(), PagerError> {
        if let Supply::Building(thread) = std::mem::replace(self, Supply::Lost) {
            *self = Supply::Pager(thread.stop()?);
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

    /// Reads what the pager has sent, and reports what the guest has written. Returns why
    /// the VM ends, if its memory is lost.
    pub fn process_events(&mut self, ram: &GuestRam) -> Option<Ending> {
        let Supply::Pager(memory) = self else {
            return None;
        };
        memory.tell_written(ram);
        memory.process_events()
    }

    /// How long the next call of [`process_events`](Supply::process_events) may wait.
    pub fn timeout(&self) -> Option<Duration> {
        match self {
            Supply::Pager(memory) => memory.timeout(),
            _ => None,
        }
    }

    /// Readable when the pager has sent something.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Supply::Pager(memory) => memory.descriptor(),
            _ => None,
        }
    }
}
