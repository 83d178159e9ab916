//! Logs the pages of guest memory that the monitor itself has written: KVM's dirty log has only the
//! guest's writes.

use std::num::NonZeroUsize;
use std::sync::{Arc, OnceLock};
use vm_memory::bitmap::{AtomicBitmap, Bitmap, RefSlice, WithBitmapSlice};
use vm_memory::mmap::{GuestRegionMmap, MmapRegion, NewBitmap};

const PAGE: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");

/// The log of one region. Nothing is logged before [`keep`](WriteLog::keep).
#[derive(Debug, Clone, Default)]
pub struct WriteLog {
    length: usize,
    pages: Arc<OnceLock<AtomicBitmap>>,
}

impl WriteLog {
    /// The log of a region.
    pub fn of(region: &GuestRegionMmap<WriteLog>) -> &WriteLog {
        let mapping: &MmapRegion<WriteLog> = region;
        mapping.bitmap()
    }

    /// Starts the log.
    pub fn keep(&self) {
        self.pages
            .get_or_init(|| AtomicBitmap::new(self.length, PAGE));
    }

    /// Whether the log was started.
    pub fn is_kept(&self) -> bool {
        self.pages.get().is_some()
    }

    /// The pages that were written since the last call, one bit each, lowest first; empty if the
    /// log was not started.
    pub fn take(&self) -> Vec<u64> {
        self.pages
            .get()
            .map(AtomicBitmap::get_and_reset)
            .unwrap_or_default()
    }
}

impl<'a> WithBitmapSlice<'a> for WriteLog {
    type S = RefSlice<'a, WriteLog>;
}

impl Bitmap for WriteLog {
    fn mark_dirty(&self, offset: usize, length: usize) {
        if let Some(pages) = self.pages.get() {
            pages.set_addr_range(offset, length);
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.pages
            .get()
            .is_some_and(|pages| pages.is_addr_set(offset))
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, WriteLog> {
        RefSlice::new(self, offset)
    }
}

impl NewBitmap for WriteLog {
    fn with_len(length: usize) -> WriteLog {
        WriteLog {
            length,
            ..WriteLog::default()
        }
    }
}

/// Memory of another monitor, which tracks writes itself and is not offered a log
/// (`VHOST_USER_PROTOCOL_F_LOG_SHMFD`).
#[cfg(feature = "vhost-user")]
impl vhost_user_backend::bitmap::BitmapReplace for WriteLog {
    type InnerBitmap = ();

    fn replace(&self, (): ()) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GuestMemory;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

    #[test]
    fn writes_are_logged_after_the_log_is_enabled() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0x10_0000), 70 << 12)]).unwrap();
        let log = WriteLog::of(memory.iter().next().unwrap());
        let write = |page: u64, length: usize| {
            let address = GuestAddress(0x10_0000 + page * 4096);
            memory.write_slice(&vec![1; length], address).unwrap();
        };
        write(1, 1);
        assert!(log.take().is_empty());
        log.keep();
        write(3, 4097);
        write(69, 1);
        assert_eq!(log.take(), [0b11 << 3, 1 << 5]);
        assert_eq!(log.take(), [0, 0]);
    }
}
