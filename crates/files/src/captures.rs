//! Captures of the VM: saves what the guest knows and has open, and restores it in another server.

use crate::folder::{Folder, facts_with};
use crate::handles::Handle;
use crate::nodes::ROOT;
use crate::protocol::{Answer, Arguments, Outcome};
use crate::saved::{self, Entry, FileId, Known, Refused, Session, Table};
use jiffy_sys::mutex::lock;
use jiffy_wire::files::{DATA_MAX, SESSION_MAX};
use rustix::fs::{OFlags, Statx};
use rustix::io::Errno;
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a session waits for requests that were sent before, of which the guest has no answer.
const SETTLE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(1);

impl Folder {
    /// `SAVE`.
    ///
    /// # Errors
    ///
    /// `EBUSY` if earlier messages are not executed in time, `EFBIG` if the session is too large,
    /// `EINVAL` if the message is malformed or its offset is beyond the session.
    pub fn answer_save(&self, mut arguments: Arguments<'_>, answer: &mut Answer) -> Outcome<()> {
        let (offset, sent) = (arguments.u64()?, arguments.u64()?);
        arguments.end()?;
        let mut session = lock(&self.session);
        if offset == 0 {
            self.settle(sent)?;
            *session = self.save()?;
        }
        let rest = usize::try_from(offset).ok();
        let rest = rest.and_then(|offset| session.get(offset..));
        let rest = rest.ok_or(Errno::INVAL)?;
        answer.put_u64(session.len() as u64)?;
        let part = &rest[..rest.len().min(DATA_MAX)];
        answer.put(part)?;
        if part.len() == rest.len() {
            *session = Vec::new();
        }
        Ok(())
    }

    /// Waits until this many messages were executed. `EBUSY` if that takes too long.
    fn settle(&self, sent: u64) -> Outcome<()> {
        let end = Instant::now() + SETTLE;
        while self.served.load(Ordering::Acquire) < sent {
            if Instant::now() > end {
                return Err(Errno::BUSY);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn save(&self) -> Outcome<Vec<u8>> {
        let (nodes, handles) = (self.nodes.list(), self.handles.list());
        let mut session = Session {
            next_node: nodes.next,
            last_handle: handles.last,
            ..Session::default()
        };
        let root = self.path_of(&self.nodes.get(ROOT)?.descriptor)?;
        let mut path_bytes = 0;
        let mut add = |entries: &mut Vec<Entry>, descriptor: &OwnedFd, known| {
            let Some((path, file)) = self.place_of(descriptor, root.to_bytes()) else {
                return Ok(false);
            };
            path_bytes += path.as_bytes().len();
            // The paths share beginnings, so they may take more memory than what is saved.
            if path_bytes > 4 * SESSION_MAX {
                return Err(Errno::FBIG);
            }
            entries.push(Entry { path, file, known });
            Ok(true)
        };
        for (number, lookups, node) in nodes.nodes {
            let known = Known::Node { number, lookups };
            // The guest gets ESTALE for a node that is not saved.
            add(&mut session.entries, &node.descriptor, known)?;
        }
        for (number, handle) in handles.handles {
            let saved = match handle {
                None => false,
                Some(handle) => {
                    let flags = handle.flags;
                    let known = Known::Handle { number, flags };
                    add(&mut session.entries, &handle.descriptor, known)?
                }
            };
            if !saved {
                session.lost.push(number);
            }
        }
        session.encode()
    }

    /// The path of a file below the folder, whose own path is `root`, and which file it is; `None` if it
    /// has none.
    fn place_of(&self, descriptor: &OwnedFd, root: &[u8]) -> Option<(CString, FileId)> {
        let facts = facts_with(descriptor, FileId::FACTS).ok()?;
        if facts.stx_nlink == 0 {
            return None;
        }
        let path = self.path_of(descriptor).ok()?;
        let path = saved::path(below(root, path.to_bytes())?.to_vec())?;
        Some((path, FileId::of(&facts)))
    }

    /// `RESTORE`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed, out of order or too large, or the session is damaged;
    /// `EPROTONOSUPPORT` if the session has another version.
    pub fn restore_part(&self, mut arguments: Arguments<'_>) -> Outcome<()> {
        let (length, offset) = (arguments.u64()?, arguments.u64()?);
        let part = arguments.rest();
        let mut session = lock(&self.session);
        if offset == 0 {
            session.clear();
        }
        let had = session.len() as u64;
        let has = had + part.len() as u64;
        if offset != had || has > length || length > SESSION_MAX as u64 {
            return Err(Errno::INVAL);
        }
        session.extend_from_slice(part);
        if has < length {
            return Ok(());
        }
        let whole = std::mem::take(&mut *session);
        self.restore(&whole).map_err(|refused| {
            tracing::error!(%refused, "the files that a captured VM knew can't be restored");
            match refused {
                Refused::Version(_) => Errno::PROTONOSUPPORT,
                Refused::Damaged(_) => Errno::INVAL,
            }
        })
    }

    /// Replaces what the guest knows and has open. A file that is not where it was, or is another one
    /// by now, is lost: the guest gets `ESTALE`.
    fn restore(&self, session: &[u8]) -> Result<(), Refused> {
        let table = Table::of(session)?;
        self.clear();
        self.nodes.continue_with(table.next_node);
        self.handles.continue_after(table.last_handle);
        for number in &table.lost {
            self.handles.restore(*number, None);
        }
        table.each(|entry| {
            if let Err(error) = self.restore_entry(entry) {
                let path = saved::shown(&entry.path);
                tracing::debug!(%path, %error, "a file that a captured VM knew is lost");
            }
        });
        Ok(())
    }

    fn restore_entry(&self, entry: &Entry) -> Outcome<()> {
        let found = self.find_again(entry);
        match entry.known {
            Known::Node { number, lookups } => {
                let (path, facts) = found?;
                self.nodes.restore(number, lookups, path, &facts)
            }
            Known::Handle { number, flags } => {
                let opened = found.and_then(|(path, _)| self.open_again(&path, flags));
                let lost = opened.as_ref().err().copied();
                self.handles.restore(number, opened.ok());
                lost.map_or(Ok(()), Err)
            }
        }
    }

    /// The file of an entry. `ESTALE` if another one is in its place.
    fn find_again(&self, entry: &Entry) -> Outcome<(OwnedFd, Statx)> {
        let path = self.find_path(&entry.path)?;
        let facts = facts_with(&path, FileId::FACTS)?;
        match FileId::of(&facts) == entry.file {
            true => Ok((path, facts)),
            false => Err(Errno::STALE),
        }
    }

    /// Opens a file or folder, whose kind was checked, with the flags that it had.
    fn open_again(&self, path: impl AsFd, flags: OFlags) -> Outcome<Arc<Handle>> {
        if self.sharing.read_only && flags.intersects(OFlags::WRONLY | OFlags::RDWR) {
            return Err(Errno::ROFS);
        }
        let slot = self.handles.reserve()?;
        Ok(Handle::new(self.reopen(path, flags)?, flags, slot))
    }
}

/// A path below this folder; empty for the folder itself.
fn below<'a>(folder: &[u8], path: &'a [u8]) -> Option<&'a [u8]> {
    match (folder, path.strip_prefix(folder)?) {
        (_, []) => Some(&[]),
        (b"/", rest) | (_, [b'/', rest @ ..]) => Some(rest),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_below_a_folder_has_a_path_there() {
        for (folder, path, expected) in [
            ("/", "/", Some("")),
            ("/", "/a/b", Some("a/b")),
            ("/a", "/a", Some("")),
            ("/a", "/a/b/c", Some("b/c")),
            ("/a", "/ab", None),
            ("/a", "/b/a", None),
            ("/", "pipe:[5]", None),
        ] {
            let found = below(folder.as_bytes(), path.as_bytes());
            assert_eq!(found, expected.map(str::as_bytes), "{folder} {path}");
        }
    }
}
