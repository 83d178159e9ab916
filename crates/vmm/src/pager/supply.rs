//! The source of a VM's missing memory, from its building to its end.

use super::{PagedMemory, PagerError, PagerThread};
use crate::ending::Ending;
use crate::memory::GuestRam;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The source of missing memory.
#[derive(Debug, Default)]
pub enum Supply {
    /// No memory is missing: there is no pager.
    #[default]
    NoPager,
    /// A pager; a thread serves its connection while the VM is built.
    Building(PagerThread),
    /// A pager; the main thread serves its connection.
    Pager(PagedMemory),
    /// Memory was lost while the VM was built, and reads as zero: devices would use zeros as data
    /// of requests.
    Lost,
}

impl Supply {
    /// Call it when the VM is built. From then on the main thread serves the connection, and must
    /// not touch RAM that may be missing.
    ///
    /// # Errors
    ///
    /// If memory was lost while the VM was built.
    pub fn take_over(&mut self) -> Result<(), PagerError> {
        if let Supply::Building(thread) = std::mem::replace(self, Supply::Lost) {
            *self = Supply::Pager(thread.stop()?);
            return Ok(());
        }
        *self = Supply::NoPager;
        Ok(())
    }

    /// Whether no memory is missing.
    pub fn is_complete(&self) -> bool {
        match self {
            Supply::NoPager => true,
            Supply::Pager(memory) => memory.is_complete(),
            Supply::Building(_) | Supply::Lost => false,
        }
    }

    /// Whether some memory is missing for good. Nothing may read it any more.
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
        memory.report_written(ram);
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
