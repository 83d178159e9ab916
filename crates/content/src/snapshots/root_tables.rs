//! Finds blocks of RAM in the root file system it was booted from.

use crate::model::vm::Root;
use jiffy_store::backing::BlockTable;
use jiffy_store::{Backing, BackingRef};
use jiffy_sys::mutex::lock;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tracing::warn;

/// Largest root whose blocks are looked up: the whole file is read once, which takes about a
/// second for each GiB that is not in the page cache.
const LARGEST: u64 = 2 << 30;
/// Roots whose tables are kept in memory: 2 MiB for each GiB of a root.
const KEPT: usize = 4;

/// Tables of the blocks of root file systems, cached by digest, since several snapshots are
/// usually made of VMs with the same root.
#[derive(Debug, Default)]
pub struct RootTables {
    /// By the root's digest; the most recently used comes last.
    tables: Mutex<VecDeque<(String, Arc<BlockTable>)>>,
}

impl RootTables {
    /// The root at `path` as the backing file of an image of RAM that is about to be written in
    /// the same folder: blocking. `None` if the root is too large or can't be read; RAM is then
    /// stored whole.
    pub fn backing(&self, path: &Path, root: &Root) -> Option<Backing> {
        // A lazy root is a disk cache, which may be incomplete.
        if root.lazy.is_some() {
            return None;
        }
        match self.open(path, &root.digest) {
            Ok(backing) => backing,
            Err(error) => {
                warn!(root = %path.display(), %error, "the root can't be read: its blocks are stored in the memory image too");
                None
            }
        }
    }

    fn open(&self, path: &Path, digest: &str) -> io::Result<Option<Backing>> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        let Some(reference) = reference(path, digest, size).filter(|_| size <= LARGEST) else {
            return Ok(None);
        };
        let table = self.table(&file, digest)?;
        Ok(Some(Backing::search(reference, table, file)))
    }

    /// The lock is held while reading, so that two callers do not read the same root.
    fn table(&self, file: &File, digest: &str) -> io::Result<Arc<BlockTable>> {
        let mut tables = lock(&self.tables);
        let known = tables.iter().position(|(known, _)| known == digest);
        let table = match known.and_then(|at| tables.remove(at)) {
            Some((_, table)) => table,
            None => Arc::new(BlockTable::of(file)?),
        };
        tables.push_back((digest.to_owned(), Arc::clone(&table)));
        if tables.len() > KEPT {
            tables.pop_front();
        }
        Ok(table)
    }
}

fn reference(path: &Path, digest: &str, size: u64) -> Option<BackingRef> {
    let digest = blake3::Hash::from_hex(digest).ok()?;
    Some(BackingRef {
        digest: *digest.as_bytes(),
        size,
        name: path.file_name()?.to_str()?.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::image::LazyDisk;
    use std::fs;

    fn root(path: &Path, bytes: &[u8]) -> Root {
        fs::write(path, bytes).unwrap();
        Root {
            path: path.to_owned(),
            digest: blake3::hash(bytes).to_hex().to_string(),
            lazy: None,
        }
    }

    #[test]
    fn a_root_is_read_once_and_few_are_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("root.erofs");
        let tables = RootTables::default();
        let roots: Vec<Root> = (1..=6_u8)
            .map(|letter| root(&path, &[letter; 8192]))
            .collect();
        let kept = || {
            let kept = tables.tables.lock().unwrap();
            kept.iter()
                .map(|(digest, _)| digest.clone())
                .collect::<Vec<_>>()
        };
        for at in [0, 1, 2, 0, 3, 4, 5] {
            let backing = tables.backing(&path, &roots[at]).unwrap();
            assert_eq!(backing.reference.name, "root.erofs");
            assert_eq!(backing.reference.size, 8192);
        }
        let expected: Vec<String> = [0, 3, 4, 5].map(|at| roots[at].digest.clone()).to_vec();
        assert_eq!(expected, kept());
        let table = |root: &Root| {
            let file = File::open(&path).unwrap();
            tables.table(&file, &root.digest).unwrap()
        };
        assert!(Arc::ptr_eq(&table(&roots[3]), &table(&roots[3])));
    }

    #[test]
    fn a_root_without_a_usable_file_gets_no_table() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("root.erofs");
        let tables = RootTables::default();
        let good = root(&path, &[1; 8192]);
        let lazy = Root {
            lazy: Some(LazyDisk {
                chunks: Vec::new(),
                ext4: false,
            }),
            ..good.clone()
        };
        let nameless = Root {
            digest: "d".into(),
            ..good.clone()
        };
        assert!(tables.backing(&path, &lazy).is_none());
        assert!(tables.backing(&path, &nameless).is_none());
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(LARGEST + 1).unwrap();
        assert!(tables.backing(&path, &good).is_none());
        fs::remove_file(&path).unwrap();
        assert!(tables.backing(&path, &good).is_none());
        assert!(tables.tables.lock().unwrap().is_empty());
    }
}
