//! Which bytes of RAM are whose: one protocol over what is mapped.
//!
//! | what happens | layers | mapped | given back, cuts | log |
//! |---|---|---|---|---|
//! | a VM boots | its memfd | shared | none | none |
//! | a pager shares a part (`share`) | that part on top | still shared below | – | – |
//! | a VM goes on from a capture | those of the capture | privately | none | none |
//! | the guest gives memory back (`release`) | – | zeros over private ranges | one more given back | – |
//! | it was frozen often (`keep_log`) | – | – | – | begun |
//! | `freeze` | sealed; what was written and given back on top | privately | given back become cuts, or all is mapped anew | whole |
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
    /// Ranges that the guest gave back since the last freeze: zero, whatever
    /// the layers say.
    released: Vec<Extent>,
    /// Ranges mapped apart from their surroundings that no layer tells of.
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
