//! Mounts cgroup v2 and enables its controllers.

use crate::files;
use crate::program::prepare::reason;
use alloc::{format, string::String};
use rustix::mount::{MountFlags, mount};

/// Mounts the hierarchy and enables all controllers for groups below the root.
///
/// # Errors
///
/// If the kernel refuses the mount or the controllers.
pub fn mount_hierarchy() -> Result<(), String> {
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NODEV;
    mount(
        c"cgroup2",
        c"/sys/fs/cgroup",
        c"cgroup2",
        flags,
        c"nsdelegate,memory_recursiveprot",
    )
    .map_err(|error| format!("/sys/fs/cgroup: {}", reason(error)))?;
    let controllers = files::read_text(c"/sys/fs/cgroup/cgroup.controllers", 4096)
        .map_err(|error| format!("cgroup.controllers: {}", reason(error)))?;
    let enable = all_enabled(&controllers);
    if enable.is_empty() {
        return Ok(());
    }
    files::write(c"/sys/fs/cgroup/cgroup.subtree_control", enable.as_bytes())
        .map_err(|error| format!("cgroup.subtree_control: {}", reason(error)))
}

/// Converts `cpu memory` to `+cpu +memory`.
fn all_enabled(controllers: &str) -> String {
    let mut enable = String::new();
    for controller in controllers.split_whitespace() {
        if !enable.is_empty() {
            enable.push(' ');
        }
        enable.push('+');
        enable.push_str(controller);
    }
    enable
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_controller_is_enabled() {
        assert_eq!(super::all_enabled("cpuset cpu io\n"), "+cpuset +cpu +io");
        assert_eq!(super::all_enabled("\n"), "");
    }
}
