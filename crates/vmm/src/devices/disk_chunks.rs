//! Disks whose file a pager fills on demand: the map of present chunks, and requests for missing
//! ones ([`jiffy_wire::disk`]).
//!
//! Everything runs on the disk's own thread and without blocking: any number of reads wait for the
//! pager while others are served. If the pager ends, another one is searched for; after a timeout
//! reads of missing parts fail, and reads of present parts still work.

use crate::events::Events;
use crate::pager::{INTERVAL, Reconnect};
use crate::poll::timespec;
use jiffy_devices::virtio::block::{Fetched, Fetcher, Residency};
use jiffy_sys::dial::{self, Dialer};
use jiffy_sys::handed;
use jiffy_sys::mapped::MappedWords;
use jiffy_sys::mutex::lock;
use jiffy_wire::disk::{
    ANSWER_BYTES_MAX, ChunkAnswer, ChunkRequest, LINE_MAX, MAP_HEADER, MapError, MapHeader,
    REQUEST_BYTES_MAX,
};
use jiffy_wire::lines::{self, Lines};
use jiffy_wire::timeline::names;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long a read waits while no pager can be reached.
const PAGER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a read waits for the pager's answer: the pager asks several origins, each
/// several times.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(180);
/// How often waiting requests are checked for their timeout.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(1);
/// Failures that are logged for each disk: a guest can cause any number of them.
const REPORTS_MAX: u32 = 64;
/// How many 64-bit words a map's header has.
const HEADER_WORDS: usize = MAP_HEADER / 8;

/// Why a map of present chunks can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ResidencyError {
    /// The map can't be read.
    #[error("the map {} of the disk {} can't be used", map.display(), disk.display())]
    Read {
        /// The map's path.
        map: PathBuf,
        /// The disk's path.
        disk: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a valid map.
    #[error("the map {} of the disk {} can't be used", map.display(), disk.display())]
    Map {
        /// The map's path.
        map: PathBuf,
        /// The disk's path.
        disk: PathBuf,
        /// The cause.
        source: MapError,
    },
    /// The map is that of a disk of another size.
    #[error("the map {} is of a disk of {} bytes, but the disk {} has {} bytes", map.display(), mapped, disk.display(), bytes)]
    Length {
        /// The map's path.
        map: PathBuf,
        /// Bytes of the disk according to the map.
        mapped: u64,
        /// The disk's path.
        disk: PathBuf,
        /// Bytes of the disk.
        bytes: u64,
    },
    /// The disk is writable.
    #[error("the disk {} is filled on demand, so it must be read-only", .0.display())]
    Writable(PathBuf),
}

/// Which parts of a disk are present, and the connection over which missing ones are
/// requested.
#[derive(Debug)]
pub struct DiskChunks {
    /// The disk's name for messages.
    name: String,
    words: MappedWords,
    unit: u32,
    length: u64,
    link: Mutex<Link>,
    events: Arc<Events>,
    reported: AtomicU32,
}

/// The way to the pager, and open requests.
#[derive(Debug)]
struct Link {
    socket: PathBuf,
    dialer: Dialer,
    pager: Pager,
    last: u64,
    /// Requests without an answer, by their ids.
    pending: BTreeMap<u64, Pending>,
}

/// The connection to the pager. A VMM that connects by name makes it when something is missing.
#[derive(Debug)]
enum Pager {
    /// There is none. The first request after this time, if there is one, begins to search.
    Disconnected { until: Option<Instant> },
    /// A pager is searched for, because requests are open. The next attempt is made at `next`.
    Searched { search: Reconnect, next: Instant },
    /// Connected.
    Connected(Connection),
    /// The search was given up: why.
    Unreachable(io::Error),
}

/// A connection, and what was received on it.
#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    received: Lines,
    /// An answer that was received without its bytes, and how many follow.
    partial: Option<(ChunkAnswer, usize)>,
    /// Whether the pager was told that it may send bytes.
    is_told: bool,
}

/// A request for missing bytes that was not answered yet.
#[derive(Debug)]
struct Pending {
    bytes: Range<u64>,
    since: Instant,
    /// Whether it was sent on the current connection.
    is_sent: bool,
}

/// The error of a pager that violates the protocol.
const NO_PROTOCOL: &str = "the pager violated its protocol";
/// The bytes of an answer are a multiple of this: a disk's sector.
const SECTOR: usize = 512;

/// Why a read failed, for the timeline.
struct Failure {
    chunk: Option<u32>,
    sentence: String,
}

impl DiskChunks {
    /// Opens the map of the disk at `disk`, of `bytes` bytes. `None` if the whole disk is
    /// present: then it needs no map.
    ///
    /// # Errors
    ///
    /// If the disk is writable, or if its map can't be read, is not valid, or is that of a disk of
    /// another size. A pager that can't be reached is no error.
    pub fn open(
        disk: &jiffy_wire::vmm::Disk,
        bytes: u64,
        events: &Arc<Events>,
    ) -> Result<Option<DiskChunks>, ResidencyError> {
        let Some(residency) = &disk.residency else {
            return Ok(None);
        };
        if !disk.read_only {
            return Err(ResidencyError::Writable(disk.path.clone()));
        }
        let unreadable = |source| ResidencyError::Read {
            map: residency.present.clone(),
            disk: disk.path.clone(),
            source,
        };
        let file = handed::open(&residency.present).map_err(unreadable)?;
        let (words, header) =
            map(&file)
                .map_err(unreadable)?
                .map_err(|source| ResidencyError::Map {
                    map: residency.present.clone(),
                    disk: disk.path.clone(),
                    source,
                })?;
        if header.length != bytes {
            return Err(ResidencyError::Length {
                map: residency.present.clone(),
                mapped: header.length,
                disk: disk.path.clone(),
                bytes,
            });
        }
        let chunks = DiskChunks {
            name: match &disk.serial {
                Some(serial) => format!("{serial} ({})", disk.path.display()),
                None => disk.path.display().to_string(),
            },
            words,
            unit: header.unit,
            length: header.length,
            link: Mutex::new(Link::new(&residency.pager_socket)),
            events: events.clone(),
            reported: AtomicU32::new(0),
        };
        if chunks.is_present(&(0..bytes)) {
            return Ok(None);
        }
        chunks.link().connect_ahead();
        Ok(Some(chunks))
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        lock(&self.link)
    }

    /// The result of an answer to a request for these bytes.
    fn result_of(
        &self,
        link: &mut Link,
        bytes: &Range<u64>,
        answer: ChunkAnswer,
        came: Vec<u8>,
    ) -> Result<Fetched, Failure> {
        match answer {
            ChunkAnswer::Bytes { .. } if came.len() as u64 > bytes.end - bytes.start => {
                link.disconnect();
                Err(self.failure(bytes, NO_PROTOCOL))
            }
            ChunkAnswer::Bytes { .. } => Ok(Fetched::Bytes(came)),
            // Any pager may answer so, but only the map counts.
            ChunkAnswer::Present { .. } if self.is_present(bytes) => Ok(Fetched::Present),
            ChunkAnswer::Present { .. } => Err(self.failure(
                bytes,
                "the pager reports it as present, but the map does not have it",
            )),
            ChunkAnswer::Unavailable {
                chunk, sentence, ..
            } => Err(Failure { chunk, sentence }),
        }
    }

    /// Receives answers; returns the requests that they complete, with their results.
    fn receive_answers(&self, link: &mut Link) -> Vec<(u64, Result<Fetched, Failure>)> {
        let mut outcomes = Vec::new();
        loop {
            let Pager::Connected(connection) = &mut link.pager else {
                return outcomes;
            };
            match connection.next() {
                Ok(None) => return outcomes,
                Ok(Some((answer, came))) => {
                    // Answers to requests that were given up are ignored.
                    let id = answer.id();
                    if let Some(pending) = link.pending.remove(&id) {
                        let outcome = self.result_of(link, &pending.bytes, answer, came);
                        outcomes.push((id, outcome));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    link.disconnect();
                    let refused =
                        |pending: &Pending| Some(self.failure(&pending.bytes, NO_PROTOCOL));
                    outcomes.extend(link.fail(refused));
                    return outcomes;
                }
                Err(_) => {
                    tracing::warn!(
                        disk = self.name,
                        "the pager disconnected; searching for another"
                    );
                    link.disconnect();
                    return outcomes;
                }
            }
        }
    }

    /// Requests that have waited for too long.
    fn expire(&self, link: &mut Link) -> Vec<(u64, Result<Fetched, Failure>)> {
        let socket = link.socket.display().to_string();
        if let Pager::Unreachable(error) = &link.pager {
            let sentence = format!("the pager at {socket} can't be reached: {error}");
            link.pager = Pager::Disconnected { until: None };
            return link.fail(|pending| Some(self.failure(&pending.bytes, &sentence)));
        }
        let seconds = ANSWER_TIMEOUT.as_secs();
        let sentence = format!("the pager at {socket} has not answered for {seconds} s");
        let expired = link.fail(|pending| {
            let is_late = pending.since.elapsed() > ANSWER_TIMEOUT;
            is_late.then(|| self.failure(&pending.bytes, &sentence))
        });
        if !expired.is_empty() {
            link.disconnect();
        }
        expired
    }

    fn failure(&self, bytes: &Range<u64>, sentence: &str) -> Failure {
        Failure {
            chunk: Some((bytes.start / u64::from(self.unit)) as u32),
            sentence: sentence.to_owned(),
        }
    }

    /// Reports a part that can't be read to the timeline.
    fn report(&self, failure: &Failure) {
        if self.reported.fetch_add(1, Ordering::Relaxed) >= REPORTS_MAX {
            return;
        }
        let chunk = failure
            .chunk
            .map_or_else(String::new, |chunk| format!("chunk {chunk}: "));
        let detail = format!("disk {}: {chunk}{}", self.name, failure.sentence);
        tracing::warn!("{detail}");
        self.events.remark(names::CHUNK_UNAVAILABLE, detail);
    }
}

impl Residency for DiskChunks {
    fn is_present(&self, bytes: &Range<u64>) -> bool {
        let unit = u64::from(self.unit);
        // A disk has at most 2^32 - 1 units.
        let mut at = bytes.start / unit;
        let end = bytes.end.min(self.length).div_ceil(unit);
        while at < end {
            let until = end.min((at / 64 + 1) * 64);
            let mask = (u64::MAX >> (64 - (until - at))) << (at % 64);
            if self.words.get(HEADER_WORDS + (at / 64) as usize) & mask != mask {
                return false;
            }
            at = until;
        }
        true
    }

    fn fetcher(&self) -> Option<&dyn Fetcher> {
        Some(self)
    }
}

impl Fetcher for DiskChunks {
    fn ask(&self, bytes: Range<u64>) -> u64 {
        debug_assert!(bytes.end - bytes.start <= REQUEST_BYTES_MAX);
        let mut link = self.link();
        link.last += 1;
        let id = link.last;
        let pending = Pending {
            bytes,
            since: Instant::now(),
            is_sent: false,
        };
        link.pending.insert(id, pending);
        link.send_all();
        id
    }

    fn answers(&self) -> Vec<(u64, io::Result<Fetched>)> {
        let mut link = self.link();
        link.send_all();
        let mut outcomes = self.receive_answers(&mut link);
        outcomes.extend(self.expire(&mut link));
        drop(link);
        let reported = outcomes.into_iter().map(|(id, outcome)| {
            let outcome = outcome.map_err(|failure| {
                self.report(&failure);
                io::Error::other(failure.sentence)
            });
            (id, outcome)
        });
        reported.collect()
    }

    fn wait(&self, wakeup: BorrowedFd<'_>) -> io::Result<bool> {
        let link = self.link();
        let mut fds = vec![PollFd::from_borrowed_fd(wakeup, PollFlags::IN)];
        let time = match &link.pager {
            Pager::Connected(connection) => {
                fds.push(PollFd::new(&connection.stream, PollFlags::IN));
                // The timeout of a silent pager is checked at intervals.
                EXPIRY_INTERVAL
            }
            _ => INTERVAL,
        };
        match poll(&mut fds, Some(&timespec(time))) {
            Ok(_) => Ok(!fds[0].revents().is_empty()),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn give_up(&self) {
        let mut link = self.link();
        link.pending.clear();
        match link.pager {
            Pager::Searched { next, .. } => {
                link.pager = Pager::Disconnected { until: Some(next) };
            }
            // Of the requests that were given up.
            Pager::Unreachable(_) => link.pager = Pager::Disconnected { until: None },
            _ => {}
        }
    }
}

impl Link {
    fn new(socket: &Path) -> Link {
        Link {
            socket: socket.to_owned(),
            dialer: Dialer::new(socket),
            pager: Pager::Disconnected { until: None },
            last: 0,
            pending: BTreeMap::new(),
        }
    }

    /// Connects by name while this process may still do so, if it has to ask later.
    fn connect_ahead(&mut self) {
        if !self.dialer.is_by_name()
            && let Ok(stream) = dial::connect(&self.socket)
        {
            self.pager = Pager::Connected(Connection::new(stream));
        }
    }

    /// Closes the connection. Requests that were sent on it are to be sent again.
    fn disconnect(&mut self) {
        let until = Some(Instant::now() + INTERVAL);
        self.pager = Pager::Disconnected { until };
        for pending in self.pending.values_mut() {
            pending.is_sent = false;
        }
    }

    /// Sends requests that were not sent yet; connects to a pager first if necessary. Never blocks: if
    /// the pager is busy, the caller tries again later.
    fn send_all(&mut self) {
        if self.pending.values().all(|pending| pending.is_sent) {
            return;
        }
        let search = match &mut self.pager {
            Pager::Unreachable(_) => return,
            Pager::Disconnected { until } if is_later(*until) => return,
            Pager::Disconnected { .. } => Reconnect::within(PAGER_TIMEOUT),
            Pager::Searched { next, .. } if is_later(Some(*next)) => return,
            Pager::Searched { search, .. } => *search,
            Pager::Connected(connection) => {
                if connection.send(&mut self.pending).is_err() {
                    self.disconnect();
                }
                return;
            }
        };
        let next = Instant::now() + INTERVAL;
        self.pager = match search.attempt(|| self.dialer.attempt()) {
            Ok(None) => Pager::Searched { search, next },
            Err(error) => Pager::Unreachable(error),
            Ok(Some(stream)) => {
                let mut connection = Connection::new(stream);
                match connection.send(&mut self.pending) {
                    Ok(()) => Pager::Connected(connection),
                    Err(_) => Pager::Searched { search, next },
                }
            }
        };
    }

    /// Removes the requests for which `failure` returns one.
    fn fail(
        &mut self,
        failure: impl Fn(&Pending) -> Option<Failure>,
    ) -> Vec<(u64, Result<Fetched, Failure>)> {
        let mut failed = Vec::new();
        self.pending.retain(|id, pending| match failure(pending) {
            Some(failure) => {
                failed.push((*id, Err(failure)));
                false
            }
            None => true,
        });
        failed
    }
}

/// Whether this time has not come yet.
fn is_later(time: Option<Instant>) -> bool {
    time.is_some_and(|time| Instant::now() < time)
}

impl Connection {
    fn new(stream: UnixStream) -> Connection {
        Connection {
            stream,
            received: Lines::new(LINE_MAX),
            partial: None,
            is_told: false,
        }
    }

    /// Sends the requests that were not sent yet. If it fails, none counts as sent.
    fn send(&mut self, pending: &mut BTreeMap<u64, Pending>) -> io::Result<()> {
        let mut lines = Vec::with_capacity(128);
        if !self.is_told {
            lines.extend(encode_line(&ChunkRequest::TAKES_BYTES));
            self.is_told = true;
        }
        for (id, pending) in pending.iter().filter(|(_, pending)| !pending.is_sent) {
            lines.extend(encode_line(&ChunkRequest {
                id: *id,
                offset: pending.bytes.start,
                length: pending.bytes.end - pending.bytes.start,
            }));
        }
        // The lines of a whole queue are far shorter than what the socket takes at once.
        if send(&self.stream, &lines, SendFlags::NOSIGNAL)? < lines.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        for pending in pending.values_mut() {
            pending.is_sent = true;
        }
        Ok(())
    }

    /// The next answer that has arrived, with its bytes. `InvalidData` if the pager violates the
    /// protocol; any other error if the connection is lost.
    fn next(&mut self) -> io::Result<Option<(ChunkAnswer, Vec<u8>)>> {
        loop {
            if let Some(answer) = next_answer(&mut self.received, &mut self.partial)? {
                return Ok(Some(answer));
            }
            let mut bytes = [0; LINE_MAX];
            match recv(&self.stream, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(io::ErrorKind::ConnectionReset.into()),
                Ok((count, _)) => self.received.push(&bytes[..count]),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The next answer of the received bytes; `partial` is one whose bytes have not all arrived.
pub(crate) fn next_answer(
    received: &mut Lines,
    partial: &mut Option<(ChunkAnswer, usize)>,
) -> io::Result<Option<(ChunkAnswer, Vec<u8>)>> {
    let no_answer = || io::Error::new(io::ErrorKind::InvalidData, NO_PROTOCOL);
    let (answer, length) = match partial.take() {
        Some(partial) => partial,
        None => {
            let Some(line) = received.next_line().map_err(|_| no_answer())? else {
                return Ok(None);
            };
            let answer = serde_json::from_slice(&line).map_err(|_| no_answer())?;
            let length = match answer {
                ChunkAnswer::Bytes { length, .. } => length,
                _ => return Ok(Some((answer, Vec::new()))),
            };
            if length == 0 || length > ANSWER_BYTES_MAX || !length.is_multiple_of(SECTOR) {
                return Err(no_answer());
            }
            (answer, length)
        }
    };
    let Some(bytes) = received.next_bytes(length) else {
        *partial = Some((answer, length));
        return Ok(None);
    };
    Ok(Some((answer, bytes)))
}

fn encode_line(request: &ChunkRequest) -> Vec<u8> {
    lines::encode(request).expect("a request is plain data")
}

/// Maps the file of a map, and reads its header.
fn map(file: &File) -> io::Result<Result<(MappedWords, MapHeader), MapError>> {
    let length = file.metadata()?.len();
    let mut head = [0; MAP_HEADER];
    if length < MAP_HEADER as u64 {
        return Ok(Err(MapError::NotAMap));
    }
    file.read_exact_at(&mut head, 0)?;
    Ok(match MapHeader::decode(&head, length) {
        Ok(header) => Ok((MappedWords::new(file)?, header)),
        Err(error) => Err(error),
    })
}

#[cfg(test)]
mod tests;
