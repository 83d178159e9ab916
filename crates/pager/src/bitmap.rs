//! A bitmap that many threads set bits in; bits are never cleared.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub(crate) struct Bitmap(Box<[AtomicU64]>);

impl Bitmap {
    /// All clear.
    pub fn new(bits: u64) -> Bitmap {
        Bitmap((0..bits.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    /// A bit beyond the end is clear.
    pub fn get(&self, bit: u64) -> bool {
        self.0
            .get((bit / 64) as usize)
            .is_some_and(|word| word.load(Ordering::Acquire) & (1 << (bit % 64)) != 0)
    }

    /// Sets a bit, and returns whether it was clear.
    pub fn set(&self, bit: u64) -> bool {
        self.0.get((bit / 64) as usize).is_some_and(|word| {
            word.fetch_or(1 << (bit % 64), Ordering::AcqRel) & (1 << (bit % 64)) == 0
        })
    }

    /// Sets a range, a word at a time.
    pub fn set_range(&self, bits: Range<u64>) {
        let mut bit = bits.start;
        while bit < bits.end {
            let end = bits.end.min((bit / 64 + 1) * 64);
            let count = end - bit;
            let mask = if count == 64 {
                u64::MAX
            } else {
                ((1 << count) - 1) << (bit % 64)
            };
            if let Some(word) = self.0.get((bit / 64) as usize) {
                word.fetch_or(mask, Ordering::AcqRel);
            }
            bit = end;
        }
    }

    /// The end of the run of equal bits that begins at `from`, at most `limit`.
    pub fn run_end(&self, from: u64, limit: u64) -> u64 {
        let first = self.get(from);
        (from + 1..limit)
            .find(|bit| self.get(*bit) != first)
            .unwrap_or(limit)
    }

    /// The words that hold these bits, as little-endian bytes, and their byte offset in the whole
    /// bitmap.
    pub fn bytes_of(&self, bits: Range<u64>) -> (u64, Vec<u8>) {
        let words = (bits.start / 64) as usize..(bits.end.div_ceil(64) as usize).min(self.0.len());
        let bytes = self.0[words.clone()]
            .iter()
            .flat_map(|word| word.load(Ordering::Acquire).to_le_bytes())
            .collect();
        (words.start as u64 * 8, bytes)
    }

    /// Sets the bits that are set in `bytes`, as [`Bitmap::bytes_of`] wrote them.
    pub fn merge(&self, bytes: &[u8]) {
        for (word, bytes) in self.0.iter().zip(bytes.chunks_exact(8)) {
            let bits = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            word.fetch_or(bits, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn set_range_and_run_end_agree_with_single_bits(ranges in prop::collection::vec((0u64..300, 0u64..200), 0..6)) {
            let bitmap = Bitmap::new(512);
            let mut expected = vec![false; 512];
            for (start, length) in ranges {
                bitmap.set_range(start..start + length);
                expected[start as usize..(start + length) as usize].fill(true);
            }
            for (bit, set) in expected.iter().enumerate() {
                prop_assert_eq!(bitmap.get(bit as u64), *set);
            }
            let mut bit = 0;
            while bit < 512 {
                let end = bitmap.run_end(bit, 512);
                prop_assert!(end > bit);
                prop_assert!(expected[bit as usize..end as usize].iter().all(|set| *set == expected[bit as usize]));
                prop_assert!(end == 512 || expected[end as usize] != expected[bit as usize]);
                bit = end;
            }
            let copy = Bitmap::new(512);
            copy.merge(&bitmap.bytes_of(0..512).1);
            prop_assert!((0..512).all(|bit| copy.get(bit) == bitmap.get(bit)));
        }
    }

    #[test]
    fn a_bit_is_set_once_and_never_beyond_the_end() {
        let bitmap = Bitmap::new(10);
        assert!(bitmap.set(9));
        assert!(!bitmap.set(9));
        assert!(!bitmap.set(640));
        bitmap.set_range(60..1000);
        assert!(!bitmap.get(640));
    }
}
