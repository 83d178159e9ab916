//! Jiffy's folders on this host.

use crate::failure::{Failure, Result};
use jiffy_sys::folders::{self, Chosen};
use jiffy_sys::ownership::is_mine_alone;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The longest path of a Unix socket, in bytes (unix(7)).
const MAX_SOCKET_PATH: usize = 107;

/// Jiffy's folders on this host.
#[derive(Debug, Clone)]
pub struct Folders {
    /// Images, volumes, VMs; `None` without a home folder.
    data: Option<PathBuf>,
    /// Sockets; removed by a reboot.
    pub run: PathBuf,
    /// `jiffyd`, `jiffy-vmm`, `jiffy-init`.
    pub lib: PathBuf,
    /// Kernels, the initramfs, the machine's files.
    pub share: PathBuf,
}

impl Folders {
    /// Finds the folders by the environment and this program's path. They are not created and need
    /// not exist.
    pub fn find() -> Folders {
        let found = folders::Folders::find(&Chosen::by_environment());
        Folders {
            data: found.data,
            run: found.run,
            lib: found.lib,
            share: found.share,
        }
    }

    /// The folder of images, volumes and VMs.
    ///
    /// # Errors
    ///
    /// If neither `HOME` nor `JIFFY_DATA` is set.
    pub fn data(&self) -> Result<&Path> {
        self.data.as_deref().ok_or_else(|| {
            Failure::new("HOME is not set, so there is no folder to keep data in")
                .hint("set HOME, or JIFFY_DATA to a folder")
        })
    }

    /// The local node's socket.
    pub fn socket(&self) -> PathBuf {
        self.run.join("jiffyd.sock")
    }

    /// The path of one of Jiffy's programs.
    ///
    /// # Errors
    ///
    /// If it is not in the folder of programs.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        let path = self.lib.join(name);
        if path.exists() {
            return Ok(path);
        }
        Err(Failure::new(format!(
            "the program {name} is not installed at {}",
            path.display()
        ))
        .hint(
            "install all of Jiffy (`make install`), or set JIFFY_LIB to the folder of its programs",
        ))
    }

    /// For tests: all of them in one folder.
    #[cfg(test)]
    pub fn below(root: &Path) -> Folders {
        let [data, run, lib, share] = ["data", "run", "lib", "share"].map(|name| root.join(name));
        Folders {
            data: Some(data),
            run,
            lib,
            share,
        }
    }

    /// Whether the run folder exists.
    ///
    /// # Errors
    ///
    /// If another user could have created it, because nothing in it can be trusted; or if it can't
    /// be read.
    pub fn has_run(&self) -> Result<bool> {
        let run = self.run.display();
        match is_mine_alone(&self.run) {
            Ok(true) => Ok(true),
            Ok(false) => Err(Failure::new(format!(
                "{run} is not a folder that only you can write to"
            ))
            .hint("remove it, or set JIFFY_RUN to another folder")),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(Failure::io(format_args!("{run} can't be read"), error)),
        }
    }

    /// Creates the run folder if it is missing.
    ///
    /// # Errors
    ///
    /// If another user could have created it, it can't be created, or the path of the node's socket
    /// is too long.
    pub fn make_run(&self) -> Result<()> {
        let socket = self.socket();
        let length = socket.as_os_str().len();
        if length > MAX_SOCKET_PATH {
            return Err(Failure::new(format!(
                "the socket {} would have a path of {length} bytes; Linux allows {MAX_SOCKET_PATH}",
                socket.display()
            ))
            .hint("set JIFFY_RUN to a shorter path"));
        }
        if self.has_run()? {
            return Ok(());
        }
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.run)
            .map_err(|error| {
                Failure::io(format_args!("{} can't be made", self.run.display()), error)
            })?;
        // Another user may have created it first.
        self.has_run().map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    fn folders(run: &Path) -> Folders {
        Folders {
            data: Some("/data".into()),
            run: run.to_owned(),
            lib: "/lib".into(),
            share: "/share".into(),
        }
    }

    #[test]
    fn a_run_folder_is_made_for_its_owner_only() {
        let above = tempfile::tempdir().unwrap();
        let run = above.path().join("a/run");
        folders(&run).make_run().unwrap();
        assert_eq!(fs::metadata(&run).unwrap().mode() & 0o777, 0o700);
        folders(&run).make_run().unwrap();
    }

    #[test]
    fn a_run_folder_others_can_write_to_is_refused() {
        let run = tempfile::tempdir().unwrap();
        fs::set_permissions(run.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let failure = folders(run.path()).make_run().unwrap_err();
        assert!(failure.message.contains("only you"), "{failure}");
    }

    #[test]
    fn a_link_in_the_place_of_the_run_folder_is_refused() {
        let above = tempfile::tempdir().unwrap();
        let link = above.path().join("run");
        std::os::unix::fs::symlink(above.path(), &link).unwrap();
        folders(&link).make_run().unwrap_err();
    }

    #[test]
    fn a_path_too_long_for_a_socket_is_named() {
        let failure = folders(Path::new(&format!("/{}", "x".repeat(100))))
            .make_run()
            .unwrap_err();
        assert!(failure.message.contains("107"), "{failure}");
        assert!(failure.hint.unwrap().contains("JIFFY_RUN"));
    }
}
