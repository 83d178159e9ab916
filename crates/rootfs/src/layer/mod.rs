//! One layer: from a blob to entries whose contents can be read anywhere.
//!
//! A plain tar stays where it is. A packed one is unpacked into a spool file
//! once, on a thread of its own, while its entries are read and its digests
//! are made.

mod blob;
mod digest;
mod unpack;

pub use blob::{Blob, Packing};
pub use digest::Digest;
pub use unpack::{Bounds, Expected, LayerError, LayerStream, Spool, Tick, Unpacked, keep, unpack};
