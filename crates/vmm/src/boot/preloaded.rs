//! A kernel that is copied into RAM before it is known which VM will boot.

use super::{OpenFile, copy_segments, plan};
use jiffy_devices::GuestMemory;
use jiffy_sys::stamp::Stamp;
use std::io;
use std::ops::Range;

/// A kernel whose segments are in the beginning of RAM.
#[derive(Debug)]
pub struct Preloaded {
    stamp: Stamp,
    range: Range<u64>,
}

impl Preloaded {
    /// Copies a kernel into the first `size` bytes of RAM, which are zero there. `None`, and nothing
    /// is written, if it does not fit or can't be booted.
    ///
    /// # Errors
    ///
    /// If the file can't be read; a part of it may have been written.
    pub fn load(
        kernel: &OpenFile,
        memory: &GuestMemory,
        size: u64,
    ) -> io::Result<Option<Preloaded>> {
        let Ok(plan) = plan(kernel, size) else {
            return Ok(None);
        };
        let (Some(first), Some(last)) = (plan.segments.first(), plan.segments.last()) else {
            return Ok(None);
        };
        copy_segments(kernel, &plan, memory)?;
        Ok(Some(Preloaded {
            stamp: kernel.stamp(),
            range: first.address..last.address + last.memory_size,
        }))
    }

    /// Is it this kernel?
    pub fn is(&self, kernel: &OpenFile) -> bool {
        self.stamp == kernel.stamp()
    }

    /// Guest physical addresses of its segments.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }
}
