//! A VM to be served, and its VMM if it is there.

use super::{Notice, Notifier, listen};
use crate::handshake::{self, HandshakeError, Layout, Progress};
use crate::image::{ChunkImage, ImageKey, StoredImage};
use crate::pool::Pool;
use crate::vm::{Counters, Owner, Removed, Touched, Vm, VmParts};
use crate::working_set::{Offer, WorkingSets};
use jiffy_store::Recording;
use jiffy_sys::fds::{recv_with_fds, send_with_fds};
use jiffy_sys::userfaultfd::Userfaultfd;
use jiffy_wire::pager::{
    Mapping, PagerRequest, PagerStats, PagerWord, VmmWord, WORKING_SET_LINE, WORKING_SET_QUESTION,
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

/// How long a VMM may take for its handshake, and to go on with it after an answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long an order to complete waits for the VMM. One whose pager died looks for the next
/// for 900 ms, and may need [`PATIENCE`] for its handshake.
const VMM_PATIENCE: Duration = Duration::from_secs(5);

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
    /// Clients that want all of it, until when they wait for the VMM to be there.
    completing: Vec<(u64, Instant)>,
}

enum Peer {
    /// It has not said all yet.
    Greeting(Greeting),
    /// It is served.
    Attached {
        stream: UnixStream,
        vm: Arc<Vm>,
        /// What came of the line that it was asked for.
        telling: Option<Vec<u8>>,
    },
}

struct Greeting {
    stream: UnixStream,
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// What it was given to map.
    shared: Option<Offer>,
    answered: bool,
    deadline: Instant,
}

/// What a VMM said.
enum Said {
    /// Nothing whole yet.
    Part,
    /// It wants what is there of the working set.
    Question,
    /// Its memory.
    Mappings(Vec<Mapping>),
}

/// What came of hearing a VMM.
pub(super) enum Heard {
    Nothing,
    /// It is served from now on.
    Attached,
    /// Its guest has written these ranges of the working set.
    Wrote(ImageKey, Vec<Extent>),
    /// It was served, and has gone.
    Gone,
}

impl Served {
    /// Listens. `request` is a `Serve`.
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
        let listener = listen::anew(&socket)
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

    /// The image and what tells it from others.
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
            Peer::Greeting(greeting) => greeting.stream.as_fd(),
            Peer::Attached { stream, .. } => stream.as_fd(),
        })
    }

    /// When a handshake has to be over.
    fn handshake_deadline(&self) -> Option<Instant> {
        match &self.peer {
            Some(Peer::Greeting(greeting)) => Some(greeting.deadline),
            _ => None,
        }
    }

    /// When something is over that is waited for.
    pub fn deadline(&self) -> Option<Instant> {
        let completing = self.completing.iter().map(|(_, deadline)| *deadline);
        self.handshake_deadline()
            .into_iter()
            .chain(completing)
            .min()
    }

    /// A client waits for the VMM.
    pub fn await_vmm(&mut self, client: u64) {
        let deadline = Instant::now() + VMM_PATIENCE;
        self.completing.push((client, deadline));
    }

    /// Clients that wait for the VMM no more: all, or those whose time is over.
    pub fn stop_waiting(&mut self, until: Option<Instant>) -> Vec<u64> {
        let is_over = |(_, deadline): &mut (u64, Instant)| until.is_none_or(|now| *deadline <= now);
        let over = self.completing.extract_if(.., is_over);
        over.map(|(client, _)| client).collect()
    }

    /// One VMM at a time: others wait in the socket's queue.
    pub fn accept(&mut self) {
        self.peer = listen::accept(&self.listener).map(|stream| {
            Peer::Greeting(Greeting {
                stream,
                bytes: Vec::new(),
                fds: Vec::new(),
                shared: None,
                answered: false,
                deadline: Instant::now() + PATIENCE,
            })
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

    /// Hears what the VMM says, if it says something.
    pub fn hear(
        &mut self,
        pool: &Pool,
        notifier: &Notifier,
        sets: &mut WorkingSets,
        token: u64,
    ) -> Heard {
        match &mut self.peer {
            None => Heard::Nothing,
            Some(Peer::Attached {
                stream, telling, ..
            }) => {
                // If it was not asked, only its end matters.
                let mut bytes = [0; 4096];
                match io::Read::read(stream, &mut bytes) {
                    Ok(0) => {}
                    Ok(count) => {
                        let told = self.key.zip(hear_written(telling, &bytes[..count]));
                        return told.map_or(Heard::Nothing, |(key, what)| Heard::Wrote(key, what));
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        return Heard::Nothing;
                    }
                    Err(_) => {}
                }
                tracing::info!(vm = self.name, "its VMM has gone");
                self.let_go(pool);
                Heard::Gone
            }
            Some(Peer::Greeting(greeting)) => {
                let outcome = match greeting.hear() {
                    Ok(Said::Part) => Ok(Heard::Nothing),
                    Ok(Said::Question) => self.answer(sets).map(|()| Heard::Nothing),
                    Ok(Said::Mappings(mappings)) => self
                        .attach(&mappings, pool, notifier, token)
                        .map(|()| Heard::Attached),
                    Err(sentence) => Err(sentence),
                };
                outcome.unwrap_or_else(|sentence| {
                    self.refuse(&sentence);
                    Heard::Nothing
                })
            }
        }
    }

    /// Gives the VMM what is there of the working set.
    fn answer(&mut self, sets: &mut WorkingSets) -> Result<(), String> {
        // What a recorded VM touches has to come to the pager.
        let wanted = self.prefetch && self.touched.is_none();
        let offer = self.key.filter(|_| wanted).and_then(|key| sets.of(key));
        let Some(Peer::Greeting(greeting)) = &mut self.peer else {
            return Ok(());
        };
        let word = match &offer {
            Some((set, written)) => PagerWord::WorkingSet {
                ranges: set.covers().to_vec(),
                written: written.clone(),
            },
            None => PagerWord::WorkingSet {
                ranges: Vec::new(),
                written: None,
            },
        };
        let files: Vec<BorrowedFd<'_>> = offer.iter().map(|(set, _)| set.as_fd()).collect();
        send_with_fds(&greeting.stream, &line(&word), &files)
            .map_err(|error| format!("the VMM does not take an answer: {error}"))?;
        greeting.shared = offer;
        // It could say no more before it heard this, however late that was. Once: who
        // asks again and again is not waited for.
        if !mem::replace(&mut greeting.answered, true) {
            greeting.deadline = Instant::now() + PATIENCE;
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
        let Some(Peer::Greeting(Greeting {
            stream,
            fds,
            shared,
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
        let removed = self.removed(&layout, &stream);
        let told = notifier.clone();
        let vm = Vm::new(VmParts {
            name: self.name.clone(),
            token,
            uffd,
            layout,
            image: self.image.clone(),
            removed,
            counters: self.counters.clone(),
            touched: self.touched.clone(),
            on_failure: Box::new(move |sentence| {
                told.send(Notice::Failed {
                    token,
                    sentence: sentence.to_owned(),
                });
            }),
        });
        let vm = vm.map_err(|error| format!("the userfaultfd cannot be used: {error}"))?;
        let vm = Arc::new(vm);
        let mut telling = None;
        if let Some((set, written)) = &shared {
            vm.note_shared(set.covers());
            telling = written.is_none().then(Vec::new);
        }
        pool.attach(vm.clone())
            .map_err(|error| format!("the userfaultfd cannot be watched: {error}"))?;
        tracing::info!(vm = self.name, prefetch = self.prefetch, "its VMM is here");
        if self.prefetch {
            let (notifier, name) = (notifier.clone(), self.name.clone());
            pool.prefetch(&vm, move || notifier.send(Notice::Prefetched { name }));
        }
        self.failed = None;
        self.peer = Some(Peer::Attached {
            stream,
            vm,
            telling,
        });
        Ok(())
    }

    /// What the VM has given up: known from a predecessor if this is the same
    /// process still.
    fn removed(&self, layout: &Layout, stream: &UnixStream) -> Removed {
        let owner = rustix::net::sockopt::socket_peercred(stream)
            .ok()
            .and_then(|peer| Owner::of(peer.pid.as_raw_nonzero().get() as u32));
        let Some(owner) = owner else {
            return Removed::new(layout);
        };
        Removed::open(layout, &self.notes(), &owner).unwrap_or_else(|error| {
            tracing::warn!(vm = self.name, %error, "given-up pages cannot be noted for a successor");
            Removed::new(layout)
        })
    }

    /// Tells the VMM why, and closes the connection.
    fn refuse(&mut self, sentence: &str) {
        tracing::warn!(vm = self.name, "{sentence}");
        if let Some(Peer::Greeting(greeting)) = self.peer.take() {
            say_failed(&greeting.stream, sentence);
        }
    }

    /// The VM can be served no longer.
    pub fn fail(&mut self, pool: &Pool, sentence: &str) {
        self.failed = Some(sentence.to_owned());
        if let Some(Peer::Attached { stream, vm, .. }) = self.peer.take() {
            pool.detach(&vm);
            say_failed(&stream, sentence);
        }
    }

    /// Nothing that is not zero is missing any more: the VMM may stop faulting.
    pub fn say_complete(&self) {
        if let Some(Peer::Attached { stream, .. }) = &self.peer {
            say(stream, &PagerWord::Complete(true));
        }
    }

    /// Serves the VMM no longer, if there is one.
    pub fn let_go(&mut self, pool: &Pool) {
        if let Some(Peer::Attached { vm, .. }) = self.peer.take() {
            pool.detach(&vm);
        }
    }

    pub fn remove_socket(&self) {
        let _ = fs::remove_file(&self.socket);
    }

    /// Nobody will go on with this VM.
    pub fn remove_notes(&self) {
        let _ = fs::remove_file(self.notes());
    }

    fn notes(&self) -> PathBuf {
        let mut path = self.socket.clone().into_os_string();
        path.push(".removed");
        path.into()
    }

    /// What was touched so far, if that is to be written anywhere.
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

impl Greeting {
    /// A question, or the mappings once all have come. An error ends the
    /// connection.
    fn hear(&mut self) -> Result<Said, String> {
        let mut buffer = [0; 4096];
        let bytes = match recv_with_fds(&self.stream, &mut buffer, &mut self.fds) {
            Ok(0) => return Err("the VMM hung up in its handshake".into()),
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Said::Part),
            Err(error) => return Err(format!("the handshake cannot be read: {error}")),
        };
        self.bytes.extend(&buffer[..bytes]);
        if self.fds.len() > 1 {
            return Err("the handshake came with more than one descriptor".into());
        }
        // Who asks waits for the answer, and says nothing behind it.
        if self.bytes == WORKING_SET_QUESTION {
            self.bytes.clear();
            return Ok(Said::Question);
        }
        if WORKING_SET_QUESTION.starts_with(&self.bytes) {
            return Ok(Said::Part);
        }
        match handshake::parse(&self.bytes) {
            Ok(Progress::More) => Ok(Said::Part),
            Ok(Progress::Mappings(mappings)) => Ok(Said::Mappings(mappings)),
            Err(error @ HandshakeError::Json(_)) if self.fds.is_empty() => {
                Err(format!("{error}, and came without a userfaultfd"))
            }
            Err(error) => Err(error.to_string()),
        }
    }
}

/// What the line says that the VMM was asked for, when it is whole. It is read once,
/// and what is no such line, or too long, not at all.
fn hear_written(telling: &mut Option<Vec<u8>>, bytes: &[u8]) -> Option<Vec<Extent>> {
    let line = telling.as_mut()?;
    line.extend(bytes);
    if line.last() != Some(&b'\n') && line.len() < WORKING_SET_LINE {
        return None;
    }
    let line = telling.take()?;
    let VmmWord::Written(ranges) = serde_json::from_slice(&line).ok()?;
    Some(ranges)
}

/// Says why a connection ends, and closes it.
pub(super) fn say_failed(stream: &UnixStream, sentence: &str) {
    say(stream, &PagerWord::Failed(sentence.to_owned()));
    let _ = stream.shutdown(Shutdown::Both);
}

fn say(mut stream: &UnixStream, word: &PagerWord) {
    // The VMM may have gone.
    let _ = stream.write_all(&line(word));
}

fn line(word: &PagerWord) -> Vec<u8> {
    let mut line = serde_json::to_vec(word).expect("a word is plain data");
    line.push(b'\n');
    line
}
