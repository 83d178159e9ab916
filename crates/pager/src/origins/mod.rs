//! Origins of missing chunks, as described by the node. The pager reads from none itself: it holds
//! the memory of VMs, and speaks with their monitors. Another program does, `jiffy-origins`, which
//! talks to registries and has their credentials.
//!
//! * [`elsewhere`]: the pager's side.
//! * [`request`]: what the two say to each other.
//! * [`service`]: the other program.
//! * `registry`: a file of an artifact in a registry.

pub mod elsewhere;
mod registry;
pub mod request;
pub mod service;

use elsewhere::{Elsewhere, Reader};
use jiffy_store::{ImageId, Origin};
use jiffy_wire::pager::Origin as Described;
use std::path::Path;
use std::sync::Arc;

/// The origins that were described, for the image with this id at this path. None of them is
/// contacted yet.
pub fn origins(
    reader: &Arc<Reader>,
    described: &[Described],
    id: ImageId,
    path: &Path,
) -> Vec<Arc<dyn Origin>> {
    described
        .iter()
        .map(|origin| -> Arc<dyn Origin> {
            Arc::new(Elsewhere::new(reader.clone(), origin, id, path))
        })
        .collect()
}
