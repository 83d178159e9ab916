//! A TAP interface of the host.

use super::super::error::NetError;
use super::super::frame::{Frame, Place};
use super::super::header;
use jiffy_sys::tap_queue::{self, offload};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use virtio_bindings::virtio_net::*;

const HOST: [u32; 4] = [
    VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_HOST_ECN,
];
const HOST_UDP: u32 = VIRTIO_NET_F_HOST_UFO;
const HOST_SEGMENTS: u32 = VIRTIO_NET_F_HOST_USO;
/// The driver's receive offloads, with the kernel's flags for them.
const GUEST: [(u32, u32); 7] = [
    (VIRTIO_NET_F_GUEST_CSUM, offload::CSUM),
    (VIRTIO_NET_F_GUEST_TSO4, offload::TSO4),
    (VIRTIO_NET_F_GUEST_TSO6, offload::TSO6),
    (VIRTIO_NET_F_GUEST_ECN, offload::TSO_ECN),
    (VIRTIO_NET_F_GUEST_UFO, offload::UFO),
    (VIRTIO_NET_F_GUEST_USO4, offload::USO4),
    (VIRTIO_NET_F_GUEST_USO6, offload::USO6),
];
/// The offloads of these that Linux has since 6.2.
const SEGMENTS: u32 = offload::USO4 | offload::USO6;

/// A queue of the interface.
#[derive(Debug)]
pub struct Tap {
    queues: Arc<[Arc<File>]>,
    number: usize,
    features: u64,
    /// False if a test uses a socket instead.
    is_real: bool,
}

/// All offload features.
pub fn every_feature() -> u64 {
    features(u32::MAX)
}

/// The features of a kernel that supports these offloads.
fn features(known: u32) -> u64 {
    let guest = GUEST.into_iter().filter(|(_, bit)| known & bit != 0);
    let segments = (known & SEGMENTS == SEGMENTS).then_some(HOST_SEGMENTS);
    let host = HOST.into_iter().chain([HOST_UDP]).chain(segments);
    host.chain(guest.map(|(feature, _)| feature))
        .fold(0, |bits, feature| bits | 1 << feature)
}

/// Checks the queues of an interface and sets the size of their header.
///
/// # Errors
///
/// If a file is not a queue of a TAP interface, or its interface lacks a flag.
pub fn open(files: Vec<File>) -> Result<Vec<Tap>, NetError> {
    let mut known = 0;
    for (number, file) in files.iter().enumerate() {
        let no_tap = |source| NetError::NotATap { number, source };
        let flags = tap_queue::flags(file).map_err(no_tap)?;
        let mut needed = vec![
            (tap_queue::IFF_TAP, "IFF_TAP, IFF_NO_PI and IFF_VNET_HDR"),
            (tap_queue::IFF_NO_PI, "IFF_NO_PI and IFF_VNET_HDR"),
            (tap_queue::IFF_VNET_HDR, "IFF_VNET_HDR"),
        ];
        if files.len() > 1 {
            needed.push((tap_queue::IFF_MULTI_QUEUE, "IFF_MULTI_QUEUE"));
        }
        if let Some((_, needed)) = needed.into_iter().find(|(flag, _)| flags & flag == 0) {
            return Err(NetError::TapFlags {
                number,
                needed,
                flags,
            });
        }
        rustix::io::ioctl_fionbio(file, true).map_err(|error| no_tap(error.into()))?;
        tap_queue::set_header_bytes(file, header::BYTES as i32).map_err(no_tap)?;
        let all = GUEST.iter().fold(0, |bits, (_, bit)| bits | bit);
        known = match tap_queue::set_offload(file, all) {
            Ok(()) => all,
            Err(_) => all & !SEGMENTS,
        };
        tap_queue::set_offload(file, 0).map_err(no_tap)?;
    }
    Ok(queues(files, features(known), true))
}

/// Sockets that behave like a TAP interface.
#[cfg(any(test, feature = "testing"))]
pub fn fake_taps(files: Vec<File>) -> Vec<Tap> {
    queues(files, every_feature(), false)
}

fn queues(files: Vec<File>, features: u64, is_real: bool) -> Vec<Tap> {
    let queues: Arc<[Arc<File>]> = files.into_iter().map(Arc::new).collect();
    let tap = |number| Tap {
        queues: queues.clone(),
        number,
        features,
        is_real,
    };
    (0..queues.len()).map(tap).collect()
}

impl Tap {
    pub fn features(&self) -> u64 {
        self.features
    }

    pub fn file(&self) -> &Arc<File> {
        &self.queues[self.number]
    }

    pub fn is_first(&self) -> bool {
        self.number == 0
    }

    /// Sets the offloads that the driver has accepted, and enables the queues of the first
    /// `used_pairs` pairs. Only the first queue does so, for all of them.
    ///
    /// # Errors
    ///
    /// If `TUNSETOFFLOAD` or `TUNSETQUEUE` fails.
    pub fn configure(&self, features: u64, used_pairs: u16) -> io::Result<()> {
        if !self.is_real {
            return Ok(());
        }
        if self.is_first() {
            let guest = GUEST.into_iter();
            let agreed = guest.filter(|(feature, _)| features & (1 << feature) != 0);
            let bits = agreed.fold(0, |bits, (_, bit)| bits | bit);
            tap_queue::set_offload(&**self.file(), bits)?;
            self.enable_queues(used_pairs)?;
        }
        Ok(())
    }

    /// Enables the first `count` queues of the interface, and no others.
    ///
    /// # Errors
    ///
    /// If `TUNSETQUEUE` fails. A queue that is enabled, or disabled, already is no error.
    pub fn enable_queues(&self, count: u16) -> io::Result<()> {
        if !self.is_real || self.queues.len() < 2 {
            return Ok(());
        }
        for (number, queue) in self.queues.iter().enumerate() {
            match tap_queue::set_queue(&**queue, number < usize::from(count)) {
                // The queue is enabled, or disabled, already.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                other => other?,
            }
        }
        Ok(())
    }

    /// Receives the next frame, with its virtio header. Returns the bytes of both.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is none, or if this is not the first queue and it is not enabled.
    /// Otherwise if readv(2) fails: `EBADFD` if the interface is gone.
    pub fn receive(&self, mut place: Place<'_, '_>) -> io::Result<usize> {
        match place.read_from(self.file().as_fd()) {
            // The queue is not enabled. If the interface is gone, the first queue has this error,
            // too.
            Err(error) if !self.is_first() && error.raw_os_error() == Some(libc::EBADFD) => {
                Err(io::ErrorKind::WouldBlock.into())
            }
            other => other,
        }
    }

    /// Sends a frame with its virtio header.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if the queue is full. Otherwise if writev(2) fails: `EBADFD` if the interface
    /// is gone or the queue is not enabled.
    pub fn send(&self, mut frame: Frame<'_, '_>) -> io::Result<()> {
        let lead = frame.lead;
        frame.write_to(self.file().as_fd(), lead).map(drop)
    }
}
