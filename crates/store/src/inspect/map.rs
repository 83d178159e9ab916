//! The address space as text.

use super::summary::cells;
use crate::error::ImageError;
use crate::format::Kind;
use crate::reader::ImageReader;
use std::fmt::Write;

/// Most rows of a map.
const ROWS: u32 = 32;

/// A map of the address space: rows of `width` characters (at least 1), each with its address
/// first. A character shows the most frequent kind of its chunks, as a capital if at least half of
/// them are not zero.
///
/// # Errors
///
/// If the table of chunks can't be read or is damaged.
pub fn map(image: &ImageReader, width: u32) -> Result<String, ImageError> {
    let width = width.max(1);
    let step = step(image.chunks(), width.saturating_mul(ROWS));
    let cell = u64::from(step) * u64::from(image.chunk_size());
    let mut text = String::new();
    for (number, found) in (0_u64..).zip(cells(image, step)) {
        let (kind, filled) = found?;
        if number % u64::from(width) == 0 {
            let line = if number > 0 { "\n" } else { "" };
            let _ = write!(text, "{line}{:012x} ", number * cell);
        }
        let letter = letter(kind);
        text.push(if 2 * u64::from(filled) >= u64::from(step) {
            letter.to_ascii_uppercase()
        } else {
            letter
        });
    }
    let _ = write!(
        text,
        "{}one character is {} KiB: . zero",
        if text.is_empty() { "" } else { "\n" },
        cell >> 10
    );
    for kind in &Kind::ALL[1..] {
        let _ = write!(text, ", {} {}", letter(*kind), kind.name());
    }
    text.push_str("; a capital if at least half is not zero\n");
    Ok(text)
}

/// How many chunks one of at most `places` cells stands for: a power of two.
pub(super) fn step(chunks: u32, places: u32) -> u32 {
    chunks
        .div_ceil(places)
        .checked_next_power_of_two()
        .unwrap_or(1 << 31)
        .max(1)
}

fn letter(kind: Kind) -> char {
    match kind {
        Kind::Zero => '.',
        Kind::Raw => 'r',
        Kind::Lz4 => 'l',
        Kind::Zstd => 'z',
        Kind::ZstdDictionary => 'd',
        Kind::Parent => 'p',
        Kind::Backing => 'b',
    }
}
