//! Disks that are filled on demand, and the VMMs that use them.

use super::disk_peer::{Answers, DiskPeer, Line};
use super::opening::{Opened, Opening, Wanted};
use super::requests::Answer;
use super::served::send_failed;
use super::{Notice, Notifier, Server, listen, spawn_thread};
use crate::disk::{DemandOutcome, Disk, Unavailable};
use crate::image::Unreadable;
use crate::io_pool::{IoPool, Urgency};
use crate::sentence::bounded;
use jiffy_store::Recording;
use jiffy_sys::log_limit::LogLimit;
use jiffy_wire::disk::{ChunkAnswer, ChunkRequest};
use jiffy_wire::pager::{OpenDisk, PagerResponse};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

/// Most VMMs of one disk; more have to wait.
const MAX_PEERS: usize = 1024;
/// Most connections of one process: one is enough, but a broken one may linger.
const MAX_OF_ONE: usize = 8;

pub(super) struct ServedDisk {
    request: OpenDisk,
    pub disk: Arc<Disk>,
    listener: UnixListener,
    pub peers: BTreeMap<u64, DiskPeer>,
    logs: BTreeMap<Option<u32>, Arc<LogLimit>>,
}

impl ServedDisk {
    pub fn listener(&self) -> Option<BorrowedFd<'_>> {
        (self.peers.len() < MAX_PEERS).then(|| self.listener.as_fd())
    }

    /// The chunks requested so far, if they are recorded; with `last`, recording ends.
    pub fn recording(&self, last: bool) -> Option<(PathBuf, Recording)> {
        let path = self.request.record.clone()?;
        let recording = self.disk.recording(last)?;
        // A cache is removed with its image, and then nothing would remove the recording.
        self.request.cache.exists().then_some((path, recording))
    }

    pub fn remove_socket(&self) {
        let _ = fs::remove_file(&self.request.socket);
    }

    fn connections_of(&self, pid: u32) -> usize {
        let all = self.peers.values();
        all.filter(|peer| peer.pid == Some(pid)).count()
    }

    /// Limits the messages that a process causes, on however many connections.
    fn log_of(&mut self, pid: Option<u32>) -> Arc<LogLimit> {
        if self.logs.len() > MAX_PEERS {
            let connected: BTreeSet<_> = self.peers.values().map(|peer| peer.pid).collect();
            self.logs.retain(|pid, _| connected.contains(pid));
        }
        self.logs.entry(pid).or_default().clone()
    }

    fn warn_of_too_many(&mut self, pid: u32) {
        if self.log_of(Some(pid)).admits() {
            tracing::warn!(
                disk = self.disk.name(),
                pid,
                "refused a connection: its process has too many already"
            );
        }
    }
}

impl Server {
    pub(super) fn open_disk(&mut self, request: OpenDisk, client: u64) -> Result<Answer, String> {
        let otherwise = format!(
            "disk {} is already open with other options; forget it first",
            request.name
        );
        // A restarted node may repeat its request.
        if let Some(open) = self.disks.get(&request.name) {
            return match open.request == request {
                true => Ok(Some(PagerResponse::Ok)),
                false => Err(otherwise),
            };
        }
        if let Some(opening) = self.opening.get_mut(&request.name) {
            return match opening.join(&Wanted::Disk(request), client) {
                true => Ok(None),
                false => Err(otherwise),
            };
        }
        if self.served.contains_key(&request.name) {
            return Err(format!("{} is a VM that is served here", request.name));
        }
        self.check_socket(&request.socket)?;
        if let Some(other) = self
            .disk_requests()
            .find(|other| other.cache == request.cache)
        {
            return Err(format!(
                "the cache {} is that of the disk {}, which is open",
                request.cache.display(),
                other.name
            ));
        }
        let opening = Opening::new(Wanted::Disk(request.clone()), client);
        let (images, notifier) = (self.images.clone(), self.notifier.clone());
        spawn_thread("disk-open", move || {
            let name = request.name;
            let open = |image| {
                Disk::open(&name, image, &request.cache, request.record.is_some())
                    .map_err(|error| Unreadable::from_error(&error).0)
            };
            let outcome = images.open(&request.image).and_then(open);
            let outcome = outcome.map(|disk| Opened::Disk(Arc::new(disk)));
            notifier.send(Notice::Opened { name, outcome });
        })?;
        self.opening.insert(opening.name().to_owned(), opening);
        Ok(None)
    }

    /// Opens a disk's socket to VMMs.
    pub(super) fn serve_disk(&mut self, request: OpenDisk, disk: Arc<Disk>) -> Result<(), String> {
        let listener = listen::bind(&request.socket).map_err(|error| {
            format!(
                "{} cannot be listened on: {error}",
                request.socket.display()
            )
        })?;
        if let Some(recording) = &request.prefetch {
            disk.prefetch(&self.io_pool, Some(recording));
        }
        tracing::info!(
            disk = request.name,
            full = disk.cache().is_full(),
            "disk opened"
        );
        let name = request.name.clone();
        let served = ServedDisk {
            request,
            disk,
            listener,
            peers: BTreeMap::new(),
            logs: BTreeMap::new(),
        };
        self.disks.insert(name, served);
        Ok(())
    }

    /// The requests of disks that are open or being opened.
    fn disk_requests(&self) -> impl Iterator<Item = &OpenDisk> {
        let open = self.disks.values().map(|served| &served.request);
        open.chain(self.opening.values().filter_map(Opening::disk))
    }

    /// Checks that no VM or disk uses this socket yet.
    pub(super) fn check_socket(&self, socket: &std::path::Path) -> Result<(), String> {
        let vm = self.served.values().any(|other| other.socket() == socket);
        let disk = self
            .disks
            .values()
            .any(|other| other.request.socket == socket);
        let coming = self.opening.values().any(|other| other.socket() == socket);
        match vm || disk || coming {
            true => Err(format!("{} serves another VM", socket.display())),
            false => Ok(()),
        }
    }

    pub(super) fn accept_disk_peer(&mut self, name: &str) {
        let Some(served) = self.disks.get_mut(name) else {
            return;
        };
        if let Some(stream) = listen::accept(&served.listener) {
            let pid = listen::pid_of(&stream);
            if let Some(pid) = pid
                && served.connections_of(pid) >= MAX_OF_ONE
            {
                return served.warn_of_too_many(pid);
            }
            let peer = DiskPeer::new(stream, pid, served.log_of(pid));
            served.peers.insert(self.next, peer);
            self.next += 1;
        }
    }

    /// Handles input from a VMM, a writable socket, or its end.
    pub(super) fn read_disk_peer(&mut self, name: &str, number: u64, hung_up: bool) {
        let Some(peer) = self.disk_peer(name, number) else {
            return;
        };
        match peer.exchange(hung_up) {
            true => self.continue_disk_peer(name, number),
            false => self.remove_disk_peer(name, number),
        }
    }

    fn disk_peer(&mut self, name: &str, number: u64) -> Option<&mut DiskPeer> {
        self.disks.get_mut(name)?.peers.get_mut(&number)
    }

    /// Starts the requests that have arrived, and sends pending output.
    pub(super) fn continue_disk_peer(&mut self, name: &str, number: u64) {
        let Some(served) = self.disks.get_mut(name) else {
            return;
        };
        let Some(peer) = served.peers.get_mut(&number) else {
            return;
        };
        loop {
            match peer.next_line() {
                Ok(Some(Line::OnBehalfOf(pid))) => {
                    if served.connections_of(pid) > MAX_OF_ONE {
                        served.warn_of_too_many(pid);
                        return self.remove_disk_peer(name, number);
                    }
                    let log = served.log_of(Some(pid));
                    if let Some(peer) = served.peers.get_mut(&number) {
                        peer.log = log;
                    }
                    return self.continue_disk_peer(name, number);
                }
                Ok(Some(Line::Request(ChunkRequest::TAKES_BYTES))) => peer.takes_bytes = true,
                Ok(Some(Line::Request(request))) => {
                    let work = Work {
                        disk: served.disk.clone(),
                        io_pool: self.io_pool.clone(),
                        notifier: self.notifier.clone(),
                        peer: number,
                        answers: peer.begin_request(),
                        takes_bytes: peer.takes_bytes,
                        log: peer.log.clone(),
                        request,
                    };
                    work.begin();
                }
                Ok(None) => break,
                Err(sentence) => {
                    if peer.log.admits() {
                        tracing::warn!(disk = name, "{sentence}");
                    }
                    send_failed(peer.stream(), &sentence);
                    return self.remove_disk_peer(name, number);
                }
            }
        }
        if !peer.flush() {
            self.remove_disk_peer(name, number);
        }
    }

    /// Removes a VMM that has gone. After the last one, the recording is written.
    fn remove_disk_peer(&mut self, name: &str, number: u64) {
        if let Some(served) = self.disks.get_mut(name) {
            served.peers.remove(&number);
            if served.peers.is_empty() {
                self.recorder.write(served.recording(false), None);
            }
        }
    }

    /// Closes a disk; false if there is no such disk.
    pub(super) fn forget_disk(&mut self, name: &str, client: u64) -> Result<bool, String> {
        let Some(mut served) = self.disks.remove(name) else {
            return Ok(false);
        };
        served.remove_socket();
        served.disk.end();
        served.peers.clear();
        tracing::info!(disk = name, "disk closed");
        let notifier = self.notifier.clone();
        spawn_thread("disk-close", move || {
            let mut problem = served.disk.close().err().map(|error| {
                // The cache was not closed in order, so it is filled again after the next boot of
                // the host.
                Unreadable::from_error(&error).0
            });
            if let Some((path, recording)) = served.recording(true)
                && let Err(error) = recording.write(&path)
            {
                let path = path.display();
                problem.get_or_insert(format!("the recording {path} was not written: {error}"));
            }
            // Dropped before the answer, because the client may open the files after it.
            drop(served);
            notifier.send(Notice::Answer { client, problem });
        })?;
        Ok(true)
    }

    /// Closes all disks.
    pub(super) fn finish_disks(&mut self) {
        for served in self.disks.values() {
            served.remove_socket();
            self.recorder.write(served.recording(true), None);
            if let Err(error) = served.disk.close() {
                tracing::warn!(disk = served.disk.name(), "{error}");
            }
        }
    }
}

/// A request in flight.
struct Work {
    disk: Arc<Disk>,
    io_pool: Arc<IoPool>,
    notifier: Notifier,
    peer: u64,
    answers: Arc<Answers>,
    takes_bytes: bool,
    log: Arc<LogLimit>,
    request: ChunkRequest,
}

impl Work {
    /// Starts the request in the I/O pool, whose thread answers the VMM itself.
    fn begin(self) {
        let io_pool = self.io_pool.clone();
        let lane = self.disk.lane_of(self.request.offset, self.request.length);
        io_pool.push(Urgency::Now, lane, move |scratch| {
            let stop = self.answers.stop();
            if stop.is_cancelled() {
                return;
            }
            scratch.decoder.stop = stop.clone();
            let ChunkRequest { id, offset, length } = self.request;
            let (disk, takes_bytes) = (&self.disk, self.takes_bytes);
            let outcome = disk.demand(&self.io_pool, offset, length, takes_bytes, scratch);
            let mut bytes = Vec::new();
            let answer = match outcome {
                Ok(DemandOutcome::Present) => ChunkAnswer::Present { id },
                Ok(DemandOutcome::Bytes(had)) => {
                    bytes = had;
                    let length = bytes.len();
                    ChunkAnswer::Bytes { id, length }
                }
                Err(_) if stop.is_cancelled() => return,
                Err(Unavailable { chunk, sentence }) => {
                    let sentence = bounded(&sentence);
                    if self.log.admits() {
                        tracing::error!(disk = self.disk.name(), chunk, "{sentence}");
                    }
                    ChunkAnswer::Unavailable {
                        id,
                        chunk,
                        sentence,
                    }
                }
            };
            if self.answers.send_answer(&answer, &bytes) {
                self.notifier.send(Notice::DiskPeer {
                    name: self.disk.name().to_owned(),
                    peer: self.peer,
                });
            }
        });
    }
}
