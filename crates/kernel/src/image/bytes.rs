//! Reads little-endian numbers with checked offsets.

/// The `N` bytes at `offset`; `None` if they are not all in `data`.
pub fn array<const N: usize>(data: &[u8], offset: usize) -> Option<[u8; N]> {
    data.get(offset..offset.checked_add(N)?)?.try_into().ok()
}

pub fn u16_at(data: &[u8], offset: usize) -> Option<u16> {
    array(data, offset).map(u16::from_le_bytes)
}

pub fn u32_at(data: &[u8], offset: usize) -> Option<u32> {
    array(data, offset).map(u32::from_le_bytes)
}

pub fn u64_at(data: &[u8], offset: usize) -> Option<u64> {
    array(data, offset).map(u64::from_le_bytes)
}

/// `size` bytes at `offset`; both may come from an untrusted file.
pub fn slice_at(data: &[u8], offset: u64, size: u64) -> Option<&[u8]> {
    let start = usize::try_from(offset).ok()?;
    let end = start.checked_add(usize::try_from(size).ok()?)?;
    data.get(start..end)
}

/// Offset of the first occurrence of `needle`.
pub fn find(data: &[u8], needle: &[u8]) -> Option<usize> {
    let (&first, rest) = needle.split_first()?;
    let mut from = 0;
    loop {
        let at = from + data.get(from..)?.iter().position(|&byte| byte == first)?;
        if data[at + 1..].starts_with(rest) {
            return Some(at);
        }
        from = at + 1;
    }
}
