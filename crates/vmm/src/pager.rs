//! RAM served by a pager: the userfaultfd, how it is handed over, and what happens
//! when the pager ends.
//!
//! The connection carries one message to the pager ([`jiffy_wire::pager`]) and
//! then lines from it ([`PagerMessage`]). When it breaks, the VMM reconnects for a while, and
//! threads that wait for a page keep waiting. A VM whose memory is lost must end without
//! touching it again.
//!
//! If the image has a working set, the VMM first asks which part of it the pager has in
//! memory, and maps that part: it takes no faults there. If the pager does not know yet
//! which of these pages a guest writes in its first moments, the VMM reports them: VMs that
//! come later copy them in one go.
//!
//! * [`Supply`]: where missing memory comes from, over the life of a VM.
//! * [`PagerThread`]: serves the connection while the VM is built.
//! * [`Reconnect`]: the search for another pager.
//! * [`run_off_main`]: runs work that may wait for memory off the main thread.

use crate::ending::Ending;
use crate::memory::{GuestRam, MemoryError};
use jiffy_sys::dial::Dialer;
use jiffy_sys::fds;
use jiffy_sys::userfaultfd::{Features, Userfaultfd};
use jiffy_wire::lines::{self, Lines};
use jiffy_wire::pager::{
    Mapping, PagerMessage, VmmMessage, WORKING_SET_LINE, WORKING_SET_QUESTION, WORKING_SET_RANGES,
};
use jiffy_wire::vmm::{ExitReason, Extent};
use rustix::net::RecvFlags;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use thiserror::Error;

mod off_main;
mod reconnect;
mod supply;
mod thread;

pub use off_main::run_off_main;
pub use reconnect::{INTERVAL, Reconnect};
pub use supply::Supply;
pub use thread::PagerThread;

/// How long a VM waits for another pager, unless [`TIMEOUT_VARIABLE`] sets another time.
const TIMEOUT: Duration = Duration::from_millis(900);
/// Milliseconds, for hosts on which starting another pager takes longer.
const TIMEOUT_VARIABLE: &str = "JIFFY_PAGER_PATIENCE_MS";
/// Least time that a VM waits for the pager's answer about the working set. A pager may be busy,
/// and the VM can't start without the answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long after the first entry the written pages are reported.
const WRITTEN_REPORT_DELAY: Duration = Duration::from_millis(20);
/// Longest line of a pager, bytes.
const LINE_MAX: usize = 4096;

/// Why a pager could not serve the VM's memory.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PagerError {
    /// A userfaultfd can't be created.
    #[error("no userfaultfd can be created, so no pager can handle the guest's page faults")]
    Userfaultfd(#[source] io::Error),
    /// The pager can't be reached.
    #[error("the pager at {} can't be reached", .0.display())]
    Connect(PathBuf, #[source] io::Error),
    /// The pager's answer about the working set is missing or not valid.
    #[error("the pager at {} gave no valid answer about the working set", .0.display())]
    WorkingSet(PathBuf, #[source] io::Error),
    /// The memory that the pager shares can't be mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The thread that serves the connection while the VM is built failed.
    #[error("the thread that serves the pager's connection failed")]
    Thread(#[source] io::Error),
    /// The pager ended while the VM was built, and no other one came.
    #[error("{0}")]
    Lost(String),
}

impl PagerError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            PagerError::Userfaultfd(_) => Some(
                "let this user open /dev/userfaultfd, or set vm.unprivileged_userfaultfd=1".into(),
            ),
            PagerError::Memory(error) => error.hint(),
            PagerError::Connect(..)
            | PagerError::WorkingSet(..)
            | PagerError::Thread(_)
            | PagerError::Lost(_) => None,
        }
    }
}

/// The memory of a VM and the pager that serves it.
#[derive(Debug)]
pub struct PagedMemory {
    dialer: Dialer,
    uffd: Userfaultfd,
    mappings: Vec<Mapping>,
    /// The ranges that the userfaultfd serves, `(address, length)`: all of the mappings except what
    /// the pager shares with other VMs.
    served: Vec<(u64, u64)>,
    link: Link,
    written_report: WrittenReport,
    lines: Lines,
    /// How long it waits for another pager.
    timeout: Duration,
}

/// Whether the pages that the guest writes first must be reported to the pager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WrittenReport {
    No,
    /// Yes, [`WRITTEN_REPORT_DELAY`] after the guest is entered.
    Wanted,
    /// Yes, at this time.
    At(Instant),
}

#[derive(Debug)]
enum Link {
    Up(UnixStream),
    /// The pager is gone, and another one is searched for.
    Down(Reconnect),
    /// Nothing is missing any more. The connection stays open, because the pager may be asked to
    /// complete the memory again.
    Done {
        _connection: UnixStream,
    },
    /// Memory is missing for good.
    Lost,
}

impl PagedMemory {
    /// Hands the RAM, which is still untouched, over to the pager at `socket`. With `working_set`
    /// the pager may have a part of it in memory already, and know which ranges a guest writes
    /// first: those are returned.
    ///
    /// # Errors
    ///
    /// If there is no userfaultfd, no pager, or no valid answer.
    pub fn attach(
        ram: &GuestRam,
        socket: &Path,
        working_set: bool,
    ) -> Result<(PagedMemory, Vec<Extent>), PagerError> {
        let unreachable = |error| PagerError::Connect(socket.into(), error);
        let uffd = Userfaultfd::create(Features::GUEST_MEMORY).map_err(PagerError::Userfaultfd)?;
        let mappings = ram.serve_by(&uffd).map_err(PagerError::Userfaultfd)?;
        let stream = UnixStream::connect(socket).map_err(unreachable)?;
        let timeout = std::env::var(TIMEOUT_VARIABLE)
            .ok()
            .and_then(|text| text.parse().ok())
            .map_or(TIMEOUT, Duration::from_millis);
        let (mut written_report, mut first_writes) = (WrittenReport::No, Vec::new());
        if working_set {
            let answer = ask_for_working_set(&stream, timeout.max(ANSWER_TIMEOUT))
                .map_err(|error| PagerError::WorkingSet(socket.into(), error))?;
            if let Some((file, covers, written)) = answer {
                ram.share(file, covers)?;
                match written {
                    Some(written) => first_writes = written,
                    None => written_report = WrittenReport::Wanted,
                }
            }
        }
        send_uffd(&stream, &uffd, &mappings).map_err(unreachable)?;
        let memory = PagedMemory {
            dialer: Dialer::new(socket),
            uffd,
            mappings,
            served: ram.unshared(),
            link: Link::Up(stream),
            written_report,
            lines: Lines::new(LINE_MAX),
            timeout,
        };
        Ok((memory, first_writes))
    }

    /// Readable when there is something to [process](PagedMemory::process_events).
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.link {
            Link::Up(stream) => Some(stream.as_fd()),
            _ => None,
        }
    }

    /// How long the next call of [`process_events`](PagedMemory::process_events) may wait.
    pub fn timeout(&self) -> Option<Duration> {
        let retry = matches!(self.link, Link::Down(_)).then_some(INTERVAL);
        let written_report = match self.written_report {
            WrittenReport::At(time) => Some(time.saturating_duration_since(Instant::now())),
            _ => None,
        };
        [retry, written_report].into_iter().flatten().min()
    }

    /// The guest runs from now on.
    pub fn guest_runs(&mut self) {
        if self.written_report == WrittenReport::Wanted {
            self.written_report = WrittenReport::At(Instant::now() + WRITTEN_REPORT_DELAY);
        }
    }

    /// Reports to the pager what the guest has written, once it is time. A failure only costs time,
    /// and only for other VMs.
    pub fn report_written(&mut self, ram: &GuestRam) {
        let WrittenReport::At(time) = self.written_report else {
            return;
        };
        if Instant::now() < time {
            return;
        }
        self.written_report = WrittenReport::No;
        let Link::Up(stream) = &self.link else {
            return;
        };
        let sent = ram.written_at_once().and_then(|mut ranges| {
            ranges.truncate(WORKING_SET_RANGES);
            let message = VmmMessage::Written(ranges);
            let line = lines::encode(&message).expect("a message is plain data");
            fds::send_with_fds(stream, &line, &[])
        });
        if let Err(error) = sent {
            tracing::debug!(%error, "the first written pages could not be reported to the pager");
        }
    }

    /// Whether all of the memory is present.
    pub fn is_complete(&self) -> bool {
        matches!(self.link, Link::Done { .. })
    }

    /// Whether some memory is missing for good. Nothing may read it any more.
    pub fn is_lost(&self) -> bool {
        matches!(self.link, Link::Lost)
    }

    /// Reads what the pager has sent, or searches for another pager. Returns why the VM ends, if
    /// its memory is lost.
    pub fn process_events(&mut self) -> Option<Ending> {
        loop {
            match &self.link {
                Link::Up(stream) => {
                    let mut bytes = [0; 512];
                    match rustix::net::recv(stream, &mut bytes[..], RecvFlags::DONTWAIT) {
                        Ok((count @ 1.., _)) => {
                            self.lines.push(&bytes[..count]);
                            if let Some(ending) = self.read_lines() {
                                return Some(ending);
                            }
                        }
                        Err(rustix::io::Errno::AGAIN) => return None,
                        Err(rustix::io::Errno::INTR) => {}
                        Ok(_) | Err(_) => {
                            tracing::warn!("the pager disconnected; searching for another");
                            self.lines = Lines::new(LINE_MAX);
                            self.link = Link::Down(Reconnect::within(self.timeout));
                        }
                    }
                }
                &Link::Down(search) => match search.attempt(|| self.connect_again()) {
                    Ok(Some(stream)) => self.link = Link::Up(stream),
                    Ok(None) => return None,
                    Err(error) => {
                        return Some(self.fail(&format!(
                            "the pager that serves this VM's memory is gone: {error}"
                        )));
                    }
                },
                Link::Done { .. } | Link::Lost => return None,
            }
        }
    }

    /// Connects to a pager that does not know this VM. That pager may try to fill shared ranges,
    /// too, and learns that nothing is missing there.
    fn connect_again(&mut self) -> io::Result<UnixStream> {
        let stream = self.dialer.attempt()?;
        stream.set_nonblocking(false)?;
        send_uffd(&stream, &self.uffd, &self.mappings)?;
        Ok(stream)
    }

    fn read_lines(&mut self) -> Option<Ending> {
        loop {
            let line = match self.lines.next_line() {
                Ok(line) => line?,
                Err(_) => return Some(self.fail("the pager violated its protocol")),
            };
            match serde_json::from_slice(&line) {
                Ok(PagerMessage::Complete(true)) => {
                    if let Err(error) = self.unregister() {
                        return Some(self.fail(&format!(
                            "the memory could not be unregistered from the userfaultfd: {error}"
                        )));
                    }
                    if let Link::Up(stream) = std::mem::replace(&mut self.link, Link::Lost) {
                        self.link = Link::Done {
                            _connection: stream,
                        };
                    }
                    return None;
                }
                Ok(PagerMessage::Complete(false)) => {}
                Ok(PagerMessage::Failed(why)) => return Some(self.fail(&why)),
                Ok(PagerMessage::WorkingSet { .. }) | Err(_) => {
                    return Some(self.fail("the pager violated its protocol"));
                }
            }
        }
    }

    /// Takes the memory back from the userfaultfd: missing pages are zero from now on.
    fn unregister(&self) -> io::Result<()> {
        let mut served = self.served.iter();
        served.try_for_each(|(start, length)| self.uffd.unregister(*start, *length))
    }

    /// Wakes threads that wait for lost memory. No vCPU may be among them.
    fn wake_waiters(&self) {
        if let Err(error) = self.unregister() {
            tracing::error!(%error, "threads that wait for lost memory could not be woken");
        }
    }

    fn fail(&mut self, message: &str) -> Ending {
        self.link = Link::Lost;
        Ending {
            reason: ExitReason::HostError,
            message: message.into(),
        }
    }
}

fn send_uffd(stream: &UnixStream, uffd: &Userfaultfd, mappings: &[Mapping]) -> io::Result<()> {
    let message = serde_json::to_vec(mappings).expect("mappings are plain data");
    fds::send_with_fds(stream, &message, &[uffd.as_fd()])
}

/// A file as long as RAM, the ranges of it that are valid, and those of them that a guest writes
/// first, if known.
pub(crate) type WorkingSet = (File, Vec<Extent>, Option<Vec<Extent>>);

/// Asks which part of the working set the pager has in memory.
pub(crate) fn ask_for_working_set(
    mut stream: &UnixStream,
    timeout: Duration,
) -> io::Result<Option<WorkingSet>> {
    let wrong = || io::Error::other("it violated its protocol");
    stream.write_all(WORKING_SET_QUESTION)?;
    stream.set_read_timeout(Some(timeout))?;
    let mut answer = Vec::new();
    let mut files: Vec<OwnedFd> = Vec::new();
    while answer.last() != Some(&b'\n') {
        let mut bytes = [0; 4096];
        let count = fds::recv_with_fds(stream, &mut bytes, &mut files)?;
        if count == 0 || answer.len() + count > WORKING_SET_LINE || files.len() > 1 {
            return Err(wrong());
        }
        answer.extend(&bytes[..count]);
    }
    match serde_json::from_slice(&answer) {
        Ok(PagerMessage::WorkingSet { ranges, written }) if ranges.len() <= WORKING_SET_RANGES => {
            Ok(files.pop().map(|file| (File::from(file), ranges, written)))
        }
        Ok(PagerMessage::Failed(why)) => Err(io::Error::other(why)),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests;
