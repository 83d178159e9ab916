//! The protocol between the node and `jiffy-init`, in [`crate::frame`]s over vsock.
//!
//! Two kinds of connection:
//!
//! * The **supervisor channel**: the guest dials the host at
//!   [`SUPERVISOR_PORT`] and sends [`FromGuest`]; the node answers with
//!   [`ToGuest`]. It carries readiness, init's spans and warnings, and the
//!   first command's streams. When it breaks (the node restarted) the guest
//!   dials again, says hello again, and repeats what wasn't acknowledged.
//! * **Agent connections**: the host dials the guest at [`AGENT_PORT`] and
//!   sends one [`Request`]; what follows depends on the request.
//!
//! Order on the supervisor channel: `Hello` → `Welcome` → anything.
//!
//! A guest may be older than its node, in a captured VM by many releases, or newer,
//! after a downgrade. The hello has the newest version that the guest supports, the
//! welcome the newest that both support ([`common`]). A [`Request`] has the version that
//! introduced it, and the guest takes those that it supports ([`is_spoken`]). Messages
//! never change: an extended message is a new one at the end of its enum, with a new
//! version, and is sent only to peers that support it.

use alloc::{string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// The guest dials this port of the host (CID 2).
pub const SUPERVISOR_PORT: u32 = 1024;
/// The guest listens on this port.
pub const AGENT_PORT: u32 = 1025;
/// The newest version that is spoken.
pub const VERSION: u16 = 1;
/// The oldest: guests that release 0.1 started, or captured, speak it.
pub const OLDEST: u16 = 1;
/// Most output of the first command kept for a node that is away, per stream.
pub const MAIN_OUTPUT_WINDOW: usize = 256 * 1024;

/// The newest version that both speak, if the other's newest is `newest`.
pub fn common(newest: u16) -> Option<u16> {
    (newest >= OLDEST).then(|| newest.min(VERSION))
}

/// Is this version spoken?
pub fn is_spoken(version: u16) -> bool {
    (OLDEST..=VERSION).contains(&version)
}

/// A program to run in the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Program and arguments. A program without a slash is looked up in PATH.
    pub argv: Vec<String>,
    /// The whole environment, `NAME=value`; PATH, HOME, TERM get defaults.
    #[serde(default)]
    pub env: Vec<String>,
    /// Working directory; none means `/`.
    #[serde(default)]
    pub cwd: Option<String>,
    /// `name`, `uid`, `name:group` or `uid:gid`; none means root.
    #[serde(default)]
    pub user: Option<String>,
    /// Run on a pseudo-terminal of this size; output is then all stdout.
    #[serde(default)]
    pub tty: Option<WindowSize>,
    /// Keep stdin open for data; otherwise it is /dev/null.
    #[serde(default)]
    pub stdin: bool,
}

/// Terminal size in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowSize {
    /// Lines.
    pub rows: u16,
    /// Columns.
    pub columns: u16,
}

/// An output stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    /// Standard output (and all output of a terminal).
    Stdout,
    /// Standard error.
    Stderr,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitStatus {
    /// It exited with this status (0 to 255).
    Code(i32),
    /// A signal of this number ended it.
    Signal(i32),
}

impl ExitStatus {
    /// The status a shell would show: the code, or 128 + the signal.
    pub fn shell_code(self) -> i32 {
        match self {
            ExitStatus::Code(code) => code,
            ExitStatus::Signal(signal) => 128 + signal,
        }
    }
}

/// Why a program could not be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StartFailure {
    /// No such program (shells say 127).
    NotFound,
    /// The file is not executable (shells say 126).
    NotExecutable,
    /// The user or group does not exist in the image.
    NoSuchUser,
    /// The working directory does not exist.
    NoSuchDirectory,
    /// The request was not valid (empty argv, a NUL byte, …).
    Invalid,
    /// Anything else: out of memory, too many processes.
    Other,
}

impl StartFailure {
    /// The exit status docker users expect: 127, 126, or 125.
    pub fn exit_code(self) -> i32 {
        match self {
            StartFailure::NotFound => 127,
            StartFailure::NotExecutable => 126,
            _ => 125,
        }
    }
}

/// A program could not be started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartError {
    /// What kind of failure.
    pub kind: StartFailure,
    /// One sentence that names the program.
    pub message: String,
}

/// A span or moment in the guest, on the guest's CLOCK_MONOTONIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestSpan {
    /// True for a milestone of the kernel, false for a step of init.
    pub kernel: bool,
    /// What happened.
    pub name: String,
    /// Start, guest nanoseconds.
    pub start_ns: u64,
    /// End, guest nanoseconds.
    pub end_ns: u64,
    /// What went wrong, if anything did.
    pub error: Option<String>,
}

/// Guest to host, on the supervisor channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromGuest {
    /// First message of each connection.
    Hello {
        /// The newest that the guest speaks.
        version: u16,
        /// The id from the guest's configuration.
        vm_id: String,
        /// Guest clock at which the mark `MARK_PID1` was written, nanoseconds;
        /// of a restored guest, `MARK_GATE_ENTERED`.
        pid1_ns: u64,
        /// 0 for the first connection of this boot, or of this generation,
        /// then 1, 2, …
        attempt: u32,
    },
    /// What init has measured since the last such message.
    Spans(Vec<GuestSpan>),
    /// A step failed; the guest goes on without it. For `jiffy logs` and stderr.
    Warning {
        /// Which step.
        step: String,
        /// One sentence.
        message: String,
    },
    /// The agent accepts requests.
    Ready,
    /// The first command runs.
    MainStarted {
        /// Its process id in the guest.
        pid: u32,
    },
    /// The first command could not be started.
    MainFailed(StartError),
    /// Output of the first command.
    MainOutput {
        /// Which stream.
        stream: Stream,
        /// Offset of the first byte in that stream since the start.
        offset: u64,
        /// At most [`crate::frame::MAX_DATA`] bytes.
        #[serde(with = "serde_bytes")]
        data: Vec<u8>,
    },
    /// The first command ended and all its output was sent before this.
    MainExited(ExitStatus),
    /// A line a service wrote, or that it started, ended, gave up.
    ServiceLog {
        /// The service's name.
        name: String,
        /// The bytes, without the newline.
        #[serde(with = "serde_bytes")]
        line: Vec<u8>,
    },
    /// Orderly end: no program is left but those that nothing ends. File systems
    /// are synced after this, then the power goes.
    PoweringOff,
    /// The first command's standard input has room for this many more bytes,
    /// counted from the hello; at first for [`crate::frame::MAX_DATA`] or
    /// more, said before `MainStarted`. Signals and the like need no room.
    /// A guest that never says it takes any amount: it then has to keep, and
    /// to go on reading, for acknowledgements come on the same connection.
    MainInputRoom {
        /// Bytes.
        bytes: u32,
    },
}

/// Host to guest, on the supervisor channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToGuest {
    /// Answers a hello.
    Welcome {
        /// The newest that both speak.
        version: u16,
        /// How much of the first command's stdout the host has stored.
        stdout_offset: u64,
        /// How much of its stderr.
        stderr_offset: u64,
    },
    /// Output up to these offsets is stored; the guest forgets it.
    MainOutputStored {
        /// Bytes of stdout.
        stdout_offset: u64,
        /// Bytes of stderr.
        stderr_offset: u64,
    },
    /// Input for the first command.
    MainInput(ExecInput),
    /// `MainExited` or `MainFailed` is stored; with `power_off_after_main`
    /// the guest may go. Said once it was told on this connection: before that it
    /// counts for nothing.
    MainEndStored,
}

/// What the host wants on an agent connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Run a program. Then [`ExecInput`] in, [`ExecOutput`] out, until
    /// `Exited` or `Failed`. A connection lost early ends it with SIGHUP.
    Exec {
        /// [`OLDEST`].
        version: u16,
        /// What to run.
        command: Command,
    },
    /// Copy into the guest. [`CopyFrame`]s in; one [`CopyDone`] out.
    CopyIn {
        /// [`OLDEST`].
        version: u16,
        /// Existing folder or the new name, as `cp -r` understands it.
        path: String,
    },
    /// Copy out of the guest. [`CopyFrame`]s out, then one `CopyFrame::End`,
    /// or `CopyFrame::Failed`.
    CopyOut {
        /// [`OLDEST`].
        version: u16,
        /// File or folder.
        path: String,
    },
    /// One [`Stat`] out.
    Stat {
        /// [`OLDEST`].
        version: u16,
    },
    /// End the VM in order: TERM to all, sync, power off (or reboot). One
    /// [`Done`] out before it begins.
    Shutdown {
        /// [`OLDEST`].
        version: u16,
        /// How long programs have after SIGTERM, milliseconds.
        grace_ms: u32,
    },
    /// Quiesce the workload for a capture: freeze all programs, write dirty pages back,
    /// and, if requested, drop caches. One [`Done`] out when that is done. Programs stay
    /// frozen until this connection ends. Then the guest reads its
    /// [`crate::guest::Generation`]: if it is unchanged, the guest was only captured, and
    /// programs are thawed; if not, it was restored.
    ///
    /// The answer waits up to 500 ms until the host has stored what the first
    /// command wrote: it belongs to this guest, and a clone starts at offset 0.
    /// Until programs go on other connections are accepted by the kernel, but
    /// not served. Nothing may be sent on this one.
    Quiesce {
        /// [`OLDEST`].
        version: u16,
        /// Give up page cache, dentries and inodes, and compact memory, so
        /// that the capture is small.
        drop_caches: bool,
    },
    /// Send a signal to the first command. One [`Done`] out.
    SignalMain {
        /// [`OLDEST`].
        version: u16,
        /// Signal number.
        signal: i32,
    },
    /// What was changed in the root file system: the overlay's upper layer as
    /// a tar, with whiteouts and opaque folders as overlayfs has them. Programs
    /// are frozen meanwhile. [`CopyFrame::Data`] out, then `End`, or `Failed`.
    Changes {
        /// [`OLDEST`].
        version: u16,
    },
}

impl Request {
    /// The version in which it came to be: whoever speaks that, or a later one,
    /// knows it.
    pub fn version(&self) -> u16 {
        match self {
            Request::Exec { version, .. }
            | Request::CopyIn { version, .. }
            | Request::CopyOut { version, .. }
            | Request::Stat { version }
            | Request::Shutdown { version, .. }
            | Request::Quiesce { version, .. }
            | Request::SignalMain { version, .. }
            | Request::Changes { version } => *version,
        }
    }
}

/// To a running program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExecInput {
    /// Bytes for stdin, at most [`crate::frame::MAX_DATA`].
    Stdin(#[serde(with = "serde_bytes")] Vec<u8>),
    /// End of stdin.
    StdinClosed,
    /// Send this signal to the program's process group.
    Signal(i32),
    /// The terminal changed its size.
    Resize(WindowSize),
}

/// From a running program. The node sends the same to an attached CLI.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExecOutput {
    /// It runs.
    Started {
        /// Process id in the guest.
        pid: u32,
    },
    /// It wrote.
    Output {
        /// Where.
        stream: Stream,
        /// At most [`crate::frame::MAX_DATA`] bytes.
        #[serde(with = "serde_bytes")]
        data: Vec<u8>,
    },
    /// It ended; nothing follows.
    Exited(ExitStatus),
    /// It could not be started; nothing follows.
    Failed(StartError),
    /// From the node only: the VM ended before the program did; nothing follows.
    Lost {
        /// One sentence that says how.
        message: String,
        /// What the user can do.
        hint: Option<String>,
    },
}

/// One piece of a copied file or tree. A tree is its entries in depth-first
/// order, the root first with an empty path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CopyFrame {
    /// The next file, folder or link; ends the one before.
    Entry(CopyEntry),
    /// Bytes of the current file, at most [`crate::frame::MAX_DATA`].
    Data(#[serde(with = "serde_bytes")] Vec<u8>),
    /// The copy is whole.
    End,
    /// It failed; nothing follows.
    Failed {
        /// One sentence that names the path.
        message: String,
    },
}

/// A file, folder or link in a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyEntry {
    /// Path below the root of the copy; never absolute, never with `..`.
    pub path: String,
    /// What it is.
    pub kind: CopyKind,
    /// Permission bits (07777).
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time, seconds since 1970.
    pub mtime: i64,
}

/// What a copied entry is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CopyKind {
    /// A regular file of this size in bytes.
    File(u64),
    /// A folder.
    Folder,
    /// A symbolic link to this target.
    Symlink(String),
}

/// The answer to a copy into the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyDone {
    /// Entries written.
    pub entries: u64,
    /// What went wrong, one sentence; none if it is whole.
    pub error: Option<String>,
}

/// The answer to a request without a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Done {
    /// It was done, or has begun.
    Ok,
    /// It was not, and why.
    Error(String),
}

/// Memory and CPU of the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    /// MemTotal, bytes.
    pub memory_total: u64,
    /// MemAvailable, bytes.
    pub memory_available: u64,
    /// MemFree, bytes.
    pub memory_free: u64,
    /// CPU time of all vCPUs, user mode, nanoseconds.
    pub cpu_user_ns: u64,
    /// Kernel mode, nanoseconds.
    pub cpu_system_ns: u64,
    /// Idle, nanoseconds.
    pub cpu_idle_ns: u64,
    /// Load average over a minute, in hundredths.
    pub load_1m_hundredths: u32,
    /// Processes.
    pub processes: u32,
    /// Since boot, nanoseconds.
    pub uptime_ns: u64,
}
