//! Which chunks are read, and in which order they are written.

use crate::error::WriteError;
use crate::source::ChunkSource;
use std::ops::Range;

/// About how many bytes a thread works on at once.
const BATCH_BYTES: u32 = 512 << 10;

/// The chunks to read: the working set, then the others that are not holes. All other chunks are
/// zero.
#[derive(Debug)]
pub(super) struct Plan {
    hot: Vec<Range<u32>>,
    /// Sorted, without overlap.
    data: Vec<Range<u32>>,
    batch: u32,
}

/// A set of chunks.
#[derive(Debug, Default)]
pub(super) struct Set(Vec<Range<u32>>);

impl Set {
    /// A set of ranges that do not overlap.
    fn new(mut ranges: Vec<Range<u32>>) -> Set {
        ranges.sort_unstable_by_key(|range| range.start);
        Set(ranges)
    }

    pub(super) fn contains(&self, index: u32) -> bool {
        let after = self.0.partition_point(|range| range.start <= index);
        after > 0 && self.0[after - 1].contains(&index)
    }
}

impl Plan {
    pub(super) fn new(
        source: &(impl ChunkSource + ?Sized),
        chunk_size: u32,
        working_set: &[u32],
    ) -> Result<Plan, WriteError> {
        let failed = |source| WriteError::Source { offset: 0, source };
        let size = source.size();
        let mut data: Vec<Range<u32>> = Vec::new();
        for range in source.data_ranges().map_err(failed)? {
            let end = range.end.min(size);
            if range.start >= end {
                continue;
            }
            // Their numbers fit: this was checked with the size.
            let first = (range.start / u64::from(chunk_size)) as u32;
            let end = end.div_ceil(u64::from(chunk_size)) as u32;
            match data.last_mut() {
                Some(last) if last.end >= first => last.end = last.end.max(end),
                _ => data.push(first..end),
            }
        }
        Ok(Plan {
            hot: ranges_of(working_set),
            data,
            batch: (BATCH_BYTES / chunk_size).max(1),
        })
    }

    /// The chunks of the working set.
    pub(super) fn hot(&self) -> Set {
        Set::new(self.hot.clone())
    }

    /// The first chunks of the working set, up to so many bytes.
    pub(super) fn first(&self, bytes: u32, chunk_size: u32) -> Set {
        let mut left = bytes / chunk_size;
        let mut first = Vec::new();
        for range in &self.hot {
            let end = range.end.min(range.start.saturating_add(left));
            left -= end - range.start;
            if end > range.start {
                first.push(range.start..end);
            }
        }
        Set::new(first)
    }

    /// At most `count` chunks taken evenly from those that are not holes.
    pub(super) fn sample(&self, count: u64) -> impl Iterator<Item = u32> {
        let all: u64 = self.data.iter().map(|range| range.len() as u64).sum();
        let step = all.div_ceil(count.max(1)).max(1) as usize;
        self.data.iter().flat_map(Range::clone).step_by(step)
    }

    /// Pieces of work, in the order in which they are written.
    pub(super) fn batches(self) -> impl Iterator<Item = Vec<Range<u32>>> + Send {
        let set = self.hot();
        let cold = without(self.data, set);
        let mut ranges = self.hot.into_iter().chain(cold);
        let mut begun: Option<Range<u32>> = None;
        let batch = self.batch;
        std::iter::from_fn(move || {
            let mut taken = Vec::new();
            let mut room = batch;
            while room > 0 {
                let Some(range) = begun.take().or_else(|| ranges.next()) else {
                    break;
                };
                let end = range.end.min(range.start.saturating_add(room));
                room -= end - range.start;
                taken.push(range.start..end);
                if end < range.end {
                    begun = Some(end..range.end);
                }
            }
            (!taken.is_empty()).then_some(taken)
        })
    }
}

/// Chunk numbers as ranges in the same order, each number once.
pub(crate) fn ranges_of(chunks: &[u32]) -> Vec<Range<u32>> {
    let mut seen = std::collections::HashSet::with_capacity(chunks.len());
    let mut ranges: Vec<Range<u32>> = Vec::new();
    for index in chunks.iter().copied().filter(|index| seen.insert(*index)) {
        match ranges.last_mut() {
            Some(last) if last.end == index => last.end = index + 1,
            _ => ranges.push(index..index + 1),
        }
    }
    ranges
}

/// The parts of `ranges`, which are sorted, that are not in `set`.
fn without(ranges: Vec<Range<u32>>, set: Set) -> Vec<Range<u32>> {
    let mut left = Vec::new();
    let mut cuts = set.0.iter().peekable();
    for range in ranges {
        let mut at = range.start;
        while let Some(cut) = cuts.peek()
            && cut.start < range.end
        {
            if cut.start > at {
                left.push(at..cut.start);
            }
            at = at.max(cut.end);
            if cut.end > range.end {
                break;
            }
            cuts.next();
        }
        if at < range.end {
            left.push(at..range.end);
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Holes(Vec<Range<u64>>);

    impl ChunkSource for Holes {
        fn size(&self) -> u64 {
            1 << 20
        }
        fn read_at(&self, _: u64, _: &mut [u8]) -> std::io::Result<()> {
            unreachable!("a plan reads nothing")
        }
        fn data_ranges(&self) -> std::io::Result<Vec<Range<u64>>> {
            Ok(self.0.clone())
        }
    }

    proptest! {
        #[test]
        fn every_chunk_is_planned_once_and_the_working_set_first(
            mut cuts in prop::collection::vec(0..1_u64 << 20, 0..20),
            working_set in prop::collection::vec(0..128_u32, 0..40),
        ) {
            cuts.sort_unstable();
            let (pairs, _) = cuts.as_chunks::<2>();
            let ranges: Vec<Range<u64>> = pairs.iter().map(|[a, b]| *a..*b).collect();
            let mut plan = Plan::new(&Holes(ranges.clone()), 8192, &working_set).unwrap();
            plan.batch = 5;
            let hot = plan.hot();
            let first = plan.first(9 * 8192, 8192);
            let batches: Vec<_> = plan.batches().collect();
            for batch in &batches[..batches.len().saturating_sub(1)] {
                prop_assert_eq!(batch.iter().map(|range| range.len()).sum::<usize>(), 5);
            }
            let order: Vec<u32> = batches.into_iter().flatten().flatten().collect();

            let mut expected: Vec<u32> = Vec::new();
            for index in &working_set {
                if !expected.contains(index) {
                    expected.push(*index);
                }
            }
            for index in 0..128_u32 {
                prop_assert_eq!(hot.contains(index), working_set.contains(&index));
                prop_assert_eq!(
                    first.contains(index),
                    order.iter().take(9).any(|one| *one == index) && hot.contains(index)
                );
                let bytes = u64::from(index) * 8192..u64::from(index + 1) * 8192;
                let has_data = ranges.iter().any(|range| {
                    range.start < range.end && range.start < bytes.end && range.end > bytes.start
                });
                if has_data && !working_set.contains(&index) {
                    expected.push(index);
                }
            }
            prop_assert_eq!(order, expected);
        }
    }
}
