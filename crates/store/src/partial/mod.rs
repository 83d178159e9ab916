//! Partial images: a sparse file as long as the image, a map of the blocks that are present, and
//! origins for the others.
//!
//! Header and manifest are always present. They are checked against the image's id when the file is
//! created and each time it is opened. Chunks are fetched when they are read, in blocks of 64 KiB
//! and in large runs; no block is fetched twice at the same time. **Every chunk is checked against
//! its content hash each time it is read**, so the cause of a wrong block (a lying origin, or a
//! power loss between two writes) does not matter: it is dropped and fetched again, from another
//! origin if there is one. Therefore the map need not be synced, and a crash at any moment does no
//! harm.
//!
//! * [`origin`]: where missing bytes can be fetched.
//! * [`blocks`]: the blocks of one file: fetched once, dropped when wrong.
//! * [`create`](mod@create): creates a partial image; [`create::shrink`] drops what it has fetched.

pub mod blocks;
pub mod create;
pub mod origin;
#[cfg(test)]
mod tests;

pub use create::{create, shrink};
pub use origin::{Bytes, Origin, OriginError, PeerFolder};

use crate::error::Fault;
use crate::format::{Footer, ImageId};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Gives the origins of the image at that path, the preferred one first.
pub type Origins<'a> = dyn Fn(&Path, ImageId) -> Vec<Arc<dyn Origin>> + 'a;

/// No origins.
pub fn no_origins(_: &Path, _: ImageId) -> Vec<Arc<dyn Origin>> {
    Vec::new()
}

/// The map of the image at `path`, if that is partial: `.NAME.present` in the
/// same folder. An image without a map is whole.
pub fn map_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.present"))
}

/// Most packings of one image that are kept.
pub const MAX_PACKINGS: usize = 4;

/// The paths of other packings of the image at `path`: `NAME.2.EXTENSION` and so on in the same
/// folder, whether they exist or not. The id of an image depends on its contents alone, while each
/// artifact has its own order of chunks and its own origins.
pub fn packings(path: &Path) -> Vec<PathBuf> {
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    (2..=MAX_PACKINGS)
        .map(|number| path.with_extension(format!("{number}.{extension}")))
        .collect()
}

/// A partial image with a backing file is refused: the backing file would not be fetched.
pub(crate) fn with_backing(footer: &Footer) -> Fault {
    Fault::Damaged {
        offset: footer.backing.offset,
        what: "a partial image cannot have a backing file",
    }
}

/// Whether parts of the image at `path` may be missing.
pub fn is_partial(path: &Path) -> bool {
    map_path(path).exists()
}
