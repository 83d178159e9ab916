//! Disks whose file is filled as it is read: what is there is asked before
//! each read, and what is missing is waited for. Who fills the file, and how
//! it is asked, is somebody else's business.

use crate::virtio::queue::doorbell::descriptor;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vmm_sys_util::eventfd::EventFd;

/// Knows what of a disk's file is there.
pub trait Residency: std::fmt::Debug + Send + Sync {
    /// Whether all of these bytes are in the file. Asked before every read, so
    /// it should cost next to nothing. What is there stays there.
    fn is_present(&self, bytes: &Range<u64>) -> bool;

    /// Waits until they are, or until some have come that the file has no room for. The
    /// guest gets an I/O error for any error but [`io::ErrorKind::Interrupted`], which
    /// means that the order to stop has come: then the request is done anew another time.
    fn fetch(&self, bytes: &Range<u64>, order: &StopOrder) -> io::Result<Fetched>;
}

/// What became of bytes that were missing.
#[derive(Debug, PartialEq, Eq)]
pub enum Fetched {
    /// All of them are in the file.
    Present,
    /// The first of them, at least one and no more than were asked for. They are not in
    /// the file.
    Bytes(Vec<u8>),
}

/// The order to stop, for those who wait in a disk's thread.
#[derive(Debug)]
pub struct StopOrder {
    stop: Arc<AtomicBool>,
    bell: Option<EventFd>,
}

/// An order without a bell.
impl From<Arc<AtomicBool>> for StopOrder {
    fn from(stop: Arc<AtomicBool>) -> StopOrder {
        StopOrder { stop, bell: None }
    }
}

impl StopOrder {
    /// `bell` rings when the order comes.
    pub(super) fn set_bell(&mut self, bell: EventFd) {
        self.bell = Some(bell);
    }

    /// Whether it has come.
    pub fn has_come(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Readable when it has come, and at other times too. Without one the
    /// order is to be looked for now and then.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.bell.as_ref().map(descriptor)
    }

    /// Silences the bell, which is readable. It also rings for further
    /// requests of the driver, which are looked for in any case.
    pub fn silence(&self) {
        if let Some(bell) = &self.bell {
            let _ = bell.read();
        }
    }
}
