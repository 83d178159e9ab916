//! Sockets that only their owner may connect to.

use jiffy_sys::log_limit::LogLimit;
use jiffy_sys::peer::Peer;
use jiffy_sys::private_socket::bind_private;
use jiffy_wire::pager::OnBehalf;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Listens on `path` with mode 0600. A stale socket of a process that has ended is replaced; any
/// other file there is an error.
pub(super) fn bind(path: &Path) -> io::Result<UnixListener> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => fs::remove_file(path)?,
        Ok(_) => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "there is a file that is not a socket",
            ));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let listener = bind_private(path, 16)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Like [`bind`], but refuses if another process listens there.
pub(super) fn bind_exclusive(path: &Path) -> io::Result<UnixListener> {
    if UnixStream::connect(path).is_ok() {
        return Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            "another pager answers there",
        ));
    }
    bind(path)
}

/// The process at the other end of a connection.
pub(super) fn pid_of(stream: &UnixStream) -> Option<u32> {
    Peer::of(stream).ok()?.pid
}

/// The process for which a connection was made, if `line`, its first one, says so, and comes from a
/// process of this user: others can only speak for themselves.
pub(super) fn on_behalf(stream: &UnixStream, line: &[u8]) -> Option<u32> {
    let OnBehalf { on_behalf_of } = serde_json::from_slice(line).ok()?;
    let peer = Peer::of(stream).ok()?;
    (peer.uid == rustix::process::geteuid().as_raw()).then_some(on_behalf_of)
}

/// The next connection, non-blocking; `None` if there is none after all.
pub(super) fn accept(listener: &UnixListener) -> Option<UnixStream> {
    static LOG: LogLimit = LogLimit::new();
    let accepted = listener.accept().and_then(|(stream, _)| {
        stream.set_nonblocking(true)?;
        Ok(stream)
    });
    match accepted {
        Ok(stream) => Some(stream),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        Err(error) => {
            // For example, no descriptors are left. The connection stays in the queue.
            if LOG.admits() {
                tracing::warn!(%error, "a connection was not accepted");
            }
            thread::sleep(Duration::from_millis(10));
            None
        }
    }
}
