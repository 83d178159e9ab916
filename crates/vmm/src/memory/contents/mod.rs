//! Which file holds which bytes of RAM: the layers, how they are mapped, and what changed
//! since the last freeze. All of it changes together, in these transitions:
//!
//! | transition | layers | mapped | released, cuts | dirty log |
//! |---|---|---|---|---|
//! | a VM boots | its memfd | shared | none | none |
//! | a pager shares a part (`share`) | that part on top | still shared below | – | – |
//! | a VM is restored from a capture | those of the capture | privately | none | none |
//! | `release` of guest memory | – | zeros over private ranges | one more released | – |
//! | repeated captures (`keep_log`) | – | – | – | begun |
//! | `freeze` | sealed, and a new one on top | privately | released ranges become cuts | whole |
//!
//! The new layer of a freeze has the written and released ranges. A freeze without the dirty log
//! maps that layer in their place, and leaves no cuts.
//!
//! * `freeze`: freezes RAM; from then on its files never change.
//! * `release`: drops memory that the guest does not need.
//! * `written`: finds what was written since the last freeze.

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

/// The contents of RAM.
#[derive(Debug)]
pub(super) struct Contents {
    /// The layers, lowest first.
    layers: Vec<Layer>,
    mapped: Mapped,
    /// Ranges released since the last freeze: they are zero, whatever the layers hold.
    released: Vec<Extent>,
    /// How many ranges that were released before are still mappings of their own.
    cuts: usize,
    tracking: Tracking,
}

/// How the layers are mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mapped {
    /// The lowest layer is mapped shared: that file is the memory. A layer that a pager shares with
    /// other VMs is above it, mapped privately.
    Shared,
    /// All layers are mapped privately: written pages are this process's own.
    Privately,
}

impl Contents {
    /// Contents of these layers, lowest first, mapped in that way.
    pub(super) fn new(layers: Vec<Layer>, mapped: Mapped) -> Contents {
        Contents {
            layers,
            mapped,
            released: Vec::new(),
            cuts: 0,
            tracking: Tracking::default(),
        }
    }

    /// Maps a layer privately that other VMs map, too. RAM must be new, and untouched where the
    /// layer covers it.
    pub(super) fn share(&mut self, mapping: &Mapping, layer: Layer) -> io::Result<()> {
        debug_assert!(self.mapped == Mapped::Shared && self.layers.len() == 1);
        for extent in &layer.covers {
            mapping.map_over(*extent, Some(&layer.file))?;
        }
        self.layers.push(layer);
        Ok(())
    }

    /// All ranges except those that are [shared](Contents::share).
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
