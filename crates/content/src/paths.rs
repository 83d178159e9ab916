//! Where the node's files are.

use crate::error::{Error, Result};
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Most bytes of a Unix socket's path (`sun_path` less its final zero).
const MAX_SOCKET_PATH: usize = 107;

/// The folders of one node.
#[derive(Debug, Clone)]
pub struct Paths {
    /// Files that must survive a restart of the host.
    pub data: PathBuf,
    /// Sockets of what runs now.
    pub run: PathBuf,
    /// Jiffy's other binaries.
    pub lib: PathBuf,
    /// Kernels, initramfs and images that came with Jiffy.
    pub share: PathBuf,
    /// The API's Unix socket.
    pub socket: PathBuf,
    /// Folder of another node's images of chunks, searched before a registry.
    pub peer: Option<PathBuf>,
}

impl Paths {
    /// Makes the folders.
    ///
    /// # Errors
    ///
    /// If a socket's path has more than 107 bytes, the run folder belongs to another user, or a
    /// folder can't be made or closed to others.
    pub fn prepare(&self) -> Result<()> {
        let longest = self.supervisor_socket("0123456789ab");
        for socket in [&self.socket, &longest] {
            let length = socket.as_os_str().len();
            if length > MAX_SOCKET_PATH {
                return Err(Error::invalid(format!(
                    "The run folder's name is too long: the socket {} has {length} bytes, and Linux allows {MAX_SOCKET_PATH}; choose a shorter --run folder.",
                    socket.display()
                )));
            }
        }
        make_private(&self.run)?;
        let owner = fs::metadata(&self.run)
            .map_err(|error| Error::io("look at the run folder", &self.run, &error))?;
        let me = rustix::process::geteuid().as_raw();
        if owner.uid() != me {
            return Err(Error::invalid(format!(
                "The run folder {} belongs to user {}, not to user {me}; choose another with --run.",
                self.run.display(),
                owner.uid()
            )));
        }
        // Jailed monitors of an earlier daemon, which have a group of their own, may connect to their
        // sockets at any time.
        let is_foreign = owner.gid() != rustix::process::getegid().as_raw();
        let permitted = if is_foreign { 0o710 } else { 0o700 };
        if owner.permissions().mode() & 0o777 & !permitted != 0 {
            fs::set_permissions(&self.run, fs::Permissions::from_mode(0o700))
                .map_err(|error| Error::io("close the run folder to others", &self.run, &error))?;
        }
        if let Some(folder) = self.socket.parent() {
            make_private(folder)?;
        }
        for folder in [
            self.data.clone(),
            self.vms(),
            self.images(),
            self.pulls(),
            self.chunks(),
            self.disks(),
            self.kernels(),
            self.volumes(),
            self.snapshots(),
            self.golden(),
            self.run.join("vms"),
            self.run.join("pager"),
            self.run.join("disks"),
            self.spares(),
        ] {
            make_private(&folder)?;
        }
        Ok(())
    }

    /// All VMs' folders.
    pub fn vms(&self) -> PathBuf {
        self.data.join("vms")
    }

    /// A VM's data folder.
    pub fn vm(&self, id: &str) -> PathBuf {
        self.data.join("vms").join(id)
    }

    /// A VM's sockets.
    pub fn vm_run(&self, id: &str) -> PathBuf {
        self.run.join("vms").join(id)
    }

    /// Where host programs reach the guest's ports.
    pub fn vsock_socket(&self, id: &str) -> PathBuf {
        self.vm_run(id).join("vsock.sock")
    }

    /// Where the guest's init reaches the node.
    pub fn supervisor_socket(&self, id: &str) -> PathBuf {
        self.vm_run(id)
            .join(format!("vsock.sock_{}", jiffy_wire::agent::SUPERVISOR_PORT))
    }

    /// Where the VMM takes commands.
    pub fn control_socket(&self, id: &str) -> PathBuf {
        self.vm_run(id).join("control.sock")
    }

    /// All images' folders.
    pub fn images(&self) -> PathBuf {
        self.data.join("images")
    }

    /// Images of chunks.
    pub fn chunks(&self) -> PathBuf {
        self.data.join("chunks")
    }

    /// Caches of disks that are filled on demand.
    pub fn disks(&self) -> PathBuf {
        self.data.join("disks")
    }

    /// Blobs of pulls that are not finished.
    pub fn pulls(&self) -> PathBuf {
        self.data.join("pulls")
    }

    /// The user's kernels.
    pub fn kernels(&self) -> PathBuf {
        self.data.join("kernels")
    }

    /// All volumes.
    pub fn volumes(&self) -> PathBuf {
        self.data.join("volumes")
    }

    /// Ranges of addresses, and networks that users made.
    pub fn networks(&self) -> PathBuf {
        self.data.join("networks.json")
    }

    /// Snapshots that users made.
    pub fn snapshots(&self) -> PathBuf {
        self.data.join("snapshots")
    }

    /// Snapshots that the node keeps for later runs.
    pub fn golden(&self) -> PathBuf {
        self.data.join("golden")
    }

    /// Ids of requests that were begun.
    pub fn requests(&self) -> PathBuf {
        self.run.join("requests")
    }

    /// Where the pager takes commands.
    pub fn pager_socket(&self) -> PathBuf {
        self.run.join("pager.sock")
    }

    /// Where a VMM reaches the pager about its VM's memory: a link to [`Paths::pager_vm_socket`].
    pub fn vm_memory_socket(&self, id: &str) -> PathBuf {
        self.vm_run(id).join("memory.sock")
    }

    /// The run folders of spares, which VMs take over.
    pub fn spares(&self) -> PathBuf {
        self.run.join("spares")
    }

    /// Where the pager waits for a VM. A VMM of an earlier release connects to it directly.
    pub fn pager_vm_socket(&self, id: &str) -> PathBuf {
        self.run.join("pager").join(format!("{id}.sock"))
    }

    /// Where the pager listens for requests about this disk. VMMs can't reach it: each VM that
    /// has the disk gets a link to the socket ([`Paths::vm_disk_socket`]).
    pub fn disk_socket(&self, name: &str) -> PathBuf {
        self.run.join("disks").join(format!("{name}.sock"))
    }

    /// Where a VMM reaches the pager about the disk that its VM has.
    pub fn vm_disk_socket(&self, id: &str) -> PathBuf {
        self.vm_run(id).join("disk.sock")
    }

    /// The pager's binary.
    pub fn pager(&self) -> PathBuf {
        self.lib.join("jiffy-pager")
    }

    /// The binary that serves folders of the host.
    pub fn files(&self) -> PathBuf {
        self.lib.join("jiffy-files")
    }

    /// The binary that loads the host's scheduling policy.
    pub fn sched(&self) -> PathBuf {
        self.lib.join("jiffy-sched")
    }

    /// The compiled policy.
    pub fn sched_policy(&self) -> PathBuf {
        self.lib.join("jiffy-sched.bpf.o")
    }

    /// The binary that makes images.
    pub fn import(&self) -> PathBuf {
        self.lib.join("jiffy-import")
    }

    /// The guests' initramfs.
    pub fn initramfs(&self) -> PathBuf {
        self.share.join("initramfs.cpio")
    }

    /// The VMM's binary.
    pub fn vmm(&self) -> PathBuf {
        self.lib.join("jiffy-vmm")
    }
}

fn make_private(folder: &Path) -> Result<()> {
    let made = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder);
    made.map_err(|error| {
        Error::internal(format!(
            "The folder {} can't be made: {error}.",
            folder.display()
        ))
    })
}

/// A volume's file in the folder of a snapshot, or of a VM that has its own volumes.
pub fn volume_in(folder: &Path, name: &str) -> PathBuf {
    folder.join("volumes").join(format!("{name}.img"))
}

/// Makes the folder that [`volume_in`] names files in. It does not make the parent: if the parent
/// is gone, the VM was just removed, and nothing would remove a new folder.
///
/// # Errors
///
/// If the folder can't be made, such as when its parent is gone.
pub fn make_volumes(folder: &Path) -> io::Result<()> {
    let made = fs::DirBuilder::new()
        .mode(0o700)
        .create(folder.join("volumes"));
    match made {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_run_folder_is_closed_to_others_but_not_to_the_group_of_monitors() {
        use std::os::unix::fs::chown;
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths {
            data: folder.path().join("data"),
            run: folder.path().join("run"),
            socket: folder.path().join("run/jiffyd.sock"),
            lib: folder.path().into(),
            share: folder.path().into(),
            peer: None,
        };
        let prepared = |mode| {
            fs::set_permissions(&paths.run, fs::Permissions::from_mode(mode)).unwrap();
            paths.prepare().unwrap();
            fs::metadata(&paths.run).unwrap().permissions().mode() & 0o777
        };
        paths.prepare().unwrap();
        assert_eq!(prepared(0o710), 0o700, "it has this process's group");
        if rustix::process::geteuid().is_root() {
            chown(&paths.run, None, Some(1_880_000_000)).unwrap();
            assert_eq!(prepared(0o710), 0o710);
            assert_eq!(prepared(0o750), 0o700);
        }
    }

    #[test]
    fn a_removed_vm_gets_no_folder_again() {
        let folder = tempfile::tempdir().unwrap();
        let removed = folder.path().join("vm");
        assert!(make_volumes(&removed).is_err());
        assert!(!removed.exists());
        for _ in 0..2 {
            make_volumes(folder.path()).unwrap();
        }
        assert!(volume_in(folder.path(), "data").parent().unwrap().is_dir());
    }
}
