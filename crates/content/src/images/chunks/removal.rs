//! Which images of chunks are removed: those that nothing needs, and what a killed daemon left.

use super::{Chunks, PRESENT, SUFFIX, parse_id};
use crate::error::{Error, Result};
use crate::leases::{Holder, Item, Lease, Mode};
use jiffy_store::partial::map_path;
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use tracing::info;

/// What needs images while no record names them.
const STORED: &str = "stored";

impl Chunks {
    /// Keeps these images from being removed as unused until the leases are dropped: blocking, for
    /// as long as one of them is being removed.
    pub fn hold(&self, ids: &[String]) -> Vec<Lease> {
        ids.iter()
            .map(|id| self.leases.share(Item::Chunks(id.clone()), STORED))
            .collect()
    }

    /// The ids that are held now.
    pub fn held(&self) -> Vec<String> {
        let items = self.leases.items().into_iter();
        items
            .filter_map(|item| match item {
                Item::Chunks(id) => Some(id),
                _ => None,
            })
            .collect()
    }

    /// Removes all images that are neither wanted nor held, with the files beside them; returns
    /// the bytes that were freed.
    pub fn remove_unused(&self, wanted: impl Fn(&str) -> bool) -> u64 {
        // Until the end nobody can hold what is removed.
        let mut leases = HashMap::new();
        let mut is_unused = |name: &str| {
            let Some(id) = id_in(name).filter(|id| !wanted(id)) else {
                return false;
            };
            let lease = || {
                let (item, holder) = (Item::Chunks(id.to_owned()), Holder::Operation("removed"));
                self.leases.take(item, Mode::Exclusive, holder).ok()
            };
            let lease = leases.entry(id.to_owned()).or_insert_with(lease);
            lease.is_some()
        };
        let mut unused = self.entries();
        unused.retain(|(name, _)| is_unused(name));
        // Images first, synced: an image that lost its map would be taken for a whole one.
        let (images, others): (Vec<_>, Vec<_>) = unused
            .into_iter()
            .partition(|(name, _)| name.ends_with(SUFFIX));
        let mut bytes = 0;
        for (_, path) in &images {
            let stored = fs::metadata(path).map_or(0, |data| data.blocks() * 512);
            if fs::remove_file(path).is_ok() {
                bytes += stored;
            }
        }
        if !images.is_empty() {
            let _ = jiffy_sys::durable::sync_folder_of(&images[0].1);
        }
        for (name, path) in others {
            let image = name.trim_start_matches('.').strip_suffix(PRESENT);
            // If the image could not be removed, it needs its map.
            if image.is_none_or(|image| !self.folder.join(image).exists()) {
                let _ = fs::remove_file(path);
            }
        }
        bytes
    }

    /// Removes a packing, with all files beside it; processes that have it open can still read it.
    pub(super) fn remove_packing(&self, key: &str) -> Result<()> {
        let path = self.path(key);
        info!(path = %path.display(), "removing the least recently used packing of an image");
        // The image first: an image without its map would be taken for a whole one.
        fs::remove_file(&path)
            .map_err(|error| Error::io("remove a packing of an image", &path, &error))?;
        let is_of_it = |name: &str| {
            let rest = name.strip_prefix('.').unwrap_or(name).strip_prefix(key);
            rest.is_some_and(|rest| rest.starts_with('.'))
        };
        for (_, path) in self.entries().iter().filter(|(name, _)| is_of_it(name)) {
            let _ = fs::remove_file(path);
        }
        Ok(())
    }

    /// Removes what a killed daemon has left half done. The map of a partial image begins with a
    /// dot, too, and is kept.
    pub fn sweep(&self) {
        for (name, path) in self.entries() {
            let orphan = match id_in(&name) {
                Some(id) => {
                    let is_map = |image: &str| map_path(&self.folder.join(image)) == path;
                    let image = name
                        .strip_prefix('.')
                        .and_then(|name| name.strip_suffix(PRESENT));
                    let of_image = image
                        .is_some_and(|image| is_map(image) && self.folder.join(image).exists());
                    !self.has(id) || name.starts_with('.') && !of_image
                }
                None => name.starts_with('.'),
            };
            if orphan {
                info!(path = %path.display(), "removing an unfinished file of an earlier daemon");
                let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
            }
        }
    }

    /// Names and paths of all files in the folder.
    fn entries(&self) -> Vec<(String, PathBuf)> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries
            .map(|entry| {
                let name = entry.file_name().to_string_lossy().into_owned();
                (name, entry.path())
            })
            .collect()
    }
}

/// The id in a file name: of `ID.jimg`, `ID.origins.json`, `.ID.jimg.present` and so on.
fn id_in(name: &str) -> Option<&str> {
    let (id, _) = name.strip_prefix('.').unwrap_or(name).split_once('.')?;
    parse_id(id).is_ok().then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packing_is_removed_with_the_access_to_its_origins() {
        let folder = tempfile::tempdir().unwrap();
        let chunks = Chunks::new(folder.path().to_owned());
        let id = "0".repeat(32);
        for key in [id.clone(), format!("{id}.2"), format!("{id}.3")] {
            let image = chunks.path(&key);
            fs::write(&image, "the image").unwrap();
            fs::write(map_path(&image), "the map").unwrap();
            fs::write(chunks.origins_file(&key), "the origins").unwrap();
            for access in ["auth.json", "0123456789abcdef.ca.pem"] {
                fs::write(image.with_extension(access), "the access").unwrap();
            }
        }
        let before = chunks.entries().len();
        chunks.remove_packing(&format!("{id}.2")).unwrap();
        let left = chunks.entries();
        assert_eq!(left.len(), before / 3 * 2, "{left:?}");
        let of_it = |name: &str| name.contains(&format!("{id}.2."));
        assert!(!left.iter().any(|(name, _)| of_it(name)), "{left:?}");
        // What could not be removed is not free.
        chunks.remove_packing(&format!("{id}.2")).unwrap_err();
    }

    /// A partial image without its map would be taken for a whole one, also by the next daemon if
    /// this one is killed between the two removals.
    #[test]
    fn an_image_is_removed_before_its_map_and_keeps_it_if_it_stays() {
        let folder = tempfile::tempdir().unwrap();
        let chunks = Chunks::new(folder.path().to_owned());
        let image = chunks.path(&"0".repeat(32));
        let map = map_path(&image);
        // A folder can't be removed as a file is.
        fs::create_dir(&image).unwrap();
        fs::write(&map, "the map").unwrap();
        assert_eq!(chunks.remove_unused(|_| false), 0);
        assert!(map.exists() && image.exists());
        chunks.sweep();
        assert!(map.exists() && image.exists());
        fs::remove_dir(&image).unwrap();
        fs::write(&image, "the image").unwrap();
        assert!(chunks.remove_unused(|_| false) > 0);
        assert!(!map.exists() && !image.exists());
    }
}
