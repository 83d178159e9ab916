//! Joins ranges of a file that are close together, so that they are read at once.

use std::ops::Range;

/// Joins ranges whose gaps have at most `gap` bytes into runs of at most `most` bytes, each with
/// the values of its ranges. A longer range is a run of its own. Ranges must be sorted by where
/// they begin; they may overlap.
pub fn join<T>(
    places: impl IntoIterator<Item = (Range<u64>, T)>,
    gap: u64,
    most: u64,
) -> Vec<(Range<u64>, Vec<T>)> {
    let mut runs: Vec<(Range<u64>, Vec<T>)> = Vec::new();
    for (place, item) in places {
        match runs.last_mut() {
            Some((run, items))
                if place.start <= run.end.saturating_add(gap)
                    && place.end.max(run.end) - run.start <= most =>
            {
                run.end = run.end.max(place.end);
                items.push(item);
            }
            _ => runs.push((place, vec![item])),
        }
    }
    runs
}

/// Joins ranges that touch or overlap, without a limit of length.
pub fn join_touching(ranges: impl IntoIterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let runs = join(ranges.into_iter().map(|range| (range, ())), 0, u64::MAX);
    runs.into_iter().map(|(run, _)| run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_runs_are_joined_up_to_a_length() {
        let runs = |gap, most| {
            let places = [(0..10, 'a'), (10..20, 'b'), (12..15, 'c'), (25..90, 'd')];
            join(places, gap, most)
        };
        assert_eq!(
            runs(0, 100),
            [(0..20, vec!['a', 'b', 'c']), (25..90, vec!['d'])]
        );
        assert_eq!(runs(5, 100), [(0..90, vec!['a', 'b', 'c', 'd'])]);
        assert_eq!(
            runs(5, 12),
            [
                (0..10, vec!['a']),
                (10..20, vec!['b', 'c']),
                (25..90, vec!['d'])
            ]
        );
        assert_eq!(join_touching([0..1, 1..3, 4..5]), [0..3, 4..5]);
    }
}
