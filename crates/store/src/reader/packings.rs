//! The same image in several packings.
//!
//! An image's id depends on its contents alone; each artifact has its own order of chunks. Two
//! nodes that packed an image with different boot sets are both right, and the order that a
//! dishonest artifact gives is wrong. Each packing that is partial has a file and origins of its
//! own. A read that one packing cannot serve is tried with the next; the packing that served the
//! last read is tried first.

use super::ImageReader;
use crate::error::ImageError;
use crate::stop::Stop;
use jiffy_sys::mutex::{read, write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

#[derive(Default)]
pub(super) struct Packings {
    others: RwLock<Vec<Arc<ImageReader>>>,
    /// The packing that served the last read: 0 for the reader itself, otherwise an index in the
    /// others plus one.
    last: AtomicUsize,
}

impl Packings {
    fn others(&self) -> Vec<Arc<ImageReader>> {
        let others = read(&self.others);
        others.clone()
    }

    /// Tries one packing after the other until one succeeds, with `None` for the reader's own.
    ///
    /// # Errors
    ///
    /// If no packing succeeds: the first error. If `stop` is cancelled: the error of that attempt.
    pub fn try_each<T>(
        &self,
        stop: &Stop,
        mut attempt: impl FnMut(Option<&ImageReader>) -> Result<T, ImageError>,
    ) -> Result<T, ImageError> {
        let others = self.others();
        let count = others.len() + 1;
        let first = self.last.load(Ordering::Relaxed) % count;
        let mut failed = None;
        for step in 0..count {
            let which = (first + step) % count;
            let packing = which.checked_sub(1).map(|index| &*others[index]);
            match attempt(packing) {
                Ok(done) => {
                    self.last.store(which, Ordering::Relaxed);
                    return Ok(done);
                }
                Err(error) if stop.is_cancelled() => return Err(error),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        Err(failed.expect("one was tried"))
    }
}

impl ImageReader {
    /// Sets other packings of this image. Only readers with the same id and chunk size are taken;
    /// none of them may have other packings of its own.
    pub fn set_packings(&self, mut others: Vec<Arc<ImageReader>>) {
        let alike = |other: &ImageReader| {
            other.id() == self.id()
                && other.chunk_size() == self.chunk_size()
                && other.size() == self.size()
        };
        others.retain(|other| alike(other));
        *write(&self.packings.others) = others;
    }

    /// The other packings.
    pub fn packings(&self) -> Vec<Arc<ImageReader>> {
        self.packings.others()
    }
}
