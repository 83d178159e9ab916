//! Records which requests have begun, for clients that lose their connection before the answer.
//!
//! A client gives an id to a request that must not be done twice ([`REQUEST_HEADER`]). Before the
//! request is handled, the id is written to a file in the run folder, where this daemon and the
//! next one find it. The file is a ring of fixed size, so that an id needs no space on a full disk.
//! It outlives the daemon, but not the host. Little endian:
//!
//! | bytes | slot 0 | further slots |
//! |---|---|---|
//! | 8 | magic `JIFFYREQ` | number of the request, from 1; 0 if the slot is empty |
//! | 32 | version, 1, then zeros | id |

use axum::http::HeaderMap;
use jiffy_content::error::{Error, Result};
use jiffy_sys::mutex::lock;
use jiffy_sys::regular;
use jiffy_wire::api::REQUEST_HEADER;
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tracing::warn;

const MAGIC: &[u8; 8] = b"JIFFYREQ";
const VERSION: u8 = 1;
/// Hexadecimal digits of an id.
const DIGITS: usize = 32;
const SLOT: usize = 8 + DIGITS;
/// Number of ids that are kept. Clients ask for an id soon after they have sent the request.
const KEPT: u64 = 32_768;
/// A client asks for its request at most this long after it was sent.
const ASKED_WITHIN: Duration = Duration::from_secs(60);
/// Ids of requests that must not begin any more, because their clients were told so.
const GIVEN_UP: usize = 256;
const BYTES: usize = SLOT * (KEPT as usize + 1);

/// The id of a request.
type Id = [u8; DIGITS];

/// Requests that have begun.
#[derive(Debug)]
pub struct Begun {
    /// `None` if the file could not be made: then the state of requests is unknown.
    ring: Option<Mutex<Ring>>,
}

#[derive(Debug)]
struct Ring {
    file: File,
    /// Number of the last request.
    last: u64,
    /// When the file was made; `None` if an earlier daemon made it.
    made: Option<Instant>,
    /// Ids that were reported to clients as not begun, the oldest first.
    given_up: VecDeque<Id>,
}

impl Begun {
    /// Opens the file at `path`, or makes it.
    pub fn open(path: &Path) -> Begun {
        let ring = Ring::open(path).inspect_err(|error| {
            let file = path.display();
            warn!(%file, %error, "the record of begun requests can't be opened: clients that lose their connection can't ask whether their request was begun");
        });
        Begun {
            ring: ring.ok().map(Mutex::new),
        }
    }

    /// Records that the request with this id begins.
    ///
    /// # Errors
    ///
    /// If the id is invalid, it can't be written, or its client was told that the request had not
    /// begun: the client may have sent another.
    pub fn note(&self, id: &str) -> Result<()> {
        let id = parse(id)?;
        let Some(ring) = &self.ring else {
            return Ok(());
        };
        let mut ring = lock(ring);
        if ring.given_up.contains(&id) {
            return Err(Error::conflict(
                "The request came after its client was told that it was not begun.",
            ));
        }
        ring.add(&id).map_err(|error| {
            Error::internal(format!("The id of a request can't be recorded: {error}."))
        })
    }

    /// Has the request begun? `None` if that is unknown. A request that has not will never begin.
    ///
    /// # Errors
    ///
    /// If the id is invalid, or the record can't be read.
    pub fn has(&self, id: &str) -> Result<Option<bool>> {
        let id = parse(id)?;
        let Some(ring) = &self.ring else {
            return Ok(None);
        };
        let mut ring = lock(ring);
        let slots = ring.read().map_err(|error| {
            Error::internal(format!(
                "The record of begun requests can't be read: {error}."
            ))
        })?;
        let mut slots = slots.chunks_exact(SLOT).skip(1);
        if slots.any(|slot| slot[8..] == id) {
            return Ok(Some(true));
        }
        if ring.made.is_some_and(|made| made.elapsed() < ASKED_WITHIN) {
            // An earlier daemon that left no file may have begun it.
            return Ok(None);
        }
        if ring.given_up.len() == GIVEN_UP {
            ring.given_up.pop_front();
        }
        ring.given_up.push_back(id);
        Ok(Some(false))
    }
}

impl Ring {
    fn open(path: &Path) -> io::Result<Ring> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = regular::make_with(options.mode(0o600), path)?;
        let mut ring = Ring {
            file,
            last: 0,
            made: None,
            given_up: VecDeque::new(),
        };
        match ring.read() {
            Ok(slots) if slots[..SLOT] == header() => {
                let numbers = slots.chunks_exact(SLOT).skip(1).map(number);
                // The largest number is that of a damaged slot.
                let possible = numbers.filter(|number| *number != u64::MAX);
                ring.last = possible.max().unwrap_or(0);
            }
            // The file is new, or was not written by this version.
            _ => {
                let mut slots = vec![0; BYTES];
                slots[..SLOT].copy_from_slice(&header());
                ring.file.set_len(0)?;
                ring.file.write_all_at(&slots, 0)?;
                ring.made = Some(Instant::now());
            }
        }
        Ok(ring)
    }

    fn read(&self) -> io::Result<Vec<u8>> {
        let mut slots = vec![0; BYTES];
        self.file.read_exact_at(&mut slots, 0)?;
        Ok(slots)
    }

    fn add(&mut self, id: &Id) -> io::Result<()> {
        self.last += 1;
        let mut slot = [0; SLOT];
        slot[..8].copy_from_slice(&self.last.to_le_bytes());
        slot[8..].copy_from_slice(id);
        let index = 1 + self.last % KEPT;
        self.file.write_all_at(&slot, index * SLOT as u64)
    }
}

fn header() -> [u8; SLOT] {
    let mut slot = [0; SLOT];
    slot[..8].copy_from_slice(MAGIC);
    slot[8] = VERSION;
    slot
}

fn number(slot: &[u8]) -> u64 {
    slot[..8].try_into().map_or(0, u64::from_le_bytes)
}

/// The id that a client has given its request.
///
/// # Errors
///
/// If it is invalid.
pub fn id_of(headers: &HeaderMap) -> Result<Option<&str>> {
    let Some(id) = headers.get(REQUEST_HEADER) else {
        return Ok(None);
    };
    let id = id.to_str().unwrap_or_default();
    check(id).map(|()| Some(id))
}

/// Checks a request id.
///
/// # Errors
///
/// If it is not 32 hexadecimal digits in lower case.
pub fn check(id: &str) -> Result<()> {
    parse(id).map(drop)
}

fn parse(id: &str) -> Result<Id> {
    let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let id = id.as_bytes().try_into().ok();
    id.filter(|id: &Id| id.iter().all(is_digit)).ok_or_else(|| {
        Error::invalid(format!(
            "The id of a request is not {DIGITS} hexadecimal digits in lower case."
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn id(number: u64) -> String {
        format!("{number:032x}")
    }

    #[test]
    fn begun_requests_survive_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("requests");
        let begun = Begun::open(&path);
        begun.note(&id(1)).unwrap();
        assert_eq!(begun.has(&id(1)).unwrap(), Some(true));
        // An earlier release may have begun it.
        assert_eq!(begun.has(&id(0)).unwrap(), None);
        drop(begun);
        let begun = Begun::open(&path);
        assert_eq!(begun.has(&id(1)).unwrap(), Some(true));
        assert_eq!(begun.has(&id(0)).unwrap(), Some(false));
        for next in 2..KEPT + 10 {
            begun.note(&id(next)).unwrap();
        }
        let size = std::fs::metadata(&path).unwrap().len();
        assert_eq!(size, BYTES as u64, "it does not grow");
        // Continues after the last daemon's entries: only the oldest are overwritten.
        let next = Begun::open(&path);
        next.note(&id(KEPT + 10)).unwrap();
        for (number, known) in [(10, false), (11, true), (KEPT + 9, true), (KEPT + 10, true)] {
            assert_eq!(next.has(&id(number)).unwrap(), Some(known), "{number}");
        }
    }

    #[test]
    fn a_request_reported_as_not_begun_cannot_begin_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("requests");
        drop(Begun::open(&path));
        let begun = Begun::open(&path);
        begun.note(&id(1)).unwrap();
        for number in 0..2 * GIVEN_UP as u64 {
            let known = begun.has(&id(number)).unwrap();
            assert_eq!(known, Some(number == 1));
        }
        begun.note(&id(2 * GIVEN_UP as u64 - 1)).unwrap_err();
        begun.note(&id(2 * GIVEN_UP as u64)).unwrap();
        // Repeated idempotent requests come with the same id.
        begun.note(&id(1)).unwrap();
    }

    #[test]
    fn invalid_request_ids_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let begun = Begun::open(&folder.path().join("requests"));
        for bad in [
            "",
            "1",
            &id(1)[1..],
            &format!("{}0", id(1)),
            &"A".repeat(32),
        ] {
            begun.note(bad).unwrap_err();
            begun.has(bad).unwrap_err();
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_HEADER, HeaderValue::from_str(bad).unwrap());
            id_of(&headers).unwrap_err();
        }
        assert_eq!(id_of(&HeaderMap::new()).unwrap(), None);
    }

    #[test]
    fn requests_are_served_with_a_damaged_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("requests");
        for damage in [&b""[..], b"garbage", &[0xff; BYTES]] {
            std::fs::write(&path, damage).unwrap();
            let begun = Begun::open(&path);
            assert_eq!(begun.has(&id(1)).unwrap(), None);
            begun.note(&id(1)).unwrap();
            assert_eq!(begun.has(&id(1)).unwrap(), Some(true));
        }
        // The numbers in a damaged file may be any.
        let mut slots = vec![0xff; BYTES];
        slots[..SLOT].copy_from_slice(&header());
        std::fs::write(&path, slots).unwrap();
        Begun::open(&path).note(&id(1)).unwrap();
        let begun = Begun::open(&folder.path().join("missing/requests"));
        begun.note(&id(1)).unwrap();
        assert_eq!(begun.has(&id(1)).unwrap(), None);
    }
}
