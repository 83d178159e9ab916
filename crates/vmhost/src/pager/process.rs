//! Starts and watches the pager's process, and replaces it when it dies.

use super::{DISKS_AT_ONCE, Pager};
use crate::process::{VmmProcess, is_alive};
use futures_util::stream::{self, StreamExt};
use jiffy_content::error::{Error, Result};
use jiffy_content::paths::Paths;
use jiffy_sys::durable::remove_any;
use jiffy_sys::regular;
use jiffy_sys::spawn::{Detached, Environment, spawn_detached};
use jiffy_wire::pager::{PagerRequest, PagerResponse};
use jiffy_wire::sched::Class;
use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};
use tracing::{error, info, warn};

/// How long a new pager has to start listening.
const START_TIME: Duration = Duration::from_secs(30);
/// How long a killed pager has to end.
const END_TIME: Duration = Duration::from_secs(10);
/// How often a new pager is checked for listening.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// A pager that dies more often than this many times in [`DEATHS_WITHIN`] is not restarted
/// automatically.
pub(super) const MAX_DEATHS: usize = 5;
const DEATHS_WITHIN: Duration = Duration::from_secs(10);

impl Pager {
    /// Starts a pager unless one runs.
    pub(super) async fn run(&self) -> Result<()> {
        let runs = || self.state().pid.is_some();
        if runs() {
            return Ok(());
        }
        let _one = self.starting.lock().await;
        if runs() {
            return Ok(());
        }
        let (paths, log) = (self.paths.clone(), self.log());
        let spawned = tokio::task::spawn_blocking(move || spawn(&paths, &log)).await;
        let pid = spawned.map_err(|error| {
            Error::internal(format!("The pager's start was cut short: {error}."))
        })??;
        let process = VmmProcess::child(pid).map(Arc::new);
        let until = Instant::now() + START_TIME;
        while self.ping().await.is_none() {
            let died = !is_alive(pid);
            if died || Instant::now() >= until {
                // The next pager takes over its socket; nothing else would end this one.
                if let Ok(process) = process {
                    process.kill();
                    let _ = timeout(END_TIME, process.ended()).await;
                }
                return Err(Error::internal(format!(
                    "The pager {}; see its log {}.",
                    if died {
                        "ended at once"
                    } else {
                        "does not listen"
                    },
                    self.log().display()
                )));
            }
            sleep(POLL_INTERVAL).await;
        }
        info!(pid, "pager started");
        self.watch(process, pid);
        Ok(())
    }

    fn log(&self) -> PathBuf {
        self.paths.run.join("jiffy-pager.log")
    }

    /// Watches the running pager for its end.
    pub(super) fn watch(&self, process: io::Result<Arc<VmmProcess>>, pid: u32) {
        self.state().pid = Some(pid);
        self.scheduler.tell(pid, Class::Urgent);
        let this = self.this.clone();
        match process {
            Ok(process) => {
                tokio::spawn(async move {
                    process.ended().await;
                    if let Some(this) = this.upgrade() {
                        this.died(pid).await;
                    }
                });
            }
            Err(error) => warn!(%error, "the pager can't be watched"),
        }
    }

    async fn died(&self, pid: u32) {
        {
            let mut state = self.state();
            if state.pid != Some(pid) {
                return;
            }
            state.pid = None;
            if state.served.is_empty() && state.disks.is_empty() {
                return;
            }
            let now = Instant::now();
            state.deaths.retain(|then| now - *then < DEATHS_WITHIN);
            state.deaths.push(now);
            if state.deaths.len() > MAX_DEATHS {
                error!("the pager died too often and is not restarted: VMs that need it end");
                return;
            }
            let vms = state.served.len();
            warn!(pid, vms, "the pager died: starting another one");
        }
        match self.run().await {
            Ok(()) => self.tell_all().await,
            Err(error) => error!(%error, "the pager can't be restarted: VMs that need it end"),
        }
    }

    /// Tells the running pager about everything that it does not know yet.
    ///
    /// Memory comes first: a VMM's read of a disk waits ten times as long for the next pager.
    /// Several requests run at once: an image may be slow to open, and a disk's cache may have to
    /// be begun anew.
    pub(super) async fn tell_all(&self) {
        let vms: Vec<String> = self.state().served.keys().cloned().collect();
        let told = stream::iter(vms).for_each_concurrent(DISKS_AT_ONCE, |id| async move {
            let _turn = self.orders.turn(&id).await;
            let paged = {
                let state = self.state();
                let served = state.served.get(&id);
                let untold = served.filter(|served| served.told != state.pid);
                untold.map(|served| served.what.clone())
            };
            if let Some(paged) = paged {
                match self.send_serve(&id, &paged).await {
                    Ok(pid) => self.state().note_served(&id, pid),
                    Err(why) => error!(id, why, "a VM's memory can't be served any more"),
                }
            }
        });
        told.await;
        let disks: Vec<String> = self.state().disks.keys().cloned().collect();
        let told = stream::iter(disks).for_each_concurrent(DISKS_AT_ONCE, |name| async move {
            let _turn = self.orders.turn(&name).await;
            let disk = {
                let state = self.state();
                let open = state.disks.get(&name);
                let untold = open.filter(|open| open.told != state.pid);
                untold.map(|open| open.what.clone())
            };
            if let Some(disk) = disk {
                match self.send_open_disk(&disk).await {
                    Ok(pid) => self.state().note_disk(&name, pid),
                    Err(why) => error!(name, why, "a VM's disk can't be filled any more"),
                }
            }
        });
        told.await;
    }

    /// The process that answers on the control socket, if one does.
    pub(super) async fn ping(&self) -> Option<u32> {
        match self
            .ask_with_pid(&PagerRequest::Ping, super::ANSWER_TIME)
            .await
        {
            Ok((PagerResponse::Ok, pid)) => pid,
            _ => None,
        }
    }
}

/// Starts a pager. Blocks until its program is executed.
fn spawn(paths: &Paths, log: &Path) -> Result<u32> {
    let program = paths.pager();
    let socket = paths.pager_socket();
    let [sockets, disks] = ["pager", "disks"].map(|name| paths.run.join(name));
    let _ = remove_any(&socket);
    let mut options = OpenOptions::new();
    options.create(true).append(true).mode(0o600);
    let output = regular::make_with(&mut options, log)
        .map_err(|error| Error::io("open the pager's log", log, &error))?;
    let spawned = spawn_detached(&Detached {
        program: &program,
        arguments: &[
            OsStr::new("serve"),
            OsStr::new("--control"),
            socket.as_os_str(),
            OsStr::new("--folder"),
            paths.data.as_os_str(),
            OsStr::new("--folder"),
            sockets.as_os_str(),
            OsStr::new("--folder"),
            disks.as_os_str(),
        ],
        directory: &paths.run,
        output: output.as_fd(),
        descriptors: &[],
        environment: Environment::Inherited,
    });
    spawned.map_err(|error| {
        Error::internal(format!(
            "The pager {} can't be started: {error}.",
            program.display()
        ))
        .hint("Reinstall Jiffy, or give the folder of jiffy-pager with --lib or JIFFY_LIB.")
    })
}
