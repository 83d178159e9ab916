//! Removes images, chunks and caches that nothing uses.

use super::{Images, lazy, name};
use crate::durable::LoadError;
use crate::error::Result;
use crate::model::snapshot::Manifest;
use crate::model::vm::{VmRecord, is_active};
use jiffy_wire::api::Pruned;
use std::borrow::Borrow;
use std::collections::HashSet;
use std::fs::{self, DirEntry};
use std::io;
use std::path::Path;
use std::sync::Arc;

impl Images {
    /// Removes files of unfinished pulls and pushes of an earlier daemon, and what none of these VMs, all
    /// that have a folder, uses.
    pub fn sweep<'a>(
        &self,
        vms: impl Iterator<Item = std::result::Result<&'a VmRecord, &'a LoadError>>,
    ) {
        self.chunks.sweep();
        lazy::sweep(&self.disks);
        self.collect(vms);
    }

    /// Removes chunks and caches that nothing uses any more.
    pub fn collect_garbage(&self) {
        let folders = std::iter::once_with(|| entries(&self.vms)).flatten();
        let vms = folders.filter(is_complete);
        self.collect(vms.map(|entry| VmRecord::load(&entry.path())));
    }

    /// As [`Images::collect_garbage`], with these VMs' records. They are read after what is held: a VM
    /// that starts holds its chunks until its record names them.
    fn collect<R: Borrow<VmRecord>, E: Borrow<LoadError>>(
        &self,
        vms: impl Iterator<Item = std::result::Result<R, E>>,
    ) {
        // If the chunks of one user are not known, nothing may be removed.
        let Some(mut wanted) = self.chunks_in_use(vms) else {
            return;
        };
        // Another packing may have ancestors that the records do not name.
        let named: Vec<String> = wanted.iter().cloned().collect();
        wanted.extend(self.chunks.with_all_parents(&named));
        self.chunks.remove_unused(|id| wanted.contains(id));
        for entry in entries(&self.disks) {
            let name = entry.file_name().to_string_lossy().into_owned();
            let id = name.strip_suffix(".recording").unwrap_or(&name);
            if !wanted.contains(id) {
                let path = entry.path();
                let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
            }
        }
    }

    /// `None` if a record or manifest that may name chunks can't be read.
    fn chunks_in_use<R: Borrow<VmRecord>, E: Borrow<LoadError>>(
        &self,
        vms: impl Iterator<Item = std::result::Result<R, E>>,
    ) -> Option<HashSet<String>> {
        let mut wanted: HashSet<String> = self.chunks.held().into_iter().collect();
        wanted.extend(self.chunks_of_images()?);
        wanted.extend(self.chunks_of_snapshots()?);
        wanted.extend(chunks_of_vms(vms)?);
        Some(wanted)
    }

    /// `None` if the record of an image can't be read.
    fn chunks_of_images(&self) -> Option<Vec<String>> {
        let names = entries(&self.folder)
            .filter_map(|entry| name::of_folder(&entry.file_name().to_string_lossy()));
        let mut chunks = Vec::new();
        for name in names {
            chunks.extend(self.record(&name).ok()?.chunks.iter().cloned());
        }
        Some(chunks)
    }

    /// `None` if the manifest of a snapshot can't be read.
    fn chunks_of_snapshots(&self) -> Option<Vec<String>> {
        let mut chunks = Vec::new();
        for entry in entries(&self.snapshots).filter(is_complete) {
            let manifest = Manifest::load(&entry.path()).ok()?;
            chunks.extend(manifest.lazy_root.into_iter().flat_map(|it| it.chunks));
        }
        Some(chunks)
    }

    /// Removes pulled images that `in_use` releases: they can be pulled again. Images that the user
    /// imported are kept.
    ///
    /// # Errors
    ///
    /// If the images can't be listed. One that can't be removed is skipped.
    pub async fn prune<F: Future<Output = Result<()>>>(
        self: &Arc<Self>,
        in_use: impl Fn(String) -> F,
    ) -> Result<Pruned> {
        let mut pruned = Pruned::default();
        for image in self.list()? {
            let can_be_pulled = image.name.contains('/')
                && (image.source.as_ref()).is_some_and(|source| source.manifest.is_some());
            let gone = || self.remove(&image.name, || in_use(image.name.clone()));
            if can_be_pulled && gone().await.is_ok() {
                pruned.bytes += image.stored;
                pruned.names.push(image.name);
            }
        }
        Ok(pruned)
    }
}

/// `None` if the record of a VM that may be running can't be read.
fn chunks_of_vms<R: Borrow<VmRecord>, E: Borrow<LoadError>>(
    vms: impl Iterator<Item = std::result::Result<R, E>>,
) -> Option<Vec<String>> {
    let mut chunks = Vec::new();
    for record in vms {
        let record = record.as_ref().map(Borrow::borrow).map_err(Borrow::borrow);
        let record = match record {
            Ok(record) => record,
            // An empty record: the VM was never started.
            Err(LoadError::Empty) => continue,
            Err(LoadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(_) => return None,
        };
        let root = record.root.as_ref().filter(|_| is_active(record.state));
        let disk = root.and_then(|root| root.lazy.as_ref());
        chunks.extend(disk.into_iter().flat_map(|disk| disk.chunks.clone()));
    }
    Some(chunks)
}

fn entries(folder: &Path) -> impl Iterator<Item = DirEntry> {
    fs::read_dir(folder).into_iter().flatten().flatten()
}

/// Names of folders that are being made begin with a dot.
fn is_complete(entry: &DirEntry) -> bool {
    !entry.file_name().to_string_lossy().starts_with('.')
}
