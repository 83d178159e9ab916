//! Unix sockets that only their owner may connect to.

use rustix::fs::{Mode, fchmod};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;

/// Listens on `path` with mode 0600 and this backlog (connections).
///
/// # Errors
///
/// `EADDRINUSE` if `path` exists. `InvalidInput` if it is too long for a socket's address.
/// Otherwise if a call of the socket fails.
pub fn bind_private(path: &Path, backlog: i32) -> io::Result<UnixListener> {
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // Before bind(2), because the file gets the socket's mode (less the umask: unix(7)) and must
    // never have another one.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, backlog)?;
    Ok(UnixListener::from(socket))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_socket_file_is_private_and_replaces_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = bind_private(&path, 4).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        listener.accept().unwrap();
        let error = bind_private(&path, 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
