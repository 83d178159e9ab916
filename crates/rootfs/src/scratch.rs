//! Unnamed files for temporary data.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Where unnamed temporary files come from.
#[derive(Debug, Clone)]
pub enum Scratch {
    /// They are created in this folder.
    Folder(PathBuf),
    /// They are there already, empty.
    Files(ScratchFiles),
}

/// Empty files that are used up, one after the other.
#[derive(Debug, Clone)]
pub struct ScratchFiles {
    /// Their folder, for messages.
    folder: PathBuf,
    files: Arc<Mutex<Vec<File>>>,
}

impl Scratch {
    /// These files; `folder` is for messages.
    pub fn files(folder: impl Into<PathBuf>, files: Vec<File>) -> Scratch {
        Scratch::Files(ScratchFiles {
            folder: folder.into(),
            files: Arc::new(Mutex::new(files)),
        })
    }

    /// The folder, for messages.
    pub fn folder(&self) -> &Path {
        match self {
            Scratch::Folder(folder) | Scratch::Files(ScratchFiles { folder, .. }) => folder,
        }
    }

    /// An empty file.
    ///
    /// # Errors
    ///
    /// If the file can't be created, or all files are used up.
    pub fn file(&self) -> io::Result<File> {
        match self {
            Scratch::Folder(folder) => tempfile::tempfile_in(folder),
            Scratch::Files(ScratchFiles { files, .. }) => files
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop()
                .ok_or_else(|| io::Error::other("no temporary file is left")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_is_used_once() {
        let file = || tempfile::tempfile().unwrap();
        let scratch = Scratch::files("/there", vec![file(), file()]);
        let other = scratch.clone();
        assert!(scratch.file().is_ok() && other.file().is_ok());
        assert!(scratch.file().is_err() && other.file().is_err());
        assert_eq!(scratch.folder(), Path::new("/there"));
    }
}
