//! Mounts folders of the host.

use crate::files;
use crate::program::prepare::reason;
use crate::report::Report;
use alloc::format;
use jiffy_wire::guest::FolderMount;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};

/// Mounts a folder. Set-uid programs and device nodes in it have no effect, because the host's
/// users did not make them for this guest.
pub fn mount_folder(folder: &FolderMount, report: &mut Report) {
    report.required_step(&format!("folder {}", folder.mount_point), |_| {
        let FolderMount {
            tag,
            mount_point,
            read_only,
        } = folder;
        if !mount_point.starts_with('/') {
            return Err(format!(
                "the mount point {mount_point:?} of a shared folder is not an absolute path"
            ));
        }
        files::make_folders(mount_point, 0o755)
            .map_err(|error| format!("{mount_point} cannot be created: {}", reason(error)))?;
        let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
        if *read_only {
            flags |= MountFlags::RDONLY;
        }
        mount(tag.as_str(), mount_point.as_str(), "virtiofs", flags, c"").map_err(|error| {
            match error {
                Errno::NODEV => format!(
                    "{mount_point} cannot be mounted: this kernel has no virtio-fs (CONFIG_VIRTIO_FS)"
                ),
                error => format!(
                    "the shared folder {tag} cannot be mounted on {mount_point}: {}",
                    reason(error)
                ),
            }
        })
    });
}
