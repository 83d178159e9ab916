//! The supervisor channel, on which a guest's init reports to the node.
//!
//! Everything in the guest is untrusted. A connection is used only after a valid hello; an
//! invalid message closes its connection and has no other effect.

mod connection;

use jiffy_jail::access::open_socket;
use jiffy_sys::durable::remove_any;
use jiffy_wire::agent::{ExecInput, FromGuest, ToGuest};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tracing::{info, warn};

/// Most connections of one guest at a time.
const MAX_CONNECTIONS: usize = 8;
/// Capacity of the queue from a connection to the VM's task; a message has 64 KiB at most.
const QUEUE: usize = 4;
/// Most input credit that a guest can grant, bytes.
const MAX_ROOM: usize = 16 << 20;

/// Most complaints about the connections of one guest in the daemon's log.
const MAX_COMPLAINTS: u64 = 100;

/// How often a failed bind of the socket is tried again.
const RETRY_LISTENING: Duration = Duration::from_secs(1);

/// What the node has stored; the guest needs to keep it no longer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stored {
    /// Bytes of stdout.
    pub stdout: u64,
    /// Bytes of stderr.
    pub stderr: u64,
    /// The end of the first command.
    pub end: bool,
}

/// The node's side of a connection that sent a valid hello.
#[derive(Debug)]
pub struct Link {
    /// Its number, in the order of hellos.
    pub serial: u64,
    /// The newest version of the protocol that both ends speak.
    pub version: u16,
    /// Messages to the guest, with back-pressure. Dropping it (and every
    /// clone) closes the connection.
    pub send: mpsc::Sender<ToGuest>,
    /// Acknowledgements: only the newest counts. They are sent before other messages.
    pub stored: watch::Sender<Stored>,
    /// The end of the first command was reported on this connection.
    pub heard_end: bool,
    /// Input credit in bytes, if the guest uses flow control.
    room: Option<Arc<Semaphore>>,
}

/// Sends input to the first command, on one connection.
#[derive(Debug, Clone)]
pub struct InputPort {
    send: mpsc::Sender<ToGuest>,
    room: Option<Arc<Semaphore>>,
}

impl Link {
    /// Adds input credit that the guest has granted, in bytes.
    pub fn add_credit(&mut self, bytes: u32) {
        let room = self.room.get_or_insert_with(|| Arc::new(Semaphore::new(0)));
        let most = MAX_ROOM.saturating_sub(room.available_permits());
        room.add_permits((bytes as usize).min(most));
    }

    /// A sender of input on this connection.
    pub fn input(&self) -> InputPort {
        InputPort {
            send: self.send.clone(),
            room: self.room.clone(),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Wakes senders that wait for credit, so that they use another connection.
        if let Some(room) = &self.room {
            room.close();
        }
    }
}

impl InputPort {
    /// Sends input once there is room for it. False if the connection is closed.
    pub async fn send(&self, input: ExecInput) -> bool {
        if let (Some(room), ExecInput::Stdin(bytes)) = (&self.room, &input) {
            let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            match room.acquire_many(length).await {
                Ok(taken) => taken.forget(),
                Err(_) => return false,
            }
        }
        self.send.send(ToGuest::MainInput(input)).await.is_ok()
    }
}

/// Messages from the connections to the VM's task, in order.
#[derive(Debug)]
pub enum FromLink {
    /// A new connection sent its hello and replaces any older one.
    Hello {
        /// The node's side of it.
        link: Link,
        /// Guest time of the mark `PID 1`.
        pid1_ns: u64,
        /// Connections before this one since the guest's boot.
        attempt: u32,
    },
    /// A message on the connection with this serial.
    Message(u64, FromGuest),
    /// That connection is closed.
    Gone(u64),
}

/// Counts the complaints about a guest's connections: a guest can give cause for any number, and the
/// daemon's log is never cut.
#[derive(Debug, Default)]
pub struct Complaints(AtomicU64);

impl Complaints {
    /// Counts one more. Is it among the first, which are logged?
    pub fn may_be_logged(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) < MAX_COMPLAINTS
    }
}

/// Accepts connections of the guest with this id until dropped.
#[derive(Debug)]
pub struct Supervisor {
    /// Messages of all connections.
    pub messages: mpsc::Receiver<FromLink>,
    /// Complaints about them.
    pub complaints: Arc<Complaints>,
    accepting: tokio::task::JoinHandle<()>,
}

impl Supervisor {
    /// Starts to accept connections. `first` is one that the guest's VMM has already.
    pub fn new(listener: UnixListener, first: Option<UnixStream>, vm_id: &str) -> Supervisor {
        let (send, messages) = mpsc::channel(QUEUE);
        let complaints = Arc::<Complaints>::default();
        let counted = Arc::clone(&complaints);
        let accepting = tokio::spawn(accept(listener, first, vm_id.to_owned(), send, counted));
        Supervisor {
            messages,
            complaints,
            accepting,
        }
    }

    /// Accepts connections as soon as the socket can be bound; retries until then.
    pub fn bind_later(socket: PathBuf, vm_id: &str) -> Supervisor {
        let (send, messages) = mpsc::channel(QUEUE);
        let vm_id = vm_id.to_owned();
        let complaints = Arc::<Complaints>::default();
        let counted = Arc::clone(&complaints);
        let accepting = tokio::spawn(async move {
            let listener = loop {
                tokio::time::sleep(RETRY_LISTENING).await;
                if let Ok(listener) = bind(&socket) {
                    break listener;
                }
            };
            info!(vm = %vm_id, "listening for the guest again");
            accept(listener, None, vm_id, send, counted).await;
        });
        Supervisor {
            messages,
            complaints,
            accepting,
        }
    }
}

/// Binds this socket; replaces any file at its path. The socket is renamed to its path last, so
/// that a guest which connects meanwhile is never refused for its permissions.
///
/// # Errors
///
/// If the socket can't be bound, opened to its VMM's user, or renamed.
pub fn bind(socket: &Path) -> io::Result<UnixListener> {
    let new = socket.with_extension("new");
    let _ = remove_any(&new);
    // rename(2) replaces a file, but no folder.
    if socket.is_dir() {
        let _ = remove_any(socket);
    }
    let listener = UnixListener::bind(&new)?;
    // A jailed VMM has a user of its own; its folder says which.
    new.parent()
        .map_or(Ok(()), |folder| open_socket(&new, folder))?;
    fs::rename(&new, socket)?;
    Ok(listener)
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // The connections end without being told, because their messages have no receiver.
        self.accepting.abort();
    }
}

async fn accept(
    listener: UnixListener,
    first: Option<UnixStream>,
    vm_id: String,
    messages: mpsc::Sender<FromLink>,
    complaints: Arc<Complaints>,
) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let vm_id: Arc<str> = vm_id.into();
    let mut serial = 0;
    if let Some(stream) = first {
        serial += 1;
        let (vm_id, messages) = (Arc::clone(&vm_id), messages.clone());
        let complaints = Arc::clone(&complaints);
        tokio::spawn(async move {
            // Its guest connects when it has booted.
            if stream.readable().await.is_ok() {
                connection::serve(stream, serial, &vm_id, messages, &complaints).await;
            }
        });
    }
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(vm = %vm_id, %error, "a connection from the guest could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        serial += 1;
        let (vm_id, messages) = (Arc::clone(&vm_id), messages.clone());
        let complaints = Arc::clone(&complaints);
        tokio::spawn(async move {
            connection::serve(stream, serial, &vm_id, messages, &complaints).await;
            drop(place);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::connection::HELLO_TIME;
    use super::*;
    use jiffy_wire::agent::{self, Stream};
    use jiffy_wire::frame::{self, Decoder};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn hello(vm_id: &str) -> Vec<u8> {
        hello_of(agent::VERSION, vm_id)
    }

    fn hello_of(version: u16, vm_id: &str) -> Vec<u8> {
        frame::to_vec(&FromGuest::Hello {
            version,
            vm_id: vm_id.into(),
            pid1_ns: 7,
            attempt: 0,
        })
        .unwrap()
    }

    #[tokio::test]
    async fn the_highest_common_version_is_spoken_with_a_guest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let mut supervisor =
            Supervisor::new(UnixListener::bind(&path).unwrap(), None, "0123456789ab");
        // The hello of release 0.1's init, byte for byte.
        let old = include_str!("../../wire/golden/agent-1.txt").lines().next();
        let hex = old.unwrap().split(' ').nth(1).unwrap();
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        let old = (0..hex.len()).step_by(2).map(byte).collect();
        let newer = hello_of(agent::VERSION + 1, "0123456789ab");
        for (hello, spoken) in [(old, 1), (newer, agent::VERSION)] {
            let mut guest = UnixStream::connect(&path).await.unwrap();
            guest.write_all(&hello).await.unwrap();
            let Some(FromLink::Hello { link, .. }) = supervisor.messages.recv().await else {
                panic!("no hello");
            };
            assert_eq!(link.version, spoken);
            drop(link);
            assert!(matches!(
                supervisor.messages.recv().await,
                Some(FromLink::Gone(_))
            ));
        }
    }

    /// Paused time advances to the next timer only when there is nothing else to do.
    #[tokio::test(start_paused = true)]
    async fn silent_connections_are_limited_and_time_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let begun = tokio::time::Instant::now();
        let mut supervisor = Supervisor::new(UnixListener::bind(&path).unwrap(), None, "me");
        let mut silent = Vec::new();
        for _ in 0..2 * MAX_CONNECTIONS {
            silent.push(UnixStream::connect(&path).await.unwrap());
        }
        let mut guest = UnixStream::connect(&path).await.unwrap();
        guest.write_all(&hello("me")).await.unwrap();
        let Some(FromLink::Hello { link, .. }) = supervisor.messages.recv().await else {
            panic!("no hello");
        };
        // All places were taken twice before there was one for it.
        assert_eq!(link.serial, 2 * MAX_CONNECTIONS as u64 + 1);
        let waited = begun.elapsed();
        assert!(
            waited >= 2 * HELLO_TIME && waited < 3 * HELLO_TIME,
            "{waited:?}"
        );
        for mut stream in silent {
            assert_eq!(stream.read(&mut [0]).await.unwrap(), 0, "it was closed");
        }
    }

    #[test]
    fn only_the_first_complaints_about_a_guest_are_logged() {
        let complaints = Complaints::default();
        let logged = (0..10 * MAX_COMPLAINTS).filter(|_| complaints.may_be_logged());
        assert_eq!(logged.count() as u64, MAX_COMPLAINTS);
    }

    #[tokio::test]
    async fn invalid_data_closes_only_its_own_connection() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let mut supervisor = Supervisor::new(UnixListener::bind(&path).unwrap(), None, "me");
        let mut good = UnixStream::connect(&path).await.unwrap();
        good.write_all(&hello("me")).await.unwrap();
        let Some(FromLink::Hello { link, pid1_ns, .. }) = supervisor.messages.recv().await else {
            panic!("no hello");
        };
        assert_eq!(pid1_ns, 7);
        for nonsense in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            &[0xff; 64],
            &hello("somebody else"),
            &hello_of(0, "me"),
            &frame::to_vec(&FromGuest::Ready).unwrap(),
        ] {
            let mut bad = UnixStream::connect(&path).await.unwrap();
            bad.write_all(nonsense).await.unwrap();
            let mut rest = Vec::new();
            let _ = bad.read_to_end(&mut rest).await;
            assert!(rest.is_empty(), "it was closed without an answer");
        }
        good.write_all(&frame::to_vec(&FromGuest::Ready).unwrap())
            .await
            .unwrap();
        assert!(matches!(
            supervisor.messages.recv().await,
            Some(FromLink::Message(serial, FromGuest::Ready)) if serial == link.serial
        ));
        drop(link);
        assert!(matches!(
            supervisor.messages.recv().await,
            Some(FromLink::Gone(_))
        ));
    }

    #[tokio::test]
    async fn acknowledgements_overtake_unread_input() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let mut supervisor = Supervisor::new(UnixListener::bind(&path).unwrap(), None, "me");
        let mut guest = UnixStream::connect(&path).await.unwrap();
        guest.write_all(&hello("me")).await.unwrap();
        let Some(FromLink::Hello { link, .. }) = supervisor.messages.recv().await else {
            panic!("no hello");
        };
        let welcome = ToGuest::Welcome {
            version: agent::VERSION,
            stdout_offset: 0,
            stderr_offset: 0,
        };
        link.send.send(welcome.clone()).await.unwrap();
        link.stored.send_replace(Stored {
            stdout: 5,
            stderr: 0,
            end: true,
        });
        let output = FromGuest::MainOutput {
            stream: Stream::Stdout,
            offset: 0,
            data: b"hello".to_vec(),
        };
        guest
            .write_all(&frame::to_vec(&output).unwrap())
            .await
            .unwrap();
        link.send
            .send(ToGuest::MainInput(ExecInput::StdinClosed))
            .await
            .unwrap();
        let mut decoder = Decoder::new();
        let mut got = Vec::new();
        while got.len() < 4 {
            let mut buffer = [0; 512];
            let count = guest.read(&mut buffer).await.unwrap();
            decoder.push(&buffer[..count]);
            while let Some(message) = decoder.next::<ToGuest>().unwrap() {
                got.push(message);
            }
        }
        assert_eq!(got[0], welcome);
        assert!(got.contains(&ToGuest::MainEndStored));
        assert!(got.contains(&ToGuest::MainInput(ExecInput::StdinClosed)));
    }

    #[tokio::test]
    async fn input_waits_until_the_guest_has_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let mut supervisor = Supervisor::new(UnixListener::bind(&path).unwrap(), None, "me");
        let mut guest = UnixStream::connect(&path).await.unwrap();
        guest.write_all(&hello("me")).await.unwrap();
        let Some(FromLink::Hello { mut link, .. }) = supervisor.messages.recv().await else {
            panic!("no hello");
        };
        // The first message is the welcome; here any will do.
        link.send
            .send(ToGuest::MainInput(ExecInput::StdinClosed))
            .await
            .unwrap();
        link.add_credit(u32::MAX);
        link.add_credit(u32::MAX);
        assert_eq!(link.room.as_ref().unwrap().available_permits(), MAX_ROOM);
        let port = link.input();
        let piece = || ExecInput::Stdin(vec![0; 60_000]);
        link.room
            .as_ref()
            .unwrap()
            .forget_permits(MAX_ROOM - 100_000);
        assert!(port.send(piece()).await);
        let waiting = tokio::spawn({
            let port = port.clone();
            async move { port.send(piece()).await }
        });
        assert!(
            port.send(ExecInput::Signal(2)).await,
            "a signal needs no room"
        );
        assert!(!waiting.is_finished());
        link.add_credit(20_000);
        assert!(waiting.await.unwrap());
        let waiting = tokio::spawn(async move { port.send(piece()).await });
        tokio::task::yield_now().await;
        drop(link);
        assert!(!waiting.await.unwrap(), "the connection is gone");
    }
}
