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
use super::registry::{RegistryFile, new_memory};
use super::request::{Answer, MAX_FETCH, MAX_LINE, Request};
use jiffy_jail::confine;
use jiffy_store::{ImageId, OriginError, PeerFolder};
use jiffy_sys::fork::{Fork, fork};
use jiffy_sys::mutex::lock;
use jiffy_sys::{causes, fds};
use jiffy_wire::lines;
use jiffy_wire::pager::Origin;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
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
///
/// # Errors
///
/// If this process can't be hardened, no socket can be made, or its child can't be waited for; in
/// the child, if it can't be confined.
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
            let (answer, memory) = match outcome {
                Ok((memory, offset)) => (Answer::Bytes { offset }, Some(memory)),
                Err(OriginError { why, again }) => (Answer::Failed { why, again }, None),
            };
            let line = lines::encode(&answer).expect("an answer is plain data");
            let attached: Vec<_> = memory.iter().map(AsFd::as_fd).collect();
            if fds::send_with_fds(connection, &line, &attached).is_err() {
                return;
            }
        }
    }

    /// The bytes of a request in sealed memory, from this offset on.
    fn fetch(
        &self,
        request: &Request,
        connection: &UnixStream,
    ) -> Result<(File, u64), OriginError> {
        let range = request.start..request.end;
        let valid = range.start < range.end && range.end - range.start <= MAX_FETCH;
        if !valid {
            return Err(OriginError::permanent("the requested range is not valid"));
        }
        let (memory, offset) = match &request.origin {
            Origin::Folder { folder } => {
                let origin = PeerFolder::new(folder, ImageId(request.id), &request.here);
                let mut memory = new_memory(range.end - range.start)?;
                origin.read(range.start, &mut memory)?;
                (memory, 0)
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
                file.fetch(range, &|| has_hung_up(connection))?
            }
        };
        let sealed = memory.seal();
        let sealed = sealed.map_err(|error| OriginError::transient(error.to_string()))?;
        Ok((sealed, offset))
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
