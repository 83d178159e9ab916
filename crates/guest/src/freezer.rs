//! Freezes all programs with the cgroup v2 freezer (the kernel's
//! Documentation/admin-guide/cgroup-v2.rst).
//!
//! Programs start in the root cgroup, which can't be frozen, and may create cgroups, so a guest
//! that is never captured has no cost. To freeze programs, those in the root cgroup are moved to
//! one of init's, and each cgroup below the root is frozen. At the end init checks that all cgroups
//! are frozen and that it is alone in the root cgroup: only a running program could change that.

use crate::files;
use crate::program::prepare::reason;
use crate::syscalls;
use alloc::{format, string::String, vec::Vec};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::fs::{CWD, Dir, FileType, Mode};
use rustix::io::Errno;

/// Path of the root cgroup in a booted guest.
const ROOT: &str = "/sys/fs/cgroup";
/// Name of the cgroup for programs in the root cgroup.
const OWN_GROUP: &str = "jiffy";
/// Time limit for programs to freeze, nanoseconds: a program in uninterruptible sleep on a slow
/// disk finishes its transfer first.
const TIMEOUT_NS: u64 = 5_000_000_000;
/// Most rounds of moving processes. Later rounds move those that were forked during the first.
const MOST_ROUNDS: u32 = 64;
/// Largest file of the cgroup file system that is read, bytes.
const LARGEST: usize = 4 * 1024 * 1024;

/// The cgroups of programs.
#[derive(Debug, Clone)]
pub struct Freezer {
    root: String,
    /// Whether this is the root of all cgroups, which contains kernel threads as well.
    is_whole: bool,
}

/// Cgroups that were frozen here. Cgroups that a program froze itself are not included, and stay
/// frozen.
#[derive(Debug, Default)]
#[must_use = "programs stay frozen until this is thawed"]
pub struct Frozen {
    folders: Vec<String>,
}

impl Freezer {
    /// All cgroups of this guest.
    pub fn of_guest() -> Freezer {
        Freezer {
            root: ROOT.into(),
            is_whole: true,
        }
    }

    /// Cgroups below one that contains this process and its children.
    pub fn below(root: &str) -> Freezer {
        Freezer {
            root: root.trim_end_matches('/').into(),
            is_whole: false,
        }
    }

    /// Freezes every program except this one.
    ///
    /// # Errors
    ///
    /// If there are no cgroups of version 2, a cgroup can't be read, made or joined, one does not
    /// freeze in time, or new processes come too fast. No program is left frozen then.
    pub fn freeze(&self) -> Result<Frozen, String> {
        if !files::exists(format!("{}/cgroup.procs", self.root)) {
            return Err(format!(
                "programs cannot be frozen: {} has no control groups of version 2",
                self.root
            ));
        }
        let mut frozen = Frozen::default();
        match self.freeze_all(&mut frozen) {
            Ok(()) => Ok(frozen),
            Err(message) => {
                frozen.thaw();
                Err(format!("programs cannot be frozen: {message}"))
            }
        }
    }

    fn freeze_all(&self, frozen: &mut Frozen) -> Result<(), String> {
        let give_up = syscalls::monotonic_ns() + TIMEOUT_NS;
        if self.is_whole {
            self.move_self_to_root()?;
        }
        let mut still: Vec<String> = Vec::new();
        for _ in 0..MOST_ROUNDS {
            let moved = self.move_root_processes()?;
            let mut new = Vec::new();
            for name in self.groups()? {
                if !still.contains(&name) {
                    self.begin(&name, frozen)?;
                    new.push(name);
                }
            }
            if !moved && new.is_empty() {
                return Ok(());
            }
            for name in new {
                self.wait_until_frozen(&name, give_up)?;
                still.push(name);
            }
        }
        Err("new processes are created too fast".into())
    }

    fn path(&self, group: &str, file: &str) -> String {
        format!("{}/{group}/{file}", self.root)
    }

    /// Moves this process to the root cgroup. A distribution's init may have put it elsewhere.
    fn move_self_to_root(&self) -> Result<(), String> {
        let own = files::read_text(c"/proc/self/cgroup", LARGEST).unwrap_or_default();
        if own.lines().any(|line| line == "0::/") {
            return Ok(());
        }
        files::write(format!("{}/cgroup.procs", self.root), b"0")
            .map_err(|error| format!("jiffy-init cannot leave its cgroup: {}", reason(error)))
    }

    /// Moves processes of the root cgroup to one that can be frozen. Returns whether there were
    /// any.
    fn move_root_processes(&self) -> Result<bool, String> {
        let root_processes = self.root_processes()?;
        if root_processes.is_empty() {
            return Ok(false);
        }
        match rustix::fs::mkdirat(CWD, self.path(OWN_GROUP, ""), Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => {
                return Err(format!(
                    "no cgroup could be created for them: {}",
                    reason(error)
                ));
            }
        }
        // A move waits for an RCU grace period; unless it is expedited, a few moves take 20 ms.
        let expedited = self.is_whole && files::write(c"/sys/kernel/rcu_expedited", b"1").is_ok();
        let moved = root_processes.iter().try_for_each(|pid| {
            match files::write(self.path(OWN_GROUP, "cgroup.procs"), pid.as_bytes()) {
                // The process has ended.
                Ok(()) | Err(Errno::SRCH) => Ok(()),
                Err(error) => Err(format!("process {pid}: {}", reason(error))),
            }
        });
        if expedited {
            let _ = files::write(c"/sys/kernel/rcu_expedited", b"0");
        }
        moved.map(|()| true)
    }

    /// Processes in the root cgroup, except this one and kernel threads.
    fn root_processes(&self) -> Result<Vec<String>, String> {
        let list = files::read_text(format!("{}/cgroup.procs", self.root), LARGEST)
            .map_err(|error| format!("{}/cgroup.procs: {}", self.root, reason(error)))?;
        let own = format!("{}", rustix::process::getpid().as_raw_nonzero());
        let root_processes = list.lines().filter(|pid| *pid != own);
        Ok(root_processes
            .filter(|pid| !self.is_whole || has_program(pid))
            .map(String::from)
            .collect())
    }

    /// Names of the cgroups directly below the root.
    fn groups(&self) -> Result<Vec<String>, String> {
        let failed = |error| format!("{}: {}", self.root, reason(error));
        let folder = files::open(self.root.as_str()).map_err(failed)?;
        let mut names = Vec::new();
        for entry in Dir::read_from(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            if entry.file_type() == FileType::Directory && name != c"." && name != c".." {
                names.push(name.to_string_lossy().into_owned());
            }
        }
        Ok(names)
    }

    fn begin(&self, group: &str, frozen: &mut Frozen) -> Result<(), String> {
        let switch = self.path(group, "cgroup.freeze");
        match files::read_text(switch.as_str(), 16) {
            Ok(state) if state.trim() == "1" => return Ok(()),
            Ok(_) => {}
            // The cgroup was removed after it was listed.
            Err(Errno::NOENT | Errno::NODEV) => return Ok(()),
            Err(error) => return Err(format!("cgroup {group}: {}", reason(error))),
        }
        frozen.folders.push(format!("{}/{group}", self.root));
        match files::write(switch, b"1") {
            Ok(()) | Err(Errno::NOENT | Errno::NODEV) => Ok(()),
            Err(error) => Err(format!("cgroup {group}: {}", reason(error))),
        }
    }

    fn wait_until_frozen(&self, group: &str, give_up: u64) -> Result<(), String> {
        let Ok(events) = files::open(self.path(group, "cgroup.events")) else {
            return Ok(());
        };
        loop {
            match is_frozen(&events) {
                Ok(true) | Err(Errno::NODEV) => return Ok(()),
                Ok(false) => {}
                Err(error) => return Err(format!("cgroup {group}: {}", reason(error))),
            }
            let left = give_up.saturating_sub(syscalls::monotonic_ns());
            if left == 0 {
                return Err(format!(
                    "a program of cgroup {group} did not freeze within {} s",
                    TIMEOUT_NS / 1_000_000_000
                ));
            }
            let timeout = Timespec {
                tv_sec: (left / 1_000_000_000) as i64,
                tv_nsec: (left % 1_000_000_000) as i64,
            };
            // The kernel reports a change of the file as an exception.
            let _ = poll(&mut [PollFd::new(&events, PollFlags::PRI)], Some(&timeout));
        }
    }
}

/// Whether a process executes a program. Kernel threads and processes that are exiting do not.
fn has_program(pid: &str) -> bool {
    let path = format!("/proc/{pid}/exe");
    let mut space = [0u8; 8];
    rustix::fs::readlinkat_raw(CWD, path, &mut space[..]).is_ok()
}

/// Reads `cgroup.events`: lines of a name and a number.
fn is_frozen(events: &OwnedFd) -> Result<bool, Errno> {
    let mut content = [0u8; 256];
    let count = rustix::io::pread(events, &mut content[..], 0)?;
    Ok(content[..count]
        .split(|byte| *byte == b'\n')
        .any(|line| line == b"frozen 1"))
}

impl Frozen {
    /// Thaws the cgroups.
    pub fn thaw(self) {
        for folder in &self.folders {
            let _ = files::write(format!("{folder}/cgroup.freeze"), b"0");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_control_groups_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let error = Freezer::below(folder.path().to_str().unwrap())
            .freeze()
            .unwrap_err();
        assert!(error.contains("no control groups"), "{error}");
    }

    #[test]
    fn the_state_is_read_from_its_line() {
        for (content, expected) in [
            ("populated 1\nfrozen 1\n", true),
            ("populated 1\nfrozen 0\n", false),
            ("frozen 10\n", false),
            ("", false),
        ] {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), content).unwrap();
            let events = files::open(file.path().to_str().unwrap()).unwrap();
            assert_eq!(is_frozen(&events), Ok(expected), "{content:?}");
        }
    }
}
