//! A VM to be served, and its VMM once it has connected.

use super::{Notice, Notifier, listen};
use crate::handshake::{self, HandshakeError, Layout, Progress};
use crate::image::{ChunkImage, ImageKey, StoredImage};
use crate::pool::Pool;
use crate::sentence::bounded;
use crate::vm::{Counters, Owner, Removed, Touched, Vm, VmParts};
use crate::working_set::{Offer, WorkingSets};
use jiffy_store::Recording;
use jiffy_sys::fds::{recv_with_fds, send_with_fds};
use jiffy_sys::log_limit::LogLimit;
use jiffy_sys::userfaultfd::Userfaultfd;
use jiffy_wire::lines::{self, Lines};
use jiffy_wire::pager::{
    Mapping, PagerMessage, PagerRequest, PagerStats, VmmMessage, WORKING_SET_LINE,
    WORKING_SET_QUESTION,
};
use jiffy_wire::vmm::Extent;
use std::fs;
use std::io::{self, Write};
use std::mem;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a VMM may take for its handshake, and to continue it after an answer. Long, because a
/// busy host may stall it, and one that takes this long keeps no other VM waiting.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a request to complete a VM waits for the VMM. A VMM whose pager died looks for the next
/// one for 900 ms, and may need [`HANDSHAKE_TIMEOUT`] for its handshake.
const VMM_TIMEOUT: Duration = Duration::from_secs(15);

/// How the line of a connection that was made for a VMM begins ([`jiffy_wire::pager::OnBehalf`]).
const ON_BEHALF: &[u8] = b"{\"on_behalf_of\"";
/// Longest such line, bytes.
const LINE_MAX: usize = 64;

pub(super) struct Served {
    request: PagerRequest,
    name: String,
    socket: PathBuf,
    record: Option<PathBuf>,
    prefetch: bool,
    image: Arc<dyn ChunkImage>,
    key: Option<ImageKey>,
    listener: UnixListener,
    peer: Option<Peer>,
    counters: Arc<Counters>,
    touched: Option<Arc<Touched>>,
    failed: Option<String>,
    /// Clients that want all memory filled, and until when each waits for the VMM.
    completing: Vec<(u64, Instant)>,
    /// Limits the messages that its VMM causes, on however many connections.
    log: Arc<LogLimit>,
}

enum Peer {
    /// The handshake is not complete.
    Handshake(Handshake),
    /// The handshake is complete, and the VM is served.
    Attached {
        stream: UnixStream,
        vm: Arc<Vm>,
        /// Reads the line about written ranges, if the VMM owes that line.
        written_line: Option<Lines>,
    },
}

pub(super) struct Handshake {
    stream: UnixStream,
    /// The VMM's process.
    pub pid: Option<u32>,
    /// Nothing has been received yet but a part of the first line.
    at_begin: bool,
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// The working set that the VMM was given to map.
    shared: Option<Offer>,
    answered: bool,
    deadline: Instant,
}

/// A message of a VMM in its handshake.
pub(super) enum Received {
    /// No whole message yet.
    Part,
    /// It asks for the working set that is in memory.
    Question,
    /// The mappings of its memory.
    Mappings(Vec<Mapping>),
}

/// The result of reading from a VMM.
pub(super) enum PeerEvent {
    Nothing,
    /// The handshake is complete: the VM is served from now on.
    Attached,
    /// Its guest has written these ranges of the working set.
    Wrote(ImageKey, Vec<Extent>),
    /// The connection of a served VMM has ended.
    Gone,
}

impl Served {
    /// Listens on the socket of `request`, which is a `Serve`.
    ///
    /// # Errors
    ///
    /// If the socket can't be listened on, or `request` is another one.
    pub fn new(request: PagerRequest, image: Arc<StoredImage>) -> Result<Served, String> {
        let PagerRequest::Serve {
            name,
            socket,
            record,
            prefetch,
            ..
        } = request.clone()
        else {
            return Err("not a request to serve".into());
        };
        let listener = listen::bind(&socket)
            .map_err(|error| format!("{} cannot be listened on: {error}", socket.display()))?;
        let touched = record
            .is_some()
            .then(|| Arc::new(Touched::new(image.size(), image.chunk_size())));
        Ok(Served {
            request,
            name,
            socket,
            record,
            prefetch,
            key: image.key(),
            image,
            listener,
            peer: None,
            counters: Arc::default(),
            touched,
            failed: None,
            completing: Vec::new(),
            log: Arc::default(),
        })
    }

    pub fn request(&self) -> &PagerRequest {
        &self.request
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    pub fn failed(&self) -> Option<&str> {
        self.failed.as_deref()
    }

    pub fn stats(&self) -> PagerStats {
        PagerStats {
            bytes_fetched: self.image.fetched(),
            ..self.counters.stats(self.failed.clone())
        }
    }

    /// The image and its key.
    pub fn image(&self) -> Option<(ImageKey, Arc<dyn ChunkImage>)> {
        Some((self.key?, self.image.clone()))
    }

    pub fn vm(&self) -> Option<&Arc<Vm>> {
        match &self.peer {
            Some(Peer::Attached { vm, .. }) => Some(vm),
            _ => None,
        }
    }

    pub fn token(&self) -> Option<u64> {
        self.vm().map(|vm| vm.token())
    }

    pub fn peer_fd(&self) -> Option<BorrowedFd<'_>> {
        self.peer.as_ref().map(|peer| match peer {
            Peer::Handshake(handshake) => handshake.stream.as_fd(),
            Peer::Attached { stream, .. } => stream.as_fd(),
        })
    }

    /// When the handshake has to be complete.
    fn handshake_deadline(&self) -> Option<Instant> {
        match &self.peer {
            Some(Peer::Handshake(handshake)) => Some(handshake.deadline),
            _ => None,
        }
    }

    /// When the next wait (for a handshake or for the VMM) times out.
    pub fn deadline(&self) -> Option<Instant> {
        let completing = self.completing.iter().map(|(_, deadline)| *deadline);
        self.handshake_deadline()
            .into_iter()
            .chain(completing)
            .min()
    }

    /// Adds a client that waits for the VMM.
    pub fn await_vmm(&mut self, client: u64) {
        let deadline = Instant::now() + VMM_TIMEOUT;
        self.completing.push((client, deadline));
    }

    /// Removes and returns the clients that wait for the VMM: all, or those whose time is over.
    pub fn take_waiting(&mut self, until: Option<Instant>) -> Vec<u64> {
        let is_over = |(_, deadline): &mut (u64, Instant)| until.is_none_or(|now| *deadline <= now);
        let over = self.completing.extract_if(.., is_over);
        over.map(|(client, _)| client).collect()
    }

    /// Accepts the next VMM. One VMM is served at a time; others wait in the socket's queue.
    pub fn accept(&mut self) {
        self.peer = listen::accept(&self.listener).map(|stream| {
            let pid = listen::pid_of(&stream);
            Peer::Handshake(Handshake::new(stream, pid))
        });
    }

    pub fn hang_up_if_late(&mut self, now: Instant) {
        if self
            .handshake_deadline()
            .is_some_and(|deadline| deadline <= now)
        {
            self.refuse("the handshake took too long");
        }
    }

    /// Reads what the VMM has sent.
    pub fn read_peer(
        &mut self,
        pool: &Pool,
        notifier: &Notifier,
        sets: &mut WorkingSets,
        token: u64,
    ) -> PeerEvent {
        match &mut self.peer {
            None => PeerEvent::Nothing,
            Some(Peer::Attached {
                stream,
                written_line,
                ..
            }) => {
                // Nothing else is expected from a VMM, so only the end of its connection matters.
                let mut bytes = [0; 4096];
                match io::Read::read(stream, &mut bytes) {
                    Ok(0) => {}
                    Ok(count) => {
                        let written = self.key.zip(read_written(written_line, &bytes[..count]));
                        return written.map_or(PeerEvent::Nothing, |(key, what)| {
                            PeerEvent::Wrote(key, what)
                        });
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        return PeerEvent::Nothing;
                    }
                    Err(_) => {}
                }
                if self.log.admits() {
                    tracing::info!(vm = self.name, "its VMM has disconnected");
                }
                self.detach(pool);
                PeerEvent::Gone
            }
            Some(Peer::Handshake(handshake)) => {
                let outcome = match handshake.receive() {
                    Ok(Received::Part) => Ok(PeerEvent::Nothing),
                    Ok(Received::Question) => self.answer(sets).map(|()| PeerEvent::Nothing),
                    Ok(Received::Mappings(mappings)) => self
                        .attach(&mappings, pool, notifier, token)
                        .map(|()| PeerEvent::Attached),
                    Err(sentence) => Err(sentence),
                };
                outcome.unwrap_or_else(|sentence| {
                    self.refuse(&sentence);
                    PeerEvent::Nothing
                })
            }
        }
    }

    /// Sends the VMM the part of the working set that is in memory.
    fn answer(&mut self, sets: &mut WorkingSets) -> Result<(), String> {
        // A recorded VM gets nothing, because the pager must see all its faults.
        let wanted = self.prefetch && self.touched.is_none();
        let offer = self.key.filter(|_| wanted).and_then(|key| sets.of(key));
        let Some(Peer::Handshake(handshake)) = &mut self.peer else {
            return Ok(());
        };
        let message = match &offer {
            Some((set, written)) => PagerMessage::WorkingSet {
                ranges: set.covers().to_vec(),
                written: written.clone(),
            },
            None => PagerMessage::WorkingSet {
                ranges: Vec::new(),
                written: None,
            },
        };
        let files: Vec<BorrowedFd<'_>> = offer.iter().map(|(set, _)| set.as_fd()).collect();
        send_with_fds(&handshake.stream, &line(&message), &files)
            .map_err(|error| format!("the VMM does not take an answer: {error}"))?;
        handshake.shared = offer;
        // The VMM waited for this answer, which may be late, so its deadline is extended: only
        // once, so that a VMM can't extend the handshake by asking repeatedly.
        if !mem::replace(&mut handshake.answered, true) {
            handshake.deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        }
        Ok(())
    }

    fn attach(
        &mut self,
        mappings: &[Mapping],
        pool: &Pool,
        notifier: &Notifier,
        token: u64,
    ) -> Result<(), String> {
        let Some(Peer::Handshake(Handshake {
            stream,
            fds,
            shared,
            pid,
            ..
        })) = &mut self.peer
        else {
            return Ok(());
        };
        let shared = shared.take();
        if fds.len() != 1 {
            return Err(format!(
                "the handshake came with {} descriptors instead of one",
                fds.len()
            ));
        }
        let uffd = Userfaultfd::from_received(fds.remove(0)).map_err(|error| error.to_string())?;
        let layout = Layout::new(mappings, self.image.size()).map_err(|error| error.to_string())?;
        let stream = stream.try_clone().map_err(|error| error.to_string())?;
        let pid = *pid;
        let removed = self.removed(&layout, pid);
        let failure_notifier = notifier.clone();
        let vm = Vm::new(VmParts {
            name: self.name.clone(),
            token,
            uffd,
            layout,
            image: self.image.clone(),
            removed,
            counters: self.counters.clone(),
            touched: self.touched.clone(),
            log: self.log.clone(),
            on_failure: Box::new(move |sentence| {
                failure_notifier.send(Notice::Failed {
                    token,
                    sentence: sentence.to_owned(),
                });
            }),
        });
        let vm = vm.map_err(|error| format!("the userfaultfd cannot be used: {error}"))?;
        let vm = Arc::new(vm);
        let mut written_line = None;
        if let Some((set, written)) = &shared {
            vm.note_shared(set.covers());
            written_line = written.is_none().then(|| Lines::new(WORKING_SET_LINE));
        }
        pool.attach(vm.clone())
            .map_err(|error| format!("the userfaultfd cannot be watched: {error}"))?;
        if self.log.admits() {
            tracing::info!(
                vm = self.name,
                prefetch = self.prefetch,
                "its VMM has connected"
            );
        }
        if self.prefetch {
            let (notifier, name) = (notifier.clone(), self.name.clone());
            pool.prefetch(&vm, move || notifier.send(Notice::Prefetched { name }));
        }
        self.failed = None;
        self.peer = Some(Peer::Attached {
            stream,
            vm,
            written_line,
        });
        Ok(())
    }

    /// The pages that the VM has given up. A predecessor's notes are used if the VMM is still the
    /// same process.
    fn removed(&self, layout: &Layout, pid: Option<u32>) -> Removed {
        let Some(owner) = pid.and_then(Owner::of) else {
            return Removed::new(layout);
        };
        Removed::open(layout, &self.notes(), &owner).unwrap_or_else(|error| {
            if self.log.admits() {
                tracing::warn!(vm = self.name, %error, "the pages that the VM gives up cannot be saved for the next pager");
            }
            Removed::new(layout)
        })
    }

    /// Sends the VMM the reason, and closes the connection.
    fn refuse(&mut self, sentence: &str) {
        let sentence = bounded(sentence);
        if self.log.admits() {
            tracing::warn!(vm = self.name, "{sentence}");
        }
        if let Some(Peer::Handshake(handshake)) = self.peer.take() {
            send_failed(&handshake.stream, &sentence);
        }
    }

    /// Ends the service of this VM after an error.
    pub fn fail(&mut self, pool: &Pool, sentence: &str) {
        self.failed = Some(sentence.to_owned());
        if let Some(Peer::Attached { stream, vm, .. }) = self.peer.take() {
            pool.detach(&vm);
            send_failed(&stream, sentence);
        }
    }

    /// Tells the VMM that only zero pages are missing, so that it may stop using the pager.
    pub fn send_complete(&self) {
        if let Some(Peer::Attached { stream, .. }) = &self.peer {
            send(stream, &PagerMessage::Complete(true));
        }
    }

    /// Stops serving the VMM, if there is one.
    pub fn detach(&mut self, pool: &Pool) {
        if let Some(Peer::Attached { vm, .. }) = self.peer.take() {
            pool.detach(&vm);
        }
    }

    pub fn remove_socket(&self) {
        let _ = fs::remove_file(&self.socket);
    }

    /// Removes the file of given-up pages: no other pager will take over this VM.
    pub fn remove_notes(&self) {
        let _ = fs::remove_file(self.notes());
    }

    fn notes(&self) -> PathBuf {
        let mut path = self.socket.clone().into_os_string();
        path.push(".removed");
        path.into()
    }

    /// The chunks touched so far, if they are recorded.
    pub fn recording(&self) -> Option<(PathBuf, Recording)> {
        let (path, touched) = self.record.as_ref().zip(self.touched.as_ref())?;
        let recording = Recording {
            image: self.image.id(),
            chunk_size: self.image.chunk_size() as u32,
            chunks: touched.chunks(),
        };
        Some((path.clone(), recording))
    }
}

impl Handshake {
    /// `stream` is non-blocking.
    pub fn new(stream: UnixStream, pid: Option<u32>) -> Handshake {
        Handshake {
            pid,
            at_begin: true,
            stream,
            bytes: Vec::new(),
            fds: Vec::new(),
            shared: None,
            answered: false,
            deadline: Instant::now() + HANDSHAKE_TIMEOUT,
        }
    }

    /// Reads a question, or the mappings once all of them have arrived.
    ///
    /// # Errors
    ///
    /// If the VMM hangs up or violates the protocol, or the socket can't be read. The connection
    /// ends then.
    pub fn receive(&mut self) -> Result<Received, String> {
        let mut buffer = [0; 4096];
        let bytes = match recv_with_fds(&self.stream, &mut buffer, &mut self.fds) {
            Ok(0) => return Err("the VMM hung up in its handshake".into()),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Received::Part),
            Err(error) => return Err(format!("the handshake cannot be read: {error}")),
        };
        self.bytes.extend(&buffer[..bytes]);
        if self.fds.len() > 1 {
            return Err("the handshake came with more than one descriptor".into());
        }
        if self.at_begin && self.bytes.starts_with(ON_BEHALF) {
            let Some(end) = self.bytes.iter().position(|byte| *byte == b'\n') else {
                return match self.bytes.len() {
                    ..LINE_MAX => Ok(Received::Part),
                    _ => Err("its first line is too long".into()),
                };
            };
            let line: Vec<u8> = self.bytes.drain(..=end).collect();
            let pid = listen::on_behalf(&self.stream, &line);
            self.pid = Some(pid.ok_or("it may not speak for another process")?);
            self.at_begin = false;
            if self.bytes.is_empty() {
                return Ok(Received::Part);
            }
        }
        // A VMM waits for the answer, so nothing follows the question.
        if self.bytes == WORKING_SET_QUESTION {
            self.bytes.clear();
            self.at_begin = false;
            return Ok(Received::Question);
        }
        if WORKING_SET_QUESTION.starts_with(&self.bytes) {
            return Ok(Received::Part);
        }
        match handshake::parse(&self.bytes) {
            Ok(Progress::More) => Ok(Received::Part),
            Ok(Progress::Mappings(mappings)) => Ok(Received::Mappings(mappings)),
            Err(error @ HandshakeError::Json(_)) if self.fds.is_empty() => {
                Err(format!("{error}, and came without a userfaultfd"))
            }
            Err(error) => Err(error.to_string()),
        }
    }
}

/// The ranges in the line about written pages, once it is complete. It is read once; a line that is
/// malformed or too long is ignored.
pub(super) fn read_written(owed: &mut Option<Lines>, bytes: &[u8]) -> Option<Vec<Extent>> {
    let lines = owed.as_mut()?;
    lines.push(bytes);
    let line = lines.next_line().transpose()?;
    *owed = None;
    let VmmMessage::Written(ranges) = serde_json::from_slice(&line.ok()?).ok()?;
    Some(ranges)
}

/// Sends the reason for the end of a connection, and closes it.
pub(super) fn send_failed(stream: &UnixStream, sentence: &str) {
    send(stream, &PagerMessage::Failed(sentence.to_owned()));
    let _ = stream.shutdown(Shutdown::Both);
}

fn send(mut stream: &UnixStream, message: &PagerMessage) {
    // The VMM may have gone.
    let _ = stream.write_all(&line(message));
}

fn line(message: &PagerMessage) -> Vec<u8> {
    lines::encode(message).expect("a message is plain data")
}
