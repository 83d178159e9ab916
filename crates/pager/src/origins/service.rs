//! `jiffy-origins`: reads from registries and from folders of peers for the pager.
//!
//! It checks what a registry sends against the hashes of its blocks, decompresses nothing, and has
//! neither memory of VMs nor a connection to their VMMs. It is a separate program because it needs
//! what the pager must not have: the network, credentials, and folders that become known later.
//!
//! It is two processes. The first starts the second, and executes credential helpers for it. The
//! second reads from registries and peers, and is confined.

use super::confinement;
use super::helpers::{self, Helpers};
use super::registry::RegistryFile;
use super::request::{Answer, MAX_FETCH, MAX_LINE, Request};
use jiffy_jail::confine;
use jiffy_store::{ImageId, Origin as _, OriginError, PeerFolder, Stop};
use jiffy_sys::fork::{Fork, fork};
use jiffy_sys::mutex::lock;
use jiffy_sys::{causes, fds};
use jiffy_wire::pager::Origin;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Most files in registries that are cached.
const MAX_FILES: usize = 1024;
/// The pause before a dead process is restarted.
const RESTART_DELAY: Duration = Duration::from_millis(100);

/// Serves the channel until the pager closes it. A child process does the work and is restarted
/// when it dies: a crash loses its current requests, but no VM.
pub fn run(channel: OwnedFd) -> io::Result<()> {
    confine::harden().map_err(|error| io::Error::other(causes::sentence(&error)))?;
    let channel = UnixStream::from(channel);
    loop {
        let (helpers, broker) = helpers::pair()?;
        match fork() {
            Ok(Fork::Child) => {
                drop(broker);
                return serve(&channel, helpers);
            }
            Ok(Fork::Parent(child)) => {
                drop(helpers);
                let status = broker.serve(child)?;
                if status.success() || has_hung_up(&channel) {
                    return Ok(());
                }
                tracing::error!(%status, "the process that reads from registries and peers ended: restarting it");
            }
            Err(_) if has_hung_up(&channel) => return Ok(()),
            Err(error) => {
                tracing::error!(%error, "the process that reads from registries and peers can't be started");
            }
        }
        thread::sleep(RESTART_DELAY);
    }
}

fn serve(channel: &UnixStream, helpers: Helpers) -> io::Result<()> {
    let bounded =
        confinement::enter().map_err(|error| io::Error::other(causes::sentence(&error)))?;
    if !bounded {
        tracing::info!("this kernel has no Landlock: only permissions protect files");
    }
    let files = Arc::new(Files::new(helpers));
    loop {
        let mut connections = Vec::new();
        if fds::recv_with_fds(channel, &mut [0; 64], &mut connections)? == 0 {
            return Ok(());
        }
        for connection in connections {
            let files = files.clone();
            let serve = move || files.serve_connection(&UnixStream::from(connection));
            // If no thread starts, the connection is closed, which the pager notices.
            if let Err(error) = thread::Builder::new().name("origin".into()).spawn(serve) {
                tracing::warn!(%error, "a request can't be served");
            }
        }
    }
}

/// The files of registries that were read from.
struct Files {
    /// By the numbers of their origins.
    known: Mutex<HashMap<u64, Arc<RegistryFile>>>,
    helpers: Arc<Helpers>,
}

impl Files {
    fn new(helpers: Helpers) -> Files {
        Files {
            known: Mutex::default(),
            helpers: Arc::new(helpers),
        }
    }

    /// Answers requests until the connection is closed.
    fn serve_connection(&self, connection: &UnixStream) {
        let mut input = BufReader::new(connection);
        loop {
            let mut line = Vec::new();
            let read = (&mut input).take(MAX_LINE).read_until(b'\n', &mut line);
            if read.is_err() || line.is_empty() {
                return;
            }
            let outcome = match serde_json::from_slice(&line) {
                Ok(request) => self.fetch(&request, connection),
                Err(error) => Err(OriginError::permanent(format!(
                    "it is not a request: {error}"
                ))),
            };
            let (answer, bytes) = match outcome {
                Ok(bytes) => (Answer::Bytes, bytes),
                Err(OriginError { why, again }) => (Answer::Failed { why, again }, Vec::new()),
            };
            let mut output = connection;
            let mut line = serde_json::to_vec(&answer).expect("an answer is plain data");
            line.push(b'\n');
            if output.write_all(&line).is_err() || output.write_all(&bytes).is_err() {
                return;
            }
        }
    }

    fn fetch(&self, request: &Request, connection: &UnixStream) -> Result<Vec<u8>, OriginError> {
        let range = request.start..request.end;
        let valid = range.start <= range.end && range.end - range.start <= MAX_FETCH;
        if !valid {
            return Err(OriginError::permanent("the requested range is not valid"));
        }
        match &request.origin {
            Origin::Folder { folder } => {
                let origin = PeerFolder::new(folder, ImageId(request.id), &request.here);
                origin.fetch(range, &Stop::never())
            }
            Origin::Registry(described) => {
                let file = {
                    let mut files = lock(&self.known);
                    if files.len() >= MAX_FILES && !files.contains_key(&request.number) {
                        files.clear();
                    }
                    let new = || Arc::new(RegistryFile::new(described, &self.helpers));
                    files.entry(request.number).or_insert_with(new).clone()
                };
                file.fetch(range, &|| has_hung_up(connection))
            }
        }
    }
}

fn has_hung_up(connection: &UnixStream) -> bool {
    const NOW: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut events = [PollFd::new(connection, PollFlags::RDHUP)];
    matches!(poll(&mut events, Some(&NOW)), Ok(1..))
}
