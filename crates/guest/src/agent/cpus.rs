//! Brings vCPUs on and off line (the kernel's `core-api/cpu_hotplug.rst`).

use crate::files;
use crate::program::prepare::reason;
use alloc::{format, string::String, vec::Vec};

/// Folder of the vCPUs in sysfs.
pub const FOLDER: &str = "/sys/devices/system/cpu";
/// Longest list of vCPUs, and longest state of one, bytes.
const LONGEST: usize = 4096;

/// Brings the first `count` vCPUs in the `folder` online and the others offline. The first vCPU is
/// always online.
///
/// # Errors
///
/// If `count` is not 1 to the number of vCPUs, or the kernel refuses one. Then those are online
/// that were before.
pub fn set_online(folder: &str, count: u16) -> Result<(), String> {
    let present = present(folder)?;
    if !(1..=present).contains(&count) {
        return Err(format!(
            "{count} vCPUs can't be online; the guest has {present}"
        ));
    }
    let mut changed = Vec::new();
    for cpu in 1..present {
        let path = format!("{folder}/cpu{cpu}/online");
        let (before, wanted) = (is_online(&path), cpu < count);
        let written = match before {
            Ok(before) if before == wanted => continue,
            Ok(_) => files::write(&path, state(wanted)),
            Err(errno) => Err(errno),
        };
        if let Err(errno) = written {
            for (path, before) in &changed {
                let _ = files::write(path, state(*before));
            }
            let to = if wanted { "online" } else { "offline" };
            return Err(format!("vCPU {cpu} can't be taken {to}: {}", reason(errno)));
        }
        changed.push((path, !wanted));
    }
    Ok(())
}

/// Number of vCPUs that the guest has, from a list such as `0-3`.
fn present(folder: &str) -> Result<u16, String> {
    let path = format!("{folder}/present");
    let list = files::read_text(&path, LONGEST)
        .map_err(|errno| format!("reading {path} failed: {}", reason(errno)))?;
    let last = list.trim().rsplit(['-', ',']).next();
    last.and_then(|last| last.parse::<u16>().ok()?.checked_add(1))
        .ok_or_else(|| format!("{path} has no list of vCPUs"))
}

fn is_online(path: &str) -> rustix::io::Result<bool> {
    Ok(files::read_text(path, LONGEST)?.trim() == "1")
}

fn state(is_online: bool) -> &'static [u8] {
    if is_online { b"1" } else { b"0" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A folder like sysfs with vCPUs of these states; the first has no file.
    fn sysfs(states: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let list = format!("0-{}\n", states.len());
        fs::write(folder.path().join("present"), list).unwrap();
        for (index, state) in states.iter().enumerate() {
            let cpu = folder.path().join(format!("cpu{}", index + 1));
            fs::create_dir(&cpu).unwrap();
            fs::write(cpu.join("online"), format!("{state}\n")).unwrap();
        }
        folder
    }

    fn states(folder: &tempfile::TempDir, cpus: u16) -> Vec<bool> {
        let of = |cpu| is_online(&format!("{}/cpu{cpu}/online", folder.path().display()));
        (1..=cpus).map(|cpu| of(cpu).unwrap()).collect()
    }

    fn set(folder: &tempfile::TempDir, count: u16) -> Result<(), String> {
        set_online(folder.path().to_str().unwrap(), count)
    }

    #[test]
    fn the_first_vcpus_are_online() {
        let folder = sysfs(&["1", "0", "1"]);
        for (count, online) in [
            (1, [false, false, false]),
            (3, [true, true, false]),
            (4, [true, true, true]),
            (2, [true, false, false]),
        ] {
            set(&folder, count).unwrap();
            assert_eq!(states(&folder, 3), online, "{count}");
        }
    }

    #[test]
    fn a_number_that_the_guest_does_not_have_is_refused() {
        let folder = sysfs(&["1"]);
        assert!(set(&folder, 0).unwrap_err().contains("the guest has 2"));
        assert!(set(&folder, 3).unwrap_err().contains("the guest has 2"));
        assert_eq!(states(&folder, 1), [true]);
    }

    #[test]
    fn a_vcpu_that_fails_leaves_the_others_as_they_were() {
        let folder = sysfs(&["1", "1", "1"]);
        fs::remove_file(folder.path().join("cpu3/online")).unwrap();
        let error = set(&folder, 1).unwrap_err();
        assert_eq!(
            error,
            "vCPU 3 can't be taken offline: no such file or directory"
        );
        assert_eq!(states(&folder, 2), [true, true]);
    }

    #[test]
    fn after_an_error_a_vcpu_that_was_offline_is_so_again() {
        // As a program in the guest may have left them.
        let folder = sysfs(&["0", "1", "1"]);
        fs::remove_file(folder.path().join("cpu3/online")).unwrap();
        set(&folder, 2).unwrap_err();
        assert_eq!(states(&folder, 2), [false, true]);
    }

    #[test]
    fn a_guest_without_sysfs_says_so() {
        let empty = tempfile::tempdir().unwrap();
        assert!(set(&empty, 1).unwrap_err().contains("present failed"));
        fs::write(empty.path().join("present"), "none").unwrap();
        assert!(set(&empty, 1).unwrap_err().contains("no list of vCPUs"));
    }
}
