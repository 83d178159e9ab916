//! The VMM's process and its events.

use jiffy_jail::{Cgroup, Identity, Share};
use jiffy_wire::vmm::VmmEvent;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitId, WaitIdOptions, pidfd_open,
    pidfd_send_signal, prlimit, waitid,
};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Longest line of an event.
const MAX_LINE: usize = 64 * 1024;
/// Most reads of the pipe, 4 KiB each, before other work gets its turn.
const READS_AT_A_TIME: usize = 64;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It exited with this status.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
    /// The OOM killer killed it, because it reached the memory limit of its cgroup.
    OutOfMemory,
    /// Unknown: it was not a child of this daemon, so there is no wait status.
    Unknown,
}

impl Ended {
    /// Was it killed by a user, an administrator or the OOM killer? Then the snapshot it was
    /// restored from is not to blame.
    pub fn was_killed_externally(self) -> bool {
        let outside = [Signal::HUP, Signal::INT, Signal::KILL, Signal::TERM];
        matches!(self, Ended::Signal(signal) if outside.iter().any(|one| one.as_raw() == signal))
    }
}

/// Registers a descriptor with tokio to wait until it is readable.
///
/// # Errors
///
/// If tokio can't register it.
pub fn readable(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    ready_for(descriptor, Interest::READABLE)
}

/// Registers a descriptor with tokio to wait for an event.
///
/// The constructor is deprecated because it also takes borrowed descriptors; an [`OwnedFd`] can't
/// be closed while tokio uses it.
///
/// # Errors
///
/// If tokio can't register it.
#[allow(deprecated)]
pub fn ready_for(descriptor: OwnedFd, event: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(descriptor, event)
}

/// A `jiffy-vmm`, held by a pidfd, which never refers to another process.
#[derive(Debug)]
pub struct VmmProcess {
    /// Its process id.
    pub pid: u32,
    pidfd: AsyncFd<OwnedFd>,
    child: bool,
    /// The user it runs as; no other VMM gets this user meanwhile.
    identity: Option<Identity>,
    /// Its control group.
    cgroup: Option<Cgroup>,
}

impl VmmProcess {
    /// A child of this daemon that was not reaped yet.
    ///
    /// # Errors
    ///
    /// If there is no such process, or no descriptor for it.
    pub fn child(pid: u32) -> io::Result<VmmProcess> {
        VmmProcess::open(pid, true)
    }

    /// A process that an earlier daemon spawned. After this call the caller must check that the
    /// process is still the intended one.
    ///
    /// # Errors
    ///
    /// If there is no such process, or no descriptor for it.
    pub fn adopted(pid: u32) -> io::Result<VmmProcess> {
        VmmProcess::open(pid, false)
    }

    fn open(pid: u32, child: bool) -> io::Result<VmmProcess> {
        let raw = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let pidfd = pidfd_open(raw, PidfdFlags::empty())?;
        Ok(VmmProcess {
            pid,
            pidfd: readable(pidfd)?,
            child,
            identity: None,
            cgroup: None,
        })
    }

    /// The same process, with the user it runs as and its cgroup.
    pub fn with(mut self, identity: Option<Identity>, cgroup: Option<Cgroup>) -> VmmProcess {
        self.identity = identity;
        self.cgroup = cgroup;
        self
    }

    /// Limits its resources, if it has a cgroup of its own, and the bytes of its files, if those are
    /// to be limited.
    ///
    /// # Errors
    ///
    /// If the kernel refuses a limit.
    pub fn set_limits(&self, share: &Share, file_size: Option<u64>) -> io::Result<()> {
        if let Some(cgroup) = &self.cgroup {
            cgroup.set_limits(share)?;
        }
        if let Some(most) = file_size {
            let pid = Pid::from_raw(self.pid as i32);
            let limit = Rlimit {
                current: Some(most),
                maximum: Some(most),
            };
            prlimit(pid, Resource::Fsize, limit)?;
        }
        Ok(())
    }

    /// Changes how many processors it may use, if it has a cgroup of its own.
    ///
    /// # Errors
    ///
    /// If the cgroup's file can't be written.
    pub fn set_processors(&self, processors: u32) -> io::Result<()> {
        self.cgroup
            .as_ref()
            .map_or(Ok(()), |cgroup| cgroup.set_processors(processors))
    }

    /// Moves another process, which works for it, into its cgroup, if it has one of its own.
    ///
    /// # Errors
    ///
    /// If the cgroup's file can't be written, as when the process has ended.
    pub fn admit_to_cgroup(&self, pid: u32) -> io::Result<()> {
        self.cgroup
            .as_ref()
            .map_or(Ok(()), |cgroup| cgroup.admit(pid))
    }

    /// Raises its memory limit by so many bytes.
    ///
    /// # Errors
    ///
    /// If the cgroup's files can't be read or written.
    pub fn raise_memory_limit(&self, bytes: u64) -> io::Result<()> {
        self.cgroup
            .as_ref()
            .map_or(Ok(()), |cgroup| cgroup.raise_memory_limit(bytes))
    }

    /// Changes its memory limit to `bytes`, but to no less than it uses plus `headroom`.
    ///
    /// # Errors
    ///
    /// If the cgroup's files can't be read or written.
    pub fn set_memory_limit(&self, bytes: u64, headroom: u64) -> io::Result<()> {
        self.cgroup
            .as_ref()
            .map_or(Ok(()), |cgroup| cgroup.set_memory_limit(bytes, headroom))
    }

    /// Was it killed for reaching the memory limit of its cgroup?
    pub fn was_oom_killed(&self) -> bool {
        self.cgroup.as_ref().is_some_and(Cgroup::was_oom_killed)
    }

    /// Its user id, if it has a user of its own.
    pub fn user(&self) -> Option<u32> {
        self.identity.as_ref().map(Identity::id)
    }

    /// Waits for its end. Cancel-safe.
    pub async fn ended(&self) -> Ended {
        loop {
            let Ok(mut ready) = self.pidfd.readable().await else {
                return Ended::Unknown;
            };
            if !self.child {
                return Ended::Unknown;
            }
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            match waitid(WaitId::PidFd(self.pidfd.as_fd()), options) {
                Ok(Some(status)) => {
                    return match (status.exit_status(), status.terminating_signal()) {
                        (Some(code), _) => Ended::Code(code),
                        (_, Some(signal)) => Ended::Signal(signal),
                        _ => Ended::Unknown,
                    };
                }
                Ok(None) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(_) => return Ended::Unknown,
            }
        }
    }

    /// Is it still alive?
    pub fn lives(&self) -> bool {
        let mut look = [PollFd::new(self.pidfd.get_ref(), PollFlags::IN)];
        !matches!(poll(&mut look, Some(&Timespec::default())), Ok(1..))
    }

    /// Sends SIGKILL.
    pub fn kill(&self) {
        // An error means that it has ended already.
        let _ = pidfd_send_signal(self.pidfd.as_fd(), Signal::KILL);
    }

    /// Sends SIGKILL and waits for the end in the background: nobody else would reap it. It keeps its
    /// user and cgroup until then.
    pub fn end(self) {
        self.kill();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { self.ended().await });
        }
    }
}

/// How long the last child of a killed daemon may take to execute its program: until then it holds the
/// daemon's locks.
pub const DYING_TIME: Duration = Duration::from_secs(10);
/// How often it is tried to take them meanwhile.
pub const DYING_POLL: Duration = Duration::from_millis(2);

/// Does this process exist, and is it neither ending nor a zombie? One whose files are being closed
/// ends, and others may know of that already.
pub fn is_alive(pid: u32) -> bool {
    const FLAGS: usize = 6;
    const PF_EXITING: u32 = 4;
    stat_of(pid).is_some_and(|fields| {
        let flags = fields.get(FLAGS).and_then(|flags| flags.parse().ok());
        fields[0] != "Z" && flags.is_none_or(|flags: u32| flags & PF_EXITING == 0)
    })
}

/// Is this process the leader of a session?
pub fn leads_session(pid: u32) -> bool {
    const SESSION: usize = 3;
    stat_of(pid).is_some_and(|fields| fields.get(SESSION) == Some(&pid.to_string()))
}

/// The fields of `/proc/PID/stat` after the name, which may contain anything (proc(5)): the first
/// is the state.
fn stat_of(pid: u32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(") ")?;
    Some(fields.split(' ').map(str::to_owned).collect())
}

/// Calls `tell` with `owner`, if that still exists, when this process has ended. Does not reap the
/// process. Does nothing if it was reaped already.
pub fn on_exit<T: Send + Sync + 'static>(
    pid: u32,
    owner: &Arc<T>,
    tell: impl FnOnce(&T) + Send + 'static,
) {
    let Ok(process) = VmmProcess::adopted(pid) else {
        return;
    };
    let owner = Arc::downgrade(owner);
    tokio::spawn(async move {
        process.ended().await;
        if let Some(owner) = owner.upgrade() {
            tell(&owner);
        }
    });
}

/// The pipe on which a VMM reports events.
#[derive(Debug)]
pub struct Events {
    pipe: AsyncFd<OwnedFd>,
    lines: EventLines,
}

/// Reads events out of the bytes of a pipe.
#[derive(Debug, Default)]
pub(crate) struct EventLines {
    pending: Vec<u8>,
    /// The rest of an overlong line is being skipped.
    skipping: bool,
}

impl Events {
    /// A new pipe: the read end, and the write end for the VMM.
    ///
    /// # Errors
    ///
    /// If `pipe2` fails, or tokio can't register the pipe.
    pub fn new() -> io::Result<(Events, OwnedFd)> {
        let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        let events = Events {
            pipe: readable(ours)?,
            lines: EventLines::default(),
        };
        Ok((events, theirs))
    }

    /// Waits until there is something to read, or the VMM closed its end.
    pub async fn readable(&self) {
        if let Ok(mut ready) = self.pipe.readable().await {
            ready.retain_ready();
        }
    }

    /// Is there something to read?
    pub fn any(&self) -> bool {
        rustix::io::ioctl_fionread(self.pipe.get_ref()).is_ok_and(|bytes| bytes > 0)
    }

    /// Reads the pending events, up to a limit, because a guest can cause any number of them. The
    /// flag is true at the end of the pipe.
    pub fn drain(&mut self) -> (Vec<VmmEvent>, bool) {
        let mut events = Vec::new();
        let mut buffer = [0; 4096];
        for _ in 0..READS_AT_A_TIME {
            // The first read goes through tokio, so that it learns when the pipe is empty; the
            // others are direct, because tokio's readiness may be out of date.
            let mut read = |pipe: &OwnedFd| Ok(rustix::io::read(pipe, &mut buffer)?);
            let got = match self.pipe.try_io(Interest::READABLE, &mut read) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    read(self.pipe.get_ref())
                }
                other => other,
            };
            match got {
                Ok(0) => return (events, true),
                Ok(got) => self.lines.take(&buffer[..got], &mut events),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return (events, false);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return (events, true),
            }
        }
        (events, false)
    }
}

impl EventLines {
    /// Adds the events that these bytes complete. Unknown events and overlong lines are ignored.
    pub fn take(&mut self, bytes: &[u8], events: &mut Vec<VmmEvent>) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.pending.extend_from_slice(piece);
            if piece.last() == Some(&b'\n') {
                if !std::mem::take(&mut self.skipping) {
                    match serde_json::from_slice(&self.pending) {
                        Ok(event) => events.push(event),
                        Err(error) => {
                            tracing::debug!(%error, "ignored an unknown event of the VMM")
                        }
                    }
                }
                self.pending.clear();
            } else if self.pending.len() > MAX_LINE {
                self.pending.clear();
                self.skipping = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[tokio::test]
    async fn exit_codes_and_signals_of_a_child_are_distinguished() {
        for (script, expected) in [
            ("exit 3", Ended::Code(3)),
            ("kill -9 $$", Ended::Signal(9)),
            ("exec sleep 100", Ended::Signal(9)),
        ] {
            // It is reaped through its descriptor.
            #[allow(clippy::zombie_processes)]
            let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            let process = VmmProcess::child(child.id()).unwrap();
            if script.contains("sleep") {
                process.kill();
            }
            assert_eq!(process.ended().await, expected);
        }
    }

    #[tokio::test]
    async fn a_child_that_nobody_waits_for_leaves_no_zombie() {
        // It is reaped through its descriptor.
        #[allow(clippy::zombie_processes)]
        let child = Command::new("sleep").arg("100").spawn().unwrap();
        let entry = format!("/proc/{}", child.id());
        VmmProcess::child(child.id()).unwrap().end();
        while fs::exists(&entry).unwrap() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn events_split_anywhere_are_read_and_garbage_is_skipped() {
        let (mut events, pipe) = Events::new().unwrap();
        let write = |text: &[u8]| rustix::io::write(&pipe, text).unwrap();
        write(b"{\"mark\":{\"value\":1,");
        events.readable().await;
        assert_eq!(events.drain(), (vec![], false));
        write(b"\"at_ns\":5}}\nnonsense\n");
        write(&vec![b'x'; 40_000]);
        events.readable().await;
        let (mut got, _) = events.drain();
        write(&vec![b'x'; 40_000]);
        got.extend(events.drain().0);
        write(b"tail\n{\"mark\":{\"value\":2,\"at_ns\":6}}\n");
        drop(pipe);
        let (more, closed) = events.drain();
        got.extend(more);
        assert!(closed);
        assert_eq!(
            got,
            [
                VmmEvent::Mark { value: 1, at_ns: 5 },
                VmmEvent::Mark { value: 2, at_ns: 6 }
            ]
        );
    }
}
