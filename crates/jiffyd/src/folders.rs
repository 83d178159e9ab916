//! Where the node's folders are, unless its options say.

use crate::options::Options;
use anyhow::bail;
use jiffy_content::paths::Paths;
use jiffy_sys::folders::{Chosen, Folders};
use std::fs;
use std::path::{Path, PathBuf};

impl Options {
    /// Where files are: from options, environment and the user's home, in this order.
    pub fn paths(&self) -> anyhow::Result<Paths> {
        let found = Folders::find(&Chosen {
            data: self.data.clone(),
            run: self.run.clone(),
            lib: self.lib.clone(),
            share: self.share.clone(),
        });
        let Some(data) = found.data else {
            bail!("There is no HOME to keep data in; name a folder with --data.");
        };
        let [data, run, lib, share] =
            [data, found.run, found.lib, found.share].map(|path| absolute(&path));
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
