//! VMMs (monitors) and the jails they run in.

use crate::process::{VmmProcess, is_alive};
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::VmRecord;
use jiffy_content::paths::Paths;
use jiffy_jail::access::open_folder;
use jiffy_jail::confine::has_landlock;
use jiffy_jail::{
    Cgroup, Cgroups, Identities, Identity, Jail, Level, Limits, Program, Share, identity,
};
use jiffy_sys::causes;
use jiffy_sys::handed::PROC;
use jiffy_sys::mutex::lock;
use jiffy_sys::spawn::{Detached, Environment, FIRST_DESCRIPTOR, spawn_detached};
use jiffy_sys::userfaultfd::DEVICE as USERFAULTFD;
use jiffy_wire::api::Containment;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tracing::{debug, info, warn};

const KVM: &str = "/dev/kvm";
/// Variables of the daemon's environment that monitors inherit.
const ENVIRONMENT: [&str; 2] = ["RUST_LOG", "JIFFY_PAGER_PATIENCE_MS"];
/// RLIMIT_NOFILE of a monitor: its layers of RAM and their copies, disks, and connections of its
/// guest.
const FILES: u64 = 4096;
/// Most processes of a monitor: threads for vCPUs and devices, and KVM's.
const PROCESSES: u64 = 256;

/// Page tables of a monitor and of KVM: one part in this many of the VM's memory.
const PAGE_TABLES: u64 = 64;
/// Memory of the monitor itself, bytes.
const OVERHEAD: u64 = 64 << 20;
/// Bytes that a file of a monitor may have beyond those of its VM's RAM and disks: room for its log,
/// and for the RAM that a spare makes before its VM is known.
const FILE_ROOM: u64 = 128 << 20;

/// Starts monitors.
#[derive(Debug)]
pub struct Launcher {
    run: PathBuf,
    program: PathBuf,
    /// `None`: monitors run without a jail, as the daemon's user.
    level: Option<Level>,
    identities: Arc<Identities>,
    /// `None`: the resources of monitors are not limited.
    cgroups: Option<Arc<Cgroups>>,
    /// Features that this host does not support, and why.
    lacks: Vec<String>,
    /// Processes that work for a monitor, by its process id.
    helpers: Mutex<HashMap<u32, Vec<u32>>>,
}

/// A monitor to be started.
#[derive(Debug)]
pub struct Monitor<'a> {
    /// Its arguments, without those that [`Launcher::start`] adds.
    pub arguments: &'a [&'a OsStr],
    /// Its working directory, if it has no jail.
    pub directory: &'a Path,
    /// The folder of its VM's sockets: all of the file system that it can reach in a jail.
    pub run: &'a Path,
    /// Its log.
    pub output: BorrowedFd<'a>,
    /// Descriptors it inherits, numbered from 3.
    pub descriptors: &'a [BorrowedFd<'a>],
    /// The user it runs as.
    pub identity: Option<Identity>,
    /// Its resource limits; not known yet for a spare.
    pub limits: Option<MonitorLimits>,
}

/// Resource limits of a VM's monitor.
#[derive(Debug, Clone, Copy)]
pub struct MonitorLimits {
    /// Limits of its cgroup.
    pub share: Share,
    /// Bytes of the largest file that it may write (RLIMIT_FSIZE); `None` without a jail.
    pub file_size: Option<u64>,
}

impl Launcher {
    /// Probes which jails this host supports, if they are wanted, and logs once what is missing.
    pub fn new(paths: &Paths, jailed: bool) -> Launcher {
        let identities = Identities::new(identity::first_of(&paths.run), identity::COUNT);
        let mut launcher = Launcher {
            run: paths.run.clone(),
            program: paths.vmm(),
            level: None,
            identities,
            cgroups: None,
            lacks: Vec::new(),
            helpers: Mutex::default(),
        };
        if !jailed {
            debug!("monitors run without a jail, as the daemon's user");
            launcher
                .lacks
                .push("jiffyd was started with --jail off".into());
            return launcher;
        }
        let group = launcher.identities.shared_group();
        let level = match Jail::prepare(&paths.run) {
            Ok(()) => {
                let (level, refused) = Jail::strongest_level(&paths.run, group);
                for error in refused {
                    launcher.lacks.push(format!("{error}: {}", error.io()));
                }
                level
            }
            Err(error) => {
                launcher
                    .lacks
                    .push(format!("the folder for jails can't be made: {error}"));
                Level::Bare
            }
        };
        match level {
            Level::OwnUser => launcher.share_folders(paths),
            Level::UserNamespace => {}
            Level::Bare => warn!(
                why = launcher.lacks.join("; "),
                "monitors have no namespaces, because the host does not allow them: they see the host's file system; their system calls are filtered"
            ),
        }
        launcher.cgroups = match Cgroups::of_host(&group_name(&paths.run)) {
            Ok(cgroups) => Some(cgroups),
            Err(error) => {
                let error = causes::sentence(&error);
                warn!(
                    error,
                    "monitors have no control groups: their memory and processors are not limited"
                );
                launcher.lacks.push(error);
                None
            }
        };
        info!(%level, cgroups = launcher.cgroups.is_some(), "containment of monitors");
        launcher.level = Some(level);
        launcher
    }

    /// Notes that a process works for this monitor.
    pub fn note_helper(&self, monitor: u32, helper: u32) {
        let mut helpers = lock(&self.helpers);
        helpers.retain(|pid, _| *pid == monitor || is_alive(*pid));
        helpers.entry(monitor).or_default().push(helper);
    }

    /// The processes that work for this monitor. Those that an earlier daemon started are known only if
    /// monitors have control groups.
    pub fn helpers(&self, monitor: u32) -> Vec<u32> {
        if let Some(known) = lock(&self.helpers).get(&monitor) {
            return known.clone();
        }
        let cgroups = self.cgroups.as_ref();
        let mut all = cgroups.map_or_else(Vec::new, |cgroups| cgroups.members(monitor));
        all.retain(|pid| *pid != monitor);
        all
    }

    /// Has the kernel throttle a monitor once it has allocated this many more bytes; `None`: never.
    /// May block.
    pub fn limit_growth(&self, pid: u32, bytes: Option<u64>) {
        let Some(cgroups) = &self.cgroups else { return };
        if let Err(error) = cgroups.limit_growth(pid, bytes) {
            debug!(pid, %error, "the memory growth of a VM can't be limited");
        }
    }

    /// Lets jailed monitors of an earlier release, which see all of the run folder, traverse it to
    /// reach their own sockets.
    fn share_folders(&self, paths: &Paths) {
        let folders = [
            paths.run.clone(),
            paths.run.join("vms"),
            paths.run.join("pager"),
        ];
        for folder in folders {
            let shared = open_folder(&folder, Some(self.identities.shared_group()));
            if let Err(error) = shared {
                warn!(folder = %folder.display(), %error, "monitors can't traverse a folder");
            }
        }
    }

    /// How monitors are contained, and what this host does not support.
    pub fn containment(&self) -> Containment {
        Containment {
            jailed: self.level.is_some_and(Level::has_own_root),
            own_user: self.level == Some(Level::OwnUser),
            cgroups: self.cgroups.is_some(),
            landlock: Some(has_landlock()),
            lacks: self.lacks.clone(),
        }
    }

    /// Are files passed to monitors as descriptors, because monitors can't open any?
    pub fn passes_descriptors(&self) -> bool {
        self.level.is_some()
    }

    /// The path of a socket in a VM's run folder as its monitor must use it to connect.
    pub fn inside<'a>(&self, socket: &'a Path) -> &'a Path {
        let name = self.level.and(socket.file_name());
        name.map_or(socket, Path::new)
    }

    /// A new user for a monitor, if each has its own.
    ///
    /// # Errors
    ///
    /// If all user ids for monitors are in use.
    pub fn identity(&self) -> Result<Option<Identity>> {
        if self.level != Some(Level::OwnUser) {
            return Ok(None);
        }
        let none = || Error::no_room("All user ids for monitors are in use.");
        self.identities.take().map(Some).ok_or_else(none)
    }

    /// Can this process be the monitor of the VM with this run folder? A compromised monitor may
    /// change its command line, but not its user, which must match the folder's group.
    pub fn is_user_of(&self, pid: u32, folder: &Path) -> bool {
        let (Ok(folder), Some(user)) = (fs::metadata(folder), user_of(pid)) else {
            return true;
        };
        user_matches_group(user, folder.gid())
    }

    /// Reserves the user of a running monitor, so that no other gets it.
    pub fn adopt(&self, process: VmmProcess) -> VmmProcess {
        let identity = user_of(process.pid).and_then(|user| self.identities.adopt(user));
        let cgroups = self.cgroups.as_ref();
        let cgroup = cgroups.and_then(|cgroups| cgroups.of_process(process.pid));
        process.with(identity, cgroup)
    }

    /// All running monitors are adopted: kills processes in all other cgroups.
    pub fn all_adopted(&self) {
        if let Some(cgroups) = &self.cgroups {
            cgroups.kill_unknown();
        }
    }

    /// Starts a monitor.
    ///
    /// # Errors
    ///
    /// If the program can't be opened or started, its cgroup can't be made, or a step of its jail
    /// fails.
    pub fn start(&self, monitor: Monitor<'_>) -> Result<VmmProcess> {
        let failed = |error: &io::Error| spawn_error(&self.program, error);
        let Some(level) = self.level else {
            let pid = spawn_detached(&Detached {
                program: &self.program,
                arguments: monitor.arguments,
                directory: monitor.directory,
                output: monitor.output,
                descriptors: monitor.descriptors,
                environment: Environment::Inherited,
            });
            return watch_child(pid.map_err(|error| failed(&error))?);
        };
        let file = File::open(&self.program).map_err(|error| failed(&error))?;
        let devices = Devices::open();
        let mut descriptors = monitor.descriptors.to_vec();
        let mut names = devices.pass(&mut descriptors);
        names.push(named(PROC, descriptors.len()));
        let mut arguments = vec![self.program.as_os_str()];
        arguments.extend(monitor.arguments);
        for name in &names {
            arguments.extend([OsStr::new("--fd"), name]);
        }
        let environment: Vec<OsString> = ENVIRONMENT.iter().filter_map(|name| set(name)).collect();
        let environment: Vec<&OsStr> = environment.iter().map(OsString::as_os_str).collect();
        let cgroup = self.cgroup(&monitor).map_err(|error| failed(&error))?;
        let jail = Jail {
            level,
            user: monitor.identity.as_ref().map_or(0, Identity::id),
            group: self.identities.shared_group(),
            folder: monitor.run,
            run: &self.run,
            limits: Limits {
                files: FILES,
                processes: PROCESSES,
                file_size: monitor.limits.and_then(|limits| limits.file_size),
            },
            cgroup: cgroup.as_ref().map(AsFd::as_fd),
        };
        let started = jail.launch(&Program {
            file: file.as_fd(),
            arguments: &arguments,
            environment: &environment,
            output: monitor.output,
            descriptors: &descriptors,
            own_proc: true,
        });
        let pid = started.map_err(|error| {
            let why = format!("{error}: {}", error.io());
            failed(&io::Error::new(error.io().kind(), why))
        })?;
        Ok(watch_child(pid)?.with(monitor.identity, cgroup))
    }

    fn cgroup(&self, monitor: &Monitor<'_>) -> io::Result<Option<Cgroup>> {
        let Some(cgroups) = &self.cgroups else {
            return Ok(None);
        };
        let cgroup = cgroups.make(PROCESSES)?;
        if let Some(limits) = &monitor.limits {
            cgroup.set_limits(&limits.share)?;
        }
        Ok(Some(cgroup))
    }
}

/// Devices that every monitor needs; the monitor reports those that could not be opened.
struct Devices {
    kvm: Option<File>,
    userfaultfd: Option<File>,
}

impl Devices {
    fn open() -> Devices {
        let open = |name| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).open(name).ok()
        };
        Devices {
            kvm: open(KVM),
            userfaultfd: open(USERFAULTFD),
        }
    }

    fn pass<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>) -> Vec<OsString> {
        let mut names = Vec::new();
        for (name, device) in [(KVM, &self.kvm), (USERFAULTFD, &self.userfaultfd)] {
            if let Some(device) = device {
                names.push(named(name, descriptors.len()));
                descriptors.push(device.as_fd());
            }
        }
        names
    }
}

/// The arguments of a VMM with this configuration, of which `option` names the first descriptor.
pub fn arguments<'a>(config: &'a Path, option: &'static str) -> Vec<&'a OsStr> {
    const _: () = assert!(FIRST_DESCRIPTOR == 3);
    vec![
        OsStr::new("run"),
        OsStr::new("--config"),
        config.as_os_str(),
        OsStr::new(option),
        OsStr::new("3"),
    ]
}

/// The value of `--fd` for the descriptor at this index.
pub fn named(name: &str, at: usize) -> OsString {
    format!("{name}={}", FIRST_DESCRIPTOR as usize + at).into()
}

fn set(name: &str) -> Option<OsString> {
    let mut entry = OsString::from(name);
    entry.push("=");
    entry.push(std::env::var_os(name)?);
    Some(entry)
}

fn watch_child(pid: u32) -> Result<VmmProcess> {
    VmmProcess::child(pid)
        .map_err(|error| Error::internal(format!("The VMM can't be watched: {error}.")))
}

/// Resource limits of a VM's monitor that is to be started. `wakes`: the VM was hibernated.
pub fn share_of(record: &VmRecord, is_last: bool, wakes: bool) -> Share {
    let now = (record.memory_mib(), record.cpus());
    let (memory_mib, cpus) = match wakes {
        true => now,
        false => record.spec.until_ready(now.0, now.1),
    };
    Share {
        memory: memory_limit(record, memory_mib),
        processors: cpus.into(),
        is_last,
    }
}

/// Bytes that the monitor of a VM with so much memory may use: twice that, because a capture freezes
/// a copy of the pages that are written after it. [`capture_headroom`] raises the limit for later
/// captures.
pub fn memory_limit(record: &VmRecord, memory_mib: u32) -> u64 {
    2 * bytes(memory_mib) + bytes(record.spec.ram_mib()) / PAGE_TABLES + OVERHEAD
}

/// Bytes of the largest file that a VM's monitor may write: its disks have sizes that stay the same
/// while it runs, the largest of them `disk` bytes, and files of captured RAM are as long as RAM.
pub fn file_size_limit(record: &VmRecord, disk: u64) -> u64 {
    bytes(record.spec.ram_mib()).max(disk) + FILE_ROOM
}

/// Bytes by which a monitor's memory limit is raised for a further capture: all written memory is
/// frozen, and may be written again.
pub fn capture_headroom(record: &VmRecord) -> u64 {
    2 * bytes(record.memory_mib())
}

fn bytes(mib: u32) -> u64 {
    u64::from(mib) << 20
}

/// Name of the cgroup of a node's monitors: its run folder, escaped like a unit name
/// (systemd.unit(5)).
fn group_name(run: &Path) -> String {
    let mut name = String::from("jiffy");
    for byte in run.as_os_str().as_bytes() {
        match byte {
            b'/' => name.push('-'),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' => name.push(char::from(*byte)),
            _ => name.push_str(&format!("\\x{byte:02x}")),
        }
    }
    name
}

/// Can a monitor with this user be that of a VM whose run folder has this group?
fn user_matches_group(user: u32, group: u32) -> bool {
    let has_own = identity::is_one(user) || identity::is_one(group);
    !has_own || user == group
}

/// The user that a process runs as.
fn user_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn spawn_error(program: &Path, error: &io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::NotFound => {
            Error::internal(format!("The VMM {} does not exist.", program.display())).hint(
                "Reinstall Jiffy, or give the folder of jiffy-vmm with --lib or JIFFY_LIB.",
            )
        }
        io::ErrorKind::OutOfMemory => {
            Error::no_room("The host has no memory left to start another VMM.")
        }
        io::ErrorKind::WouldBlock => {
            Error::no_room("The host does not allow jiffyd to start another process for a VMM.").hint(
                "End VMs, or raise the limit (`ulimit -u`, TasksMax= in jiffyd's unit, pids.max of its cgroup).",
            )
        }
        _ => Error::internal(format!(
            "The VMM {} can't be started: {error}.",
            program.display()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmm_belongs_to_a_vm_only_if_it_runs_as_the_folders_user() {
        let [one, other] = [1, 2].map(|number| identity::FIRST + number);
        assert!(user_matches_group(one, one));
        assert!(user_matches_group(0, 0), "neither has a jail");
        assert!(user_matches_group(1000, 0));
        assert!(
            !user_matches_group(one, other),
            "its command line names another VM"
        );
        assert!(!user_matches_group(one, 0));
        assert!(!user_matches_group(0, one));
    }

    #[test]
    fn a_group_is_named_after_its_run_folder() {
        assert_eq!(group_name(Path::new("/run/jiffy")), "jiffy-run-jiffy");
        assert_eq!(group_name(Path::new("/a b")), "jiffy-a\\x20b");
    }
}
