//! The connection to the node. The guest connects without blocking, early in the boot, and again
//! whenever the connection breaks.

use crate::poll::{PollSet, Token};
use crate::stream::{FrameStream, Received};
use crate::syscalls::{self, vsock::VsockAddress};
use alloc::string::String;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicI32, Ordering};
use jiffy_wire::agent::{self, FromGuest, SUPERVISOR_PORT, ToGuest, VERSION};
use rustix::event::PollFlags;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io::{Errno, Result};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

const FIRST_PAUSE_NS: u64 = 20_000_000;
/// First pause of a restored guest: its kernel drops a connection that was made before it has
/// handled the device's reset, which may be a moment later.
const RESTART_PAUSE_NS: u64 = 100_000;
const LONGEST_PAUSE_NS: u64 = 1_000_000_000;
/// Pause after the kernel reported that it has no vsock device, nanoseconds.
const ABSENT_PAUSE_NS: u64 = 30_000_000_000;
/// Time limit for the host's answer to a hello, nanoseconds.
const GREETING_NS: u64 = 10_000_000_000;

/// Address of the node.
#[derive(Debug, Clone)]
pub enum Peer {
    /// The host, over vsock.
    Host,
    /// A Unix socket, for an agent that is an ordinary process.
    Unix(String),
    /// There is no node.
    None,
}

/// Contents of the hello.
#[derive(Debug, Clone)]
pub struct Identity {
    /// VM id in the configuration.
    pub vm_id: String,
    /// When PID 1 started or found that it was restored, guest CLOCK_MONOTONIC in nanoseconds.
    pub pid1_ns: u64,
}

/// The connection and its state.
#[derive(Debug)]
pub struct Link {
    peer: Peer,
    identity: Identity,
    state: State,
    attempt: u32,
    pause_ns: u64,
}

#[derive(Debug)]
enum State {
    Down {
        retry_at: u64,
        absent: bool,
    },
    Connecting(FrameStream),
    Greeting {
        stream: FrameStream,
        give_up_at: u64,
    },
    Up(FrameStream),
}

/// An event of the link.
#[derive(Debug)]
pub enum Event {
    /// The host sent its welcome, with the offsets up to which it has the first command's output.
    Welcome {
        /// Bytes of stdout.
        stdout: u64,
        /// Bytes of stderr.
        stderr: u64,
    },
    /// Another message.
    Message(ToGuest),
    /// The connection is lost.
    Lost,
}

impl Link {
    /// A link that is not connected yet.
    pub fn new(peer: Peer, identity: Identity) -> Link {
        let state = State::Down {
            retry_at: 0,
            absent: matches!(peer, Peer::None),
        };
        Link {
            peer,
            identity,
            state,
            attempt: 0,
            pause_ns: FIRST_PAUSE_NS,
        }
    }

    /// Restarts with another identity: connects at once.
    pub fn restart(&mut self, identity: Identity, now: u64) {
        OPEN.store(NONE, Ordering::Relaxed);
        self.identity = identity;
        self.attempt = 0;
        self.pause_ns = RESTART_PAUSE_NS;
        self.state = State::Down {
            retry_at: now,
            absent: matches!(self.peer, Peer::None),
        };
        self.advance(now);
    }

    /// The VM id in the hello.
    pub fn vm_id(&self) -> &str {
        &self.identity.vm_id
    }

    /// Whether the kernel has no vsock device, or there is no peer.
    pub fn is_absent(&self) -> bool {
        matches!(self.state, State::Down { absent: true, .. })
    }

    /// Whether the host has sent its welcome.
    pub fn is_up(&self) -> bool {
        matches!(self.state, State::Up(_))
    }

    /// The stream, once the host has sent its welcome.
    pub fn up(&mut self) -> Option<&mut FrameStream> {
        match &mut self.state {
            State::Up(stream) => Some(stream),
            _ => None,
        }
    }

    /// Connects when it is due; closes a connection whose hello was not answered.
    pub fn advance(&mut self, now: u64) {
        match &self.state {
            State::Down { retry_at, .. } if now >= *retry_at => self.dial(now),
            State::Greeting { give_up_at, .. } if now >= *give_up_at => self.lost(now, false),
            _ => {}
        }
    }

    /// When [`Self::advance`] has something to do, CLOCK_MONOTONIC nanoseconds.
    pub fn deadline(&self) -> Option<u64> {
        match &self.state {
            State::Down { .. } if matches!(self.peer, Peer::None) => None,
            State::Down { retry_at, .. } => Some(*retry_at),
            State::Greeting { give_up_at, .. } => Some(*give_up_at),
            _ => None,
        }
    }

    fn dial(&mut self, now: u64) {
        let result = match &self.peer {
            Peer::None => return,
            Peer::Host => dial(AddressFamily::VSOCK, |socket| {
                connect(
                    socket,
                    &VsockAddress::new(VsockAddress::HOST, SUPERVISOR_PORT),
                )
            }),
            Peer::Unix(path) => dial(AddressFamily::UNIX, |socket| {
                connect(socket, &SocketAddrUnix::new(path.as_str())?)
            }),
        };
        match result {
            Ok((socket, true)) => self.greet(FrameStream::new(socket), now),
            Ok((socket, false)) => self.state = State::Connecting(FrameStream::new(socket)),
            Err(Errno::AFNOSUPPORT | Errno::NODEV) => {
                self.state = State::Down {
                    retry_at: now + ABSENT_PAUSE_NS,
                    absent: true,
                };
            }
            Err(_) => self.lost(now, false),
        }
    }

    fn greet(&mut self, mut stream: FrameStream, now: u64) {
        stream.send(&FromGuest::Hello {
            version: VERSION,
            vm_id: self.identity.vm_id.clone(),
            pid1_ns: self.identity.pid1_ns,
            attempt: self.attempt,
        });
        self.attempt = self.attempt.saturating_add(1);
        let sent = stream.flush();
        self.state = State::Greeting {
            stream,
            give_up_at: now + GREETING_NS,
        };
        if sent.is_err() {
            self.lost(now, false);
        }
    }

    fn lost(&mut self, now: u64, was_up: bool) {
        OPEN.store(NONE, Ordering::Relaxed);
        if was_up {
            self.pause_ns = FIRST_PAUSE_NS;
        }
        self.state = State::Down {
            retry_at: now + self.pause_ns,
            absent: false,
        };
        self.pause_ns = (self.pause_ns * 2).min(LONGEST_PAUSE_NS);
    }

    /// Adds the descriptor to the poll set; polls for messages only if `reading`.
    pub fn interest<'a>(&'a self, reading: bool, set: &mut PollSet<'a>) {
        let (stream, flags) = match &self.state {
            State::Down { .. } => return,
            State::Connecting(stream) => (stream, PollFlags::OUT),
            State::Greeting { stream, .. } | State::Up(stream) => {
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::IN, reading);
                flags.set(PollFlags::OUT, stream.unsent() > 0);
                (stream, flags)
            }
        };
        set.add(stream, flags, Token::Supervisor);
    }

    /// Handles readiness; calls `on_event` for each event.
    pub fn ready(
        &mut self,
        now: u64,
        space: &mut [MaybeUninit<u8>],
        mut on_event: impl FnMut(Event),
    ) {
        if let State::Connecting(stream) = &self.state {
            let connected = syscalls::socket_error(stream);
            let State::Connecting(stream) = core::mem::replace(
                &mut self.state,
                State::Down {
                    retry_at: 0,
                    absent: false,
                },
            ) else {
                return;
            };
            match connected {
                Ok(()) => self.greet(stream, now),
                Err(Errno::NODEV) => {
                    self.state = State::Down {
                        retry_at: now + ABSENT_PAUSE_NS,
                        absent: true,
                    };
                }
                Err(_) => self.lost(now, false),
            }
            return;
        }
        let was_up = matches!(self.state, State::Up(_));
        if self.receive(space, &mut on_event).is_err() {
            let was_up = was_up || matches!(self.state, State::Up(_));
            self.lost(now, was_up);
            on_event(Event::Lost);
        }
    }

    fn receive(
        &mut self,
        space: &mut [MaybeUninit<u8>],
        on_event: &mut impl FnMut(Event),
    ) -> core::result::Result<(), ()> {
        let (State::Greeting { stream, .. } | State::Up(stream)) = &mut self.state else {
            return Ok(());
        };
        stream.flush().map_err(|_| ())?;
        match stream.receive(space) {
            Received::Data => {}
            Received::Nothing => return Ok(()),
            Received::Closed => return Err(()),
        }
        loop {
            let (greeting, stream) = match &mut self.state {
                State::Greeting { stream, .. } => (true, stream),
                State::Up(stream) => (false, stream),
                _ => return Ok(()),
            };
            let Some(message) = stream.next::<ToGuest>().map_err(|_| ())? else {
                return Ok(());
            };
            match message {
                ToGuest::Welcome {
                    version,
                    stdout_offset,
                    stderr_offset,
                } if greeting => {
                    if !agent::is_supported(version) {
                        return Err(());
                    }
                    self.welcome();
                    on_event(Event::Welcome {
                        stdout: stdout_offset,
                        stderr: stderr_offset,
                    });
                }
                // A second welcome violates the protocol.
                ToGuest::Welcome { .. } => return Err(()),
                _ if greeting => return Err(()),
                message => on_event(Event::Message(message)),
            }
        }
    }

    fn welcome(&mut self) {
        self.pause_ns = FIRST_PAUSE_NS;
        let state = core::mem::replace(
            &mut self.state,
            State::Down {
                retry_at: 0,
                absent: false,
            },
        );
        if let State::Greeting { stream, .. } = state {
            OPEN.store(stream.as_fd().as_raw_fd(), Ordering::Relaxed);
            self.state = State::Up(stream);
        }
    }

    /// Passes queued messages to the kernel. Returns false if the connection broke.
    pub fn flush(&mut self, now: u64) -> bool {
        if let State::Up(stream) = &mut self.state
            && stream.flush().is_err()
        {
            self.lost(now, true);
            return false;
        }
        true
    }
}

/// Descriptor of the connected channel, for the panic handler.
static OPEN: AtomicI32 = AtomicI32::new(NONE);
const NONE: i32 = -1;

/// Reports a panic of init to the host without using this module's state.
pub fn report_panic(message: &str) {
    let fd = OPEN.load(Ordering::Relaxed);
    let warning = FromGuest::Warning {
        step: "jiffy-init".into(),
        message: message.into(),
    };
    if let (true, Ok(bytes)) = (fd != NONE, jiffy_wire::frame::to_vec(&warning)) {
        syscalls::send_ignoring_errors(fd, &bytes);
    }
}

/// Creates a socket; returns it, and whether it is connected already.
fn dial(
    family: AddressFamily,
    connect: impl Fn(&OwnedFd) -> Result<()>,
) -> Result<(OwnedFd, bool)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match connect(&socket) {
        Ok(()) => Ok((socket, true)),
        Err(Errno::INPROGRESS) => Ok((socket, false)),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restored_guest_soon_repeats_a_failed_connection() {
        let identity = || Identity {
            vm_id: "box".into(),
            pid1_ns: 0,
        };
        let mut link = Link::new(Peer::Unix("/nowhere/socket".into()), identity());
        let mut now = 0;
        link.advance(now);
        assert_eq!(link.deadline(), Some(FIRST_PAUSE_NS));
        now = 5;
        link.restart(identity(), now);
        for pause in [RESTART_PAUSE_NS, 2 * RESTART_PAUSE_NS] {
            assert_eq!(link.deadline(), Some(now + pause));
            now += pause;
            link.advance(now);
        }
    }
}
