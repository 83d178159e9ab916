//! Where the node's files are.

use crate::options::Options;
use anyhow::{Context, bail};
use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Most bytes of a Unix socket's path (`sun_path` less its final zero).
const MAX_SOCKET_PATH: usize = 107;

/// The folders of one node.
#[derive(Debug, Clone)]
pub struct Paths {
    /// What must survive a restart of the host.
    pub data: PathBuf,
    /// Sockets of what runs now.
    pub run: PathBuf,
    /// Jiffy's other binaries.
    pub lib: PathBuf,
    /// Kernels, initramfs and images that came with Jiffy.
    pub share: PathBuf,
    /// The API's Unix socket.
    pub socket: PathBuf,
    /// Images of chunks of another node, to be looked into before a registry.
    pub peer: Option<PathBuf>,
}

impl Paths {
    /// From options, environment and the user's home, in this order.
    pub fn resolve(options: &Options) -> anyhow::Result<Paths> {
        let data = match &options.data {
            Some(data) => data.clone(),
            None => default_data()?,
        };
        let run = match &options.run {
            Some(run) => run.clone(),
            None => default_run(),
        };
        let executable = std::env::current_exe().context("finding jiffyd's own file")?;
        let here = executable.parent().unwrap_or(Path::new("/"));
        let lib = match &options.lib {
            Some(lib) => lib.clone(),
            None => first_existing(&[here, &here.join("../lib/jiffy")], "jiffy-vmm"),
        };
        let share = match &options.share {
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
        let socket = match &options.socket {
            Some(socket) => absolute(socket),
            None => run.join("jiffyd.sock"),
        };
        Ok(Paths {
            data,
            run,
            lib,
            share,
            socket,
            peer: options.peer.as_deref().map(absolute),
        })
    }

    /// Makes the folders; refuses a run folder that others can write to, and
    /// names too long for a socket.
    pub fn prepare(&self) -> anyhow::Result<()> {
        let longest = self.supervisor_socket("0123456789ab");
        for socket in [&self.socket, &longest] {
            let length = socket.as_os_str().len();
            if length > MAX_SOCKET_PATH {
                bail!(
                    "The run folder's name is too long: the socket {} has {length} bytes, and Linux allows {MAX_SOCKET_PATH}; choose a shorter --run folder.",
                    socket.display()
                );
            }
        }
        make_private(&self.run)?;
        let owner =
            fs::metadata(&self.run).with_context(|| format!("reading {}", self.run.display()))?;
        let me = rustix::process::geteuid().as_raw();
        if owner.uid() != me {
            bail!(
                "The run folder {} belongs to user {}, not to user {me}; choose another with --run.",
                self.run.display(),
                owner.uid()
            );
        }
        if owner.permissions().mode() & 0o077 != 0 {
            fs::set_permissions(&self.run, fs::Permissions::from_mode(0o700))
                .with_context(|| format!("closing {} to others", self.run.display()))?;
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
        ] {
            make_private(&folder)?;
        }
        Ok(())
    }

    /// All VMs' folders.
    pub fn vms(&self) -> PathBuf {
        self.data.join("vms")
    }

    /// What a VM keeps.
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

    /// Snapshots that users made.
    pub fn snapshots(&self) -> PathBuf {
        self.data.join("snapshots")
    }

    /// Snapshots that the node keeps for later runs.
    pub fn golden(&self) -> PathBuf {
        self.data.join("golden")
    }

    /// Where the pager takes commands.
    pub fn pager_socket(&self) -> PathBuf {
        self.run.join("pager.sock")
    }

    /// Where the pager waits for a VM.
    pub fn pager_vm_socket(&self, id: &str) -> PathBuf {
        self.run.join("pager").join(format!("{id}.sock"))
    }

    /// The pager's binary.
    pub fn pager(&self) -> PathBuf {
        self.lib.join("jiffy-pager")
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

fn make_private(folder: &Path) -> anyhow::Result<()> {
    match fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
    {
        Ok(()) => Ok(()),
        Err(error) => bail!("The folder {} can't be made: {error}.", folder.display()),
    }
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
        make_private(&first).unwrap();
        assert_eq!(absolute(&wanted), first);
        assert_eq!(absolute(&link).as_os_str(), real.as_os_str());
        assert!(absolute(Path::new("not/there")).is_absolute());
    }
}
