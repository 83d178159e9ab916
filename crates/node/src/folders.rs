//! Where the node's folders are, unless its options say.

use crate::options::Options;
use anyhow::{Context, bail};
use jiffy_content::paths::Paths;
use std::fs;
use std::path::{Path, PathBuf};

impl Options {
    /// Where files are: from options, environment and the user's home, in this order.
    pub fn paths(&self) -> anyhow::Result<Paths> {
        let data = match &self.data {
            Some(data) => data.clone(),
            None => default_data()?,
        };
        let run = match &self.run {
            Some(run) => run.clone(),
            None => default_run(),
        };
        let executable = std::env::current_exe().context("finding jiffyd's own file")?;
        let here = executable.parent().unwrap_or(Path::new("/"));
        let lib = match &self.lib {
            Some(lib) => lib.clone(),
            None => first_existing(&[here, &here.join("../lib/jiffy")], "jiffy-vmm"),
        };
        let share = match &self.share {
            Some(share) => share.clone(),
            None => first_existing(
                &[
                    &here.join("../../share/jiffy"),
                    &here.join("../share/jiffy"),
                ],
                "initramfs.cpio",
            ),
        };
        let [data, run, lib, share] = [data, run, lib, share].map(|path| absolute(&path));
        let socket = match &self.socket {
            Some(socket) => absolute(socket),
            None => run.join("jiffyd.sock"),
        };
        Ok(Paths {
            data,
            run,
            lib,
            share,
            socket,
            peer: self.peer.as_deref().map(absolute),
        })
    }
}

fn default_data() -> anyhow::Result<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Ok("/var/lib/jiffy".into());
    }
    if let Some(folder) = std::env::var_os("XDG_DATA_HOME").filter(|folder| !folder.is_empty()) {
        return Ok(Path::new(&folder).join("jiffy"));
    }
    match std::env::var_os("HOME") {
        Some(home) => Ok(Path::new(&home).join(".local/share/jiffy")),
        None => bail!("There is no HOME to keep data in; name a folder with --data."),
    }
}

fn default_run() -> PathBuf {
    let me = rustix::process::geteuid();
    if me.is_root() {
        return "/run/jiffy".into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty()) {
        Some(folder) => Path::new(&folder).join("jiffy"),
        None => format!("/tmp/jiffy-{}", me.as_raw()).into(),
    }
}

/// The first of the folders that has the file, else the last folder: error
/// messages then name a sensible place.
fn first_existing(folders: &[&Path], file: &str) -> PathBuf {
    folders
        .iter()
        .find(|folder| folder.join(file).exists())
        .or(folders.last())
        .map_or_else(PathBuf::new, |folder| folder.to_path_buf())
}

/// The path without links. VMMs are found by it, also by a daemon that comes when
/// all of it is there: what is not there yet is below what is.
fn absolute(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    path.ancestors()
        .find_map(|there| {
            let real = fs::canonicalize(there).ok()?;
            let below = path.strip_prefix(there).ok()?;
            // Joining nothing would add a slash.
            Some(match below.as_os_str().is_empty() {
                true => real,
                false => real.join(below),
            })
        })
        .unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_path_is_the_same_before_and_after_its_folders_are_made() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let (real, link) = (folder.join("real"), folder.join("link"));
        fs::create_dir(&real).unwrap();
        symlink(&real, &link).unwrap();
        let wanted = link.join("u/.local/share/jiffy");
        let first = absolute(&wanted);
        assert_eq!(first, real.join("u/.local/share/jiffy"));
        fs::create_dir_all(&first).unwrap();
        assert_eq!(absolute(&wanted), first);
        assert_eq!(absolute(&link).as_os_str(), real.as_os_str());
        assert!(absolute(Path::new("not/there")).is_absolute());
    }
}
