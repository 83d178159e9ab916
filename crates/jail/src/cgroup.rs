//! Control groups (version 2; the kernel's Documentation/admin-guide/cgroup-v2.rst): one for each
//! jailed program, within one group of the node.

use rustix::fs::{AtFlags, CWD, Mode, OFlags, mkdirat, openat, statfs, unlinkat};
use rustix::io::Errno;
use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use thiserror::Error;

/// Where the hierarchy is mounted.
const HIERARCHY: &str = "/sys/fs/cgroup";
/// `CGROUP2_SUPER_MAGIC` (linux/magic.h).
const MAGIC: i64 = 0x6367_7270;
/// Controllers that are required to limit a program.
const CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu"];
/// A controller that is used if it is available.
const OPTIONAL: &str = "io";
/// The group that this process moves to, within the group it was started in.
const OWN: &str = "daemon";
/// The period of `cpu.max`, microseconds.
const PERIOD: u64 = 100_000;
/// The nice value of programs with the lowest priority.
const LAST: &str = "19";

/// Why cgroups can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CgroupError {
    /// Version 2 is not mounted.
    #[error("version 2 of cgroups is not mounted at {HIERARCHY}")]
    Version,
    /// This user may not use it.
    #[error("the cgroup {} can't be used", .0.display())]
    Group(PathBuf, #[source] io::Error),
    /// The controller is not enabled in the parent, or the group contains other processes.
    #[error("the cgroup {} has no controller \"{controller}\" for its child groups", .group.display())]
    Controller {
        /// The group.
        group: PathBuf,
        /// The controller.
        controller: &'static str,
    },
}

/// The node's group, which contains those of the programs.
#[derive(Debug)]
pub struct Cgroups {
    folder: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of groups made so far.
    made: u32,
    /// Groups of programs that this process knows.
    used: HashSet<PathBuf>,
    /// Groups that were dropped before their program had ended.
    left: Vec<PathBuf>,
}

/// The cgroup of one program. It is removed when this is dropped, or later if the program has not
/// ended by then.
#[derive(Debug)]
pub struct Cgroup {
    folder: PathBuf,
    open: OwnedFd,
    of: Arc<Cgroups>,
}

/// Resource limits of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Bytes of memory.
    pub memory: u64,
    /// Number of processors; the weights of CPU and disks are proportional to it.
    pub processors: u32,
    /// Whether it has the lowest priority for CPU and disks.
    pub is_last: bool,
}

impl Cgroups {
    /// Creates the node's group with this name. For root it is at the top of the hierarchy, unless
    /// the group of this process was delegated to it. In that case, and for other users, it is
    /// within the process's group, and this process moves to a sibling of it, because a group with
    /// controllers for its children can't contain processes.
    ///
    /// # Errors
    ///
    /// If version 2 is not mounted, if a group can't be created or this process can't be moved, or
    /// if a controller can't be enabled.
    pub fn of_host(name: &str) -> Result<Arc<Cgroups>, CgroupError> {
        let top = Path::new(HIERARCHY);
        if !statfs(top).is_ok_and(|facts| facts.f_type == MAGIC) {
            return Err(CgroupError::Version);
        }
        let own = own_group().map(|own| top.join(own.trim_start_matches('/')));
        let own = own.unwrap_or_else(|| top.to_owned());
        if own == top || (rustix::process::geteuid().is_root() && !is_delegated(&own)) {
            return Cgroups::below(top, name);
        }
        // The previous daemon, or the parent process, was moved there already.
        let above = match own.file_name().is_some_and(|last| last == OWN) {
            true => own.parent().unwrap_or(&own).to_owned(),
            false => {
                let beside = own.join(OWN);
                make_folder(&beside)?;
                write(&beside, "cgroup.procs", "0")
                    .map_err(|error| CgroupError::Group(beside, error))?;
                own
            }
        };
        Cgroups::below(&above, name)
    }

    fn below(above: &Path, name: &str) -> Result<Arc<Cgroups>, CgroupError> {
        let folder = above.join(name);
        enable(above)?;
        make_folder(&folder)?;
        enable(&folder)?;
        Ok(Arc::new(Cgroups {
            folder,
            state: Mutex::default(),
        }))
    }

    /// Where groups are made.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Creates the group of a program that is to be started, with a limit for the number of its
    /// threads and processes together (`pids.max`).
    ///
    /// # Errors
    ///
    /// If the group can't be created or opened, or its `pids.max` can't be written.
    pub fn make(self: &Arc<Cgroups>, processes: u64) -> io::Result<Cgroup> {
        let mut state = self.lock();
        state
            .left
            .retain(|folder| rmdir(folder) == Err(Errno::BUSY));
        let folder = loop {
            state.made += 1;
            let name = format!("{}-{}", std::process::id(), state.made);
            let folder = self.folder.join(name);
            match mkdirat(CWD, &folder, Mode::from(0o755)) {
                Ok(()) => break folder,
                // The group of an earlier process with this id.
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        };
        drop(state);
        let cgroup = self.open(folder)?;
        cgroup.set("pids.max", &processes.to_string())?;
        Ok(cgroup)
    }

    /// The group of a running program; `None` if it is in none of these groups.
    pub fn of_process(self: &Arc<Cgroups>, pid: u32) -> Option<Cgroup> {
        self.open(self.folder_of(pid)?).ok()
    }

    fn folder_of(&self, pid: u32) -> Option<PathBuf> {
        let group = group_in(&fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?)?;
        let folder = Path::new(HIERARCHY).join(group.trim_start_matches('/'));
        (folder.parent() == Some(&self.folder)).then_some(folder)
    }

    /// All processes in the group of a running program; none if it is in none of these groups.
    pub fn members(&self, pid: u32) -> Vec<u32> {
        let folder = self.folder_of(pid);
        let text = folder.and_then(|folder| fs::read_to_string(folder.join("cgroup.procs")).ok());
        let pids = text.unwrap_or_default();
        pids.lines().filter_map(|pid| pid.parse().ok()).collect()
    }

    /// Kills all programs in groups that this process does not know, and removes the groups.
    pub fn kill_unknown(&self) {
        let mut state = self.lock();
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let folder = entry.path();
            let is_group = entry.file_type().is_ok_and(|kind| kind.is_dir());
            // An empty group is removed at once.
            if is_group
                && !state.used.contains(&folder)
                && rmdir(&folder) == Err(Errno::BUSY)
                && write(&folder, "cgroup.kill", "1").is_ok()
            {
                state.left.push(folder);
            }
        }
    }

    /// Makes the kernel throttle a running program once it has allocated this many more bytes
    /// (`memory.high`); `None`: never. The kernel reclaims memory first.
    ///
    /// # Errors
    ///
    /// If `memory.current` or `memory.high` of its group can't be accessed. A program in none of
    /// these groups is no error.
    pub fn limit_growth(&self, pid: u32, bytes: Option<u64>) -> io::Result<()> {
        let Some(folder) = self.folder_of(pid) else {
            return Ok(());
        };
        let high = match bytes {
            None => "max".to_owned(),
            Some(bytes) => {
                let used = fs::read_to_string(folder.join("memory.current"))?;
                let used: u64 = used.trim().parse().unwrap_or(u64::MAX);
                used.saturating_add(bytes).to_string()
            }
        };
        write(&folder, "memory.high", &high)
    }

    /// Removes the node's group, if it is empty.
    pub fn remove(&self) {
        let _ = rmdir(&self.folder);
    }

    fn open(self: &Arc<Cgroups>, folder: PathBuf) -> io::Result<Cgroup> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = openat(CWD, &folder, flags, Mode::empty())?;
        self.lock().used.insert(folder.clone());
        Ok(Cgroup {
            folder,
            open,
            of: Arc::clone(self),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Cgroup {
    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Moves a process into the group.
    ///
    /// # Errors
    ///
    /// If `cgroup.procs` can't be written: `ESRCH` if there is no such process.
    pub fn admit(&self, pid: u32) -> io::Result<()> {
        self.set("cgroup.procs", &pid.to_string())
    }

    /// Sets the limits of the program.
    ///
    /// # Errors
    ///
    /// If `memory.max`, `cpu.max`, `cpu.weight` or `cpu.weight.nice` can't be written; earlier ones
    /// are set then. A missing `io.weight` is no error.
    pub fn set_limits(&self, share: &Share) -> io::Result<()> {
        self.set("memory.max", &share.memory.to_string())?;
        self.set_quota(share.processors)?;
        match share.is_last {
            true => {
                let _ = self.set("io.weight", "1");
                self.set("cpu.weight.nice", LAST)
            }
            // It has this weight already.
            false if share.processors == 1 => Ok(()),
            false => self.set_weight(share.processors),
        }
    }

    /// Changes the number of processors that a program may use. It may use one more, for its
    /// threads that are not vCPUs.
    ///
    /// # Errors
    ///
    /// If `cpu.max` or `cpu.weight` can't be written.
    pub fn set_processors(&self, processors: u32) -> io::Result<()> {
        self.set_quota(processors)?;
        self.set_weight(processors)
    }

    /// A processor more than the vCPUs, for the program's other threads.
    fn set_quota(&self, processors: u32) -> io::Result<()> {
        let quota = (u64::from(processors) + 1) * PERIOD;
        self.set("cpu.max", &format!("{quota} {PERIOD}"))
    }

    /// Disks are shared by the same weight if the kernel can do that; else this is no error.
    fn set_weight(&self, processors: u32) -> io::Result<()> {
        // The default of one processor is 100, the largest is 10,000.
        let weight = (u64::from(processors) * 100).min(10_000).to_string();
        let _ = self.set("io.weight", &weight);
        self.set("cpu.weight", &weight)
    }

    /// Raises the memory limit to at least the current usage plus `bytes`, and ends the throttling
    /// of [`Cgroups::limit_growth`].
    ///
    /// # Errors
    ///
    /// If `memory.high` or `memory.max` can't be written, or `memory.current` or `memory.max` can't
    /// be read.
    pub fn raise_memory_limit(&self, bytes: u64) -> io::Result<()> {
        self.set("memory.high", "max")?;
        let wanted = self.number("memory.current")?.saturating_add(bytes);
        match wanted > self.number("memory.max")? {
            true => self.set("memory.max", &wanted.to_string()),
            false => Ok(()),
        }
    }

    /// Changes the memory limit to `bytes`, but to no less than the current usage plus `headroom`:
    /// with less than is used, the kernel would kill the program.
    ///
    /// # Errors
    ///
    /// If `memory.current` can't be read, or `memory.max` can't be written.
    pub fn set_memory_limit(&self, bytes: u64, headroom: u64) -> io::Result<()> {
        let least = self.number("memory.current")?.saturating_add(headroom);
        self.set("memory.max", &bytes.max(least).to_string())
    }

    fn number(&self, name: &str) -> io::Result<u64> {
        Ok(self.get(name)?.trim().parse().unwrap_or(u64::MAX))
    }

    /// Whether the kernel's OOM killer ended the program.
    pub fn was_oom_killed(&self) -> bool {
        let events = self.get("memory.events").unwrap_or_default();
        let kills = events
            .lines()
            .find_map(|line| line.strip_prefix("oom_kill "));
        kills.is_some_and(|kills| kills != "0")
    }

    fn set(&self, name: &str, value: &str) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let file = openat(&self.open, name, flags, Mode::empty())?;
        rustix::io::write(&file, value.as_bytes())?;
        Ok(())
    }

    fn get(&self, name: &str) -> io::Result<String> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = openat(&self.open, name, flags, Mode::empty())?;
        io::read_to_string(fs::File::from(file))
    }
}

impl AsFd for Cgroup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.open.as_fd()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let mut state = self.of.lock();
        state.used.remove(&self.folder);
        if rmdir(&self.folder) == Err(Errno::BUSY) {
            state.left.push(std::mem::take(&mut self.folder));
        }
    }
}

/// The group of this process, relative to the hierarchy's mount point.
fn own_group() -> Option<String> {
    group_in(&fs::read_to_string("/proc/self/cgroup").ok()?)
}

/// The version 2 entry in `/proc/PID/cgroup` (cgroups(7)).
fn group_in(text: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix("0::"));
    line.map(str::to_owned)
}

/// Whether systemd delegated this group (systemd's CGROUP_DELEGATION document).
fn is_delegated(group: &Path) -> bool {
    ["trusted.delegate", "user.delegate"].iter().any(|name| {
        let mut value = [0_u8; 1];
        rustix::fs::getxattr(group, *name, &mut value) == Ok(1) && value == *b"1"
    })
}

fn make_folder(folder: &Path) -> Result<(), CgroupError> {
    match fs::create_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(CgroupError::Group(folder.to_owned(), error))
        }
        _ => Ok(()),
    }
}

/// Enables the controllers for child groups.
fn enable(group: &Path) -> Result<(), CgroupError> {
    const LIST: &str = "cgroup.subtree_control";
    let enabled = |controller: &str| {
        let list = fs::read_to_string(group.join(LIST)).unwrap_or_default();
        list.split_whitespace().any(|one| one == controller)
    };
    for controller in CONTROLLERS.iter().chain([&OPTIONAL]) {
        if !enabled(controller) {
            // Errors are detected below, where the controllers are checked.
            let _ = write(group, LIST, &format!("+{controller}"));
        }
    }
    match CONTROLLERS.into_iter().find(|one| !enabled(one)) {
        Some(controller) => Err(CgroupError::Controller {
            group: group.to_owned(),
            controller,
        }),
        None => Ok(()),
    }
}

fn rmdir(group: &Path) -> Result<(), Errno> {
    unlinkat(CWD, group, AtFlags::REMOVEDIR)
}

fn write(group: &Path, name: &str, value: &str) -> io::Result<()> {
    fs::write(group.join(name), value)
}
