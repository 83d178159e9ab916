//! VMMs that were started before it is known for which VM.
//!
//! Executing `jiffy-vmm`, opening KVM and making a VM in it is much of what a
//! restore or a fork costs, and depends on nothing that is asked for. So a few
//! are started ahead, while nothing else starts, and wait on a socket; the next
//! VM that needs a VMM has one of them be its VMM, and what comes after that is
//! as if it had been spawned.
//!
//! A spare has no id, no folder and no record. It ends when its socket does,
//! which also is when the daemon is killed. Where there is none, or it can't
//! be had, a VMM is spawned.

use crate::jails::{Launcher, Monitor};
use crate::process::{VmmProcess, at_its_end};
use jiffy_content::digests::Stamp;
use jiffy_content::error::{Error, Result};
use jiffy_content::paths::Paths;
use jiffy_jail::Share;
use jiffy_sys::ahead;
use jiffy_sys::fds::send_with_fds;
use jiffy_wire::vmm::TakeSpare;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tracing::debug;

/// Stands where the id of its VM will be; it is none.
pub const NO_ID: &str = "------------";

/// How long no VM must have been starting before a spare is made.
const QUIET_TIME: Duration = Duration::from_millis(10);
/// One that does not live that long is not replaced at once: the next may not
/// either.
const LIFE: Duration = Duration::from_secs(10);

/// The spares of a node.
#[derive(Debug)]
pub struct Spares {
    /// So many are kept.
    room: usize,
    ready: Mutex<Vec<Spare>>,
    wanted: Notify,
}

/// A VMM that waits.
#[derive(Debug)]
pub struct Spare {
    process: Option<VmmProcess>,
    socket: OwnedFd,
    /// The file that it executes, as it was.
    program: Stamp,
    made: Instant,
}

impl Spares {
    /// None yet, and never more than this.
    pub fn new(room: usize) -> Spares {
        Spares {
            room,
            ready: Mutex::default(),
            wanted: Notify::new(),
        }
    }

    /// One, if there is one.
    pub fn take(&self, paths: &Paths) -> Option<Spare> {
        if self.room == 0 {
            return None;
        }
        self.wanted.notify_one();
        self.pop(paths)
    }

    fn pop(&self, paths: &Paths) -> Option<Spare> {
        let program = Stamp::of(&fs::metadata(paths.vmm()).ok()?);
        let mut ready = self.lock();
        while let Some(spare) = ready.pop() {
            // Another release may have been installed meanwhile.
            if spare.lives() && spare.program == program {
                return Some(spare);
            }
        }
        None
    }

    /// Lets go of those that died. Does one have to be made?
    fn bury(&self) {
        let mut ready = self.lock();
        let died_old = |spare: &Spare| !spare.lives() && spare.made.elapsed() > LIFE;
        if ready.iter().any(died_old) {
            self.wanted.notify_one();
        }
        ready.retain(Spare::lives);
    }

    fn lacks_one(&self) -> bool {
        self.lock().len() < self.room
    }

    /// Ends them all.
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
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Spare {
    fn start(paths: &Paths, launcher: &Launcher) -> Result<Spare> {
        let path = paths.vmm();
        let failed = |error: io::Error| Error::io("start a VMM ahead", &path, &error);
        let program = Stamp::of(&fs::metadata(&path).map_err(failed)?);
        let (socket, theirs) = ahead::pair().map_err(failed)?;
        let config = paths.vm(NO_ID).join("vmm.json");
        // It has nothing to say: what keeps it from being a VMM keeps a
        // spawned one from it too, and that one has a log.
        let nowhere = File::options().write(true).open("/dev/null");
        let nowhere = nowhere.map_err(failed)?;
        let process = launcher.start(Monitor {
            arguments: &[
                OsStr::new("run"),
                OsStr::new("--config"),
                config.as_os_str(),
                OsStr::new("--spare-fd"),
                OsStr::new("3"),
            ],
            directory: Path::new("/"),
            output: nowhere.as_fd(),
            descriptors: &[theirs.as_fd()],
            identity: launcher.identity()?,
            share: None,
        })?;
        Ok(Spare {
            process: Some(process),
            socket,
            program,
            made: Instant::now(),
        })
    }

    fn lives(&self) -> bool {
        self.process.as_ref().is_some_and(VmmProcess::lives)
    }

    /// The user that it runs as, if that is its own.
    pub fn user(&self) -> Option<u32> {
        self.process.as_ref().and_then(VmmProcess::user)
    }

    /// Has it be the VMM of the VM with this configuration: it gets the VM's log, and
    /// descriptors as a spawned one would inherit them.
    pub fn be(
        mut self,
        share: &Share,
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
        process.bound(share)?;
        send_with_fds(&self.socket, &take, &all)?;
        self.process
            .take()
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        let Some(process) = self.process.take() else {
            return;
        };
        process.kill();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            // Until somebody waits for it, a process stays as a dead one.
            runtime.spawn(async move { process.ended().await });
        }
    }
}

/// Makes spares that are missing, while no VM starts.
pub async fn keep(
    spares: Arc<Spares>,
    paths: Paths,
    launcher: Arc<Launcher>,
    is_starting: impl Fn() -> bool,
) {
    if spares.room == 0 {
        return;
    }
    loop {
        while spares.lacks_one() {
            quiet(&is_starting).await;
            let (paths, launcher) = (paths.clone(), Arc::clone(&launcher));
            let started = tokio::task::spawn_blocking(move || Spare::start(&paths, &launcher));
            let cut_short = |error| Err(Error::internal(format!("It was cut short: {error}.")));
            match started.await.unwrap_or_else(cut_short) {
                Ok(spare) => {
                    let pid = spare.process.as_ref().map(|process| process.pid);
                    spares.lock().push(spare);
                    // Not before it is kept: it may have died by now.
                    if let Some(pid) = pid {
                        at_its_end(pid, &spares, Spares::bury);
                    }
                }
                Err(error) => {
                    debug!(%error, "no spare VMM is kept");
                    break;
                }
            }
        }
        spares.wanted.notified().await;
    }
}

/// Waits until no VM has been starting for a while: what was asked for goes
/// first, and what is done right after a start belongs to it.
async fn quiet(is_starting: &impl Fn() -> bool) {
    loop {
        tokio::time::sleep(QUIET_TIME).await;
        if !is_starting() {
            return;
        }
    }
}
