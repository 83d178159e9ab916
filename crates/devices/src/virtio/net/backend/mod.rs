//! Backends that send and receive frames.
//!
//! * [`tap`]: a TAP interface of the host.
//! * [`passt`]: a process that translates the guest's connections to sockets.

mod passt;
mod tap;

use super::error::NetError;
use super::frame::{Frame, Place};
use super::guard::Gate;
use super::header;
use passt::Passt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use tap::Tap;

/// Sends and receives the frames of a device.
#[derive(Debug)]
pub enum Backend {
    /// A TAP interface with `IFF_VNET_HDR`, as descriptors of its queues: one for each pair of the
    /// device's queues.
    Tap(Vec<OwnedFd>),
    /// A connection to passt(1): on a stream, each frame follows its length, four bytes big endian.
    /// It offers no offloads. A restored driver keeps those that it has from another backend.
    Passt(UnixStream),
    /// The link is down, and the guest's frames are dropped.
    None,
    /// Datagrams in place of a TAP interface, for tests: each has a virtio header and a frame.
    #[cfg(any(test, feature = "testing"))]
    Datagrams(Vec<std::os::unix::net::UnixDatagram>),
}

/// The outcome of sending a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// All of it will arrive.
    Whole,
    /// The link is down.
    Nowhere,
}

/// One queue of a backend.
#[derive(Debug)]
pub(super) enum Endpoint {
    Tap(Tap),
    Passt(Box<Passt>),
    /// The other end is missing or gone. Features stay those that were offered.
    Gone {
        features: u64,
    },
}

impl Backend {
    /// Prepares its queues. `gate` is told who may be answered.
    pub(super) fn open(self, gate: Option<&Arc<Gate>>) -> Result<Vec<Endpoint>, NetError> {
        match self {
            Backend::Tap(queues) => {
                let taps = tap::open(queues.into_iter().map(File::from).collect())?;
                Ok(taps.into_iter().map(Endpoint::Tap).collect())
            }
            Backend::Passt(socket) => {
                let passt = Passt::new(socket, gate.cloned()).map_err(NetError::Passt)?;
                Ok(vec![Endpoint::Passt(Box::new(passt))])
            }
            // A driver that was saved with another backend keeps all features it uses.
            Backend::None => Ok(vec![Endpoint::Gone {
                features: tap::every_feature(),
            }]),
            #[cfg(any(test, feature = "testing"))]
            Backend::Datagrams(sockets) => {
                let files = sockets.into_iter().map(|socket| {
                    socket.set_nonblocking(true).expect("a socket");
                    File::from(OwnedFd::from(socket))
                });
                let taps = tap::fake_taps(files.collect());
                Ok(taps.into_iter().map(Endpoint::Tap).collect())
            }
        }
    }
}

impl Endpoint {
    /// The offloads that it supports.
    pub(super) fn features(&self) -> u64 {
        match self {
            Endpoint::Tap(tap) => tap.features(),
            Endpoint::Passt(_) => 0,
            Endpoint::Gone { features } => *features,
        }
    }

    /// The offloads that a restored driver may use, besides those that are offered.
    pub(super) fn tolerated(&self) -> u64 {
        match self {
            // It does not check checksums, and takes large TCP segments as they are.
            Endpoint::Passt(_) => tap::every_feature(),
            _ => 0,
        }
    }

    /// The descriptor to wait on.
    pub(super) fn descriptor(&self) -> Option<Arc<File>> {
        match self {
            Endpoint::Tap(tap) => Some(tap.file().clone()),
            Endpoint::Passt(passt) => Some(passt.file().clone()),
            Endpoint::Gone { .. } => None,
        }
    }

    pub(super) fn is_connected(&self) -> bool {
        !matches!(self, Endpoint::Gone { .. })
    }

    /// Configures the other end for the driver's features, before anything is received, and for
    /// whether this queue is used.
    pub(super) fn configure(&self, features: u64, used_pairs: u16) -> io::Result<()> {
        match self {
            Endpoint::Tap(tap) => tap.configure(features, used_pairs),
            _ => Ok(()),
        }
    }

    /// Enables the first `count` queues of the other end, and no others.
    pub(super) fn enable_pairs(&self, count: u16) -> io::Result<()> {
        match self {
            Endpoint::Tap(tap) => tap.enable_queues(count),
            _ => Ok(()),
        }
    }

    /// Receives the next frame, with its virtio header, into a place that must have space for the
    /// longest; returns its length. `None` if there is none yet, or the link is down.
    pub(super) fn receive(&mut self, place: Place<'_, '_>) -> Option<usize> {
        let received = match self {
            Endpoint::Tap(tap) => tap.receive(place),
            Endpoint::Passt(passt) => passt.receive(place),
            Endpoint::Gone { .. } => return None,
        };
        match received {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => {
                self.disconnect(&error);
                None
            }
        }
    }

    /// Sends a frame. Does not begin one that would have to wait.
    pub(super) fn send(&mut self, frame: Frame<'_, '_>) -> io::Result<Sent> {
        let sent = match self {
            Endpoint::Tap(tap) => tap.send(frame),
            Endpoint::Passt(passt) => match header::datagram(frame.lead) {
                Some(segment) => passt.send_segments(&frame, segment),
                None => passt.send(frame),
            },
            Endpoint::Gone { .. } => return Ok(Sent::Nowhere),
        };
        if let Err(error) = &sent
            && self.is_disconnect(error)
        {
            self.disconnect(error);
            return Ok(Sent::Nowhere);
        }
        sent.map(|()| Sent::Whole)
    }

    /// Continues sending a frame that was begun.
    pub(super) fn flush(&mut self) {
        if let Endpoint::Passt(passt) = self
            && let Err(error) = passt.flush()
            && error.kind() != io::ErrorKind::WouldBlock
        {
            self.disconnect(&error);
        }
    }

    /// Whether the rest of a frame must be sent before the next one.
    pub(super) fn has_unsent(&self) -> bool {
        matches!(self, Endpoint::Passt(passt) if passt.has_unsent())
    }

    /// Whether a failed write means that the other end is gone.
    fn is_disconnect(&self, error: &io::Error) -> bool {
        match (self, error.raw_os_error()) {
            // The interface was removed, or a driver sends on a queue that is not enabled.
            (Endpoint::Tap(tap), Some(libc::EBADFD)) => tap.is_first(),
            (Endpoint::Passt(_), error) => {
                matches!(error, Some(libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN))
            }
            _ => false,
        }
    }

    fn disconnect(&mut self, error: &io::Error) {
        tracing::warn!(%error, "the link of a network device is down: its other end disconnected");
        *self = Endpoint::Gone {
            features: self.features(),
        };
    }
}
