//! Readahead for disks that are read sequentially.

use std::ops::Range;

/// Bytes of readahead after the second request of a sequence.
const FIRST: u64 = 256 << 10;
/// Most bytes of readahead.
const MAX_BYTES: u64 = 4 << 20;

/// Tracks the requests of a disk, which are made only for missing chunks.
#[derive(Debug)]
pub(super) struct Ahead {
    chunk_size: u64,
    chunks: u32,
    /// Where the next request of a sequence would begin: behind the last request, or behind its
    /// readahead.
    expected: Range<u32>,
    /// Bytes filled ahead of the last request.
    window: u64,
}

impl Ahead {
    pub fn new(chunk_size: u64, chunks: u32) -> Ahead {
        Ahead {
            chunk_size,
            chunks,
            expected: 0..0,
            window: 0,
        }
    }

    /// The chunks to read ahead after this request; empty if it is not part of a sequence.
    pub fn after(&mut self, asked: Range<u32>) -> Range<u32> {
        let in_row = !self.expected.is_empty() && self.expected.contains(&asked.start);
        self.window = match in_row {
            false => 0,
            true => (self.window * 2).clamp(FIRST, MAX_BYTES),
        };
        let count = (self.window / self.chunk_size) as u32;
        let next = asked.end..asked.end.saturating_add(count).min(self.chunks);
        let behind = next.end.max(asked.end);
        self.expected = asked.end..behind.saturating_add(1);
        next.start..behind
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readahead_grows_with_sequential_reads_and_ignores_jumps() {
        let mut ahead = Ahead::new(64 << 10, 1000);
        assert!(
            ahead.after(10..11).is_empty(),
            "one request is not a sequence"
        );
        assert_eq!(ahead.after(11..12), 12..16);
        // What was filled ahead is not asked for.
        assert_eq!(ahead.after(16..17), 17..25);
        assert_eq!(ahead.after(25..27), 27..43);
        assert_eq!(ahead.after(43..44), 44..76);
        assert_eq!(ahead.after(76..77), 77..141);
        assert_eq!(ahead.after(141..142), 142..206, "no more than 4 MiB");
        assert!(ahead.after(500..501).is_empty());
        assert!(ahead.after(3..4).is_empty());
        assert_eq!(ahead.after(4..5), 5..9);
        ahead.after(998..999);
        assert!(ahead.after(999..1000).is_empty(), "the end");
    }
}
