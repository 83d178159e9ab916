//! Connections to Unix sockets, for a program that may not connect by name.
//!
//! A jailed program makes no connection by name once it is confined. The process that started it
//! hands it a *channel* for each socket that it may need later ([`channel_of`]), asks there for a
//! connection with four bytes (a port, for a family of sockets), and gets one byte back: with a
//! connected descriptor, or the reason why there is none. Answers come in the order of requests.
//! When the other end of a channel is gone, nothing can be connected until a new one is handed over.
//!
//! * [`Dialer`]: the program's side.
//! * [`connect`], [`answer`]: the side that connects.

use crate::fds::{recv_with_fds, send_with_fds};
use crate::handed;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect as connect_to, send,
    socket_with,
};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Bytes of a request: a port, little-endian.
pub const REQUEST: usize = 4;

const CONNECTED: u8 = 0;
const BUSY: u8 = 1;
const REFUSED: u8 = 2;

/// The name under which the channel for this socket is handed over.
pub fn channel_of(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".ask");
    name.into()
}

/// The socket for a port, of a family of sockets.
pub fn socket_of_port(family: &Path, port: u32) -> PathBuf {
    let mut name = family.as_os_str().to_owned();
    name.push(format!("_{port}"));
    name.into()
}

/// Connects by name, without waiting.
///
/// # Errors
///
/// `WouldBlock` if the queue of the program that listens there is full.
pub fn connect(socket: &Path) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(socket)?;
    let stream = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
        None,
    )?;
    connect_to(&stream, &address)?;
    Ok(stream.into())
}

/// Answers the oldest request on a channel that was not answered yet.
///
/// # Errors
///
/// If sendmsg(2) fails, such as with `EPIPE` if the program has closed the channel.
pub fn answer(channel: impl AsFd, connected: &io::Result<UnixStream>) -> io::Result<()> {
    match connected {
        Ok(stream) => send_with_fds(channel, &[CONNECTED], &[stream.as_fd()]),
        Err(error) if error.kind() == ErrorKind::WouldBlock => send_with_fds(channel, &[BUSY], &[]),
        Err(_) => send_with_fds(channel, &[REFUSED], &[]),
    }
}

/// Connects to a socket, or to those of a family: by name, or, if this process was handed its
/// files, by asking on a channel. Never waits.
#[derive(Debug)]
pub struct Dialer {
    socket: PathBuf,
    by_name: bool,
    channel: Option<UnixStream>,
    /// [`attempt`](Dialer::attempt) has asked.
    asked: bool,
}

impl Dialer {
    /// For this socket.
    pub fn new(socket: &Path) -> Dialer {
        Dialer {
            socket: socket.to_owned(),
            by_name: !handed::is_used() && !handed::has(&channel_of(socket)),
            channel: None,
            asked: false,
        }
    }

    /// Whether this process connects by name.
    pub fn is_by_name(&self) -> bool {
        self.by_name
    }

    /// The channel, which is readable when there is an [answer](Dialer::answer).
    pub fn channel(&self) -> Option<&UnixStream> {
        self.channel.as_ref()
    }

    /// Closes the channel: what was asked for is not answered.
    pub fn close(&mut self) {
        self.channel = None;
    }

    /// Asks for a connection. Returns whether the channel is another one than at the last request:
    /// then requests on the former one are not answered any more.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if the channel is full; `NotConnected` if there is none.
    pub fn ask(&mut self, port: u32) -> io::Result<bool> {
        let mut is_new = false;
        loop {
            let Some(channel) = &self.channel else {
                let channel = handed::take(&channel_of(&self.socket));
                let none = || io::Error::new(ErrorKind::NotConnected, "jiffyd is not connected");
                self.channel = Some(channel.ok_or_else(none)?.into());
                is_new = true;
                continue;
            };
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(channel, &port.to_le_bytes(), flags) {
                Ok(REQUEST) => return Ok(is_new),
                Err(Errno::AGAIN) => return Err(ErrorKind::WouldBlock.into()),
                Err(Errno::INTR) => {}
                Ok(_) | Err(_) => self.channel = None,
            }
        }
    }

    /// The next answer, if it has come.
    ///
    /// # Errors
    ///
    /// If the channel is closed, or was not used as agreed: there will be no further answers.
    pub fn answer(&mut self) -> io::Result<Option<io::Result<UnixStream>>> {
        let Some(channel) = &self.channel else {
            return Ok(None);
        };
        let (mut byte, mut received) = ([0; 1], Vec::<OwnedFd>::new());
        // One byte at a time: the descriptors that come with it are its own.
        let error = match (
            recv_with_fds(channel, &mut byte, &mut received),
            byte,
            received.pop(),
        ) {
            (Err(error), ..) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            (Err(error), ..) => error,
            (Ok(0), ..) => ErrorKind::UnexpectedEof.into(),
            (Ok(_), [CONNECTED], Some(stream)) => return Ok(Some(Ok(stream.into()))),
            (Ok(_), [BUSY], None) => return Ok(Some(Err(ErrorKind::WouldBlock.into()))),
            (Ok(_), [REFUSED], None) => {
                return Ok(Some(Err(ErrorKind::ConnectionRefused.into())));
            }
            _ => ErrorKind::InvalidData.into(),
        };
        self.channel = None;
        Err(error)
    }

    /// Tries once to connect to the one socket; call it again and again.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is no answer yet.
    pub fn attempt(&mut self) -> io::Result<UnixStream> {
        if self.by_name {
            return connect(&self.socket);
        }
        if !self.asked {
            self.ask(0)?;
            self.asked = true;
        }
        let answer = self.answer();
        let unanswered = || io::Error::new(ErrorKind::WouldBlock, "jiffyd has not answered yet");
        self.asked = matches!(answer, Ok(None));
        answer?.unwrap_or_else(|| Err(unanswered()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::Shutdown;
    use std::os::unix::net::UnixListener;

    /// A dialer that asks, and the other end of its channel.
    fn asking(name: &str) -> (Dialer, UnixStream) {
        let theirs = hand_over(name);
        (Dialer::new(Path::new(name)), theirs)
    }

    fn hand_over(name: &str) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        handed::replace(channel_of(Path::new(name)), ours.into());
        theirs
    }

    /// Closes it, and what children of other tests have of it until they execute their programs.
    fn end(theirs: UnixStream) {
        theirs.shutdown(Shutdown::Both).unwrap();
    }

    fn next_request(theirs: &mut UnixStream) -> u32 {
        let mut request = [0; REQUEST];
        theirs.read_exact(&mut request).unwrap();
        u32::from_le_bytes(request)
    }

    #[test]
    fn connections_come_in_the_order_of_requests() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (mut dialer, mut theirs) = asking("/nowhere/in-order");
        assert!(!dialer.is_by_name());
        for (port, is_first) in [(7, true), (8, false), (u32::MAX, false), (9, false)] {
            assert_eq!(dialer.ask(port).unwrap(), is_first);
        }
        assert!(dialer.answer().unwrap().is_none());
        let busy = || Err(ErrorKind::WouldBlock.into());
        for (port, result) in [
            (7, Err(ErrorKind::NotFound.into())),
            (8, connect(&path)),
            (u32::MAX, busy()),
            (9, connect(&path)),
        ] {
            assert_eq!(next_request(&mut theirs), port);
            answer(&theirs, &result).unwrap();
        }
        let mut next = || dialer.answer().unwrap().unwrap();
        assert_eq!(next().unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let mut first = next().unwrap();
        assert_eq!(next().unwrap_err().kind(), ErrorKind::WouldBlock);
        let _second = next().unwrap();
        first.write_all(b"x").unwrap();
        listener.accept().unwrap().0.read_exact(&mut [0]).unwrap();
        listener.accept().unwrap();
    }

    #[test]
    fn a_channel_whose_end_is_gone_is_replaced_by_the_next_one() {
        const NAME: &str = "/nowhere/replaced";
        let (mut dialer, theirs) = asking(NAME);
        dialer.ask(1).unwrap();
        end(theirs);
        assert!(dialer.answer().is_err());
        assert_eq!(dialer.ask(2).unwrap_err().kind(), ErrorKind::NotConnected);
        let mut theirs = hand_over(NAME);
        assert!(dialer.ask(3).unwrap(), "it is another one");
        assert_eq!(next_request(&mut theirs), 3);
        // The end of a channel may be noticed by a request.
        end(theirs);
        let mut theirs = hand_over(NAME);
        assert!(dialer.ask(4).unwrap());
        assert_eq!(next_request(&mut theirs), 4);
    }

    #[test]
    fn a_channel_that_is_full_or_breaks_its_protocol_is_an_error() {
        let (mut dialer, mut theirs) = asking("/nowhere/full");
        let full = (0..1_000_000).find_map(|port| dialer.ask(port).err());
        assert_eq!(full.unwrap().kind(), ErrorKind::WouldBlock);
        for wrong in [CONNECTED, 9] {
            let mut dialer = Dialer {
                channel: dialer.channel.as_ref().map(|it| it.try_clone().unwrap()),
                by_name: false,
                asked: false,
                socket: PathBuf::new(),
            };
            theirs.write_all(&[wrong]).unwrap();
            let error = dialer.answer().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData);
            assert!(dialer.channel().is_none());
        }
    }

    #[test]
    fn attempts_ask_once_until_there_is_an_answer() {
        let (mut dialer, mut theirs) = asking("/nowhere/attempts");
        for _ in 0..3 {
            assert_eq!(dialer.attempt().unwrap_err().kind(), ErrorKind::WouldBlock);
        }
        assert_eq!(next_request(&mut theirs), 0);
        answer(&theirs, &Err(ErrorKind::NotFound.into())).unwrap();
        let refused = dialer.attempt().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        assert!(dialer.attempt().is_err(), "it asks again");
        assert_eq!(next_request(&mut theirs), 0);
        answer(&theirs, &UnixStream::pair().map(|pair| pair.0)).unwrap();
        dialer.attempt().unwrap();
    }

    #[test]
    fn a_process_that_was_handed_nothing_connects_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let mut dialer = Dialer::new(&path);
        assert!(dialer.is_by_name());
        assert_eq!(dialer.attempt().unwrap_err().kind(), ErrorKind::NotFound);
        let _listener = UnixListener::bind(&path).unwrap();
        dialer.attempt().unwrap();
    }
}
