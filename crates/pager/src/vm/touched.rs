//! Records which chunks a VM touched, in order.

use crate::bitmap::Bitmap;
use jiffy_sys::mutex::lock;
use std::sync::Mutex;

/// The chunks of an image that were touched, in order of first touch.
#[derive(Debug)]
pub struct Touched {
    chunk_size: u64,
    seen: Bitmap,
    order: Mutex<Vec<u32>>,
}

impl Touched {
    /// For an image of this size in chunks of this size.
    pub fn new(image_size: u64, chunk_size: usize) -> Touched {
        Touched {
            chunk_size: chunk_size as u64,
            seen: Bitmap::new(image_size.div_ceil(chunk_size as u64)),
            order: Mutex::new(Vec::new()),
        }
    }

    /// Notes that the chunk with this byte was touched.
    pub(crate) fn add(&self, offset: u64) {
        let chunk = offset / self.chunk_size;
        if self.seen.set(chunk) {
            lock(&self.order).push(chunk as u32);
        }
    }

    /// The chunks touched so far.
    pub fn chunks(&self) -> Vec<u32> {
        lock(&self.order).clone()
    }
}
