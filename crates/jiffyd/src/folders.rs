//! The node's folders, from options or defaults.

use crate::options::Options;
use anyhow::bail;
use jiffy_content::paths::Paths;
use jiffy_sys::folders::{Chosen, Folders};
use std::fs;
use std::path::{Path, PathBuf};

impl Options {
    /// The paths of the node's files: from options, the environment or the user's home, in this
    /// order.
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

/// The absolute path, with symbolic links resolved in the part that exists. VMMs are recognised by
/// this path, so a daemon that starts later, when all of it exists, must get the same one.
fn absolute(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    path.ancestors()
        .find_map(|there| {
            let real = fs::canonicalize(there).ok()?;
            let below = path.strip_prefix(there).ok()?;
            // Joining an empty path would add a slash.
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
    fn a_path_resolves_the_same_before_and_after_creation() {
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
