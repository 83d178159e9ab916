//! The Unix socket that host programs connect to, and connections that were handed over ahead.

use super::error::VsockError;
use jiffy_sys::dial::socket_of_port;
use jiffy_sys::handed;
use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recv, socket_with,
};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Longest path of a Unix socket, in bytes (unix(7), with the final NUL 108).
const PATH_LIMIT: usize = 107;

/// Programs that may wait to be accepted, for example while the guest boots.
const BACKLOG: i32 = 1024;

/// A listening socket with its file, which is removed with it.
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the created file, because another file must never be removed. `None` if
    /// the socket was handed over: then others remove its file.
    identity: Option<(u64, u64)>,
}

impl Listener {
    /// Listens at `path`, for this user only. Replaces only a socket file that no program listens
    /// on. A socket of that name that was handed over is used as it is.
    ///
    /// # Errors
    ///
    /// If the path is longer than a socket's address allows, if another program listens there, if
    /// another kind of file is there, or if a call of the socket fails.
    pub fn bind(path: &Path) -> Result<Listener, VsockError> {
        let failed = |source: io::Error| VsockError::Listen {
            path: path.to_owned(),
            source,
        };
        if let Some(socket) = handed::take(path) {
            rustix::io::ioctl_fionbio(&socket, true).map_err(|errno| failed(errno.into()))?;
            return Ok(Listener {
                socket,
                path: path.to_owned(),
                identity: None,
            });
        }
        if path.as_os_str().len() > PATH_LIMIT {
            return Err(VsockError::PathTooLong {
                path: path.to_owned(),
            });
        }
        let address = SocketAddrUnix::new(path).map_err(|errno| failed(errno.into()))?;
        let socket = stream_socket().map_err(failed)?;
        // Linux gives the file the mode of the socket, so it is never accessible to others.
        fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(|errno| failed(errno.into()))?;
        match bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path, &address)?;
                bind(&socket, &address).map_err(|errno| failed(errno.into()))?;
            }
            other => other.map_err(|errno| failed(errno.into()))?,
        }
        let identity = Some(identity(path).map_err(failed)?);
        let listener = Listener {
            socket,
            path: path.to_owned(),
            identity,
        };
        listen(&listener.socket, BACKLOG).map_err(|errno| failed(errno.into()))?;
        Ok(listener)
    }

    /// Accepts one waiting program.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is none. Otherwise if accept4(2) fails, such as with `EMFILE` if no
    /// descriptor is free.
    pub fn accept(&self) -> io::Result<UnixStream> {
        let socket = accept_with(&self.socket, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?;
        Ok(UnixStream::from(socket))
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.identity.is_some()
            && identity(&self.path).ok() == self.identity
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::debug!(path = %self.path.display(), %error, "socket file not removed");
        }
    }
}

/// A connection to the program that listens for the guest's connections to `port`, if one was handed
/// over ahead and the program still has its end.
pub fn connected_ahead(path: &Path, port: u32) -> Option<UnixStream> {
    let stream = UnixStream::from(handed::take(&socket_of_port(path, port))?);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let is_over = matches!(recv(&stream, &mut [0; 1][..], flags), Ok((0, _)));
    (!is_over).then_some(stream)
}

fn stream_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
        None,
    )?)
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), VsockError> {
    let failed = |source: io::Error| VsockError::Listen {
        path: path.to_owned(),
        source,
    };
    let file = fs::symlink_metadata(path).map_err(failed)?;
    if !file.file_type().is_socket() {
        return Err(VsockError::NotASocket {
            path: path.to_owned(),
        });
    }
    let probe = stream_socket().map_err(failed)?;
    match connect(&probe, address) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path).map_err(failed),
        _ => Err(VsockError::InUse {
            path: path.to_owned(),
        }),
    }
}
