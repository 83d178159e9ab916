//! Disks whose file is filled as it is read: before each read the device checks what is
//! present, and waits for what is missing. The VMM implements [`Residency`], which knows who
//! fills the file.

use crate::virtio::queue::doorbell::descriptor;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vmm_sys_util::eventfd::EventFd;

/// Which parts of a disk's file are present, and how to get the others.
pub trait Residency: std::fmt::Debug + Send + Sync {
    /// Whether all of these bytes are in the file. Called before every read, so it must be
    /// cheap. Bytes that are present stay present.
    fn is_present(&self, bytes: &Range<u64>) -> bool;

    /// Waits until they are, or until some have come that the file has no room for. The
    /// guest gets an I/O error for any error but [`io::ErrorKind::Interrupted`], which
    /// means that the order to stop has come: then the request is done anew another time.
    fn fetch(&self, bytes: &Range<u64>, order: &StopOrder) -> io::Result<Fetched>;
}

/// The result of fetching missing bytes.
#[derive(Debug, PartialEq, Eq)]
pub enum Fetched {
    /// All of them are in the file.
    Present,
    /// The first of them, at least one and no more than were asked for. They are not in
    /// the file.
    Bytes(Vec<u8>),
}

/// The order to stop, for code that waits in a disk's thread.
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

    /// Readable when the order has come, and at other times, too. Without it, check
    /// [`has_come`](StopOrder::has_come) from time to time.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.bell.as_ref().map(descriptor)
    }

    /// Resets the event descriptor, which is readable. It is the queue's doorbell: further
    /// requests of the driver are looked for in any case.
    pub fn silence(&self) {
        if let Some(bell) = &self.bell {
            let _ = bell.read();
        }
    }
}
