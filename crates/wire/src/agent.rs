//! The protocol between the node and `jiffy-init`, in [`crate::frame`]s over vsock.
//!
//! There are two kinds of connections:
//!
//! * The **supervisor channel**: the guest connects to the host at [`SUPERVISOR_PORT`] and sends
//!   [`FromGuest`]; the node sends [`ToGuest`]. It carries readiness, init's spans and warnings,
//!   and the first command's streams. When it breaks (the node restarted) the guest connects
//!   again, sends another hello, and repeats what was not acknowledged.
//! * **Agent connections**: the host connects to the guest at [`AGENT_PORT`] and sends one
//!   [`Request`]; the rest depends on the request.
//!
//! Order on the supervisor channel: `Hello` → `Welcome` → any other message.
//!
//! A guest may be older than its node (in a captured VM by many releases) or newer (after a
//! downgrade). The hello has the newest version that the guest supports, the welcome the newest
//! that both support ([`negotiated_version`]). A [`Request`] has the version that introduced it, and the guest
//! accepts those that it supports ([`is_supported`]). Messages never change: an extended message is a
//! new one at the end of its enum, with a new version, and is sent only to peers that support it.

use alloc::{string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// Port of the host (CID 2) to which the guest connects.
pub const SUPERVISOR_PORT: u32 = 1024;
/// Port on which the guest listens.
pub const AGENT_PORT: u32 = 1025;
/// The newest supported version.
pub const VERSION: u16 = 2;
/// The version that introduced [`Request::SetCpus`].
pub const CPUS: u16 = 2;
/// The oldest supported version, which guests of release 0.1 use.
pub const OLDEST: u16 = 1;
/// Most output of the first command that the guest keeps while the node is away, bytes per stream.
pub const MAIN_OUTPUT_WINDOW: usize = 256 * 1024;

/// The newest version that both support, if the peer's newest is `newest`.
pub fn negotiated_version(newest: u16) -> Option<u16> {
    (newest >= OLDEST).then(|| newest.min(VERSION))
}

/// Whether this version is supported.
pub fn is_supported(version: u16) -> bool {
    (OLDEST..=VERSION).contains(&version)
}

/// A program to run in the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Program and arguments. A program without a slash is looked up in PATH.
    pub argv: Vec<String>,
    /// The whole environment, `NAME=value`; PATH, HOME and TERM have defaults.
    #[serde(default)]
    pub env: Vec<String>,
    /// Working directory; none means `/`.
    #[serde(default)]
    pub cwd: Option<String>,
    /// `name`, `uid`, `name:group` or `uid:gid`; none means root.
    #[serde(default)]
    pub user: Option<String>,
    /// Run on a pseudo-terminal of this size; all output is then stdout.
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

/// Kinds of failures to start a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StartFailure {
    /// The program does not exist (shells exit with 127).
    NotFound,
    /// The file is not executable (shells exit with 126).
    NotExecutable,
    /// The user or group does not exist in the image.
    NoSuchUser,
    /// The working directory does not exist.
    NoSuchDirectory,
    /// The request is not valid (empty argv, a NUL byte, …).
    Invalid,
    /// Another failure, such as too little memory or too many processes.
    Other,
}

impl StartFailure {
    /// The exit status that Docker's users expect: 127, 126 or 125.
    pub fn exit_code(self) -> i32 {
        match self {
            StartFailure::NotFound => 127,
            StartFailure::NotExecutable => 126,
            _ => 125,
        }
    }
}

/// Why a program could not be started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartError {
    /// The kind of failure.
    pub kind: StartFailure,
    /// One sentence that names the program.
    pub message: String,
}

/// A span or moment in the guest, on the guest's CLOCK_MONOTONIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestSpan {
    /// True for a milestone of the kernel, false for a step of init.
    pub kernel: bool,
    /// Its name.
    pub name: String,
    /// Start, guest nanoseconds.
    pub start_ns: u64,
    /// End, guest nanoseconds.
    pub end_ns: u64,
    /// The error, if it failed.
    pub error: Option<String>,
}

/// Guest to host, on the supervisor channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromGuest {
    /// First message of each connection.
    Hello {
        /// The newest version that the guest supports.
        version: u16,
        /// The id from the guest's configuration.
        vm_id: String,
        /// Guest's CLOCK_MONOTONIC when the mark `MARK_PID1` was written, in a restored guest
        /// `MARK_GATE_ENTERED`, nanoseconds.
        pid1_ns: u64,
        /// 0 for the first connection of this boot or generation, then 1, 2, …
        attempt: u32,
    },
    /// Spans measured since the last such message.
    Spans(Vec<GuestSpan>),
    /// A step failed, and the guest continues without it. Shown in `jiffy logs`, and by `run -d` on
    /// stderr if it was sent before `Ready`.
    Warning {
        /// The step.
        step: String,
        /// One sentence.
        message: String,
    },
    /// The agent accepts requests.
    Ready,
    /// The first command was started.
    MainStarted {
        /// Its process id in the guest.
        pid: u32,
    },
    /// The first command could not be started.
    MainFailed(StartError),
    /// Output of the first command.
    MainOutput {
        /// The stream.
        stream: Stream,
        /// Offset of the first byte in that stream since its start.
        offset: u64,
        /// At most [`crate::frame::MAX_DATA`] bytes.
        #[serde(with = "serde_bytes")]
        data: Vec<u8>,
    },
    /// The first command ended. All its output was sent before this.
    MainExited(ExitStatus),
    /// A line that a service wrote, or a message about its start, end or failure.
    ServiceLog {
        /// The service's name.
        name: String,
        /// The bytes, without the newline.
        #[serde(with = "serde_bytes")]
        line: Vec<u8>,
    },
    /// An orderly end: only programs that can't be killed are left. The guest then syncs its file
    /// systems and powers off.
    PoweringOff,
    /// The first command's standard input has room for this many more bytes, counted from the
    /// hello. The first message gives [`crate::frame::MAX_DATA`] or more and is sent before
    /// `MainStarted`. Signals and terminal sizes need no room. A guest that never sends this must
    /// accept any amount: it has to store the input and keep reading, because acknowledgements come
    /// on the same connection.
    MainInputRoom {
        /// Bytes.
        bytes: u32,
    },
}

/// Host to guest, on the supervisor channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToGuest {
    /// Answer to a hello.
    Welcome {
        /// The newest version that both support.
        version: u16,
        /// Bytes of the first command's stdout that the host has stored.
        stdout_offset: u64,
        /// Bytes of its stderr that the host has stored.
        stderr_offset: u64,
    },
    /// Output up to these offsets is stored; the guest discards it.
    MainOutputStored {
        /// Bytes of stdout.
        stdout_offset: u64,
        /// Bytes of stderr.
        stderr_offset: u64,
    },
    /// Input for the first command.
    MainInput(ExecInput),
    /// `MainExited` or `MainFailed` is stored; with `power_off_after_main` the guest may now power
    /// off. It is valid only after the end was reported on this connection.
    MainEndStored,
}

/// A request of the host on an agent connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Run a program. Then [`ExecInput`] from the host and [`ExecOutput`] from the guest, until
    /// `Exited` or `Failed`. If the connection breaks earlier, the program gets SIGHUP.
    Exec {
        /// [`OLDEST`].
        version: u16,
        /// What to run.
        command: Command,
    },
    /// Copy into the guest. [`CopyFrame`]s from the host, then one [`CopyDone`] from the guest.
    CopyIn {
        /// [`OLDEST`].
        version: u16,
        /// An existing folder or the new name, as for `cp -r`.
        path: String,
    },
    /// Copy out of the guest. [`CopyFrame`]s from the guest, the last one `CopyFrame::End` or
    /// `CopyFrame::Failed`.
    CopyOut {
        /// [`OLDEST`].
        version: u16,
        /// File or folder.
        path: String,
    },
    /// Figures of the guest. One [`Stat`] from the guest.
    Stat {
        /// [`OLDEST`].
        version: u16,
    },
    /// End the VM in order: SIGTERM to all programs, sync, power off (or reboot). One [`Done`] from
    /// the guest before it begins.
    Shutdown {
        /// [`OLDEST`].
        version: u16,
        /// Time between SIGTERM and SIGKILL, milliseconds.
        grace_ms: u32,
    },
    /// Quiesce the workload for a capture: freeze all programs, write dirty pages back and, if
    /// requested, drop caches; then one [`Done`] from the guest. Programs stay frozen until this
    /// connection ends. The guest then reads its [`crate::guest::Generation`]. If that is
    /// unchanged, the guest was only captured, and thaws its programs; otherwise it was restored.
    ///
    /// The answer waits up to 500 ms until the host has stored the first command's output, which
    /// belongs to this guest: a clone starts at offset 0. Until the programs are thawed, the kernel
    /// accepts other connections, but nobody serves them. The host must send nothing more on this
    /// connection.
    Quiesce {
        /// [`OLDEST`].
        version: u16,
        /// Drop page cache, dentries and inodes, and compact memory, so that the capture is small.
        drop_caches: bool,
    },
    /// Send a signal to the first command. One [`Done`] from the guest.
    SignalMain {
        /// [`OLDEST`].
        version: u16,
        /// Signal number.
        signal: i32,
    },
    /// The changes of the root file system: the overlay's upper layer as a tar, with whiteouts and
    /// opaque folders as in overlayfs. Programs are frozen meanwhile. [`CopyFrame::Data`] from the
    /// guest, then `End` or `Failed`.
    Changes {
        /// [`OLDEST`].
        version: u16,
    },
    /// Bring vCPUs on or off line, so that the first `count` are online. One [`Done`] from the
    /// guest; after an error those are online that were before.
    SetCpus {
        /// [`CPUS`].
        version: u16,
        /// Number of vCPUs, from 1.
        count: u16,
    },
}

impl Request {
    /// The version that introduced the request. Guests of that version and later support it.
    pub fn version(&self) -> u16 {
        match self {
            Request::Exec { version, .. }
            | Request::CopyIn { version, .. }
            | Request::CopyOut { version, .. }
            | Request::Stat { version }
            | Request::Shutdown { version, .. }
            | Request::Quiesce { version, .. }
            | Request::SignalMain { version, .. }
            | Request::Changes { version }
            | Request::SetCpus { version, .. } => *version,
        }
    }
}

/// Input for a running program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExecInput {
    /// Bytes for stdin, at most [`crate::frame::MAX_DATA`].
    Stdin(#[serde(with = "serde_bytes")] Vec<u8>),
    /// stdin is closed.
    StdinClosed,
    /// Send this signal to the program's process group.
    Signal(i32),
    /// The terminal has a new size.
    Resize(WindowSize),
}

/// Output of a running program. The node sends the same to an attached CLI.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExecOutput {
    /// The program was started.
    Started {
        /// Process id in the guest.
        pid: u32,
    },
    /// The program wrote to a stream.
    Output {
        /// The stream.
        stream: Stream,
        /// At most [`crate::frame::MAX_DATA`] bytes.
        #[serde(with = "serde_bytes")]
        data: Vec<u8>,
    },
    /// The program ended; this is the last message.
    Exited(ExitStatus),
    /// The program could not be started; this is the last message.
    Failed(StartError),
    /// Only from the node: the VM ended before the program; this is the last message.
    Lost {
        /// The reason, as one sentence.
        message: String,
        /// A hint for the user.
        hint: Option<String>,
    },
}

/// A piece of a copied file or tree. A tree is sent as its entries in depth-first order, the root
/// first with an empty path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CopyFrame {
    /// The next file, folder or link. It ends the one before.
    Entry(CopyEntry),
    /// Bytes of the current file, at most [`crate::frame::MAX_DATA`].
    Data(#[serde(with = "serde_bytes")] Vec<u8>),
    /// The copy is complete.
    End,
    /// The copy failed; this is the last message.
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
    /// Its type.
    pub kind: CopyKind,
    /// Permission bits (07777).
    pub mode: u32,
    /// Owner's user id.
    pub uid: u32,
    /// Owner's group id.
    pub gid: u32,
    /// Modification time, seconds since 1970.
    pub mtime: i64,
}

/// Type of a copied entry.
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
    /// The error as one sentence; `None` if the copy is complete.
    pub error: Option<String>,
}

/// Answer to a request without a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Done {
    /// It was done, or was begun.
    Ok,
    /// It was not done, for this reason.
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
    /// CPU time in kernel mode, nanoseconds.
    pub cpu_system_ns: u64,
    /// Idle time, nanoseconds.
    pub cpu_idle_ns: u64,
    /// Load average of the last minute, in hundredths.
    pub load_1m_hundredths: u32,
    /// Number of processes.
    pub processes: u32,
    /// Time since boot, nanoseconds.
    pub uptime_ns: u64,
}
