//! One image, packed in several ways.
//!
//! An image has the id of what it holds. Where its chunks lie is said by each artifact
//! for itself: two nodes that packed it with other boot sets are both honest, and one
//! that says nonsense is not. Each packing that is not all here has a file and origins
//! of its own, and is as good as any other: what cannot be had by one is had by the
//! next, and who had it last is asked first.

use super::ImageReader;
use crate::error::ImageError;
use crate::stop::Stop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

#[derive(Default)]
pub(super) struct Packings {
    others: RwLock<Vec<Arc<ImageReader>>>,
    /// Who had it last: 0 for the reader itself, else one more than another's index.
    last: AtomicUsize,
}

impl Packings {
    fn others(&self) -> Vec<Arc<ImageReader>> {
        let others = self.others.read().unwrap_or_else(PoisonError::into_inner);
        others.clone()
    }

    /// Tries one packing after the other, `None` for the reader's own; the first error
    /// if none can.
    pub fn first_that<T>(
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
                Err(error) if stop.is_given_up() => return Err(error),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        Err(failed.expect("one was tried"))
    }
}

impl ImageReader {
    /// Packed in these ways it can be had, too. Only those of the same id are taken,
    /// with chunks as large; none must have others of its own.
    pub fn set_packings(&self, mut others: Vec<Arc<ImageReader>>) {
        let alike = |other: &ImageReader| {
            other.id() == self.id()
                && other.chunk_size() == self.chunk_size()
                && other.size() == self.size()
        };
        others.retain(|other| alike(other));
        let known = self.packings.others.write();
        *known.unwrap_or_else(PoisonError::into_inner) = others;
    }

    /// The other ways in which it is packed.
    pub fn packings(&self) -> Vec<Arc<ImageReader>> {
        self.packings.others()
    }
}
