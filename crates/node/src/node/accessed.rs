//! Which pages of a golden snapshot's memory a restored guest accesses: those that are in the page
//! cache afterwards, if none was before.

use jiffy_content::snapshots::saved::Saved;
use jiffy_sys::page_cache;
use jiffy_wire::vmm::Extent;
use std::fs::File;
use std::io;
use std::ops::Range;
use tokio::task::spawn_blocking;
use tracing::debug;

/// The memory of a golden snapshot, of which the page cache had nothing.
pub struct Uncached(File);

impl Uncached {
    /// Drops the memory from the page cache. `None` if that is not possible, for example on a file
    /// system in memory.
    pub async fn drop_pages(saved: &Saved) -> Option<Uncached> {
        let path = saved.memory();
        let dropped = spawn_blocking(move || {
            let file = File::open(path)?;
            page_cache::drop_pages(&file)?;
            let is_dropped = page_cache::cached_ranges(&file)?.is_empty();
            io::Result::Ok(is_dropped.then_some(Uncached(file)))
        });
        dropped.await.ok()?.unwrap_or_else(|error| {
            debug!(%error, "a snapshot's memory was not dropped from the page cache");
            None
        })
    }

    /// The ranges that were accessed since then.
    pub async fn accessed(self) -> Vec<Extent> {
        let ranges = spawn_blocking(move || page_cache::cached_ranges(&self.0)).await;
        let ranges = match ranges {
            Ok(Ok(ranges)) => ranges,
            Ok(Err(error)) => {
                debug!(%error, "the pages that a golden run accesses are not known");
                Vec::new()
            }
            Err(_) => Vec::new(),
        };
        let extent = |range: Range<u64>| Extent {
            offset: range.start,
            length: range.end - range.start,
        };
        ranges.into_iter().map(extent).collect()
    }
}
