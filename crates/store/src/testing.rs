//! Makes damaged images pass their checksums, for fuzzing.

use crate::format::manifest::{ENTRY_BYTES, GROUP_BYTES, Group};
use crate::format::{Fields, footer, header, seal};

/// Offset of the first section's place in a footer, and bytes of each place.
const SECTIONS: usize = 56;
const SECTION: usize = 24;
/// Index of the backing file's section; an image without a backing file does not have it.
const BACKING: usize = 6;

/// Corrects all checksums that can be found, and changes nothing else. Chunks' own checksums stay.
pub fn reseal(image: &mut [u8]) {
    if image.len() < header::BYTES + footer::BYTES {
        return;
    }
    seal(&mut image[..header::BYTES]);
    let footer = image.len() - footer::BYTES;
    let section = |image: &[u8], number: usize| {
        let mut fields = Fields(&image[footer + SECTIONS + number * SECTION..]);
        let start = usize::try_from(fields.u64()).ok()?;
        let end = start.checked_add(usize::try_from(fields.u64()).ok()?)?;
        (end <= footer).then_some(start..end)
    };
    for number in [0, 1, 2, BACKING] {
        if let Some(range) = section(image, number)
            && (number != BACKING || !range.is_empty())
        {
            let checksum = crc_fast::crc32_iscsi(&image[range]).to_le_bytes();
            let at = footer + SECTIONS + number * SECTION + 16;
            image[at..at + 4].copy_from_slice(&checksum);
        }
    }
    if let (Some(groups), Some(entries)) = (section(image, 3), section(image, 4)) {
        for (number, at) in (0..).zip(groups.step_by(GROUP_BYTES)) {
            let Some(bytes) = image[at..].first_chunk() else {
                break;
            };
            let mut group = Group::decode(bytes);
            let start = group.first as usize * ENTRY_BYTES + entries.start;
            let end = start + group.bitmap.count_ones() as usize * ENTRY_BYTES;
            if end <= entries.end {
                group.checksum = group.checksum(number, &image[start..end]);
                image[at..at + GROUP_BYTES].copy_from_slice(&group.encode());
            }
        }
    }
    seal(&mut image[footer..]);
}
