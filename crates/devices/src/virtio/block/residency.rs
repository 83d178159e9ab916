//! Disks whose file is filled on demand: before each read the device checks which bytes are present,
//! and requests missing ones. The VMM implements [`Residency`] and [`Fetcher`].

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// Which parts of a disk's file are present, and how to get the others.
pub trait Residency: std::fmt::Debug + Send + Sync {
    /// Whether all of these bytes are in the file. Called before every read, so it must be
    /// cheap. Bytes that are present stay present.
    fn is_present(&self, bytes: &Range<u64>) -> bool;

    /// Fetches missing bytes; `None` if none are ever missing.
    fn fetcher(&self) -> Option<&dyn Fetcher>;
}

/// Gets bytes that are missing in a disk's file, any number of ranges at a time. Only the
/// disk's own thread calls it, and only [`Fetcher::wait`] blocks.
pub trait Fetcher {
    /// Requests these bytes of the disk, counted from its beginning. Returns the id that the answer
    /// will have.
    fn ask(&self, bytes: Range<u64>) -> u64;

    /// Takes the answers that have arrived, in any order, with the ids of their requests. If an
    /// answer is an error, the guest gets an I/O error.
    fn answers(&self) -> Vec<(u64, io::Result<Fetched>)>;

    /// Waits until an answer may have arrived, `wakeup` is readable, or [`Fetcher::answers`] has
    /// to be called for another reason. Returns whether `wakeup` is readable.
    ///
    /// # Errors
    ///
    /// If poll(2) fails.
    fn wait(&self, wakeup: BorrowedFd<'_>) -> io::Result<bool>;

    /// Drops all requests, because their reads were given up.
    fn give_up(&self);
}

/// The result of fetching missing bytes.
#[derive(Debug, PartialEq, Eq)]
pub enum Fetched {
    /// All of them are in the file.
    Present,
    /// The first of them, at least one and no more than requested. They are not in the file.
    Bytes(Vec<u8>),
}
