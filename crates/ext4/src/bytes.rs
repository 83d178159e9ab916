//! A structure's bytes, written field by field.

use std::ops::Range;

/// Puts little-endian fields at their offsets.
pub(crate) trait Fields {
    /// Copies `value` to `offset`.
    fn put(&mut self, offset: usize, value: &[u8]);

    fn put16(&mut self, offset: usize, value: u16) {
        self.put(offset, &value.to_le_bytes());
    }

    fn put32(&mut self, offset: usize, value: u32) {
        self.put(offset, &value.to_le_bytes());
    }

    /// Writes the low and the high half of a value at two offsets.
    fn put64_halves(&mut self, low: usize, high: usize, value: u64) {
        self.put32(low, value as u32);
        self.put32(high, (value >> 32) as u32);
    }

    fn put32_halves(&mut self, low: usize, high: usize, value: u32) {
        self.put16(low, value as u16);
        self.put16(high, (value >> 16) as u16);
    }
}

impl Fields for [u8] {
    fn put(&mut self, offset: usize, value: &[u8]) {
        self[offset..offset + value.len()].copy_from_slice(value);
    }
}

/// Sets a run of bits of a bitmap.
pub(crate) fn set_bits(bitmap: &mut [u8], from: usize, to: usize) {
    let whole = from.next_multiple_of(8)..to / 8 * 8;
    if whole.is_empty() {
        return set_each(bitmap, from..to);
    }
    set_each(bitmap, from..whole.start);
    bitmap[whole.start / 8..whole.end / 8].fill(0xff);
    set_each(bitmap, whole.end..to);
}

fn set_each(bitmap: &mut [u8], bits: Range<usize>) {
    for bit in bits {
        bitmap[bit / 8] |= 1 << (bit % 8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_bits_begins_and_ends_anywhere() {
        for from in 0..40 {
            for to in 0..=40 {
                let mut bitmap = [0; 5];
                set_bits(&mut bitmap, from, to);
                for bit in 0..40 {
                    let is_set = bitmap[bit / 8] >> (bit % 8) & 1 == 1;
                    assert_eq!(is_set, (from..to).contains(&bit), "{from}..{to}: {bit}");
                }
            }
        }
    }
}
