//! Errors of the machine, with hints.

use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

/// An error of the machine, as one sentence; [`hint`](MachineError::hint) says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// QEMU is not installed.
    #[error("the machine needs QEMU, and there is no qemu-system-x86_64 on PATH")]
    NoQemu,
    /// mkfs.xfs is not installed.
    #[error("the machine's disk must be formatted, and there is no mkfs.xfs on PATH")]
    NoMkfs,
    /// The image of the machine is missing.
    #[error("the machine's {what} is missing: {}", path.display())]
    NoImage {
        /// `kernel` or `initramfs`.
        what: &'static str,
        /// Its expected path.
        path: PathBuf,
    },
    /// The kernel that was chosen for the machine is gone.
    #[error("the machine's kernel is missing: {}", path.display())]
    NoKernel {
        /// Its path.
        path: PathBuf,
    },
    /// mkfs.xfs failed.
    #[error("the machine's disk {} could not be formatted: {message}", path.display())]
    Format {
        /// The disk.
        path: PathBuf,
        /// mkfs.xfs's error message.
        message: String,
    },
    /// QEMU did not start.
    #[error("QEMU did not start: {message}")]
    QemuRefused {
        /// The last line of its standard error.
        message: String,
    },
    /// The machine ended before it was ready, or while it was in use.
    #[error("the machine ended before it was ready{}", because(last_console_line))]
    Died {
        /// The last line of its console, if any.
        last_console_line: String,
        /// Its console log.
        console: PathBuf,
    },
    /// A service in the machine did not start.
    #[error("a service in the machine did not start: {message}")]
    NotReady {
        /// The agent's sentence.
        message: String,
        /// Its console log.
        console: PathBuf,
    },
    /// The machine did not become ready in time.
    #[error("the machine was not ready after {seconds} s")]
    Slow {
        /// The time limit, seconds.
        seconds: u64,
        /// Its console log.
        console: PathBuf,
    },
    /// The machine does not run.
    #[error("the machine is not running")]
    NotRunning,
    /// A port of the host can't be forwarded to the machine.
    #[error(
        "the port {address}:{port} is not available on this host: another program uses it, or only root may use it"
    )]
    PortInUse {
        /// The host's address.
        address: Ipv4Addr,
        /// The port.
        port: u16,
    },
    /// The host's disk is full and QEMU has paused the machine.
    #[error("the machine is paused: the disk under {} is full", path.display())]
    HostDiskFull {
        /// The data folder.
        path: PathBuf,
    },
    /// The machine does not stop.
    #[error("the machine (process {pid}) does not stop")]
    WillNotStop {
        /// QEMU's process id.
        pid: i32,
    },
    /// Another process uses the disk, and it is not the recorded QEMU.
    #[error("the machine's disk {} is in use by another process", path.display())]
    DiskInUse {
        /// The disk.
        path: PathBuf,
    },
    /// The disk exists and has another size than the requested one.
    #[error("the machine's disk exists and keeps its size of {has} GiB")]
    DiskSize {
        /// Its size in GiB.
        has: u32,
    },
    /// A socket's path is too long for the kernel.
    #[error("the path of a socket is longer than 107 bytes: {}", path.display())]
    LongPath {
        /// The path.
        path: PathBuf,
    },
    /// A program could not be run in the machine.
    #[error("{0}")]
    Program(String),
    /// An option is out of range.
    #[error("{0}")]
    Options(String),
    /// The saved options can't be read.
    #[error("{} can't be read: {message}", path.display())]
    Saved {
        /// The file.
        path: PathBuf,
        /// The cause.
        message: String,
    },
    /// QEMU's control socket failed.
    #[error("the machine's control socket failed: {0}")]
    Control(String),
    /// The agent can't be reached or refused a request.
    #[error("the machine's agent does not answer")]
    Agent(#[source] io::Error),
    /// A folder can't be shared.
    #[error("{path} can't be shared with the machine")]
    Share {
        /// The folder.
        path: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A file or folder can't be used.
    #[error("{} can't be used", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

fn because(last_console_line: &str) -> String {
    if last_console_line.is_empty() {
        String::new()
    } else {
        format!("; the last line of its console: {last_console_line}")
    }
}

impl MachineError {
    /// A hint for the user, if there is one.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            MachineError::NoQemu => "apt-get install qemu-system-x86".into(),
            MachineError::NoMkfs => "apt-get install xfsprogs".into(),
            MachineError::NoKernel { .. } => {
                "`jiffy machine start --kernel sched` builds it again; `--kernel debian` uses the one \
                 that Jiffy comes with"
                    .into()
            }
            MachineError::NoImage { .. } => {
                "install Jiffy with `make install`, or build it with `make build`".into()
            }
            MachineError::Format { .. } => {
                "check the disk's free space and permissions; `jiffy machine rm` removes the machine, so that the next start creates it again".into()
            }
            MachineError::Died { console, .. }
            | MachineError::NotReady { console, .. }
            | MachineError::Slow { console, .. } => {
                format!("its console is in {}", console.display())
            }
            MachineError::NotRunning => "jiffy machine start".into(),
            MachineError::PortInUse { .. } => "choose another port with -p".into(),
            MachineError::HostDiskFull { .. } => {
                "free some space, then run `jiffy machine start` to resume it".into()
            }
            MachineError::DiskInUse { .. } => {
                "if a machine runs that was started with another JIFFY_RUN or XDG_RUNTIME_DIR, \
                 `jiffy machine stop` with the same variable stops it"
                    .into()
            }
            MachineError::DiskSize { .. } => {
                "leave --disk out; or `jiffy machine rm` removes the disk with all VMs, images and \
                 volumes in it, and the next start creates one of another size"
                    .into()
            }
            MachineError::LongPath { .. } => "set JIFFY_RUN to a folder with a shorter path".into(),
            MachineError::Saved { .. } => "remove the file to go back to the defaults".into(),
            MachineError::Share { .. } => {
                "`jiffy machine start --share DIR` shares other folders, `--share none` shares none"
                    .into()
            }
            MachineError::Agent(_) => "`jiffy machine stop`, then `jiffy machine start`".into(),
            MachineError::File { source, .. }
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                "check who owns it, or set JIFFY_DATA and JIFFY_RUN to folders of your own".into()
            }
            MachineError::File { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                "free some space on that disk".into()
            }
            _ => return None,
        })
    }

    pub(crate) fn file(path: &Path, source: io::Error) -> MachineError {
        MachineError::File {
            path: path.into(),
            source,
        }
    }
}
