//! Disks whose file a pager fills as they are read: the map of what is present, and
//! requests for what is missing ([`jiffy_wire::disk`]).
//!
//! Everything happens in the disk's own thread. If the pager ends, another is looked for;
//! after a while reads of missing parts fail, and reads of present parts still work.

use crate::events::Events;
use crate::pager::{INTERVAL, Reconnect};
use crate::readable::timespec;
use jiffy_devices::virtio::block::{Fetched, Residency, StopOrder};
use jiffy_sys::handed;
use jiffy_sys::mapped::MappedWords;
use jiffy_wire::disk::{
    ANSWER_BYTES_MAX, ChunkAnswer, ChunkRequest, LINE_MAX, MAP_HEADER, MapError, MapHeader,
    REQUEST_BYTES_MAX,
};
use jiffy_wire::timeline::names;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long a read waits until a pager can be reached.
const PAGER_PATIENCE: Duration = Duration::from_secs(10);
/// How long a read waits for the pager's answer: the pager asks several origins, each
/// several times.
const ANSWER_PATIENCE: Duration = Duration::from_secs(180);
/// How often the order to stop is looked for by one who has no bell.
const GLANCE: Duration = Duration::from_millis(50);
/// Failures that are logged for each disk: a guest can cause any number of them.
const TOLD_MAX: u32 = 64;
/// The 64-bit words of a map's header.
const HEADER_WORDS: usize = MAP_HEADER / 8;

/// A map of what is there that cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ResidencyError {
    /// It cannot be read.
    #[error("the map {} of the disk {} can't be used", map.display(), disk.display())]
    Read {
        /// The map.
        map: PathBuf,
        /// The disk.
        disk: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is not a map.
    #[error("the map {} of the disk {} can't be used", map.display(), disk.display())]
    Map {
        /// The map.
        map: PathBuf,
        /// The disk.
        disk: PathBuf,
        /// Why.
        source: MapError,
    },
    /// It is one of another disk.
    #[error("{} is the map of a disk of {} bytes, and {} has {}", map.display(), mapped, disk.display(), bytes)]
    Length {
        /// The map.
        map: PathBuf,
        /// Bytes of the disk it is of.
        mapped: u64,
        /// The disk.
        disk: PathBuf,
        /// Its bytes.
        bytes: u64,
    },
    /// The guest may write.
    #[error("the disk {} is filled on demand, and must be read-only", .0.display())]
    Writable(PathBuf),
}

/// Which parts of a disk are present, and the connection over which missing ones are
/// requested.
#[derive(Debug)]
pub struct DiskChunks {
    /// For messages.
    name: String,
    words: MappedWords,
    unit: u32,
    length: u64,
    socket: PathBuf,
    link: Mutex<Link>,
    events: Arc<Events>,
    told: AtomicU32,
}

/// The connection to the pager; made when something is missing.
#[derive(Debug, Default)]
struct Link {
    stream: Option<OwnedFd>,
    heard: Vec<u8>,
    /// An answer of which so many bytes follow.
    coming: Option<(ChunkAnswer, usize)>,
    last: u64,
    /// The pager was told that bytes are taken.
    is_told: bool,
}

/// What the pager does not do.
const NO_PROTOCOL: &str = "the pager does not keep to its protocol";
/// What bytes of an answer are multiples of: a disk's sectors.
const SECTOR: usize = 512;

/// Why a read cannot be had: for the timeline.
struct Failure {
    chunk: Option<u32>,
    sentence: String,
}

impl DiskChunks {
    /// Opens the map of the disk at `disk`, which has so many bytes. `None` if
    /// all of it is there: then it is a disk as any other.
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
            socket: residency.pager_socket.clone(),
            link: Mutex::default(),
            events: events.clone(),
            told: AtomicU32::new(0),
        };
        Ok((!chunks.is_present(&(0..bytes))).then_some(chunks))
    }

    /// Asks the pager, and waits until it has answered.
    fn ask(&self, bytes: &Range<u64>, order: &StopOrder) -> io::Result<Result<Fetched, Failure>> {
        let failed = |sentence: String| {
            Ok(Err(Failure {
                chunk: Some((bytes.start / u64::from(self.unit)) as u32),
                sentence,
            }))
        };
        let mut link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        let mut search = Reconnect::within(PAGER_PATIENCE);
        let mut asked = None;
        loop {
            if order.has_come() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            if begun.elapsed() > ANSWER_PATIENCE {
                link.hang_up();
                return failed(format!(
                    "the pager at {} has not answered for {} s",
                    self.socket.display(),
                    ANSWER_PATIENCE.as_secs()
                ));
            }
            if link.stream.is_none() {
                asked = None;
                match search.attempt(|| link.connect(&self.socket)) {
                    Ok(Some(())) => {}
                    Ok(None) => {
                        wait(None, order, INTERVAL)?;
                        continue;
                    }
                    Err(error) => {
                        return failed(format!(
                            "the pager at {} can't be reached: {error}",
                            self.socket.display()
                        ));
                    }
                }
            }
            let id = match asked {
                Some(id) => id,
                None => match link.request(bytes) {
                    Ok(id) => *asked.insert(id),
                    Err(_) => {
                        link.hang_up();
                        search = Reconnect::within(PAGER_PATIENCE);
                        continue;
                    }
                },
            };
            match link.hear(id) {
                Ok(Some((ChunkAnswer::Bytes { .. }, came))) => {
                    if came.len() as u64 > bytes.end - bytes.start {
                        link.hang_up();
                        return failed(NO_PROTOCOL.into());
                    }
                    return Ok(Ok(Fetched::Bytes(came)));
                }
                Ok(Some((ChunkAnswer::Present { .. }, _))) => {
                    // Others may answer so, but the map is what counts.
                    return match self.is_present(bytes) {
                        true => Ok(Ok(Fetched::Present)),
                        false => failed("the pager says that it is there, and it is not".into()),
                    };
                }
                Ok(Some((
                    ChunkAnswer::Unavailable {
                        chunk, sentence, ..
                    },
                    _,
                ))) => return Ok(Err(Failure { chunk, sentence })),
                Ok(None) => wait(link.stream.as_ref(), order, GLANCE)?,
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    link.hang_up();
                    return failed(error.to_string());
                }
                Err(_) => {
                    tracing::warn!(disk = self.name, "the pager is gone; looking for another");
                    link.hang_up();
                    search = Reconnect::within(PAGER_PATIENCE);
                    wait(None, order, INTERVAL)?;
                }
            }
        }
    }

    /// Tells the timeline of a part that cannot be had.
    fn tell(&self, failure: &Failure) {
        if self.told.fetch_add(1, Ordering::Relaxed) >= TOLD_MAX {
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
        // A disk has at most 2^32 - 1 of them.
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

    fn fetch(&self, bytes: &Range<u64>, order: &StopOrder) -> io::Result<Fetched> {
        debug_assert!(bytes.end - bytes.start <= REQUEST_BYTES_MAX);
        match self.ask(bytes, order)? {
            Ok(fetched) => Ok(fetched),
            Err(failure) => {
                self.tell(&failure);
                Err(io::Error::other(failure.sentence))
            }
        }
    }
}

impl Link {
    /// Never blocks: a busy pager is tried again.
    fn connect(&mut self, path: &Path) -> io::Result<()> {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        self.heard.clear();
        self.coming = None;
        self.is_told = false;
        self.stream = Some(socket);
        Ok(())
    }

    fn hang_up(&mut self) {
        self.stream = None;
    }

    fn request(&mut self, bytes: &Range<u64>) -> io::Result<u64> {
        self.last += 1;
        let request = ChunkRequest {
            id: self.last,
            offset: bytes.start,
            length: bytes.end - bytes.start,
        };
        let mut line = Vec::with_capacity(128);
        if !self.is_told {
            line.extend(line_of(&ChunkRequest::TAKES_BYTES));
            self.is_told = true;
        }
        line.extend(line_of(&request));
        let stream = self.stream.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        // A line is far shorter than what the socket takes at once.
        match send(stream, &line, SendFlags::NOSIGNAL)? {
            sent if sent == line.len() => Ok(request.id),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// The answer to this request, with its bytes, if it is there; those to requests that
    /// were given up are passed over. `InvalidData` if the pager does not keep to
    /// the protocol; any other error if it is gone.
    fn hear(&mut self, id: u64) -> io::Result<Option<(ChunkAnswer, Vec<u8>)>> {
        loop {
            while let Some((answer, bytes)) = self.next_answer()? {
                if answer.id() == id {
                    return Ok(Some((answer, bytes)));
                }
            }
            let stream = self.stream.as_ref().ok_or(io::ErrorKind::NotConnected)?;
            let mut bytes = [0; LINE_MAX];
            match recv(stream, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(io::ErrorKind::ConnectionReset.into()),
                Ok((count, _)) => self.heard.extend_from_slice(&bytes[..count]),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The next answer of what was heard.
    fn next_answer(&mut self) -> io::Result<Option<(ChunkAnswer, Vec<u8>)>> {
        let no_answer = || io::Error::new(io::ErrorKind::InvalidData, NO_PROTOCOL);
        let (answer, length) = match self.coming.take() {
            Some(coming) => coming,
            None => {
                let Some(end) = self.heard.iter().position(|byte| *byte == b'\n') else {
                    let is_line = self.heard.len() <= LINE_MAX;
                    return is_line.then_some(None).ok_or_else(no_answer);
                };
                let line: Vec<u8> = self.heard.drain(..=end).collect();
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
        if self.heard.len() < length {
            self.coming = Some((answer, length));
            return Ok(None);
        }
        Ok(Some((answer, self.heard.drain(..length).collect())))
    }
}

fn line_of(request: &ChunkRequest) -> Vec<u8> {
    let mut line = serde_json::to_vec(request).expect("a request is plain data");
    line.push(b'\n');
    line
}

/// Waits until there is something to hear, the order to stop may have come, or
/// so much time has passed (if nothing else tells of the order).
fn wait(stream: Option<&OwnedFd>, order: &StopOrder, time: Duration) -> io::Result<()> {
    let bell = order.bell();
    let mut fds = Vec::with_capacity(2);
    fds.extend(stream.map(|stream| PollFd::new(stream, PollFlags::IN)));
    fds.extend(bell.map(|bell| PollFd::from_borrowed_fd(bell, PollFlags::IN)));
    let time = match (stream, bell) {
        // The patience with a silent pager is looked at now and then.
        (Some(_), Some(_)) => Duration::from_secs(1),
        _ => time,
    };
    match poll(&mut fds, Some(&timespec(time))) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let rung = bell.is_some() && fds.last().is_some_and(|fd| !fd.revents().is_empty());
    drop(fds);
    if rung {
        order.silence();
    }
    Ok(())
}

/// Maps a map, and reads its header.
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
