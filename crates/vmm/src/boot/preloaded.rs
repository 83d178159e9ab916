//! A kernel that is copied into RAM before it is known which VM will boot.

use super::source::ContentsId;
use super::{OpenFile, copy_segments, plan};
use jiffy_devices::GuestMemory;
use std::io;
use std::ops::Range;

/// A kernel whose segments are in the beginning of RAM.
#[derive(Debug)]
pub struct Preloaded {
    contents: ContentsId,
    range: Range<u64>,
}

impl Preloaded {
    /// Copies a kernel into the first `size` bytes of RAM, which are zero there. `None`, and nothing
    /// is written, if it does not fit or can't be booted.
    ///
    /// # Errors
    ///
    /// The file can't be read; a part of it may have been written.
    pub fn load(
        kernel: &OpenFile,
        memory: &GuestMemory,
        size: u64,
    ) -> io::Result<Option<Preloaded>> {
        let Ok(plan) = plan(kernel, size) else {
            return Ok(None);
        };
        copy_segments(kernel, &plan, memory)?;
        let end_of_last = |last: &super::Segment| last.address + last.memory_size;
        let start = plan.segments.first().map_or(0, |first| first.address);
        Ok(Some(Preloaded {
            contents: kernel.contents().clone(),
            range: start..plan.segments.last().map_or(0, end_of_last),
        }))
    }

    /// Is it this kernel?
    pub fn is(&self, kernel: &OpenFile) -> bool {
        self.contents == *kernel.contents()
    }

    /// Guest physical addresses of its segments.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }
}
