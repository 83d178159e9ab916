//! Finds and opens parents.

use super::{ImageReader, Opening};
use crate::error::{Fault, ParentFault};
use crate::format::{Footer, MAX_DEPTH, ParentRef};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Returns the path of the parent of the image at that path.
pub type Resolve<'a> = dyn Fn(&Path, &ParentRef) -> io::Result<PathBuf> + 'a;

/// The file of that name in the child's folder.
///
/// # Errors
///
/// Never; [`Resolve`] requires this type.
pub fn in_folder(child: &Path, parent: &ParentRef) -> io::Result<PathBuf> {
    Ok(child.with_file_name(&parent.name))
}

/// Opens the parent that `child` names.
pub(super) fn open(
    child: &Path,
    parent: &ParentRef,
    footer: &Footer,
    opening: &Opening<'_>,
    depth: usize,
) -> Result<Arc<ImageReader>, Fault> {
    let failed = |source| Fault::Parent {
        name: parent.name.clone(),
        source,
    };
    if depth >= MAX_DEPTH {
        return Err(failed(ParentFault::TooDeep { most: MAX_DEPTH }));
    }
    let path =
        (opening.resolve)(child, parent).map_err(|error| failed(ParentFault::NotFound(error)))?;
    let reader = match (opening.known)(&path) {
        Some(reader) => reader,
        None => ImageReader::open_at_depth(&path, opening, depth + 1)
            .map(Arc::new)
            .map_err(|error| failed(ParentFault::Image(Box::new(error))))?,
    };
    if reader.chunk_size() != footer.chunk_size {
        return Err(failed(ParentFault::OtherChunkSize));
    }
    if reader.id() != parent.id {
        return Err(failed(ParentFault::OtherContents));
    }
    Ok(reader)
}
