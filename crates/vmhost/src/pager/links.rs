//! Hard links through which VMs reach the pager's sockets: a VMM sees only its own run folder.
//!
//! The socket of a VM's memory has a link there. A disk that is filled on demand has one socket for
//! all VMs that have the disk, in a folder that no VMM can traverse. Each of these VMs has a hard link
//! to it in its own run folder, which only its own VMM can traverse. So a VMM can't request chunks of
//! another VM's disk, even if it knows its name.

use jiffy_content::model::image::LazyDisk;
use jiffy_content::paths::Paths;
use jiffy_sys::mutex::lock;
use jiffy_sys::regular;
use jiffy_wire::vmm::Residency;
use serde::Deserialize;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tracing::warn;

/// Most bytes of a VM's configuration.
const MAX_CONFIG: u64 = 1 << 20;

/// The fields of a VMM's configuration that every version has.
#[derive(Deserialize)]
struct Config {
    disks: Vec<Disk>,
}

#[derive(Deserialize)]
struct Disk {
    residency: Option<Residency>,
}

/// Links the socket of this VM's memory into its run folder. Does nothing without a socket: then a
/// pager has just died, and the next one's is linked.
///
/// # Errors
///
/// If the link can't be made.
pub fn link_memory(paths: &Paths, id: &str) -> io::Result<()> {
    match link(&paths.pager_vm_socket(id), &paths.vm_memory_socket(id)) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Links `to` to the socket of this disk. Does nothing without a socket: then a pager has just
/// died, and [`relink_all`] links the next one's socket.
///
/// # Errors
///
/// If the link can't be made.
pub fn link_disk(paths: &Paths, disk: &LazyDisk, to: &Path) -> io::Result<()> {
    let name = disk.name();
    // A pager of release 0.1 listens beside the sockets of VMs' memory.
    for socket in [paths.disk_socket(&name), paths.pager_vm_socket(&name)] {
        match link(&socket, to) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            other => return other,
        }
    }
    Ok(())
}

/// Replaces the links of all VMs with this disk, because there is a new pager.
pub(super) fn relink_all(paths: &Paths, disk: &LazyDisk) {
    let vms = fs::read_dir(paths.run.join("vms"));
    for entry in vms.into_iter().flatten().flatten() {
        let Ok(id) = entry.file_name().into_string() else {
            continue;
        };
        if let Some(socket) = connects_to(paths, &id, disk)
            && let Err(error) = link_disk(paths, disk, &socket)
        {
            warn!(id, %error, "a VM can't reach the pager: the socket of its disk can't be linked");
        }
    }
}

/// The socket to which this VM's VMM connects for chunks of this disk. A VMM of release 0.1
/// connects to a socket that all VMMs reach.
fn connects_to(paths: &Paths, id: &str, disk: &LazyDisk) -> Option<PathBuf> {
    let config = regular::read(&paths.vm(id).join("vmm.json"), MAX_CONFIG).ok()?;
    let config: Config = serde_json::from_slice(&config).ok()?;
    let present = disk.present(paths);
    let mut residencies = config.disks.into_iter().filter_map(|disk| disk.residency);
    let residency = residencies.find(|residency| residency.present == present)?;
    // In a jail its path is relative: to the VM's run folder, or of an earlier release to the node's.
    let socket = residency.pager_socket;
    let below = match socket.components().count() {
        1 => paths.vm_run(id),
        _ => paths.run.clone(),
    };
    Some(below.join(socket))
}

/// Makes `to` another name of this socket, in place of an older one.
fn link(socket: &Path, to: &Path) -> io::Result<()> {
    // A VM that starts and a new pager may link at the same time.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = lock(&TURN);
    let beside = to.with_extension("new");
    let _ = fs::remove_file(&beside);
    fs::hard_link(socket, &beside)?;
    fs::rename(&beside, to)?;
    // If both names are the same file already, rename(2) does nothing.
    let _ = fs::remove_file(&beside);
    Ok(())
}
