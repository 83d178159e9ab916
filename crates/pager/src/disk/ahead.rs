//! What a disk that is read in order will need next.

use std::ops::Range;

/// Bytes filled ahead of the second request of a row.
const FIRST: u64 = 256 << 10;
/// Bytes filled ahead at most.
const MOST: u64 = 4 << 20;

/// Follows the requests of a disk, which only come for what is missing.
#[derive(Debug)]
pub(super) struct Ahead {
    chunk_size: u64,
    chunks: u32,
    /// Where the next request of a row would begin: behind the last request, or
    /// behind what was filled ahead of it.
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

    /// What to fill after this request; empty for one that is in no row.
    pub fn after(&mut self, asked: Range<u32>) -> Range<u32> {
        let in_row = !self.expected.is_empty() && self.expected.contains(&asked.start);
        self.window = match in_row {
            false => 0,
            true => (self.window * 2).clamp(FIRST, MOST),
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
    fn rows_are_followed_faster_and_faster_and_leaps_are_not() {
        let mut ahead = Ahead::new(64 << 10, 1000);
        assert!(ahead.after(10..11).is_empty(), "one is no row");
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
