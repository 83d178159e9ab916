//! A folder for the files and sockets of targets.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

static FOLDER: OnceLock<PathBuf> = OnceLock::new();

/// This process's folder.
///
/// # Panics
///
/// If it can't be made.
pub fn folder() -> &'static Path {
    FOLDER.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("jiffy-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for scratch files");
        folder
    })
}

/// Uses `folder`, which the caller removes.
///
/// # Panics
///
/// If a target has used one.
pub fn set_folder(folder: &Path) {
    FOLDER.set(folder.into()).expect("no target has run");
}
