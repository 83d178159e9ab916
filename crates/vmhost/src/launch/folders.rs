//! Folders of the host that a VM shares, each served by a `jiffy-files`.

use crate::jails::Launcher;
use crate::process::{Ended, VmmProcess};
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::VmRecord;
use jiffy_content::paths::Paths;
use jiffy_sys::spawn::{Detached, Environment, spawn_detached};
use jiffy_wire::api::FolderUse;
use jiffy_wire::files;
use jiffy_wire::guest::FolderMount;
use jiffy_wire::vmm::Folder;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::geteuid;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use tracing::{debug, warn};

/// A folder and the sockets between the VMM and its server.
#[derive(Debug)]
pub(super) struct SharedFolder {
    source: String,
    read_only: bool,
    folder: OwnedFd,
    servers: OwnedFd,
    /// The VMM's end.
    pub vmms: OwnedFd,
}

/// Opens the folders that this VM shares.
///
/// # Errors
///
/// If a folder does not exist, or is no folder; or no socket can be made.
pub(super) fn open(record: &VmRecord) -> Result<Vec<SharedFolder>> {
    record.spec.folders.iter().map(open_folder).collect()
}

fn open_folder(wanted: &FolderUse) -> Result<SharedFolder> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat(CWD, wanted.source.as_str(), flags, Mode::empty())
        .map_err(|error| refused(&wanted.source, error))?;
    let flags = SocketFlags::CLOEXEC;
    let (vmms, servers) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|error| {
            Error::internal(format!(
                "No socket for a shared folder can be made: {}.",
                io::Error::from(error)
            ))
        })?;
    Ok(SharedFolder {
        source: wanted.source.clone(),
        read_only: wanted.read_only,
        folder,
        servers,
        vmms,
    })
}

fn refused(source: &str, error: Errno) -> Error {
    match error {
        Errno::NOENT => Error::invalid(format!(
            "The folder {source} can't be shared: it does not exist on the node's host."
        ))
        .hint("Create it first, or give another folder."),
        Errno::NOTDIR => Error::invalid(format!("{source} can't be shared: it is no folder.")),
        error => Error::io(
            "open a shared folder",
            Path::new(source),
            &io::Error::from(error),
        ),
    }
}

/// The name by which the guest mounts the folder of this number.
fn tag(number: usize) -> String {
    format!("folder{number}")
}

/// The devices of the folders, each with the number of the VMM's socket.
pub(super) fn devices(sockets: impl Iterator<Item = Option<i32>>) -> Vec<Folder> {
    let device = |(number, server)| Folder {
        tag: tag(number),
        server,
    };
    sockets.enumerate().map(device).collect()
}

/// The guest's mounts of the folders.
pub(super) fn mounts(folders: &[FolderUse]) -> Vec<FolderMount> {
    let mount = |(number, folder): (usize, &FolderUse)| FolderMount {
        tag: tag(number),
        mount_point: folder.mount.clone(),
        read_only: folder.read_only,
    };
    folders.iter().enumerate().map(mount).collect()
}

/// Starts the servers of the folders, in the VMM's control group. They end with the VMM, which
/// holds the other ends of their sockets.
///
/// # Errors
///
/// If a program can't be started.
pub(super) fn serve(
    paths: &Paths,
    launcher: &Launcher,
    folders: Vec<SharedFolder>,
    vmm: &VmmProcess,
    name: &str,
    log: BorrowedFd<'_>,
) -> Result<()> {
    for folder in folders {
        let pid = start(paths, &folder, log)?;
        launcher.note_helper(vmm.pid, pid);
        vmm.admit_to_cgroup(pid).unwrap_or_else(|error| {
            warn!(vm = name, %error, "the server of a shared folder can't be limited");
        });
        reap(pid, name, folder.source);
    }
    Ok(())
}

fn start(paths: &Paths, folder: &SharedFolder, log: BorrowedFd<'_>) -> Result<u32> {
    let program = paths.files();
    let arguments = files::arguments(folder.read_only, !geteuid().is_root());
    let arguments: Vec<&OsStr> = arguments.map(OsStr::new).collect();
    let started = spawn_detached(&Detached {
        program: &program,
        arguments: &arguments,
        directory: Path::new("/"),
        output: log,
        descriptors: &[folder.servers.as_fd(), folder.folder.as_fd()],
        environment: Environment::Empty,
    });
    started.map_err(|error| {
        let failed = Error::io("start", &program, &error);
        match error.kind() {
            io::ErrorKind::NotFound => failed.hint(
                "Reinstall Jiffy, or give the folder of jiffy-files with --lib or JIFFY_LIB.",
            ),
            _ => failed,
        }
    })
}

/// Waits for the end of a server in the background.
fn reap(pid: u32, name: &str, source: String) {
    let process = match VmmProcess::child(pid) {
        Ok(process) => process,
        Err(error) => {
            warn!(vm = name, folder = source, %error, "the server of a shared folder can't be watched");
            return;
        }
    };
    let name = name.to_owned();
    tokio::spawn(async move {
        match process.ended().await {
            Ended::Code(0) => debug!(vm = name, folder = source, "a shared folder's server ended"),
            how => warn!(
                vm = name,
                folder = source,
                ?how,
                "the server of a shared folder ended: its files can't be used until the VM is started again"
            ),
        }
    });
}
