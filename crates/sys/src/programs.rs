//! Finds programs.

use rustix::fs::{Access, access};
use std::path::PathBuf;

/// The program of this name on PATH, or where Debian has programs for root.
pub fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|folder| folder.join(program))
        .find(|candidate| access(candidate, Access::EXEC_OK).is_ok() && candidate.is_file())
}
