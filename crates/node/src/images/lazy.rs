//! Disks whose bytes come when a guest reads them.
//!
//! A VM of an image that is not all here reads a *disk cache*
//! (`docs/disk-cache.md`), which the pager fills from the image of chunks,
//! and that from the registry. All VMs of one image share the cache.

use super::chunks::Chunks;
use crate::paths::Paths;
use jiffy_wire::disk::{CONTENTS, PRESENT};
use jiffy_wire::pager::{OpenDisk, Origin, PagerRequest};
use jiffy_wire::vmm::Residency;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Digits of an id in the name of a disk; a socket's path is short.
const NAME_DIGITS: usize = 16;

/// What a VM's disk is that is filled on demand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LazyDisk {
    /// The image of chunks, and then its parents, by their ids.
    pub chunks: Vec<String>,
}

impl LazyDisk {
    /// What the pager calls it.
    pub fn name(&self) -> String {
        let id = self.chunks.first().map_or("", String::as_str);
        format!("d-{}", id.get(..NAME_DIGITS).unwrap_or(id))
    }

    /// The folder of its cache.
    fn cache(&self, paths: &Paths) -> PathBuf {
        cache_in(&paths.disks(), &self.chunks)
    }

    /// The file that VMs read.
    pub fn contents(&self, paths: &Paths) -> PathBuf {
        self.cache(paths).join(CONTENTS)
    }

    /// How a VMM gets what is missing.
    pub fn residency(&self, paths: &Paths) -> Residency {
        Residency {
            present: self.cache(paths).join(PRESENT),
            pager_socket: paths.pager_vm_socket(&self.name()),
        }
    }

    /// The images of chunks of which only parts are here.
    pub fn images(&self, paths: &Paths) -> Vec<PathBuf> {
        let chunks = Chunks::new(paths.chunks());
        let partial = self.chunks.iter().filter(|id| chunks.is_partial(id));
        partial.map(|id| chunks.path(id)).collect()
    }

    /// What the pager has to be told, in this order.
    pub fn requests(&self, paths: &Paths) -> Vec<PagerRequest> {
        let chunks = Chunks::new(paths.chunks());
        // Who is near is asked first.
        let peer = paths.peer.clone().map(|folder| Origin::Folder { folder });
        let mut requests: Vec<PagerRequest> = self
            .chunks
            .iter()
            .filter(|id| chunks.is_partial(id))
            .map(|id| PagerRequest::Origins {
                image: chunks.path(id),
                origins: peer.iter().cloned().chain(chunks.origins(id)).collect(),
            })
            .collect();
        let Some(image) = self.chunks.first() else {
            return requests;
        };
        let recording = recording(paths, image);
        requests.push(PagerRequest::OpenDisk(OpenDisk {
            name: self.name(),
            socket: paths.pager_vm_socket(&self.name()),
            cache: self.cache(paths),
            image: chunks.path(image),
            // The first boot shows what a boot needs.
            record: (!recording.exists()).then(|| recording.clone()),
            prefetch: Some(recording),
        }));
        requests
    }
}

/// Which chunks the first boot from this image asked for.
pub fn recording(paths: &Paths, id: &str) -> PathBuf {
    paths.disks().join(format!("{id}.recording"))
}

/// The folder of the cache of these chunks.
pub fn cache_in(disks: &Path, chunks: &[String]) -> PathBuf {
    disks.join(chunks.first().map_or("none", String::as_str))
}
