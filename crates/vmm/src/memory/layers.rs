//! RAM in layers: which file holds which page.
//!
//! All files are as long as RAM and use its offsets. The lowest is whole; each later one covers
//! some ranges of those below it. Holes of the files are zero.

use super::MemoryError;
use jiffy_wire::vmm::{Extent, MemoryLayout};
use std::fs::File;
use std::sync::Arc;

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Most layers accepted from outside: with the state and the layout their descriptors are sent in
/// one message.
pub const MAX_LAYERS: usize = jiffy_sys::fds::MOST - 2;

/// A file and the ranges of it that are valid.
#[derive(Debug, Clone)]
pub struct Layer {
    /// As long as RAM.
    pub file: Arc<File>,
    /// The ranges it covers: sorted, in whole pages, not overlapping.
    pub covers: Vec<Extent>,
}

/// A range of RAM and the layer that holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The range.
    pub extent: Extent,
    /// Index of the layer, lowest first.
    pub layer: usize,
}

/// Creates layers from files and their description.
///
/// # Errors
///
/// If files and description do not fit each other, or do not fit RAM of `size` bytes.
pub fn assemble(
    files: Vec<File>,
    layout: Option<MemoryLayout>,
    size: u64,
) -> Result<Vec<Layer>, MemoryError> {
    let wrong = |text: &str| MemoryError::Layout(text.into());
    if files.is_empty() || files.len() > MAX_LAYERS {
        return Err(wrong("it has no layers, or too many"));
    }
    let layout = layout.unwrap_or(MemoryLayout {
        size,
        covers: Vec::new(),
    });
    if layout.size != size {
        return Err(MemoryError::Length {
            expected: size,
            actual: layout.size,
        });
    }
    if layout.covers.len() + 1 != files.len() {
        return Err(wrong("it describes a different number of layers"));
    }
    let whole = vec![Extent {
        offset: 0,
        length: size,
    }];
    std::iter::once(whole)
        .chain(layout.covers)
        .zip(files)
        .map(|(covers, file)| Layer::new(file, covers, size))
        .collect()
}

impl Layer {
    /// A layer for RAM of `size` bytes.
    ///
    /// # Errors
    ///
    /// If the file has another length, or a range is not in whole pages, overlaps the one before,
    /// or ends beyond the RAM.
    pub fn new(file: File, covers: Vec<Extent>, size: u64) -> Result<Layer, MemoryError> {
        check(&covers, size)?;
        let actual = file
            .metadata()
            .map_err(|source| MemoryError::Open("of a layer".into(), source))?
            .len();
        if actual != size {
            return Err(MemoryError::Length {
                expected: size,
                actual,
            });
        }
        Ok(Layer {
            file: Arc::new(file),
            covers,
        })
    }
}

fn check(covers: &[Extent], size: u64) -> Result<(), MemoryError> {
    let mut reached = 0;
    for extent in covers {
        let end = extent.offset.checked_add(extent.length);
        let fits = extent.length > 0
            && extent.offset % PAGE == 0
            && extent.length % PAGE == 0
            && extent.offset >= reached
            && end.is_some_and(|end| end <= size);
        if !fits {
            return Err(MemoryError::Layout(format!(
                "the range of {:#x} bytes at {:#x}",
                extent.length, extent.offset
            )));
        }
        reached = extent.offset + extent.length;
    }
    Ok(())
}

/// The visible parts of all layers: all of RAM, in order, without gaps.
pub fn visible(layers: &[Layer]) -> Vec<Segment> {
    let mut segments = Vec::new();
    for (number, layer) in layers.iter().enumerate() {
        if number == 0 {
            segments.extend(layer.covers.iter().map(|extent| Segment {
                extent: *extent,
                layer: 0,
            }));
        } else {
            segments = overlay(segments, &layer.covers, number);
        }
    }
    segments
}

/// The visible parts of all layers in a range.
pub fn within(layers: &[Layer], range: Extent) -> Vec<Segment> {
    let end = range.offset + range.length;
    visible(layers)
        .into_iter()
        .filter_map(|Segment { extent, layer }| {
            let from = extent.offset.max(range.offset);
            let to = (extent.offset + extent.length).min(end);
            (from < to).then(|| segment(from, to, layer))
        })
        .collect()
}

/// The layers, each reduced to its visible parts. Layers without any are dropped, except the
/// lowest.
pub fn without_hidden(mut layers: Vec<Layer>) -> Vec<Layer> {
    let segments = visible(&layers);
    for layer in &mut layers[1..] {
        layer.covers.clear();
    }
    for Segment { extent, layer } in segments {
        if layer > 0 {
            layers[layer].covers.push(extent);
        }
    }
    let mut lowest = true;
    layers.retain(|layer| std::mem::take(&mut lowest) || !layer.covers.is_empty());
    layers
}

/// Lays `covers` of `layer` over `below`, which has no gaps.
fn overlay(below: Vec<Segment>, covers: &[Extent], layer: usize) -> Vec<Segment> {
    let mut result = Vec::with_capacity(below.len() + 2 * covers.len());
    let mut above = covers.iter().copied().peekable();
    for Segment { extent, layer: old } in below {
        let (mut from, end) = (extent.offset, extent.offset + extent.length);
        while from < end {
            let top = above.peek().filter(|top| top.offset < end).copied();
            let uncovered = top.map_or(end, |top| top.offset.max(from));
            if uncovered > from {
                result.push(segment(from, uncovered, old));
            }
            let Some(top) = top else { break };
            let top_end = top.offset + top.length;
            // A range that began under an earlier segment was added already.
            if top.offset >= from {
                result.push(Segment { extent: top, layer });
            }
            if top_end <= end {
                above.next();
            }
            from = top_end;
        }
    }
    result
}

fn segment(from: u64, to: u64, layer: usize) -> Segment {
    let extent = Extent {
        offset: from,
        length: to - from,
    };
    Segment { extent, layer }
}

/// Ranges joined where they touch or overlap, sorted.
pub fn union(ranges: Vec<Extent>) -> Vec<Extent> {
    joined(ranges, 0)
}

/// Ranges joined where they are at most `gap` bytes apart, sorted.
pub fn joined(mut ranges: Vec<Extent>, gap: u64) -> Vec<Extent> {
    ranges.sort_by_key(|extent| extent.offset);
    let mut joined: Vec<Extent> = Vec::with_capacity(ranges.len());
    for extent in ranges {
        match joined.last_mut() {
            Some(last) if extent.offset <= last.offset + last.length + gap => {
                let end = (last.offset + last.length).max(extent.offset + extent.length);
                last.length = end - last.offset;
            }
            _ => joined.push(extent),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_sys::memfd::{self, Pages};
    use proptest::prelude::*;

    const SIZE: u64 = 64 * PAGE;

    fn file() -> File {
        memfd::create("test", SIZE, Pages::Small).unwrap()
    }

    fn extents() -> impl Strategy<Value = Vec<Extent>> {
        proptest::collection::btree_set(0_u64..64, 0..20).prop_map(|pages| {
            union(
                pages
                    .into_iter()
                    .map(|page| Extent {
                        offset: page * PAGE,
                        length: PAGE,
                    })
                    .collect(),
            )
        })
    }

    proptest! {
        #[test]
        fn each_page_is_visible_from_its_topmost_layer(covers in proptest::collection::vec(extents(), 0..6)) {
            let files = (0..=covers.len()).map(|_| file()).collect();
            let layout = MemoryLayout { size: SIZE, covers: covers.clone() };
            let layers = assemble(files, Some(layout), SIZE).unwrap();
            let segments = visible(&layers);
            let mut reached = 0;
            for Segment { extent, layer } in segments {
                prop_assert_eq!(extent.offset, reached);
                reached += extent.length;
                for page in extent.offset / PAGE..reached / PAGE {
                    let at = page * PAGE;
                    let holds = |covers: &Vec<Extent>| {
                        covers.iter().any(|c| c.offset <= at && at < c.offset + c.length)
                    };
                    let topmost = covers.iter().rposition(holds).map_or(0, |index| index + 1);
                    prop_assert_eq!(layer, topmost, "page {}", page);
                }
            }
            prop_assert_eq!(reached, SIZE);
        }

        #[test]
        fn dropping_hidden_ranges_keeps_the_visible_ones(covers in proptest::collection::vec(extents(), 0..6)) {
            let files = (0..=covers.len()).map(|_| file()).collect();
            let layout = MemoryLayout { size: SIZE, covers };
            let layers = assemble(files, Some(layout), SIZE).unwrap();
            let shown = |layers: &[Layer]| -> Vec<_> {
                visible(layers)
                    .into_iter()
                    .map(|segment| (segment.extent, Arc::as_ptr(&layers[segment.layer].file)))
                    .collect()
            };
            let before = shown(&layers);
            let fewer = without_hidden(layers);
            prop_assert_eq!(shown(&fewer), before);
            prop_assert!(fewer[1..].iter().all(|layer| !layer.covers.is_empty()));
            let covered: u64 = fewer[1..].iter().flat_map(|layer| &layer.covers).map(|c| c.length).sum();
            prop_assert!(covered <= SIZE, "each page once");
        }

        #[test]
        fn joined_ranges_contain_all_and_keep_their_distance(fine in extents(), gap in 0_u64..6) {
            let gap = gap * PAGE;
            let joined = joined(fine.clone(), gap);
            for extent in &fine {
                prop_assert!(joined.iter().any(|c| c.offset <= extent.offset
                    && extent.offset + extent.length <= c.offset + c.length));
            }
            for pair in joined.windows(2) {
                prop_assert!(pair[0].offset + pair[0].length + gap < pair[1].offset);
            }
            let ends = |ranges: &[Extent]| {
                let last = ranges.last().map(|c| c.offset + c.length);
                (ranges.first().map(|c| c.offset), last)
            };
            prop_assert_eq!(ends(&joined), ends(&fine));
        }
    }

    #[test]
    fn a_layout_that_does_not_fit_is_refused() {
        let extent = |offset, length| Extent { offset, length };
        for covers in [
            vec![extent(1, PAGE)],
            vec![extent(0, 0)],
            vec![extent(PAGE, PAGE), extent(0, PAGE)],
            vec![extent(0, 2 * PAGE), extent(PAGE, PAGE)],
            vec![extent(63 * PAGE, 2 * PAGE)],
            vec![extent(u64::MAX - 4095, PAGE)],
        ] {
            let layout = MemoryLayout {
                size: SIZE,
                covers: vec![covers],
            };
            let error = assemble(vec![file(), file()], Some(layout), SIZE).unwrap_err();
            assert!(matches!(error, MemoryError::Layout(_)), "{error}");
        }
        let error = assemble(vec![file()], None, 2 * SIZE).unwrap_err();
        assert!(matches!(error, MemoryError::Length { .. }), "{error}");
        assert!(assemble(Vec::new(), None, SIZE).is_err());
    }
}
