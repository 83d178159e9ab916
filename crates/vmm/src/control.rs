//! The control socket: one JSON object per line, answered with one line, which may carry
//! descriptors.

use jiffy_sys::{dial, fds, handed};
use jiffy_wire::lines::{self, Lines};
use jiffy_wire::vmm::{ControlRequest, ControlResponse};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;

/// Longest request line, bytes.
const LINE_MAX: usize = 4096;
/// Most clients at once; another one waits until one has left.
const CLIENTS_MAX: usize = 32;
/// Longest path of a Unix socket, bytes.
const PATH_MAX: usize = 107;

/// Why the socket could not be created.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The path is too long: `sun_path` has 108 bytes.
    #[error("the control socket's path {} is longer than the {PATH_MAX} bytes a Unix socket can have", .0.display())]
    PathTooLong(PathBuf),
    /// Another program listens at the path.
    #[error("another program listens on the control socket {}", .0.display())]
    InUse(PathBuf),
    /// The file at the path is not a socket.
    #[error("the control socket can't be created: {} exists and is not a socket", .0.display())]
    NotASocket(PathBuf),
    /// The socket can't be created.
    #[error("the control socket {} can't be created", path.display())]
    Listen {
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The answer for a client.
#[derive(Debug)]
pub struct Answer {
    /// The response line.
    pub response: ControlResponse,
    /// Files that are sent with it (`SCM_RIGHTS`), at most [`fds::MOST`].
    pub files: Vec<Arc<File>>,
    /// After it the connection is the channel to this socket.
    pub channel_to: Option<PathBuf>,
}

impl From<ControlResponse> for Answer {
    fn from(response: ControlResponse) -> Answer {
        Answer {
            response,
            files: Vec::new(),
            channel_to: None,
        }
    }
}

/// The listening socket and its clients. Removes the socket when dropped.
pub struct ControlSocket {
    /// Path of the socket's file; `None` if the socket was handed over, because then others remove
    /// it.
    path: Option<PathBuf>,
    listener: UnixListener,
    clients: Vec<Client>,
}

pub(crate) struct Client {
    stream: UnixStream,
    lines: Lines,
}

impl ControlSocket {
    /// Listens at `path`, for this user only. Replaces the socket of a program that has ended. Uses
    /// a socket that was handed over under that name as it is.
    ///
    /// # Errors
    ///
    /// If the path is longer than a socket's address allows, if another program listens there, if
    /// another kind of file is there, or if a call of the socket fails.
    pub fn listen(path: &Path) -> Result<ControlSocket, ControlError> {
        if let Some(listener) = handed::take(path) {
            return ControlSocket::on(listener.into(), path, None);
        }
        if path.as_os_str().len() > PATH_MAX {
            return Err(ControlError::PathTooLong(path.into()));
        }
        // The socket has these permissions from the start. The umask is the process's: a
        // spare VMM already has other threads, but they wait for work and create no file.
        let mask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
        let listener = bind(path);
        rustix::process::umask(mask);
        ControlSocket::on(listener?, path, Some(path.into()))
    }

    fn on(
        listener: UnixListener,
        name: &Path,
        path: Option<PathBuf>,
    ) -> Result<ControlSocket, ControlError> {
        let made = listener.set_nonblocking(true);
        made.map_err(|source| ControlError::Listen {
            path: name.into(),
            source,
        })?;
        Ok(ControlSocket {
            path,
            listener,
            clients: Vec::new(),
        })
    }

    /// What to poll for reading: clients, and the listener as long as another client is allowed.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let room = self.clients.len() < CLIENTS_MAX;
        let clients = self.clients.iter().map(|client| client.stream.as_fd());
        clients.chain(room.then(|| self.listener.as_fd()))
    }

    /// Answers the clients that have sent something; never blocks. A malformed or overlong
    /// line, or an answer that is not read, closes that client's connection.
    pub fn serve(&mut self, mut answer: impl FnMut(ControlRequest) -> Answer) {
        self.clients.retain_mut(|client| client.serve(&mut answer));
        while self.clients.len() < CLIENTS_MAX {
            match self.listener.accept() {
                Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                    let mut client = Client::new(stream);
                    if client.serve(&mut answer) {
                        self.clients.push(client);
                    }
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Client {
    /// `stream` is non-blocking.
    pub(crate) fn new(stream: UnixStream) -> Client {
        let lines = Lines::new(LINE_MAX);
        Client { stream, lines }
    }

    /// Reads and answers; false once the connection is to be closed.
    pub(crate) fn serve(&mut self, answer: &mut impl FnMut(ControlRequest) -> Answer) -> bool {
        loop {
            match self.lines.next_line() {
                Ok(Some(line)) if self.answer_line(&line, answer) => continue,
                Ok(None) => {}
                Ok(Some(_)) | Err(_) => return false,
            }
            let mut bytes = [0; 512];
            match rustix::net::recv(&self.stream, &mut bytes[..], RecvFlags::empty()) {
                Ok((0, _)) => return false,
                Ok((count, _)) => self.lines.push(&bytes[..count]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return true,
                Err(_) => return false,
            }
        }
    }

    fn answer_line(&self, line: &[u8], answer: &mut impl FnMut(ControlRequest) -> Answer) -> bool {
        let request = match serde_json::from_slice(line) {
            Ok(request) => request,
            Err(error) => {
                let message = format!("this is not a request: {error}");
                self.send(&ControlResponse::Error(message).into());
                return false;
            }
        };
        let answer = answer(request);
        let is_sent = self.send(&answer);
        let Some(socket) = answer.channel_to else {
            return is_sent;
        };
        if is_sent && let Ok(channel) = self.stream.try_clone() {
            handed::replace(dial::channel_of(&socket), channel.into());
        }
        false
    }

    fn send(&self, answer: &Answer) -> bool {
        let line = lines::encode(&answer.response).expect("responses are plain data");
        let files: Vec<BorrowedFd<'_>> = answer.files.iter().map(|file| file.as_fd()).collect();
        fds::send_with_fds(&self.stream, &line, &files).is_ok()
    }
}

fn bind(path: &Path) -> Result<UnixListener, ControlError> {
    let failed = |source| ControlError::Listen {
        path: path.into(),
        source,
    };
    match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {}
        other => return other.map_err(failed),
    }
    let metadata = std::fs::symlink_metadata(path).map_err(failed)?;
    if !std::os::unix::fs::FileTypeExt::is_socket(&metadata.file_type()) {
        return Err(ControlError::NotASocket(path.into()));
    }
    if UnixStream::connect(path).is_ok() {
        return Err(ControlError::InUse(path.into()));
    }
    std::fs::remove_file(path).map_err(failed)?;
    UnixListener::bind(path).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::fs::PermissionsExt;

    fn socket() -> (tempfile::TempDir, PathBuf, ControlSocket) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let socket = ControlSocket::listen(&path).unwrap();
        (folder, path, socket)
    }

    fn reply(request: ControlRequest) -> Answer {
        match request {
            ControlRequest::Stop => ControlResponse::Ok.into(),
            other => ControlResponse::Error(format!("{other:?}")).into(),
        }
    }

    #[test]
    fn requests_are_answered_in_order_to_each_client() {
        let (_folder, path, mut socket) = socket();
        let mut one = UnixStream::connect(&path).unwrap();
        let mut two = UnixStream::connect(&path).unwrap();
        one.write_all(b"\"stop\"\n\"pau").unwrap();
        two.write_all(b"\"resume\"\n").unwrap();
        socket.serve(reply);
        one.write_all(b"se\"\n").unwrap();
        socket.serve(reply);
        let mut lines = BufReader::new(one).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "\"ok\"");
        assert_eq!(lines.next().unwrap().unwrap(), "{\"error\":\"Pause\"}");
        let mut lines = BufReader::new(two).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "{\"error\":\"Resume\"}");
    }

    #[test]
    fn garbage_and_endless_lines_close_only_that_client() {
        let (_folder, path, mut socket) = socket();
        let mut good = UnixStream::connect(&path).unwrap();
        let mut garbage = UnixStream::connect(&path).unwrap();
        let mut endless = UnixStream::connect(&path).unwrap();
        garbage.write_all(b"{}\n").unwrap();
        endless.write_all(&[b'x'; LINE_MAX + 1]).unwrap();
        socket.serve(reply);
        let mut text = String::new();
        garbage.read_to_string(&mut text).unwrap();
        assert!(text.contains("not a request"), "{text}");
        assert_eq!(socket.clients.len(), 1);
        good.write_all(b"\"stop\"\n").unwrap();
        socket.serve(reply);
        let mut answer = [0; 5];
        good.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"\"ok\"\n");
    }

    #[test]
    fn a_connection_becomes_a_channel_after_its_answer() {
        let (_folder, path, mut socket) = socket();
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(b"\"resume\"\n\"stop\"\n").unwrap();
        socket.serve(|_| Answer {
            channel_to: Some("/nowhere/dialed".into()),
            ..ControlResponse::Ok.into()
        });
        assert!(socket.clients.is_empty());
        let mut dialer = dial::Dialer::new(Path::new("/nowhere/dialed"));
        dialer.ask(7).unwrap();
        let mut bytes = [0; 9];
        client.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"\"ok\"\n\x07\0\0\0");
    }

    #[test]
    fn the_control_socket_is_private_and_removed_with_its_owner() {
        let (_folder, path, socket) = socket();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(matches!(
            ControlSocket::listen(&path),
            Err(ControlError::InUse(_))
        ));
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let stale = UnixListener::bind(&path).unwrap();
        // Closing is not sufficient: between fork and exec, a child of another test has the socket,
        // too.
        rustix::net::shutdown(&stale, rustix::net::Shutdown::Both).unwrap();
        drop(ControlSocket::listen(&path).unwrap());
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(
            ControlSocket::listen(&path),
            Err(ControlError::NotASocket(_))
        ));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }
}
