//! Chunks that are contiguous in the file, and so are read together.

use jiffy_store::runs;
use std::ops::Range;

/// Stored bytes read at once, at most (but at least a chunk).
pub(crate) const WINDOW: u64 = 256 << 10;
/// Largest gap between two chunks, bytes, that is read with them.
pub(crate) const GAP: u64 = 16 << 10;

/// A part of the file and the chunks that are in it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub file: Range<u64>,
    /// Chunks and their bytes in the file, in the order of memory.
    pub chunks: Vec<(u32, Range<u64>)>,
}

impl Window {
    /// The position of a chunk's bytes within the bytes of the window.
    pub fn within(&self, place: &Range<u64>) -> Range<usize> {
        (place.start - self.file.start) as usize..(place.end - self.file.start) as usize
    }
}

/// Windows for chunks, in the order of the file: a working set is stored in
/// the order in which it is needed.
pub(crate) fn windows(mut stored: Vec<(u32, Range<u64>)>) -> Vec<Window> {
    stored.sort_by_key(|(_, place)| place.start);
    let places = stored.into_iter().map(|(chunk, place)| {
        let item = (chunk, place.clone());
        (place, item)
    });
    let in_order = |(file, mut chunks): (Range<u64>, Vec<(u32, Range<u64>)>)| {
        chunks.sort_by_key(|(chunk, _)| *chunk);
        Window { file, chunks }
    };
    let windows = runs::join(places, GAP, WINDOW);
    windows.into_iter().map(in_order).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_chunks_share_a_window_and_distant_ones_do_not() {
        let far = 10 * WINDOW;
        let found = windows(vec![
            (9, 100..200),
            (4, 200..260),
            // Stored once for two chunks.
            (7, 100..200),
            (1, far..far + WINDOW),
            (2, far + WINDOW..far + WINDOW + 1),
            (3, 260 + GAP..300 + GAP),
        ]);
        let chunks: Vec<Vec<u32>> = found
            .iter()
            .map(|window| window.chunks.iter().map(|(chunk, _)| *chunk).collect())
            .collect();
        assert_eq!(chunks, [vec![3, 4, 7, 9], vec![1], vec![2]]);
        assert_eq!(found[0].file, 100..300 + GAP);
        assert_eq!(found[0].within(&(200..260)), 100..160);
    }
}
