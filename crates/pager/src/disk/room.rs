//! Chunks for a cache whose file system is full.
//!
//! A read that failed for want of room would be an I/O error in a guest that has done
//! nothing wrong. What can be had again gives way: first what was fetched of the image,
//! whose chunks the cache has unpacked, then the caches beside it that nobody uses. Then
//! the read waits for a while: the node or its user may make room.

use super::Disk;
use jiffy_store::Stop;
use jiffy_store::disk_cache::{CacheError, trim_others};
use std::thread;
use std::time::{Duration, Instant};

/// How long a read waits for room. Its VMM waits three times as long for the pager.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often it looks.
const GLANCE: Duration = Duration::from_millis(100);

impl Disk {
    /// Puts chunks into the cache, if need be in the place of others.
    pub(super) fn put(&self, first: u32, bytes: &[u8], stop: &Stop) -> Result<(), CacheError> {
        let begun = Instant::now();
        loop {
            let error = match self.cache.put(first, bytes) {
                Err(error) if error.is_for_want_of_room() => error,
                done => return done,
            };
            self.image.reader().shed();
            if self.cache.put(first, bytes).is_ok() {
                return Ok(());
            }
            let freed = trim_others(self.cache.folder(), bytes.len() as u64);
            if freed > 0 && self.cache.put(first, bytes).is_ok() {
                return Ok(());
            }
            if stop.is_given_up() || self.has_ended() || begun.elapsed() > PATIENCE {
                return Err(error);
            }
            if begun.elapsed() < GLANCE {
                tracing::warn!(disk = self.name, %error, "a read waits for room");
            }
            thread::sleep(GLANCE);
        }
    }
}
