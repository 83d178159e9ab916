//! Layered files, such as a captured VM's RAM.

use super::{ChunkSource, file};
use crate::runs;
use jiffy_wire::vmm::MemoryLayout;
use std::fs::File;
use std::io;
use std::ops::Range;

/// Bytes of a page.
const PAGE: u64 = 4096;

/// The layers of a VM's RAM: at each offset the topmost layer that covers it is read; holes are
/// zeros.
#[derive(Debug)]
pub struct LayeredFile {
    layers: Vec<File>,
    size: u64,
    /// Without gaps, sorted.
    segments: Vec<Segment>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Segment {
    range: Range<u64>,
    layer: usize,
}

impl LayeredFile {
    /// `layers` begins with the lowest.
    ///
    /// # Errors
    ///
    /// `InvalidData` if the layout contradicts itself, has parts of pages, or does not fit the
    /// number of layers.
    pub fn new(layers: Vec<File>, layout: &MemoryLayout) -> io::Result<LayeredFile> {
        if layers.len() != layout.covers.len() + 1 {
            return Err(invalid(format!(
                "the layout of RAM describes {} layers, and there are {}",
                layout.covers.len() + 1,
                layers.len()
            )));
        }
        let mut segments = vec![Segment {
            range: 0..layout.size,
            layer: 0,
        }];
        segments.retain(|segment| !segment.range.is_empty());
        for (above, covers) in layout.covers.iter().enumerate() {
            let layer = above + 1;
            let mut end = 0;
            let mut ranges = Vec::with_capacity(covers.len());
            for extent in covers {
                let range = extent.offset..extent.offset.saturating_add(extent.length);
                let pages = (extent.offset | extent.length).is_multiple_of(PAGE);
                if !pages || range.start < end || range.is_empty() || range.end > layout.size {
                    return Err(invalid(format!(
                        "layer {layer} of RAM covers {} bytes at {}, which overlaps another \
                         extent, is empty, not in whole pages, or not within {} bytes",
                        extent.length, extent.offset, layout.size
                    )));
                }
                end = range.end;
                ranges.push(range);
            }
            segments = cover(segments, &ranges, layer);
        }
        Ok(LayeredFile {
            layers,
            size: layout.size,
            segments,
        })
    }
}

fn invalid(sentence: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, sentence)
}

/// Puts `ranges` of a layer on top of the segments below.
fn cover(below: Vec<Segment>, ranges: &[Range<u64>], layer: usize) -> Vec<Segment> {
    let mut covered: Vec<Segment> = Vec::with_capacity(below.len() + 2 * ranges.len());
    let mut push = |range: Range<u64>, layer| match covered.last_mut() {
        _ if range.is_empty() => {}
        Some(last) if last.layer == layer && last.range.end == range.start => {
            last.range.end = range.end;
        }
        _ => covered.push(Segment { range, layer }),
    };
    let mut ranges = ranges.iter().peekable();
    for segment in below {
        let mut at = segment.range.start;
        while let Some(range) = ranges.peek()
            && range.start < segment.range.end
        {
            // A range that began in an earlier segment continues at `at`.
            push(at..range.start.max(at), segment.layer);
            at = at.max(range.start);
            let end = range.end.min(segment.range.end);
            push(at..end, layer);
            at = end;
            if range.end > segment.range.end {
                break;
            }
            ranges.next();
        }
        push(at..segment.range.end, segment.layer);
    }
    covered
}

impl ChunkSource for LayeredFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let first = self
            .segments
            .partition_point(|segment| segment.range.end <= offset);
        let mut done = 0;
        for segment in &self.segments[first..] {
            let left = buffer.len() - done;
            if left == 0 {
                break;
            }
            let at = offset + done as u64;
            let count = (segment.range.end - at).min(left as u64) as usize;
            file::read_or_zero(
                &self.layers[segment.layer],
                at,
                &mut buffer[done..done + count],
            )?;
            done += count;
        }
        buffer[done..].fill(0);
        Ok(())
    }

    fn data_ranges(&self) -> io::Result<Vec<Range<u64>>> {
        let mut ranges = Vec::new();
        for segment in &self.segments {
            let layer = &self.layers[segment.layer];
            ranges.extend(file::data_within(layer, segment.range.clone())?);
        }
        Ok(runs::join_touching(ranges))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_sys::memfd::{self, Pages};
    use jiffy_wire::vmm::Extent;
    use proptest::prelude::*;
    use std::os::unix::fs::FileExt;

    const PAGES: usize = 24;

    fn layout(covers: &[Vec<bool>]) -> MemoryLayout {
        MemoryLayout {
            size: PAGES as u64 * PAGE,
            covers: covers
                .iter()
                .map(|pages| {
                    let mut extents: Vec<Extent> = Vec::new();
                    for (page, _) in pages.iter().enumerate().filter(|(_, covered)| **covered) {
                        let offset = page as u64 * PAGE;
                        match extents.last_mut() {
                            // Odd pages stay extents of their own: extents may touch.
                            Some(last) if last.offset + last.length == offset && page % 2 == 0 => {
                                last.length += PAGE;
                            }
                            _ => extents.push(Extent {
                                offset,
                                length: PAGE,
                            }),
                        }
                    }
                    extents
                })
                .collect(),
        }
    }

    proptest! {
        #[test]
        fn the_topmost_covering_layer_wins(
            covers in prop::collection::vec(prop::collection::vec(any::<bool>(), PAGES), 0..4),
            written in prop::collection::vec(prop::collection::vec(any::<bool>(), PAGES), 4),
            at in 0..PAGES * 4096,
            length in 0..PAGES * 4096,
        ) {
            let layers: Vec<File> = (0..=covers.len())
                .map(|_| memfd::create("layer", PAGES as u64 * PAGE, Pages::Small).unwrap())
                .collect();
            let mut expected = vec![0; PAGES * 4096];
            for (layer, file) in layers.iter().enumerate() {
                for page in 0..PAGES {
                    let has_data = written[layer][page];
                    if has_data {
                        let bytes = [layer as u8 + 1; 4096];
                        file.write_all_at(&bytes, page as u64 * PAGE).unwrap();
                    }
                    if layer == 0 || covers[layer - 1][page] {
                        let value = if has_data { layer as u8 + 1 } else { 0 };
                        expected[page * 4096..][..4096].fill(value);
                    }
                }
            }
            let file = LayeredFile::new(layers, &layout(&covers)).unwrap();
            let mut buffer = vec![9; length];
            file.read_at(at as u64, &mut buffer).unwrap();
            expected.resize(2 * PAGES * 4096, 0);
            prop_assert_eq!(&buffer[..], &expected[at..at + length]);

            let mut from_ranges = vec![0; 2 * PAGES * 4096];
            for range in file.data_ranges().unwrap() {
                let part = &mut from_ranges[range.start as usize..range.end as usize];
                file.read_at(range.start, part).unwrap();
            }
            prop_assert_eq!(from_ranges, expected);
        }
    }

    #[test]
    fn a_layout_that_contradicts_itself_is_refused() {
        let two = || {
            (0..2)
                .map(|_| memfd::create("layer", 8 * PAGE, Pages::Small).unwrap())
                .collect::<Vec<_>>()
        };
        let with = |extents: &[(u64, u64)]| MemoryLayout {
            size: 8 * PAGE,
            covers: vec![
                extents
                    .iter()
                    .map(|&(offset, length)| Extent { offset, length })
                    .collect(),
            ],
        };
        LayeredFile::new(two(), &with(&[(0, PAGE), (PAGE, PAGE)])).unwrap();
        for bad in [
            &[(PAGE, PAGE), (0, PAGE)][..],
            &[(0, 2 * PAGE), (PAGE, PAGE)],
            &[(0, 9 * PAGE)],
            &[(0, 0)],
            &[(0, 1)],
            &[(1, PAGE)],
            &[(u64::MAX, PAGE)],
        ] {
            let error = LayeredFile::new(two(), &with(bad)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        LayeredFile::new(two(), &MemoryLayout::default()).unwrap_err();
    }
}
