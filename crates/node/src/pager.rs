//! The pager: one process that serves compressed memory to all VMs of a node.
//!
//! It is started when the first VM needs it, and outlives the daemon as VMs
//! do: the next daemon finds it by its control socket. When it dies, another
//! one is started and told of every VM again; the VMs connect to it anew.

use crate::error::{Error, Result};
use crate::images::lazy::LazyDisk;
use crate::paths::Paths;
use crate::vm::process::{VmmProcess, is_alive};
use crate::vm::record::Paged;
use crate::vm::timeline::short;
use futures_util::stream::{self, StreamExt};
use jiffy_store::partial::is_partial;
use jiffy_sys::locked::Locked;
use jiffy_sys::spawn::{Detached, spawn_detached};
use jiffy_wire::pager::{PagerRequest, PagerResponse, PagerStats};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, timeout};
use tracing::{error, info, warn};

/// What a pager has to listen after its start.
const START_TIME: Duration = Duration::from_secs(10);
/// What a pager has to end when it is killed.
const END_TIME: Duration = Duration::from_secs(2);
/// How often a new pager is knocked at.
const KNOCK_EVERY: Duration = Duration::from_millis(2);
/// What a pager has to answer a small question.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// What it has to open a disk, which may mean a look into a registry.
const DISK_TIME: Duration = Duration::from_secs(120);
/// Disks that a new pager is told of at once; its socket's queue is short.
const DISKS_AT_ONCE: usize = 8;
/// What it has to fill all of a VM's memory.
const COMPLETE_TIME: Duration = Duration::from_secs(600);
/// Longest line from a pager.
const MAX_ANSWER: u64 = 64 * 1024;
/// A pager that dies more often than this many times in [`DEATHS_WITHIN`] is
/// not started again by itself.
const MAX_DEATHS: usize = 5;
const DEATHS_WITHIN: Duration = Duration::from_secs(10);

/// The way to the pager.
#[derive(Debug)]
pub struct Pager {
    paths: Paths,
    state: Mutex<State>,
    this: Weak<Pager>,
}

#[derive(Debug)]
struct Served {
    paged: Paged,
    ticket: u64,
}

/// What a VM is served by: where to connect, and what to let go of later. A
/// VM that begins anew has another ticket, so that the end of its last life
/// does not end the next.
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
    /// What it serves: VM's id to memory.
    served: HashMap<String, Served>,
    /// The disks that it fills, by their names.
    disks: HashMap<String, LazyDisk>,
    /// VMs run whose records can't be read: they may need the pager that runs.
    others: bool,
    /// The last ticket given.
    tickets: u64,
    deaths: Vec<Instant>,
}

impl Pager {
    /// No process is started yet.
    pub fn new(paths: Paths) -> Arc<Pager> {
        Arc::new_cyclic(|this| Pager {
            paths,
            state: Mutex::default(),
            this: this.clone(),
        })
    }

    /// Serves a VM's memory. The VMM is to connect to the socket returned.
    pub async fn serve(&self, id: &str, paged: &Paged) -> Result<Serving> {
        let mut state = self.state.lock().await;
        self.run(&mut state).await?;
        if state.served.remove(id).is_some() {
            self.let_go(id).await;
        }
        self.tell(id, paged).await.map_err(|why| {
            Error::internal(format!("The pager can't serve a VM's memory: {why}."))
        })?;
        state.tickets += 1;
        let served = Served {
            paged: paged.clone(),
            ticket: state.tickets,
        };
        state.served.insert(id.to_owned(), served);
        Ok(Serving {
            socket: self.paths.pager_vm_socket(id),
            ticket: state.tickets,
        })
    }

    /// Fills a disk from now on, as its VMMs ask for it.
    pub async fn open_disk(&self, disk: &LazyDisk) -> Result<()> {
        let mut state = self.state.lock().await;
        self.open_in(&mut state, disk).await
    }

    async fn open_in(&self, state: &mut State, disk: &LazyDisk) -> Result<()> {
        self.run(state).await?;
        if state.disks.contains_key(&disk.name()) {
            if disk.contents(&self.paths).exists() {
                return Ok(());
            }
            // Its cache went with an image; this is another one's.
            self.let_go(&disk.name()).await;
        }
        if let Err(why) = self.tell_of_disk(disk).await {
            // It may be opened yet, and nobody would use it.
            state.disks.remove(&disk.name());
            self.let_go(&disk.name()).await;
            let sentence = format!("The pager can't fill a VM's disk: {why}.");
            return Err(Error::internal(sentence));
        }
        state.disks.insert(disk.name(), disk.clone());
        Ok(())
    }

    /// What is missing of a disk that is being filled is to be had elsewhere, or
    /// in another way, from now on.
    pub async fn renew_origins(&self, disk: &LazyDisk) {
        let state = self.state.lock().await;
        if !state.disks.contains_key(&disk.name()) {
            return;
        }
        for request in disk.requests(&self.paths) {
            if matches!(request, PagerRequest::Origins { .. }) {
                self.tell_origins(&disk.name(), &request).await;
            }
        }
    }

    /// The same of an image of RAM, if VMs are served from it.
    pub async fn renew_memory(&self, image: &Path) {
        let state = self.state.lock().await;
        let mut served = state.served.values();
        if !served.any(|served| served.paged.image == image) {
            return;
        }
        let origins = crate::snapshots::remote::origins(image, &self.paths);
        let request = PagerRequest::Origins {
            image: image.to_owned(),
            origins,
        };
        self.tell_origins(&image.display().to_string(), &request)
            .await;
    }

    async fn tell_origins(&self, of: &str, request: &PagerRequest) {
        if let Err(why) = done(self.ask(request, ANSWER_TIME).await) {
            warn!(of, why, "the pager does not know new origins");
        }
    }

    /// A VM has booted from this disk: what was asked for so far is what a
    /// boot needs.
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

    /// No VM has any of these disks but those that are wanted.
    pub async fn close_disks(&self, wanted: impl Fn(&str) -> bool) {
        let mut state = self.state.lock().await;
        let names: Vec<String> = state.disks.keys().cloned().collect();
        for name in names.iter().filter(|name| !wanted(name)) {
            state.disks.remove(name);
            self.let_go(name).await;
        }
    }

    /// Does something while no disk is opened or closed.
    pub async fn while_closed<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let _state = self.state.lock().await;
        tokio::task::spawn_blocking(work).await.ok()
    }

    /// Fetches all that is missing of a disk. Nothing of it is given up while
    /// what this gives is held, whatever becomes of the VMs that have it.
    pub async fn complete_disk(&self, disk: &LazyDisk) -> Result<Locked> {
        let held = {
            // Opened and locked before anybody can close it.
            let mut state = self.state.lock().await;
            self.open_in(&mut state, disk).await?;
            hold(disk.contents(&self.paths)).await?
        };
        self.complete(&disk.name()).await.map_err(|why| {
            Error::registry(format!(
                "What is missing of the VM's root file system can't be had: {why}."
            ))
        })?;
        Ok(held)
    }

    /// Fetches all that is missing of a disk's image, so that another can be
    /// made beside it. As [`Pager::complete_disk`].
    pub async fn complete_image(&self, disk: &LazyDisk) -> Result<Locked> {
        let held = self.complete_disk(disk).await?;
        for image in disk.images(&self.paths) {
            let request = PagerRequest::CompleteImage { image };
            done(self.ask(&request, COMPLETE_TIME).await).map_err(|why| {
                Error::registry(format!(
                    "What is missing of the VM's image can't be had: {why}."
                ))
            })?;
        }
        Ok(held)
    }

    /// Fetches all that is missing of a snapshot's memory, which no VM is served
    /// from, so that it can be written anew.
    pub async fn complete_memory(&self, image: &Path) -> Result<()> {
        if !is_partial(image) {
            return Ok(());
        }
        self.run(&mut *self.state.lock().await).await?;
        let origins = PagerRequest::Origins {
            image: image.to_owned(),
            origins: crate::snapshots::remote::origins(image, &self.paths),
        };
        let complete = PagerRequest::CompleteImage {
            image: image.to_owned(),
        };
        for (request, within) in [(origins, ANSWER_TIME), (complete, COMPLETE_TIME)] {
            done(self.ask(&request, within).await).map_err(|why| {
                Error::registry(format!(
                    "What is missing of the snapshot's memory can't be had: {why}."
                ))
            })?;
        }
        Ok(())
    }

    /// Takes over VMs of an earlier daemon, whose pager may run or not, and
    /// their disks. With `others` there are VMs of which it is not known what
    /// they need: nothing is taken from them.
    pub async fn adopt(&self, vms: Vec<(String, Paged)>, disks: Vec<LazyDisk>, others: bool) {
        let mut state = self.state.lock().await;
        state.others = others;
        let found = self.ping().await;
        let needed = !vms.is_empty() || !disks.is_empty() || (others && found.is_some());
        if !needed {
            if let Some(pid) = found {
                info!(pid, "ending a pager that nobody needs");
                let _ = VmmProcess::adopted(pid).map(|process| process.kill());
            }
            if !others {
                self.remove_files(|_| false);
            }
            return;
        }
        if let Some(pid) = found {
            info!(pid, "pager adopted");
            self.watch(&mut state, VmmProcess::adopted(pid).map(Arc::new), pid);
        }
        let disks = disks.into_iter().map(|disk| (disk.name(), disk));
        state.disks = disks.collect();
        let adopted = |(id, paged)| (id, Served { paged, ticket: 0 });
        state.served = vms.into_iter().map(adopted).collect();
        if let Err(error) = self.run(&mut state).await {
            error!(%error, "VMs' memory can't be served");
            return;
        }
        if found.is_none() {
            self.tell_all(&state).await;
        }
        if others {
            return;
        }
        // VMs that ended while no daemon looked.
        let sockets = fs::read_dir(self.paths.run.join("pager"));
        for entry in sockets.into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            // What is noted beside a socket goes with it.
            let Some(id) = name.strip_suffix(".sock") else {
                continue;
            };
            if !state.served.contains_key(id) && !state.disks.contains_key(id) {
                self.let_go(id).await;
            }
        }
        self.remove_files(|id| state.served.contains_key(id) || state.disks.contains_key(id));
    }

    /// Removes sockets, and what is noted beside them, of VMs and disks that
    /// are not needed: their daemon may have been killed before it wrote down
    /// that there is such a VM.
    fn remove_files(&self, needed: impl Fn(&str) -> bool) {
        let files = fs::read_dir(self.paths.run.join("pager"));
        for entry in files.into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !needed(name.split(".sock").next().unwrap_or(&name)) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Fills everything of a VM's memory that is still missing.
    pub async fn complete(&self, id: &str) -> std::result::Result<(), String> {
        let request = PagerRequest::Complete { name: id.into() };
        done(self.ask(&request, COMPLETE_TIME).await)
    }

    /// Lets go of a VM, unless it was served anew since.
    pub async fn forget(&self, id: &str, ticket: u64) {
        let mut state = self.state.lock().await;
        if state
            .served
            .get(id)
            .is_some_and(|served| served.ticket == ticket)
        {
            state.served.remove(id);
            self.let_go(id).await;
        }
    }

    async fn let_go(&self, id: &str) {
        let request = PagerRequest::Forget { name: id.into() };
        if let Err(why) = done(self.ask(&request, ANSWER_TIME).await) {
            warn!(id, why, "the pager did not let go of a VM");
        }
        let _ = fs::remove_file(self.paths.pager_vm_socket(id));
    }

    /// What it has done for a VM.
    pub async fn stats(&self, id: &str) -> Option<PagerStats> {
        let request = PagerRequest::Stats { name: id.into() };
        match self.ask(&request, ANSWER_TIME).await {
            Ok(PagerResponse::Stats(stats)) => Some(stats),
            _ => None,
        }
    }

    /// The daemon ends: a pager that serves nobody ends too.
    pub async fn end_if_idle(&self) {
        let state = self.state.lock().await;
        if let Some(pid) = state
            .pid
            .filter(|_| state.served.is_empty() && state.disks.is_empty() && !state.others)
            && let Ok(process) = VmmProcess::adopted(pid)
        {
            process.kill();
        }
    }

    // ---- the process -----------------------------------------------------

    /// Sees to it that one runs.
    async fn run(&self, state: &mut State) -> Result<()> {
        if state.pid.is_some() {
            return Ok(());
        }
        let pid = self.spawn()?;
        let process = VmmProcess::child(pid).map(Arc::new);
        let spawned = process.as_ref().ok().cloned();
        self.watch(state, process, pid);
        let until = Instant::now() + START_TIME;
        while self.ping().await.is_none() {
            let died = !is_alive(pid);
            if died || Instant::now() >= until {
                state.pid = None;
                // The next one takes its socket: nothing would ever end it.
                if let Some(process) = spawned {
                    process.kill();
                    let _ = timeout(END_TIME, process.ended()).await;
                }
                return Err(Error::internal(format!(
                    "The pager {}; {} may say why.",
                    if died {
                        "ended at once"
                    } else {
                        "does not listen"
                    },
                    self.log().display()
                )));
            }
            sleep(KNOCK_EVERY).await;
        }
        info!(pid, "pager started");
        Ok(())
    }

    fn spawn(&self) -> Result<u32> {
        let program = self.paths.pager();
        let socket = self.paths.pager_socket();
        let _ = fs::remove_file(&socket);
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(self.log())
            .map_err(|error| Error::io("open the pager's log", &self.log(), &error))?;
        let spawned = spawn_detached(&Detached {
            program: &program,
            arguments: &[
                OsStr::new("serve"),
                OsStr::new("--control"),
                socket.as_os_str(),
            ],
            directory: &self.paths.run,
            output: log.as_fd(),
            descriptors: &[],
        });
        spawned.map_err(|error| {
            Error::internal(format!(
                "The pager {} can't be started: {error}.",
                program.display()
            ))
            .hint("Install Jiffy whole, or name the folder of jiffy-pager with --lib or JIFFY_LIB.")
        })
    }

    fn log(&self) -> PathBuf {
        self.paths.run.join("jiffy-pager.log")
    }

    /// Notices its end.
    fn watch(&self, state: &mut State, process: io::Result<Arc<VmmProcess>>, pid: u32) {
        state.pid = Some(pid);
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
        let mut state = self.state.lock().await;
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
            error!(
                "the pager dies again and again and is not started any more: VMs that need it end"
            );
            return;
        }
        warn!(
            pid,
            vms = state.served.len(),
            "the pager died: another one takes over"
        );
        match self.run(&mut state).await {
            Ok(()) => self.tell_all(&state).await,
            Err(error) => error!(%error, "VMs that need the pager end"),
        }
    }

    /// The process that answers on the control socket, if one does.
    async fn ping(&self) -> Option<u32> {
        let stream = UnixStream::connect(self.paths.pager_socket()).await.ok()?;
        let pid = stream.peer_cred().ok()?.pid()?;
        let asked = exchange(stream, &PagerRequest::Ping);
        match timeout(ANSWER_TIME, asked).await {
            Ok(Ok(PagerResponse::Ok)) => u32::try_from(pid).ok(),
            _ => None,
        }
    }

    // ---- requests --------------------------------------------------------

    async fn tell(&self, id: &str, paged: &Paged) -> std::result::Result<(), String> {
        let socket = self.paths.pager_vm_socket(id);
        let _ = fs::remove_file(&socket);
        let origins = crate::snapshots::remote::origins(&paged.image, &self.paths);
        if !origins.is_empty() {
            let image = paged.image.clone();
            let request = PagerRequest::Origins { image, origins };
            done(self.ask(&request, ANSWER_TIME).await)?;
        }
        let request = PagerRequest::Serve {
            name: id.to_owned(),
            socket,
            image: paged.image.clone(),
            record: paged.record.clone(),
            prefetch: paged.prefetch,
        };
        done(self.ask(&request, DISK_TIME).await)
    }

    async fn tell_of_disk(&self, disk: &LazyDisk) -> std::result::Result<(), String> {
        for request in disk.requests(&self.paths) {
            done(self.ask(&request, DISK_TIME).await)?;
        }
        Ok(())
    }

    /// Memory first: a read of a disk waits ten times as long for the next pager.
    /// Disks several at once: the cache of one may have to be begun anew.
    async fn tell_all(&self, state: &State) {
        for (id, served) in &state.served {
            if let Err(why) = self.tell(id, &served.paged).await {
                error!(id, why, "a VM's memory can't be served any more");
            }
        }
        let disks = stream::iter(&state.disks);
        let told = disks.for_each_concurrent(DISKS_AT_ONCE, |(name, disk)| async move {
            if let Err(why) = self.tell_of_disk(disk).await {
                error!(name, why, "a VM's disk can't be filled any more");
            }
        });
        told.await;
    }

    async fn ask(&self, request: &PagerRequest, within: Duration) -> io::Result<PagerResponse> {
        let asked = async {
            let stream = UnixStream::connect(self.paths.pager_socket()).await?;
            exchange(stream, request).await
        };
        timeout(within, asked)
            .await
            .unwrap_or(Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Locks a cache's file as a VMM does that reads it.
async fn hold(contents: PathBuf) -> Result<Locked> {
    let work = tokio::task::spawn_blocking(move || {
        File::open(&contents)
            .and_then(Locked::shared)
            .map_err(|error| Error::io("hold a VM's root file system", &contents, &error))
    });
    work.await
        .map_err(|error| Error::internal(format!("A task was cut short: {error}.")))?
}

async fn exchange(mut stream: UnixStream, request: &PagerRequest) -> io::Result<PagerResponse> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line).await?;
    let mut answer = Vec::new();
    BufReader::new(stream.take(MAX_ANSWER))
        .read_until(b'\n', &mut answer)
        .await?;
    Ok(serde_json::from_slice(&answer)?)
}

fn done(answer: io::Result<PagerResponse>) -> std::result::Result<(), String> {
    match answer {
        Ok(PagerResponse::Ok) => Ok(()),
        Ok(PagerResponse::Error(why)) => Err(short(why.trim_end_matches('.'))),
        Ok(other) => Err(format!("it answered {other:?}")),
        Err(error) => Err(format!("it does not answer: {error}")),
    }
}

#[cfg(test)]
mod tests;
