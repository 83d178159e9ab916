//! A file that images refer to instead of storing the same bytes.
//!
//! A guest that has read files of its root file system has their bytes in RAM, in the same pages as
//! in the image it was booted from. An image of its RAM stores their offsets in that file instead.
//! The file is in the image's folder under the name that the image gives, and is never changed.
//!
//! * [`file`](mod@file): the file, open for a reader of the image.
//! * [`blocks`]: finds chunks in such a file.

pub mod blocks;
pub mod file;
#[cfg(test)]
mod tests;

pub use blocks::BlockTable;
pub use file::BackingFile;

use crate::format::BackingRef;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A backing file for an image that is to be written.
#[derive(Debug, Clone)]
pub struct Backing {
    /// The image's reference to it.
    pub reference: BackingRef,
    places: Arc<Places>,
}

/// Where chunks are in the file.
#[derive(Debug)]
enum Places {
    /// They are searched in the file.
    Search(Arc<BlockTable>, File),
    /// Known offsets, by chunk number.
    Known(HashMap<u32, u64>),
}

impl Backing {
    /// Looks for chunks in `file`, whose table is `table`.
    pub fn search(reference: BackingRef, table: Arc<BlockTable>, file: File) -> Backing {
        Backing {
            reference,
            places: Arc::new(Places::Search(table, file)),
        }
    }

    /// Looks for chunks in the file at this path, which is read twice for that.
    ///
    /// # Errors
    ///
    /// If the file can't be opened or read, or has 16 TiB or more.
    pub fn open(path: &Path) -> io::Result<Backing> {
        let file = File::open(path)?;
        let name = path.file_name().unwrap_or_default();
        let reference = BackingRef {
            digest: *blake3::Hasher::new()
                .update_reader(&file)?
                .finalize()
                .as_bytes(),
            size: file.metadata()?.len(),
            name: name.to_string_lossy().into_owned(),
        };
        let table = BlockTable::of(&file)?;
        Ok(Backing::search(reference, Arc::new(table), file))
    }

    /// Chunks at known offsets of the file, by chunk number.
    pub(crate) fn known(reference: BackingRef, places: HashMap<u32, u64>) -> Backing {
        Backing {
            reference,
            places: Arc::new(Places::Known(places)),
        }
    }

    /// Where in the file the chunk of this number is.
    pub(crate) fn find(&self, index: u32, chunk: &[u8]) -> Option<u64> {
        match &*self.places {
            Places::Search(table, file) => table.find(file, chunk),
            Places::Known(known) => known.get(&index).copied(),
        }
    }
}
