//! The layout of its memory that a VMM sends. It is untrusted: all of it is checked before any is
//! used.

use crate::sentence::bounded;
use jiffy_wire::pager::Mapping;
use std::ops::Range;

/// Most bytes of the message.
pub const MAX_BYTES: usize = 64 << 10;
/// Most mappings in it.
pub const MAX_MAPPINGS: usize = 64;
/// Most bytes of one VM's memory.
pub const MAX_MEMORY: u64 = 1 << 40;
const MIN_PAGE: u64 = 4 << 10;
const MAX_PAGE: u64 = 2 << 20;
/// The end of user space with five-level page tables.
const MAX_ADDRESS: u64 = 1 << 56;

/// Why a handshake was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// It is not the expected JSON.
    #[error("the handshake is not a JSON array of mappings: {0}")]
    Json(String),
    /// It is too long, or something follows the array.
    #[error("the handshake is longer than {MAX_BYTES} bytes")]
    TooLong,
    /// It has no mappings or too many.
    #[error("the handshake has {0} mappings; 1 to {MAX_MAPPINGS} are served")]
    Count(usize),
    /// One mapping makes no sense.
    #[error("mapping {index} of the handshake {what}")]
    Mapping {
        /// Its index, from 0.
        index: usize,
        /// What is wrong with it.
        what: &'static str,
    },
    /// Two mappings overlap.
    #[error("mappings {first} and {second} of the handshake overlap {what}")]
    Overlap {
        /// The index of one of them.
        first: usize,
        /// The index of the other.
        second: usize,
        /// The address space in which they overlap.
        what: &'static str,
    },
    /// The mappings are too large together.
    #[error("the mappings of the handshake have more than {MAX_MEMORY} bytes together")]
    TooMuch,
}

/// The part of a handshake that was received so far.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// The array is not complete.
    More,
    /// The whole handshake.
    Mappings(Vec<Mapping>),
}

/// Parses the bytes received so far.
///
/// # Errors
///
/// If they are no JSON array of mappings, or [`MAX_BYTES`] were received and it is not complete.
pub fn parse(bytes: &[u8]) -> Result<Progress, HandshakeError> {
    match serde_json::from_slice(bytes) {
        Ok(mappings) => Ok(Progress::Mappings(mappings)),
        Err(error) if error.is_eof() && bytes.len() < MAX_BYTES => Ok(Progress::More),
        Err(error) if error.is_eof() => Err(HandshakeError::TooLong),
        // The error may quote all of the message.
        Err(error) => Err(HandshakeError::Json(bounded(&error.to_string()))),
    }
}

/// A part of guest RAM that is in one piece in the VMM's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Its address in the VMM's address space.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Its offset in the image.
    pub offset: u64,
    /// Bytes of a page.
    pub page: u64,
}

/// Guest RAM in the VMM's address space and in the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout(Vec<Region>);

impl Layout {
    /// Checks mappings against an image of `image_size` bytes.
    ///
    /// # Errors
    ///
    /// If there are none or more than [`MAX_MAPPINGS`], one is not in whole pages of 4 KiB to 2 MiB
    /// or outside of the address space or the image, two overlap, or all have more than
    /// [`MAX_MEMORY`] bytes.
    pub fn new(mappings: &[Mapping], image_size: u64) -> Result<Layout, HandshakeError> {
        if !(1..=MAX_MAPPINGS).contains(&mappings.len()) {
            return Err(HandshakeError::Count(mappings.len()));
        }
        let mut regions = Vec::with_capacity(mappings.len());
        let mut total = 0;
        for (index, mapping) in mappings.iter().enumerate() {
            let region = region(mapping, image_size)
                .map_err(|what| HandshakeError::Mapping { index, what })?;
            total += region.size;
            regions.push(region);
        }
        if total > MAX_MEMORY {
            return Err(HandshakeError::TooMuch);
        }
        overlap(&regions, |region| region.address, "in the VMM's memory")?;
        overlap(&regions, |region| region.offset, "in the image")?;
        regions.sort_by_key(|region| region.offset);
        Ok(Layout(regions))
    }

    /// All regions, sorted by their offset in the image.
    pub fn regions(&self) -> &[Region] {
        &self.0
    }

    /// The offset in the image of the byte at this address, and its region.
    pub fn find(&self, address: u64) -> Option<(u64, &Region)> {
        self.0.iter().find_map(|region| {
            let within = address.checked_sub(region.address)?;
            (within < region.size).then_some((region.offset + within, region))
        })
    }

    /// The parts of a range of the image that are mapped: each in one region.
    pub fn parts(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, &Region)> {
        self.0.iter().filter_map(move |region| {
            let start = range.start.max(region.offset);
            let end = range.end.min(region.offset + region.size);
            (start < end).then_some((start..end, region))
        })
    }

    /// The parts of a range of addresses that are mapped, as ranges of the
    /// image.
    pub fn offsets(&self, addresses: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        self.0.iter().filter_map(move |region| {
            let start = addresses.start.max(region.address);
            let end = addresses.end.min(region.address + region.size);
            (start < end).then(|| {
                let begin = start - region.address + region.offset;
                begin..begin + (end - start)
            })
        })
    }

    /// The largest page of any region.
    pub fn largest_page(&self) -> u64 {
        self.0
            .iter()
            .map(|region| region.page)
            .max()
            .unwrap_or(MIN_PAGE)
    }

    /// The end of the last region in the image.
    pub fn end(&self) -> u64 {
        self.0
            .last()
            .map_or(0, |region| region.offset + region.size)
    }
}

fn region(mapping: &Mapping, image_size: u64) -> Result<Region, &'static str> {
    let page = if mapping.page_size != 0 {
        mapping.page_size
    } else {
        mapping.page_size_kib
    };
    if !page.is_power_of_two() || !(MIN_PAGE..=MAX_PAGE).contains(&page) {
        return Err("has pages of a size that is not served (4 KiB to 2 MiB)");
    }
    if mapping.size == 0 {
        return Err("is empty");
    }
    let together = mapping.base_host_virt_addr | mapping.size | mapping.offset;
    if !together.is_multiple_of(page) {
        return Err("is not in whole pages");
    }
    let behind = mapping.base_host_virt_addr.checked_add(mapping.size);
    if mapping.base_host_virt_addr == 0 || behind.is_none_or(|end| end > MAX_ADDRESS) {
        return Err("is outside the address space");
    }
    if mapping
        .offset
        .checked_add(mapping.size)
        .is_none_or(|end| end > image_size)
    {
        return Err("goes beyond the end of the image");
    }
    Ok(Region {
        address: mapping.base_host_virt_addr,
        size: mapping.size,
        offset: mapping.offset,
        page,
    })
}

fn overlap(
    regions: &[Region],
    start: impl Fn(&Region) -> u64,
    what: &'static str,
) -> Result<(), HandshakeError> {
    let mut order: Vec<usize> = (0..regions.len()).collect();
    order.sort_by_key(|index| start(&regions[*index]));
    for pair in order.windows(2) {
        let (low, high) = (&regions[pair[0]], &regions[pair[1]]);
        if start(low) + low.size > start(high) {
            return Err(HandshakeError::Overlap {
                first: pair[0],
                second: pair[1],
                what,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn mapping(address: u64, size: u64, offset: u64) -> Mapping {
        Mapping {
            base_host_virt_addr: address,
            size,
            offset,
            page_size: 4096,
            page_size_kib: 4096,
        }
    }

    #[test]
    fn the_documented_message_is_understood() {
        let text = br#"[{"base_host_virt_addr":140110487080960,"size":134217728,"offset":0,"page_size":4096,"page_size_kib":4096}]"#;
        let Progress::Mappings(mappings) = parse(text).unwrap() else {
            panic!("it is whole");
        };
        let layout = Layout::new(&mappings, 128 * MIB).unwrap();
        assert_eq!(layout.find(140110487080960 + 5000).unwrap().0, 5000);
        assert!(layout.find(140110487080959).is_none());
    }

    #[test]
    fn both_page_size_fields_are_accepted_and_unknown_fields_ignored() {
        for name in ["page_size", "page_size_kib"] {
            let text = format!(
                r#"[{{"base_host_virt_addr":4096,"size":4096,"offset":0,"{name}":4096,"more":1}}]"#
            );
            let Progress::Mappings(mappings) = parse(text.as_bytes()).unwrap() else {
                panic!("it is whole");
            };
            assert_eq!(
                Layout::new(&mappings, 4096).unwrap().regions()[0].page,
                4096
            );
        }
    }

    #[test]
    fn a_partial_message_waits_for_more_and_an_invalid_one_is_refused() {
        assert_eq!(parse(b"[{\"base_host").unwrap(), Progress::More);
        assert_eq!(parse(b"").unwrap(), Progress::More);
        assert!(matches!(parse(b"[1]"), Err(HandshakeError::Json(_))));
        assert!(matches!(parse(b"[] x"), Err(HandshakeError::Json(_))));
        assert!(matches!(parse(b"{}"), Err(HandshakeError::Json(_))));
        let endless = vec![b' '; MAX_BYTES];
        assert_eq!(parse(&endless), Err(HandshakeError::TooLong));
    }

    #[test]
    fn an_error_quotes_a_limited_part_of_the_message() {
        let text = format!("[\"{}\"]", "x".repeat(MAX_BYTES - 4));
        let error = parse(text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("xxx") && error.len() < 2000, "{error}");
    }

    #[test]
    fn invalid_mappings_are_refused_by_index() {
        let good = mapping(MIB, MIB, 0);
        let refused = |bad: Mapping| match Layout::new(&[good, bad], 4 * MIB) {
            Err(HandshakeError::Mapping { index: 1, what }) => what,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(mapping(4 * MIB, 0, MIB)), "is empty");
        assert_eq!(
            refused(mapping(4 * MIB + 1, MIB, MIB)),
            "is not in whole pages"
        );
        assert_eq!(
            refused(mapping(4 * MIB, MIB + 8, MIB)),
            "is not in whole pages"
        );
        assert_eq!(
            refused(mapping(4 * MIB, MIB, 4 * MIB)),
            "goes beyond the end of the image"
        );
        assert_eq!(
            refused(mapping(4 * MIB, MIB, !4095)),
            "goes beyond the end of the image"
        );
        assert_eq!(
            refused(mapping(!4095, MIB, MIB)),
            "is outside the address space"
        );
        assert_eq!(
            refused(mapping(0, MIB, MIB)),
            "is outside the address space"
        );
        for page in [0, 1, 2048, 4097, 12288, 1 << 30] {
            let bad = Mapping {
                page_size: page,
                page_size_kib: 0,
                ..good
            };
            assert!(refused(bad).starts_with("has pages of a size"), "{page}");
        }
    }

    #[test]
    fn overlapping_and_too_many_mappings_are_refused() {
        let both = |first, second| Layout::new(&[first, second], 8 * MIB).unwrap_err();
        assert!(matches!(
            both(
                mapping(4 * MIB, 2 * MIB, 0),
                mapping(3 * MIB, 2 * MIB, 4 * MIB)
            ),
            HandshakeError::Overlap {
                what: "in the VMM's memory",
                ..
            }
        ));
        assert!(matches!(
            both(mapping(4 * MIB, 2 * MIB, 0), mapping(MIB, MIB, MIB)),
            HandshakeError::Overlap {
                what: "in the image",
                ..
            }
        ));
        assert_eq!(Layout::new(&[], MIB), Err(HandshakeError::Count(0)));
        let many = vec![mapping(MIB, MIB, 0); MAX_MAPPINGS + 1];
        assert_eq!(
            Layout::new(&many, MIB),
            Err(HandshakeError::Count(MAX_MAPPINGS + 1))
        );
        let vast = [
            mapping(4096, 1 << 40, 0),
            mapping(1 << 41, 1 << 40, 1 << 40),
        ];
        assert_eq!(Layout::new(&vast, 1 << 42), Err(HandshakeError::TooMuch));
    }

    #[test]
    fn ranges_are_cut_where_regions_end() {
        let layout = Layout::new(
            &[mapping(16 * MIB, MIB, MIB), mapping(MIB, MIB, 0)],
            4 * MIB,
        )
        .unwrap();
        let parts: Vec<_> = layout
            .parts(MIB / 2..3 * MIB)
            .map(|(range, _)| range)
            .collect();
        assert_eq!(parts, [MIB / 2..MIB, MIB..2 * MIB]);
        let offsets: Vec<_> = layout.offsets(0..u64::MAX).collect();
        assert_eq!(offsets, [0..MIB, MIB..2 * MIB]);
        assert_eq!(layout.end(), 2 * MIB);
    }

    proptest! {
        #[test]
        fn parsing_arbitrary_bytes_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn accepted_mappings_are_within_the_image(
            mappings in prop::collection::vec(
                (0u64..64, 0u64..64, 0u64..64, prop::sample::select(vec![0u64, 1, 4096, 8192, 2 << 20, u64::MAX])),
                0..6,
            ),
            scale in prop::sample::select(vec![1u64, 4096, 8192, 2 << 20, 1 << 58]),
        ) {
            let mappings: Vec<Mapping> = mappings
                .into_iter()
                .map(|(address, size, offset, page)| Mapping {
                    page_size: page,
                    page_size_kib: 0,
                    ..mapping(address.wrapping_mul(scale), size.wrapping_mul(scale), offset.wrapping_mul(scale))
                })
                .collect();
            let image = 32 * scale.min(1 << 30);
            if let Ok(layout) = Layout::new(&mappings, image) {
                prop_assert!(layout.end() <= image);
                for region in layout.regions() {
                    prop_assert_eq!(layout.find(region.address).unwrap().0, region.offset);
                    prop_assert_eq!(region.size % region.page, 0);
                }
            }
        }
    }
}
