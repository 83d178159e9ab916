//! Spares: VMMs that are started before they have a VM.
//!
//! Executing `jiffy-vmm`, opening KVM and creating a VM is a large part of the time of a restore or
//! a fork, and does not depend on the request. So a few VMMs are started ahead, while no VM starts,
//! and wait on a socket. The next start takes one of them and continues as if it had been spawned.
//!
//! A spare has no id and no record, and a run folder that becomes its VM's. It ends when its socket
//! is closed, and so also when the daemon is killed. If there is no usable spare, a VMM is spawned.

use crate::jails::{self, Launcher, Monitor, MonitorLimits};
use crate::process::{VmmProcess, on_exit};
use jiffy_content::error::{Error, Result};
use jiffy_content::names;
use jiffy_content::paths::Paths;
use jiffy_sys::fds::send_with_fds;
use jiffy_sys::mutex::lock;
use jiffy_sys::spare;
use jiffy_sys::stamp::Stamp;
use jiffy_wire::vmm::{SPARE_KERNEL, TakeSpare};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tracing::debug;

/// Placeholder for the VM's id in a spare's command line; not a valid id.
pub const NO_ID: &str = "------------";

/// A spare is made when no VM has been starting for this long.
const QUIET_TIME: Duration = Duration::from_millis(5);
/// A spare that dies sooner than this is not replaced at once: the next one may die as well.
const LIFE: Duration = Duration::from_secs(10);

/// The spares of a node.
#[derive(Debug)]
pub struct Spares {
    /// How many are kept.
    room: usize,
    ready: Mutex<Vec<Spare>>,
    wanted: Notify,
}

/// A VMM that waits.
#[derive(Debug)]
pub struct Spare {
    process: Option<VmmProcess>,
    /// Its run folder, which becomes a VM's.
    folder: PathBuf,
    socket: OwnedFd,
    /// Stamp of its executable when it was started.
    program: Stamp,
    made: Instant,
}

impl Spares {
    /// No spares yet, and never more than `room`.
    pub fn new(room: usize) -> Spares {
        Spares {
            room,
            ready: Mutex::default(),
            wanted: Notify::new(),
        }
    }

    /// Takes a usable spare, if there is one.
    pub fn take(&self, paths: &Paths) -> Option<Spare> {
        if self.room == 0 {
            return None;
        }
        let spare = self.pop(paths);
        // Notified after the removal, because [`keep`] checks at once whether a spare is missing.
        self.wanted.notify_one();
        spare
    }

    fn pop(&self, paths: &Paths) -> Option<Spare> {
        let program = Stamp::of(&fs::metadata(paths.vmm()).ok()?);
        let mut ready = self.lock();
        while let Some(spare) = ready.pop() {
            // Another release of the VMM may have been installed.
            if spare.lives() && spare.program == program {
                return Some(spare);
            }
        }
        None
    }

    /// Drops spares that died. True if one must be made.
    fn reap(&self) {
        let mut ready = self.lock();
        let died_old = |spare: &Spare| !spare.lives() && spare.made.elapsed() > LIFE;
        if ready.iter().any(died_old) {
            self.wanted.notify_one();
        }
        ready.retain(Spare::lives);
    }

    fn needs_spare(&self) -> bool {
        self.lock().len() < self.room
    }

    /// Ends all spares.
    pub async fn end(&self) {
        let spares = std::mem::take(&mut *self.lock());
        for mut spare in spares {
            if let Some(process) = spare.process.take() {
                process.kill();
                process.ended().await;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Spare>> {
        lock(&self.ready)
    }
}

impl Spare {
    /// Starts one, for a VM that will probably boot this kernel.
    fn start(paths: &Paths, launcher: &Launcher, kernel: Option<File>) -> Result<Spare> {
        let path = paths.vmm();
        let failed = |error: io::Error| Error::io("start a VMM ahead", &path, &error);
        let program = Stamp::of(&fs::metadata(&path).map_err(failed)?);
        let (socket, theirs) = spare::pair().map_err(failed)?;
        let folder = paths.spares().join(names::new_id());
        let made = fs::DirBuilder::new().mode(0o700).create(&folder);
        made.map_err(|error| Error::io("make a VMM's run folder", &folder, &error))?;
        let mut spare = Spare {
            process: None,
            folder,
            socket,
            program,
            made: Instant::now(),
        };
        let config = paths.vm(NO_ID).join("vmm.json");
        // It has no log. An error that stops a spare also stops a spawned VMM, which has a log.
        let nowhere = File::options().write(true).open("/dev/null");
        let nowhere = nowhere.map_err(failed)?;
        let identity = launcher.identity()?;
        let mut arguments = jails::arguments(&config, "--spare-fd");
        let mut descriptors = vec![theirs.as_fd()];
        let handed = jails::named(SPARE_KERNEL, descriptors.len());
        if let Some(kernel) = &kernel {
            arguments.extend([OsStr::new("--fd"), &handed]);
            descriptors.push(kernel.as_fd());
        }
        spare.process = Some(launcher.start(Monitor {
            arguments: &arguments,
            directory: Path::new("/"),
            run: &spare.folder,
            output: nowhere.as_fd(),
            descriptors: &descriptors,
            identity,
            limits: None,
        })?);
        Ok(spare)
    }

    fn lives(&self) -> bool {
        self.process.as_ref().is_some_and(VmmProcess::lives)
    }

    /// Its run folder: it sees no other part of the file system.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its user id, if it has a user of its own.
    pub fn user(&self) -> Option<u32> {
        self.process.as_ref().and_then(VmmProcess::user)
    }

    /// Makes it the VMM of the VM with this configuration: sends it the VM's log and the
    /// descriptors that a spawned VMM would inherit.
    ///
    /// # Errors
    ///
    /// If the spare has ended, or the kernel refuses its limits.
    pub fn become_vmm(
        mut self,
        limits: &MonitorLimits,
        config: &Path,
        config_fd: Option<i32>,
        log: BorrowedFd<'_>,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<VmmProcess> {
        let take = serde_json::to_vec(&TakeSpare {
            config: config.to_owned(),
            config_fd,
        })?;
        let all = [&[log], descriptors].concat();
        let process = self.process.as_ref().ok_or(io::ErrorKind::NotFound)?;
        process.set_limits(&limits.share, limits.file_size)?;
        send_with_fds(&self.socket, &take, &all)?;
        self.process
            .take()
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        // A VM that took it over has its folder.
        let _ = fs::remove_dir(&self.folder);
        if let Some(process) = self.process.take() {
            process.end();
        }
    }
}

/// Makes missing spares while no VM starts. `kernel` opens the kernel that most VMs boot; `starts` waits
/// until no VM is starting, and tells whether one was.
pub async fn keep<F: Future<Output = bool>>(
    spares: Arc<Spares>,
    paths: Paths,
    launcher: Arc<Launcher>,
    kernel: impl Fn() -> Option<File>,
    starts: impl Fn() -> F,
) {
    // Folders of the spares of an earlier daemon.
    for entry in fs::read_dir(paths.spares()).into_iter().flatten().flatten() {
        let _ = fs::remove_dir(entry.path());
    }
    if spares.room == 0 {
        return;
    }
    loop {
        while spares.needs_spare() {
            wait_until_quiet(&starts).await;
            let (paths, launcher, kernel) = (paths.clone(), Arc::clone(&launcher), kernel());
            let started =
                tokio::task::spawn_blocking(move || Spare::start(&paths, &launcher, kernel));
            let cut_short = |error| {
                Err(Error::internal(format!(
                    "The start was cut short: {error}."
                )))
            };
            match started.await.unwrap_or_else(cut_short) {
                Ok(spare) => {
                    let pid = spare.process.as_ref().map(|process| process.pid);
                    spares.lock().push(spare);
                    // Watched after it was added, because it may have died already.
                    if let Some(pid) = pid {
                        debug!(pid, "a spare VMM can be taken");
                        on_exit(pid, &spares, Spares::reap);
                    }
                }
                Err(error) => {
                    debug!(%error, "a spare VMM could not be started");
                    break;
                }
            }
        }
        spares.wanted.notified().await;
    }
}

/// Waits until no VM has been starting for [`QUIET_TIME`], as far as two looks show: requests have
/// priority, also the answer of a short command, which follows its VM's start.
async fn wait_until_quiet<F: Future<Output = bool>>(starts: &impl Fn() -> F) {
    let mut looks = 0;
    while looks < 2 {
        tokio::time::sleep(QUIET_TIME).await;
        looks = if starts().await { 0 } else { looks + 1 };
    }
}
