//! A structure's bytes, written field by field.

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

    /// The low and the high half of a value, at two places.
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
    for bit in from..to {
        bitmap[bit / 8] |= 1 << (bit % 8);
    }
}
