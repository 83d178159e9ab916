//! The pager: one process that serves compressed memory to all VMs of a node.
//!
//! It is started when the first VM needs it, and outlives the daemon as VMs do: the next daemon
//! finds it by its control socket. When it dies, another one is started and told about every VM
//! again; the VMs reconnect.
//!
//! Slow requests don't block others: the state is locked only briefly, and requests of one VM or
//! disk wait for each other, not for those of others.
//!
//! * `ask`: requests and their answers.
//! * `complete`: has all missing chunks fetched.
//! * [`links`]: hard links from VMs' run folders to the pager's sockets.
//! * `orders`: serialises requests of each VM and disk.
//! * `process`: starts, watches and replaces the process.

pub(crate) mod ask;
mod complete;
pub mod links;
mod orders;
mod process;
#[cfg(test)]
mod tests;

use crate::process::VmmProcess;
use crate::scheduler::Scheduler;
use ask::done;
use futures_util::future::join_all;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::image::LazyDisk;
use jiffy_content::model::vm::Paged;
use jiffy_content::paths::Paths;
use jiffy_content::room::disk::Room;
use jiffy_sys::mutex::lock;
use jiffy_wire::pager::{PagerRequest, PagerResponse, PagerStats};
use orders::Orders;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;
use tokio::sync::{OwnedMutexGuard, RwLock, RwLockWriteGuard};
use tokio::time::Instant;
use tracing::{error, info, warn};

/// How long the pager has to answer a simple request.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// How long it has to open an image or a disk, for which it may ask a registry.
const DISK_TIME: Duration = Duration::from_secs(120);
/// VMs or disks that a new pager is told about at once; its socket's backlog is short.
const DISKS_AT_ONCE: usize = 8;

/// The node's side of the pager.
#[derive(Debug)]
pub struct Pager {
    paths: Paths,
    /// Learns which process the pager is.
    scheduler: Arc<Scheduler>,
    /// The room on disks.
    room: Arc<Room>,
    /// Never held across an await.
    state: Mutex<State>,
    orders: Orders,
    /// Held while a process is started.
    starting: tokio::sync::Mutex<()>,
    /// Held for writing while caches are trimmed, for reading while a disk is opened.
    trimming: RwLock<()>,
    this: Weak<Pager>,
}

/// A VM or disk that the pager serves.
#[derive(Debug)]
struct Served<T> {
    what: T,
    /// For [`Pager::forget`].
    ticket: u64,
    /// The pager process that knows of it; `None` while it is being told, or if that failed.
    told: Option<u32>,
}

/// How a VM is served: the socket to connect to, and a ticket to end the service with. Each start
/// of a VM gets a new ticket, so that the end of one run does not end the service of the next.
#[derive(Debug, Clone)]
pub struct Serving {
    /// Where the pager listens.
    pub socket: PathBuf,
    /// For [`Pager::forget`]; 0 for a VM that was adopted.
    pub ticket: u64,
}

#[derive(Debug, Default)]
struct State {
    /// The process that runs, if one does.
    pid: Option<u32>,
    /// The memory that it serves, by VM id.
    served: HashMap<String, Served<Paged>>,
    /// The disks that it fills, by their names.
    disks: HashMap<String, Served<LazyDisk>>,
    /// There are running VMs with unreadable records, which may need the running pager.
    others: bool,
    /// The last ticket given.
    tickets: u64,
    deaths: Vec<Instant>,
}

impl<T> Served<T> {
    /// An entry of an earlier daemon, which had told this pager process about it, if any.
    fn adopted(what: T, told: Option<u32>) -> Served<T> {
        Served {
            what,
            ticket: 0,
            told,
        }
    }
}

impl State {
    fn note_served(&mut self, id: &str, pid: Option<u32>) {
        if let Some(served) = self.served.get_mut(id) {
            served.told = pid;
        }
    }

    fn note_disk(&mut self, name: &str, pid: Option<u32>) {
        if let Some(open) = self.disks.get_mut(name) {
            open.told = pid;
        }
    }
}

impl Pager {
    /// A pager without a process yet.
    pub fn new(paths: Paths, scheduler: Arc<Scheduler>, room: Arc<Room>) -> Arc<Pager> {
        Arc::new_cyclic(|this| Pager {
            paths,
            scheduler,
            room,
            state: Mutex::default(),
            orders: Orders::default(),
            starting: tokio::sync::Mutex::default(),
            trimming: RwLock::default(),
            this: this.clone(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Serves a VM's memory. The VMM must connect to the returned socket.
    ///
    /// # Errors
    ///
    /// If no pager can be started, or it refuses.
    pub async fn serve(&self, id: &str, paged: &Paged) -> Result<Serving> {
        let _turn = self.orders.turn(id).await;
        self.run().await?;
        let old = self.state().served.remove(id);
        if old.is_some() {
            self.stop_serving(id).await;
        }
        // Inserted before the request: if the pager dies meanwhile, the next one is told, too.
        let ticket = {
            let mut state = self.state();
            state.tickets += 1;
            let served = Served {
                what: paged.clone(),
                ticket: state.tickets,
                told: None,
            };
            state.served.insert(id.to_owned(), served);
            state.tickets
        };
        match self.send_serve(id, paged).await {
            Ok(pid) => self.state().note_served(id, pid),
            Err(why) => {
                self.state().served.remove(id);
                let sentence = format!("The pager can't serve a VM's memory: {why}.");
                return Err(Error::internal(sentence));
            }
        }
        Ok(Serving {
            socket: self.paths.pager_vm_socket(id),
            ticket,
        })
    }

    /// Opens a disk: from now on the pager fetches chunks as VMMs ask for them.
    ///
    /// # Errors
    ///
    /// If no pager can be started, or it refuses.
    pub async fn open_disk(&self, disk: &LazyDisk) -> Result<()> {
        let _turn = self.orders.turn(&disk.name()).await;
        self.open_in_turn(disk).await
    }

    async fn open_in_turn(&self, disk: &LazyDisk) -> Result<()> {
        let name = disk.name();
        let _whole = self.trimming.read().await;
        self.run().await?;
        let is_open = self.state().disks.contains_key(&name);
        if is_open {
            if disk.contents(&self.paths).exists() {
                return Ok(());
            }
            // The cache was removed with its image; a new disk of the same name has a new cache.
            self.stop_serving(&name).await;
        }
        let open = Served {
            what: disk.clone(),
            ticket: 0,
            told: None,
        };
        self.state().disks.insert(name.clone(), open);
        match self.send_open_disk(disk).await {
            Ok(pid) => self.state().note_disk(&name, pid),
            Err(why) => {
                // The pager may still open it later, but nothing would use it.
                self.state().disks.remove(&name);
                self.stop_serving(&name).await;
                let sentence = format!("The pager can't fill a VM's disk: {why}.");
                return Err(Error::internal(sentence));
            }
        }
        Ok(())
    }

    /// Tells the pager that the origins of an open disk, or the access to them, have changed.
    pub async fn renew_origins(&self, disk: &LazyDisk) {
        let is_open = self.state().disks.contains_key(&disk.name());
        if !is_open {
            return;
        }
        for request in disk.requests(&self.paths) {
            if matches!(request, PagerRequest::Origins { .. }) {
                self.tell_origins(&disk.name(), &request).await;
            }
        }
    }

    /// As [`Pager::renew_origins`], for an image of RAM from which VMs are served.
    pub async fn renew_memory(&self, image: &Path) {
        let is_served = {
            let state = self.state();
            let mut served = state.served.values();
            served.any(|served| served.what.image == image)
        };
        if !is_served {
            return;
        }
        let origins = jiffy_content::snapshots::remote::origins(image, &self.paths);
        let request = PagerRequest::Origins {
            image: image.to_owned(),
            origins,
        };
        self.tell_origins(&image.display().to_string(), &request)
            .await;
    }

    async fn tell_origins(&self, of: &str, request: &PagerRequest) {
        if let Err(why) = done(self.ask(request, ANSWER_TIME).await) {
            warn!(of, why, "the pager could not be told new origins");
        }
    }

    /// A VM has booted from this disk: ends the recording of what a boot reads.
    pub async fn end_recording(&self, disk: &LazyDisk) {
        let name = disk.name();
        let request = PagerRequest::EndRecording { name };
        if let Err(why) = done(self.ask(&request, ANSWER_TIME).await) {
            warn!(
                disk = disk.name(),
                why, "a boot's recording was not written"
            );
        }
    }

    /// Closes all disks that do not satisfy `wanted`.
    pub async fn close_disks(&self, wanted: impl Fn(&str) -> bool) {
        self.close_if(|disk| !wanted(&disk.name())).await;
    }

    /// Closes the disks whose caches were removed with their images.
    pub async fn close_removed_disks(&self) {
        self.close_if(|disk| !disk.contents(&self.paths).exists())
            .await;
    }

    async fn close_if(&self, unwanted: impl Fn(&LazyDisk) -> bool) {
        // Copied, because `unwanted` may read the disk.
        let open: Vec<LazyDisk> = {
            let state = self.state();
            state.disks.values().map(|open| open.what.clone()).collect()
        };
        let closed = open.iter().filter(|disk| unwanted(disk)).map(|disk| async {
            let name = disk.name();
            let _turn = self.orders.turn(&name).await;
            // Another one of this name may have been opened meanwhile.
            let open = self.state().disks.get(&name).map(|open| open.what.clone());
            if open.is_some_and(|open| unwanted(&open)) {
                self.state().disks.remove(&name);
                self.stop_serving(&name).await;
            }
        });
        join_all(closed).await;
    }

    /// Begins to trim the caches: decides at once that all disks which do not satisfy `wanted` are
    /// closed, except those that another request is about. `None` if a disk is being opened now, which
    /// may take long.
    pub fn begin_trimming(&self, wanted: impl Fn(&str) -> bool) -> Option<Trimming<'_>> {
        let alone = self.trimming.try_write().ok()?;
        let mut state = self.state();
        let mut names: Vec<String> = state.disks.keys().cloned().collect();
        names.retain(|name| !wanted(name));
        let turns = names.into_iter().filter_map(|name| {
            let turn = self.orders.try_turn(&name)?;
            Some((name, turn))
        });
        let closing: Vec<_> = turns.collect();
        for (name, _) in &closing {
            state.disks.remove(name);
        }
        drop(state);
        Some(Trimming {
            pager: self,
            closing,
            _alone: alone,
        })
    }

    /// Takes over VMs of an earlier daemon and their disks; that daemon's pager may still run.
    /// `others`: there are VMs with unknown needs, so the pager must keep serving all it serves.
    pub async fn adopt(&self, vms: Vec<(String, Paged)>, disks: Vec<LazyDisk>, others: bool) {
        self.state().others = others;
        let found = self.ping().await;
        let needed = !vms.is_empty() || !disks.is_empty() || (others && found.is_some());
        if !needed {
            if let Some(pid) = found {
                info!(pid, "ending a pager that no VM needs");
                let _ = VmmProcess::adopted(pid).map(|process| process.kill());
            }
            if !others {
                self.remove_files(|_| false);
            }
            return;
        }
        {
            let mut state = self.state();
            state.disks = disks
                .into_iter()
                .map(|disk| (disk.name(), Served::adopted(disk, found)))
                .collect();
            state.served = vms
                .into_iter()
                .map(|(id, paged)| (id, Served::adopted(paged, found)))
                .collect();
        }
        if let Some(pid) = found {
            info!(pid, "pager adopted");
            self.watch(VmmProcess::adopted(pid).map(Arc::new), pid);
        }
        if let Err(error) = self.run().await {
            error!(%error, "VMs' memory can't be served: the pager does not run");
            return;
        }
        self.tell_all().await;
        if others {
            return;
        }
        // Removes VMs that ended while no daemon ran.
        let known = |id: &str| {
            let state = self.state();
            state.served.contains_key(id) || state.disks.contains_key(id)
        };
        for file in self.files() {
            let name = name_of(&file);
            // Other files beside a socket are removed with it.
            let Some(id) = name.strip_suffix(".sock") else {
                continue;
            };
            if !known(id) {
                self.stop_serving(id).await;
            }
        }
        self.remove_files(known);
    }

    /// Removes sockets, and files beside them, of VMs and disks that are not needed. An earlier
    /// daemon may have been killed before it saved a VM's record.
    fn remove_files(&self, needed: impl Fn(&str) -> bool) {
        for file in self.files() {
            let name = name_of(&file);
            if !needed(name.split(".sock").next().unwrap_or(&name)) {
                let _ = fs::remove_file(file);
            }
        }
    }

    /// The sockets of all VMs and disks, and the files beside them.
    fn files(&self) -> Vec<PathBuf> {
        let folders = ["pager", "disks"].map(|name| fs::read_dir(self.paths.run.join(name)));
        let entries = folders.into_iter().flatten().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }

    /// Ends the service of a VM, unless a newer start of it is served.
    pub async fn forget(&self, id: &str, ticket: u64) {
        let _turn = self.orders.turn(id).await;
        let ours = {
            let mut state = self.state();
            let known = state.served.get(id);
            let ours = known.is_some_and(|served| served.ticket == ticket);
            ours.then(|| state.served.remove(id))
        };
        if ours.is_some() {
            self.stop_serving(id).await;
        }
    }

    async fn stop_serving(&self, id: &str) {
        let request = PagerRequest::Forget { name: id.into() };
        if let Err(why) = done(self.ask(&request, ANSWER_TIME).await) {
            warn!(id, why, "the pager did not stop serving a VM or disk");
            // A new pager does not know the files that an earlier one has left.
            self.remove_files(|other| other != id);
        }
        for socket in [self.paths.pager_vm_socket(id), self.paths.disk_socket(id)] {
            let _ = fs::remove_file(socket);
        }
    }

    /// The pager's statistics of a VM.
    pub async fn stats(&self, id: &str) -> Option<PagerStats> {
        let request = PagerRequest::Stats { name: id.into() };
        match self.ask(&request, ANSWER_TIME).await {
            Ok(PagerResponse::Stats(stats)) => Some(stats),
            _ => None,
        }
    }

    /// The daemon ends: ends the pager, too, if it serves no VM.
    pub async fn end_if_idle(&self) {
        let idle = {
            let state = self.state();
            let pid = state.pid;
            pid.filter(|_| state.served.is_empty() && state.disks.is_empty() && !state.others)
        };
        if let Some(pid) = idle
            && let Ok(process) = VmmProcess::adopted(pid)
        {
            process.kill();
        }
    }
}

/// The right to trim caches. While it exists no disk is opened: who wants to open one waits, and finds
/// those closed that are being closed.
#[derive(Debug)]
#[must_use = "disks that were to be closed stay open in the pager if this is dropped"]
pub struct Trimming<'a> {
    pager: &'a Pager,
    closing: Vec<(String, OwnedMutexGuard<()>)>,
    _alone: RwLockWriteGuard<'a, ()>,
}

impl Trimming<'_> {
    /// Closes the disks, and runs `work` after that.
    pub async fn close_and_run<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let names = self.closing.iter().map(|(name, _)| name);
        join_all(names.map(|name| self.pager.stop_serving(name))).await;
        tokio::task::spawn_blocking(work).await.ok()
    }
}

fn name_of(file: &Path) -> String {
    file.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}
