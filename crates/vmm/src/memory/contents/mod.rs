//! Which file holds which bytes of RAM: the layers, how they are mapped, and what changed
//! since the last freeze. All of it changes together, in these transitions:
//!
//! | transition | layers | mapped | released, cuts | dirty log |
//! |---|---|---|---|---|
//! | a VM boots | its memfd | shared | none | none |
//! | a pager shares a part (`share`) | that part on top | still shared below | – | – |
//! | a VM goes on from a capture | those of the capture | privately | none | none |
//! | the guest releases memory (`release`) | – | zeros over private ranges | one more released | – |
//! | it is captured repeatedly (`keep_log`) | – | – | – | begun |
//! | `freeze` | sealed; a new one of what was written and released | privately | released become cuts, or all is mapped anew | whole |
//!
//! * `freeze`: from now on the files never change.
//! * `release`: memory that the guest does not need.
//! * `written`: what was written since the last freeze.

mod freeze;
mod release;
mod written;

use super::layers::{Layer, visible};
use super::mapping::Mapping;
pub use freeze::Frozen;
use jiffy_wire::vmm::Extent;
#[cfg(test)]
use std::fs::File;
use std::io;
#[cfg(test)]
use std::sync::Arc;
use written::Tracking;

/// What RAM consists of.
#[derive(Debug)]
pub(super) struct Contents {
    /// Lowest first.
    layers: Vec<Layer>,
    mapped: Mapped,
    /// Ranges released since the last freeze: they are zero, whatever the layers hold.
    released: Vec<Extent>,
    /// Ranges released before that, which are mappings of their own still.
    cuts: usize,
    tracking: Tracking,
}

/// How the layers are mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mapped {
    /// The lowest layer shared: that file is the memory. What a pager shares
    /// with others is a layer above it, mapped privately.
    Shared,
    /// Privately: written pages are this process's own.
    Privately,
}

impl Contents {
    /// These layers, lowest first, mapped so.
    pub(super) fn new(layers: Vec<Layer>, mapped: Mapped) -> Contents {
        Contents {
            layers,
            mapped,
            released: Vec::new(),
            cuts: 0,
            tracking: Tracking::default(),
        }
    }

    /// Maps a layer privately that others map, too. RAM is new, and untouched where the
    /// layer covers it.
    pub(super) fn share(&mut self, mapping: &Mapping, layer: Layer) -> io::Result<()> {
        debug_assert!(self.mapped == Mapped::Shared && self.layers.len() == 1);
        for extent in &layer.covers {
            mapping.map_over(*extent, Some(&layer.file))?;
        }
        self.layers.push(layer);
        Ok(())
    }

    /// All ranges but those that are [shared](Contents::share).
    pub(super) fn unshared(&self) -> Vec<Extent> {
        let lowest = visible(&self.layers).into_iter();
        let lowest = lowest.filter(|segment| segment.layer == 0);
        lowest.map(|segment| segment.extent).collect()
    }

    /// The file of the lowest layer.
    #[cfg(test)]
    pub(super) fn lowest(&self) -> &Arc<File> {
        &self.layers[0].file
    }
}
