//! Origins of missing chunks, as described by the node.
//!
//! * `registry`: a file of an artifact in a registry.

mod registry;

use jiffy_store::{ImageId, Origin, PeerFolder};
use jiffy_wire::pager::Origin as Described;
use std::path::Path;
use std::sync::Arc;

/// The origins that were described, for the image with this id at this path. None of them is
/// contacted yet.
pub fn origins(described: &[Described], id: ImageId, path: &Path) -> Vec<Arc<dyn Origin>> {
    described
        .iter()
        .map(|origin| -> Arc<dyn Origin> {
            match origin {
                Described::Folder { folder } => Arc::new(PeerFolder::new(folder, id, path)),
                Described::Registry(origin) => Arc::new(registry::RegistryFile::new(origin)),
            }
        })
        .collect()
}
