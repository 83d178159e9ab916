//! Talks to `jiffy-vmm` directly, without a node.

use anyhow::{Context, Result, bail};
use jiffy_sys::fds::recv_with_fds;
use jiffy_wire::lines;
use jiffy_wire::vmm::{ControlRequest, ControlResponse, Restore, TakeSpare};
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time limit until a VMM's control socket exists.
const START_TIME: Duration = Duration::from_secs(10);

/// Result of a capture.
#[derive(Debug)]
pub struct Captured {
    /// Pause of the vCPUs, nanoseconds.
    pub pause_ns: u64,
    /// Descriptors of the state, the layout and the layers of RAM.
    pub fds: Vec<OwnedFd>,
}

impl Captured {
    /// Restore configuration of a child that inherits the descriptors.
    ///
    /// # Errors
    ///
    /// If `fcntl` fails, or too few descriptors were captured.
    pub fn for_child(&self) -> Result<Restore> {
        for fd in &self.fds {
            rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
        }
        let fds: Vec<i32> = self.fds.iter().map(AsRawFd::as_raw_fd).collect();
        Restore::of_captured(&fds).context("too few descriptors were captured")
    }

    /// Restore configuration of a spare VMM. It receives the descriptors after those of output and
    /// events.
    ///
    /// # Errors
    ///
    /// If too few descriptors were captured.
    pub fn for_spare(&self) -> Result<Restore> {
        let fds: Vec<i32> = (TakeSpare::FIRST_SOURCE..).take(self.fds.len()).collect();
        Restore::of_captured(&fds).context("too few descriptors were captured")
    }
}

/// Captures the VM with this control socket and, with `resume`, resumes it.
///
/// # Errors
///
/// If the VMM does not answer (see [`ask`]), or refuses.
pub fn capture(control: &Path, resume: bool) -> Result<Captured> {
    let mut fds = Vec::new();
    match ask(control, &ControlRequest::Capture { resume }, &mut fds)? {
        ControlResponse::Captured { pause_ns, .. } => Ok(Captured { pause_ns, fds }),
        other => bail!("{other:?}"),
    }
}

/// Sends a request to the VMM with this control socket, which need not exist yet. Adds descriptors
/// that come with the answer to `fds`.
///
/// # Errors
///
/// If the VMM does not accept a connection within 10 s, ends before it answers, or its answer can't
/// be parsed.
pub fn ask(
    control: &Path,
    request: &ControlRequest,
    fds: &mut Vec<OwnedFd>,
) -> Result<ControlResponse> {
    let until = Instant::now() + START_TIME;
    let mut stream = loop {
        match UnixStream::connect(control) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > until => return Err(error.into()),
            Err(_) => std::thread::yield_now(),
        }
    };
    let line = lines::encode(request)?;
    stream.write_all(&line)?;
    let mut answer = Vec::new();
    let mut piece = vec![0; 64 << 10];
    while !answer.ends_with(b"\n") {
        match recv_with_fds(&stream, &mut piece, fds)? {
            0 => bail!("the monitor ended before it answered"),
            count => answer.extend_from_slice(&piece[..count]),
        }
    }
    Ok(serde_json::from_slice(&answer)?)
}
