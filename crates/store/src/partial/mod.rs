//! An image that is not all here: a sparse file as long as the image, a map of
//! the blocks that have arrived, and origins for the others.
//!
//! Header and manifest are always here and were held against the image's id
//! when the file was made, and are again each time it is opened. Chunks are
//! fetched as they are read, in blocks of 64 KiB, large runs at once; no block
//! is fetched twice at the same time. **Every chunk is held against its content
//! hash each time it is read**, so it makes no difference whether a block is
//! wrong because an origin lied or because the host lost its power between two
//! writes: it is dropped and fetched anew, from another origin if there is one.
//! So the map need not be synced, and a crash at any moment does no harm.
//!
//! * [`origin`]: who may have the bytes.
//! * [`blocks`]: the blocks of one file: fetched once, dropped when wrong.
//! * [`create`]: how a partial image begins; [`shrink`](create::shrink) gives
//!   back what it has fetched.

pub mod blocks;
pub mod create;
pub mod origin;
#[cfg(test)]
mod tests;

pub use create::{create, shrink};
pub use origin::{Origin, OriginError, PeerFolder};

use crate::error::Fault;
use crate::format::{Footer, ImageId};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tells where what is missing of the image at that path can be had, the first
/// origin first.
pub type Origins<'a> = dyn Fn(&Path, ImageId) -> Vec<Arc<dyn Origin>> + 'a;

/// Nobody is known.
pub fn no_origins(_: &Path, _: ImageId) -> Vec<Arc<dyn Origin>> {
    Vec::new()
}

/// The map of the image at `path`, if that is partial: `.NAME.present` in the
/// same folder. An image without a map is whole.
pub fn map_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.present"))
}

/// In how many ways packed an image is kept, at most.
pub const MAX_PACKINGS: usize = 4;

/// Where the image of `path` is, packed in other ways: `NAME.2.EXTENSION` and so on in
/// the same folder, whether they exist or not. An image has the id of what it holds;
/// where its chunks lie is another matter for each artifact that it came with, and so
/// are its origins.
pub fn packings(path: &Path) -> Vec<PathBuf> {
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    (2..=MAX_PACKINGS)
        .map(|number| path.with_extension(format!("{number}.{extension}")))
        .collect()
}

/// An image that is not all here is all there will be of it: what it names
/// beside itself nobody would have fetched.
pub(crate) fn with_backing(footer: &Footer) -> Fault {
    Fault::Damaged {
        offset: footer.backing.offset,
        what: "an image that is elsewhere has a backing file",
    }
}

/// Whether parts of the image at `path` may be missing.
pub fn is_partial(path: &Path) -> bool {
    map_path(path).exists()
}
