//! Sockets that only their owner may connect to.

use jiffy_sys::private_socket::bind_private;
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

/// The next connection, non-blocking; `None` if there is none after all.
pub(super) fn accept(listener: &UnixListener) -> Option<UnixStream> {
    let accepted = listener.accept().and_then(|(stream, _)| {
        stream.set_nonblocking(true)?;
        Ok(stream)
    });
    match accepted {
        Ok(stream) => Some(stream),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        Err(error) => {
            // For example, no descriptors are left. The connection stays in the queue.
            tracing::warn!(%error, "a connection was not accepted");
            thread::sleep(Duration::from_millis(10));
            None
        }
    }
}
