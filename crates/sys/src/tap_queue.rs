//! A queue of a [TAP device](crate::tap), for the process that serves it: frames are read and
//! written, each after a `virtio_net_hdr` (Linux, Documentation/networking/tuntap.rst).
#![allow(unsafe_code)] // ioctls that no crate wraps.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Sets the offloads that the reader supports. Numbers are those of linux/if_tun.h.
pub const TUNSETOFFLOAD: u32 = 0x4004_54d0;
/// Gets name and flags.
pub const TUNGETIFF: u32 = 0x8004_54d2;
/// Sets the bytes of the header before each frame.
pub const TUNSETVNETHDRSZ: u32 = 0x4004_54d8;
/// Sets whether the interface uses this descriptor.
pub const TUNSETQUEUE: u32 = 0x4004_54d9;

/// Ethernet frames instead of IP packets.
pub const IFF_TAP: u16 = 0x0002;
/// Without the four bytes of packet information.
pub const IFF_NO_PI: u16 = 0x1000;
/// With a `virtio_net_hdr`.
pub const IFF_VNET_HDR: u16 = 0x4000;
/// Several descriptors, one per queue.
pub const IFF_MULTI_QUEUE: u16 = 0x0100;
const IFF_ATTACH_QUEUE: u16 = 0x0200;
const IFF_DETACH_QUEUE: u16 = 0x0400;

/// Offloads that the reader of frames supports (TUNSETOFFLOAD).
pub mod offload {
    /// Incomplete checksums.
    pub const CSUM: u32 = 1;
    /// TCP over IPv4, larger than a frame.
    pub const TSO4: u32 = 2;
    /// TCP over IPv6, larger than a frame.
    pub const TSO6: u32 = 4;
    /// TCP with ECN, larger than a frame.
    pub const TSO_ECN: u32 = 8;
    /// UDP fragmentation.
    pub const UFO: u32 = 16;
    /// UDP segmentation over IPv4 (Linux 6.2).
    pub const USO4: u32 = 32;
    /// UDP segmentation over IPv6 (Linux 6.2).
    pub const USO6: u32 = 64;
}

/// `struct ifreq` with its flags.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    flags: u16,
    rest: [u8; 22],
}

impl Request {
    fn new(flags: u16) -> Request {
        Request {
            name: [0; libc::IFNAMSIZ],
            flags,
            rest: [0; 22],
        }
    }
}

/// Flags (`IFF_…`) of the interface of a descriptor.
///
/// # Errors
///
/// If `TUNGETIFF` fails: the descriptor has no interface, or is none of a TUN or TAP device.
pub fn flags(tap: &impl AsFd) -> io::Result<u16> {
    let mut request = Request::new(0);
    with_request(tap, TUNGETIFF, &mut request)?;
    Ok(request.flags)
}

/// Sets the offloads that the reader supports ([`offload`]).
///
/// # Errors
///
/// If `TUNSETOFFLOAD` fails: `EINVAL` if this kernel does not know one of them.
pub fn set_offload(tap: &impl AsFd, bits: u32) -> io::Result<()> {
    // SAFETY: the argument is a number.
    let result = unsafe {
        libc::ioctl(
            tap.as_fd().as_raw_fd(),
            TUNSETOFFLOAD.into(),
            libc::c_ulong::from(bits),
        )
    };
    checked(result)
}

/// Sets the bytes of the header before each frame.
///
/// # Errors
///
/// If `TUNSETVNETHDRSZ` fails: `EINVAL` for fewer bytes than a `virtio_net_hdr` has.
pub fn set_header_bytes(tap: &impl AsFd, bytes: i32) -> io::Result<()> {
    // SAFETY: the kernel reads an int.
    let result = unsafe {
        libc::ioctl(
            tap.as_fd().as_raw_fd(),
            TUNSETVNETHDRSZ.into(),
            &raw const bytes,
        )
    };
    checked(result)
}

/// Sets whether the interface uses this queue.
///
/// # Errors
///
/// If `TUNSETQUEUE` fails: `EINVAL` for an interface with a single queue, or if the queue is in
/// that state already.
pub fn set_queue(tap: &impl AsFd, attach: bool) -> io::Result<()> {
    let flags = if attach {
        IFF_ATTACH_QUEUE
    } else {
        IFF_DETACH_QUEUE
    };
    with_request(tap, TUNSETQUEUE, &mut Request::new(flags))
}

fn with_request(tap: &impl AsFd, number: u32, request: &mut Request) -> io::Result<()> {
    // SAFETY: the kernel reads and writes at most a `struct ifreq`, and this is one.
    let result = unsafe {
        libc::ioctl(
            tap.as_fd().as_raw_fd(),
            number.into(),
            std::ptr::from_mut(request),
        )
    };
    checked(result)
}

fn checked(result: libc::c_int) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_the_kernels_layout() {
        assert_eq!(size_of::<Request>(), size_of::<libc::ifreq>());
        assert_eq!(std::mem::offset_of!(Request, flags), libc::IFNAMSIZ);
    }

    #[test]
    fn other_files_than_tap_devices_are_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(flags(&file).is_err());
        assert!(set_offload(&file, offload::CSUM).is_err());
        assert!(set_header_bytes(&file, 12).is_err());
        assert!(set_queue(&file, true).is_err());
    }
}
