//! One layer: turns a blob into entries with contents at known offsets of a file.
//!
//! A plain tar is read in place. A compressed one is unpacked once into a spool file, on a thread of
//! its own, while its entries are read and its digests are computed.

mod blob;
mod unpack;

pub(crate) use blob::size_of;
pub use blob::{Blob, Compression};
pub use unpack::{
    Bounds, Expected, LayerError, LayerStream, Spool, Tick, Unpacked, unpack, unpack_to_file,
};
