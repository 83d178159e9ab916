//! Origins of missing chunks, as described by the node. The pager does not read from them itself,
//! because it holds the memory of VMs and talks to their VMMs. Another program does:
//! `jiffy-origins`, which talks to registries and has their credentials.
//!
//! * [`client`]: the pager's side, which sends requests.
//! * [`request`]: the protocol between the two programs.
//! * [`service`]: `jiffy-origins`, which answers them.
//! * [`confinement`]: what the process that answers them may do.
//! * `helpers`: runs credential helpers for that process.
//! * `registry`: a file of an artifact in a registry.

pub mod client;
pub mod confinement;
mod helpers;
mod registry;
pub mod request;
pub mod service;
#[cfg(feature = "testing")]
pub(crate) mod testing;

use client::{Reader, RemoteOrigin};
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
            Arc::new(RemoteOrigin::new(reader.clone(), origin, id, path))
        })
        .collect()
}
