//! The control socket and the VMs' sockets, all served by one thread of the I/O pool at a time. Slow
//! work is done by the pool's workers, the I/O pool and the recorder, which send a [`Notice`] when
//! it is done.
//!
//! * [`listen`]: sockets that only their owner may connect to.
//! * [`client`]: a connection to the control socket.
//! * [`served`]: a VM to be served, and its VMM once it has connected.
//! * [`disks`]: disks that are filled on demand, and the VMMs that use them.
//! * [`images`]: open images, each opened once.
//! * [`opening`]: images and disks that are being opened, on threads of their own.
//! * `disk_peer`: a VMM that uses a disk, and its answers.
//! * [`recorder`]: writes recordings.

mod client;
mod disk_peer;
mod disks;
mod images;
mod listen;
mod opening;
mod recorder;
mod requests;
mod served;
#[cfg(feature = "testing")]
pub(crate) mod testing;

use crate::image::ImageKey;
use crate::io_pool::IoPool;
use crate::origins::client::Reader;
use crate::pool::{Pool, Settings};
use crate::scratch::Scratch;
use crate::working_set::{WorkingSet, WorkingSets};
use client::Client;
use disks::ServedDisk;
use images::Images;
use jiffy_sys::log_limit::LogLimit;
use opening::{Opened, Opening};
use recorder::Recorder;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::setpriority_process;
use served::Served;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// Most connections to the control socket. When there are more, an idle one is closed.
const MAX_CLIENTS: usize = 64;
/// How long a VM runs before its working set is read into memory for later VMs.
const HEAD_START: Duration = Duration::from_millis(20);
/// The nice value of the thread that reads it.
const LOW_PRIORITY: i32 = 10;

/// `jiffy-origins` that ends sooner than this after the pager's start would end soon in the next pager,
/// too.
const ORIGINS_TRIAL: Duration = Duration::from_secs(2);
/// How long the pager goes on without it then.
const WITHOUT_ORIGINS: Duration = Duration::from_secs(60);

/// A message of another thread to the server.
enum Notice {
    /// An error ended the service of a VM.
    Failed { token: u64, sentence: String },
    /// The answer that a client waits for.
    Answer {
        client: u64,
        problem: Option<String>,
    },
    /// A VM's memory was filled, or could not be; a client waits for it.
    Completed {
        name: String,
        client: u64,
        problem: Option<String>,
    },
    /// The working set of an image was filled into a VM's memory, and no chunk of it is missing.
    Prefetched { name: String },
    /// The working set of an image was read into memory for later VMs, or could not be.
    WorkingSet {
        image: ImageKey,
        set: Option<WorkingSet>,
    },
    /// A VM's image or a disk is open, or could not be opened.
    Opened {
        name: String,
        outcome: Result<Opened, String>,
    },
    /// A disk's VMM was answered; there is more to write to it, or it may be read from again.
    DiskPeer { name: String, peer: u64 },
}

/// Sends notices, and wakes the thread that serves.
#[derive(Clone)]
struct Notifier {
    notices: Sender<Notice>,
    wakeup: Arc<OwnedFd>,
}

impl Notifier {
    fn send(&self, notice: Notice) {
        // Sending fails only if the server has ended.
        if self.notices.send(notice).is_ok() {
            let _ = rustix::io::write(&*self.wakeup, &1u64.to_ne_bytes());
        }
    }
}

/// Listens on `control`. A stale socket of a pager that has ended is replaced.
///
/// # Errors
///
/// If another process listens there, the path is another file, or the kernel refuses the socket.
pub fn listen_control(control: &Path) -> io::Result<UnixListener> {
    listen::bind_exclusive(control)
}

/// Serves until it is told to end.
pub struct Server {
    control: UnixListener,
    control_path: PathBuf,
    clients: BTreeMap<u64, Client>,
    served: BTreeMap<String, Served>,
    disks: BTreeMap<String, ServedDisk>,
    opening: BTreeMap<String, Opening>,
    images: Arc<Images>,
    /// The channel to `jiffy-origins`, while that lives.
    origins: Option<OwnedFd>,
    /// When this pager ends, if it goes on without `jiffy-origins`.
    without_origins_until: Option<Instant>,
    started: Instant,
    working_sets: WorkingSets,
    pool: Pool,
    io_pool: Arc<IoPool>,
    recorder: Recorder,
    notifier: Notifier,
    notices: Receiver<Notice>,
    /// The next number for a client or a VM.
    next: u64,
}

/// A source of events for the server.
#[derive(Debug, Clone)]
enum Source {
    Stop,
    Wakeup,
    Origins,
    Control,
    Client(u64),
    Listener(String),
    Peer(String),
    Disk(String),
    DiskPeer(String, u64),
}

impl Server {
    /// Starts the workers. `listener` listens on `control` ([`listen_control`]).
    ///
    /// # Errors
    ///
    /// If an eventfd or epoll can't be made, a descriptor can't be duplicated, or a thread can't be
    /// started.
    pub fn start(
        control: &Path,
        listener: UnixListener,
        reader: Reader,
        settings: Settings,
    ) -> io::Result<Server> {
        let (send, notices) = mpsc::channel();
        let wakeup = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let notifier = Notifier {
            notices: send,
            wakeup,
        };
        let io_pool = Arc::new(IoPool::default());
        let origins = reader.channel()?;
        Ok(Server {
            control: listener,
            control_path: control.to_owned(),
            clients: BTreeMap::new(),
            served: BTreeMap::new(),
            disks: BTreeMap::new(),
            opening: BTreeMap::new(),
            images: Arc::new(Images::new(reader)),
            origins,
            without_origins_until: None,
            started: Instant::now(),
            working_sets: WorkingSets::default(),
            pool: Pool::start(settings, io_pool.clone())?,
            io_pool,
            recorder: Recorder::start(notifier.clone())?,
            notifier,
            notices,
            next: 1,
        })
    }

    /// Serves until `stop` is readable or `jiffy-origins` has ended; then drops all VMs. In the first
    /// case recordings are written. The threads of the I/O pool serve in turns.
    ///
    /// # Errors
    ///
    /// If no thread can be started, or `poll` fails.
    pub fn run(self, stop: impl AsFd + Send + 'static) -> io::Result<()> {
        let (ended, end) = mpsc::channel();
        let io_pool = self.io_pool.clone();
        let mut serving = Some(self);
        io_pool.serve(move || {
            let Some(server) = &mut serving else {
                return false;
            };
            let outcome = match server.turn(stop.as_fd()) {
                Ok(true) => return true,
                outcome => outcome.map(drop),
            };
            // Ends the workers.
            serving = None;
            let _ = ended.send(outcome);
            false
        })?;
        end.recv().map_err(io::Error::other)?
    }

    /// Waits for events and handles them; false at the end.
    fn turn(&mut self, stop: BorrowedFd<'_>) -> io::Result<bool> {
        let ready = self.wait(stop)?;
        // Messages that arrived while others were served are in time.
        let looked = Instant::now();
        for (source, events) in ready {
            match source {
                Source::Stop => {
                    self.finish();
                    return Ok(false);
                }
                Source::Wakeup => self.handle_notices(),
                // As if it was killed: closing disks in order takes too long for VMs that need their
                // memory, and their requests would fail.
                Source::Origins if !self.continues_without_origins() => return Ok(false),
                Source::Origins => {}
                Source::Control => self.accept_client(),
                Source::Client(number) => self.read_client(number),
                Source::Listener(name) => self.with_served(&name, Served::accept),
                Source::Peer(name) => self.read_peer(&name),
                Source::Disk(name) => self.accept_disk_peer(&name),
                Source::DiskPeer(name, number) => {
                    let gone = events.intersects(PollFlags::HUP | PollFlags::ERR);
                    self.read_disk_peer(&name, number, gone);
                }
            }
        }
        for served in self.served.values_mut() {
            served.hang_up_if_late(looked);
        }
        self.expire_completions(looked);
        let ends = self.without_origins_until.is_some_and(|it| it <= looked);
        Ok(!ends)
    }

    /// Sleeps until there is something to do, and returns the ready sources.
    fn wait(&self, stop: BorrowedFd<'_>) -> io::Result<Vec<(Source, PollFlags)>> {
        let mut sources = vec![Source::Stop, Source::Wakeup];
        let mut fds = vec![
            PollFd::from_borrowed_fd(stop, PollFlags::IN),
            PollFd::from_borrowed_fd(self.notifier.wakeup.as_fd(), PollFlags::IN),
        ];
        if let Some(origins) = &self.origins {
            sources.push(Source::Origins);
            fds.push(PollFd::new(origins, PollFlags::RDHUP));
        }
        if self.has_room_for_client() {
            sources.push(Source::Control);
            fds.push(PollFd::new(&self.control, PollFlags::IN));
        }
        for (number, client) in &self.clients {
            sources.push(Source::Client(*number));
            fds.push(PollFd::from_borrowed_fd(client.as_fd(), client.interest()));
        }
        let mut deadline = self.without_origins_until;
        for (name, served) in &self.served {
            match served.peer_fd() {
                Some(peer) => {
                    sources.push(Source::Peer(name.clone()));
                    fds.push(PollFd::from_borrowed_fd(peer, PollFlags::IN));
                }
                None => {
                    sources.push(Source::Listener(name.clone()));
                    fds.push(PollFd::from_borrowed_fd(served.listener(), PollFlags::IN));
                }
            }
            deadline = [deadline, served.deadline()].into_iter().flatten().min();
        }
        for (name, served) in &self.disks {
            if let Some(listener) = served.listener() {
                sources.push(Source::Disk(name.clone()));
                fds.push(PollFd::from_borrowed_fd(listener, PollFlags::IN));
            }
            for (number, peer) in &served.peers {
                sources.push(Source::DiskPeer(name.clone(), *number));
                fds.push(PollFd::from_borrowed_fd(peer.as_fd(), peer.interest()));
            }
        }
        let timeout = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            // Rounded up, so that the deadline has passed after the sleep.
            let left = left + Duration::from_millis(1);
            Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        let mut timeout = timeout;
        loop {
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) => break,
                // This process may have been stopped (SIGSTOP): messages that arrived meanwhile are
                // in time.
                Err(rustix::io::Errno::INTR) => timeout = Some(Timespec::default()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(sources
            .into_iter()
            .zip(&fds)
            .map(|(source, fd)| (source, fd.revents()))
            .filter(|(_, events)| !events.is_empty())
            .collect())
    }

    /// Whether this pager goes on for a time although `jiffy-origins` has ended. It is confined, and can't start
    /// another one. The next pager can, and serves the same VMs.
    fn continues_without_origins(&mut self) -> bool {
        self.origins = None;
        let continues = self.started.elapsed() < ORIGINS_TRIAL;
        self.without_origins_until = continues.then(|| Instant::now() + WITHOUT_ORIGINS);
        match continues {
            true => tracing::error!(
                "jiffy-origins ended: chunks that are in a registry or at a peer can't be read for {} s",
                WITHOUT_ORIGINS.as_secs()
            ),
            false => tracing::error!(
                "jiffy-origins ended: this pager ends, too, because only the next one can start it"
            ),
        }
        continues
    }

    fn handle_notices(&mut self) {
        let _ = rustix::io::read(&*self.notifier.wakeup, &mut [0; 8]);
        while let Ok(notice) = self.notices.try_recv() {
            match notice {
                Notice::Failed { token, sentence } => {
                    let served = self
                        .served
                        .values_mut()
                        .find(|served| served.token() == Some(token));
                    if let Some(served) = served {
                        served.fail(&self.pool, &sentence);
                        self.recorder.write(served.recording(), None);
                    }
                }
                Notice::Completed {
                    name,
                    client,
                    problem,
                } => {
                    // The VMM is told before the node, because the node will ask the VMM next.
                    if problem.is_none() {
                        self.with_served(&name, |served| served.send_complete());
                    }
                    self.answer_late(client, problem);
                }
                Notice::Prefetched { name } => self.read_working_set(&name),
                Notice::WorkingSet { image, set } => self.working_sets.keep(image, set),
                Notice::Opened { name, outcome } => self.opened(&name, outcome),
                Notice::DiskPeer { name, peer } => self.continue_disk_peer(&name, peer),
                Notice::Answer { client, problem } => self.answer_late(client, problem),
            }
        }
    }

    fn answer_late(&mut self, client: u64, problem: Option<String>) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.answer_late(problem);
        }
        self.continue_client(client);
    }

    /// Reads the working set of a VM's image into memory for later VMs.
    fn read_working_set(&mut self, name: &str) {
        // It is tried again for each VMM that connects.
        static LOG: LogLimit = LogLimit::new();
        let Some((key, image)) = self.served.get(name).and_then(Served::image) else {
            return;
        };
        if !self.working_sets.begin_read(key) {
            return;
        }
        let notifier = self.notifier.clone();
        let begun = spawn_thread("working-set", move || {
            // The VM has only just started, and nobody waits for the working set. SCHED_IDLE is not
            // used: while restores follow one another no processor is idle, and each of them would
            // miss the working set.
            thread::sleep(HEAD_START);
            if let Err(error) = setpriority_process(None, LOW_PRIORITY) {
                tracing::debug!(%error, "a working set is read with normal priority");
            }
            let set = image
                .working_set()
                .and_then(|chunks| WorkingSet::read(&*image, &chunks, &mut Scratch::default()));
            let set = set.inspect_err(|error| {
                if LOG.admits() {
                    tracing::warn!("a working set can't be read: {error}");
                }
            });
            let set = set.ok();
            notifier.send(Notice::WorkingSet { image: key, set });
        });
        if let Err(error) = begun {
            if LOG.admits() {
                tracing::warn!(error, "a working set is not kept in memory");
            }
            self.working_sets.keep(key, None);
        }
    }

    /// Whether one more client can be accepted, if necessary by closing an idle one.
    fn has_room_for_client(&self) -> bool {
        self.clients.len() < MAX_CLIENTS || self.clients.values().any(Client::is_idle)
    }

    fn with_served(&mut self, name: &str, what: impl FnOnce(&mut Served)) {
        if let Some(served) = self.served.get_mut(name) {
            what(served);
        }
    }

    /// Handles input from the VMM of this VM, or its end.
    fn read_peer(&mut self, name: &str) {
        let Some(served) = self.served.get_mut(name) else {
            return;
        };
        let token = self.next;
        let sets = &mut self.working_sets;
        match served.read_peer(&self.pool, &self.notifier, sets, token) {
            served::PeerEvent::Nothing => {}
            served::PeerEvent::Attached => {
                self.next += 1;
                self.start_completions(name);
            }
            served::PeerEvent::Wrote(key, ranges) => self.working_sets.note_written(key, ranges),
            served::PeerEvent::Gone => self.recorder.write(served.recording(), None),
        }
    }

    /// Stops serving all VMs and disks.
    fn finish(&mut self) {
        for served in self.served.values_mut() {
            served.detach(&self.pool);
            self.recorder.write(served.recording(), None);
            served.remove_socket();
        }
        self.finish_disks();
        let _ = std::fs::remove_file(&self.control_path);
        self.recorder.finish();
    }
}

/// Runs `work` in a thread of its own, because all threads of the I/O pool may be waiting for
/// registries.
fn spawn_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), String> {
    thread::Builder::new()
        .name(name.into())
        .spawn(work)
        .map(drop)
        .map_err(|error| format!("the thread {name} cannot be started: {error}"))
}
