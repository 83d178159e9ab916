//! Disks whose contents are fetched when a guest reads them.
//!
//! A VM of a partial image reads a *disk cache* (`docs/disk-cache.md`). The pager fills it from the
//! image of chunks, and the image from the registry. All VMs of one image share the cache.

use super::chunks::{Chunks, parse_id};
use crate::durable::is_taken;
use crate::model::image::LazyDisk;
use crate::paths::Paths;
use jiffy_store::Recording;
use jiffy_store::bounded::Cached;
use jiffy_sys::durable::remove_any;
use jiffy_wire::disk::{CONTENTS, PRESENT};
use jiffy_wire::pager::{OpenDisk, Origin, PagerRequest};
use jiffy_wire::vmm::Residency;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use tracing::warn;

/// Digits of the id in a disk's name; the length of a socket's path is limited.
const NAME_DIGITS: usize = 16;

/// Removes invalid caches; their contents are fetched again.
pub fn sweep(disks: &Path) {
    for entry in fs::read_dir(disks).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_file = |path: &Path| match jiffy_sys::regular::look(path) {
            Ok(_) => true,
            Err(error) => error.kind() == io::ErrorKind::NotFound && !is_taken(path),
        };
        let is_good = match path.extension() {
            Some(_) => is_file(&path),
            None => {
                path.is_dir()
                    && [CONTENTS, PRESENT]
                        .iter()
                        .all(|name| is_file(&path.join(name)))
            }
        };
        if !is_good {
            warn!(path = %path.display(), "removing an invalid disk cache");
            let _ = remove_any(&path);
        }
    }
}

impl LazyDisk {
    /// The disk's name in requests to the pager.
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

    /// Which parts are here.
    pub fn present(&self, paths: &Paths) -> PathBuf {
        self.cache(paths).join(PRESENT)
    }

    /// How this VM's VMM finds missing chunks and asks for them.
    pub fn residency(&self, paths: &Paths, id: &str) -> Residency {
        Residency {
            present: self.present(paths),
            pager_socket: paths.vm_disk_socket(id),
        }
    }

    /// The images of chunks of which only parts are here.
    pub fn images(&self, paths: &Paths) -> Vec<PathBuf> {
        let chunks = Chunks::new(paths.chunks());
        let partial = self.chunks.iter().filter(|id| chunks.is_partial(id));
        partial.map(|id| chunks.path(id)).collect()
    }

    /// The requests that the pager needs for this disk, in order.
    pub fn requests(&self, paths: &Paths) -> Vec<PagerRequest> {
        let chunks = Chunks::new(paths.chunks());
        // The peer comes first: it is nearer than a registry.
        let peer = paths.peer.clone().map(|folder| Origin::Folder { folder });
        let all = chunks.with_all_parents(&self.chunks);
        let mut requests: Vec<PagerRequest> = all
            .iter()
            .flat_map(|id| chunks.partial(id))
            .map(|key| PagerRequest::Origins {
                image: chunks.path(&key),
                origins: peer.iter().cloned().chain(chunks.origins(&key)).collect(),
            })
            .collect();
        let Some(image) = self.chunks.first() else {
            return requests;
        };
        let recording = recording(paths, image);
        requests.push(PagerRequest::OpenDisk(OpenDisk {
            name: self.name(),
            socket: paths.disk_socket(&self.name()),
            cache: self.cache(paths),
            image: chunks.path(image),
            // The first boot is recorded; later ones prefetch what it read.
            record: (!recording.exists()).then(|| recording.clone()),
            prefetch: Some(recording),
        }));
        requests
    }
}

/// The recording of the chunks that the first boot from this image read.
pub fn recording(paths: &Paths, id: &str) -> PathBuf {
    paths.disks().join(format!("{id}.recording"))
}

/// The folder of the cache of these chunks.
pub fn cache_in(disks: &Path, chunks: &[String]) -> PathBuf {
    disks.join(chunks.first().map_or("none", String::as_str))
}

/// Fetched data that may be evicted, because it can be fetched again.
pub fn caches(paths: &Paths) -> Vec<Cached> {
    let mut found = Vec::new();
    for entry in fs::read_dir(paths.disks()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if parse_id(&name).is_ok() {
            let recorded = Recording::read(&recording(paths, &name));
            found.push(Cached::Disk {
                folder: entry.path(),
                keep: recorded.map_or_else(|_| Vec::new(), |recording| recording.chunks),
            });
        }
    }
    let chunks = Chunks::new(paths.chunks());
    for entry in fs::read_dir(paths.chunks()).into_iter().flatten().flatten() {
        let path = entry.path();
        let id = path.file_stem().unwrap_or_default().to_string_lossy();
        // Without an origin the data can't be fetched again, so it is not evicted.
        if chunks.path(&id) == path && chunks.is_partial(&id) && !chunks.origins(&id).is_empty() {
            found.push(Cached::Image(path));
        }
    }
    found
}
