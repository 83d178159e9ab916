//! TAP devices: network links whose other end is a file descriptor.
//!
//! A device that is not persistent exists until its last descriptor is closed, and its addresses,
//! routes and neighbours are removed with it. (Linux, Documentation/networking/tuntap.rst)
#![allow(unsafe_code)] // ioctl(2) of /dev/net/tun and of a socket.

use rustix::fs::{Mode, OFlags};
use std::ffi::CStr;
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Bytes of the header before each packet: virtio 1.3 §5.1.6, with `num_buffers`.
pub const HEADER_BYTES: i32 = 12;

/// Options of a new device.
#[derive(Debug, Clone, Copy)]
pub struct TapOptions<'a> {
    /// Name of the link, at most 15 bytes.
    pub name: &'a CStr,
    /// Number of queues, each with a descriptor. At least 1.
    pub queues: u16,
    /// User who may attach to the device without CAP_NET_ADMIN.
    pub owner: Option<u32>,
    /// Whether the kernel may give the reader large packets and incomplete checksums
    /// (`TUNSETOFFLOAD`). A virtio device whose driver negotiates less disables them again.
    pub offloads: bool,
    /// Whether the device stays when its last descriptor is closed.
    pub persistent: bool,
}

/// A TAP device.
#[derive(Debug)]
pub struct Tap {
    /// One descriptor per queue, non-blocking, closed on exec.
    pub queues: Vec<OwnedFd>,
    /// Index of its link in this network namespace.
    pub index: u32,
}

impl Tap {
    /// Creates a device.
    ///
    /// # Errors
    ///
    /// `EBUSY` if a link of that name exists, `EPERM` if the caller lacks CAP_NET_ADMIN,
    /// `InvalidInput` if the name is empty or too long. Otherwise if `/dev/net/tun` can't be opened,
    /// or one of its ioctls fails.
    pub fn create(options: &TapOptions) -> io::Result<Tap> {
        let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if options.queues > 1 {
            flags |= libc::IFF_MULTI_QUEUE;
        }
        let mut queues: Vec<OwnedFd> = Vec::with_capacity(options.queues.into());
        for queue in 0..options.queues.max(1) {
            let file = rustix::fs::open(
                c"/dev/net/tun",
                OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK,
                Mode::empty(),
            )?;
            // The first descriptor creates the device and fails if the name exists; the others join
            // it.
            let exclusive = if queue == 0 { libc::IFF_TUN_EXCL } else { 0 };
            let mut request = named(options.name)?;
            request.ifr_ifru.ifru_flags = (flags | exclusive) as libc::c_short;
            // SAFETY: the kernel reads and writes one `ifreq`.
            ioctl(unsafe {
                libc::ioctl(
                    file.as_raw_fd(),
                    libc::TUNSETIFF as libc::Ioctl,
                    &mut request,
                )
            })?;
            queues.push(file);
        }
        let first = &queues[0];
        // SAFETY: the kernel reads one int.
        ioctl(unsafe {
            libc::ioctl(
                first.as_raw_fd(),
                libc::TUNSETVNETHDRSZ as libc::Ioctl,
                &HEADER_BYTES,
            )
        })?;
        if options.offloads {
            set_offloads(first.as_fd())?;
        }
        if let Some(owner) = options.owner {
            // SAFETY: the argument is a number.
            ioctl(unsafe {
                libc::ioctl(
                    first.as_raw_fd(),
                    libc::TUNSETOWNER as libc::Ioctl,
                    libc::c_ulong::from(owner),
                )
            })?;
        }
        if options.persistent {
            // SAFETY: the argument is a number.
            ioctl(unsafe {
                libc::ioctl(
                    first.as_raw_fd(),
                    libc::TUNSETPERSIST as libc::Ioctl,
                    1 as libc::c_ulong,
                )
            })?;
        }
        let index = index_of(options.name)?;
        Ok(Tap { queues, index })
    }
}

/// Sets all offloads that this kernel supports; UDP's since Linux 6.2.
fn set_offloads(tap: BorrowedFd) -> io::Result<()> {
    let tcp = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    let udp = libc::TUN_F_USO4 | libc::TUN_F_USO6;
    let set = |offloads: libc::c_uint| {
        // SAFETY: the argument is a number.
        ioctl(unsafe {
            libc::ioctl(
                tap.as_raw_fd(),
                libc::TUNSETOFFLOAD as libc::Ioctl,
                libc::c_ulong::from(offloads),
            )
        })
    };
    set(tcp | udp).or_else(|_| set(tcp))
}

/// Index of the link of that name in this network namespace.
fn index_of(name: &CStr) -> io::Result<u32> {
    // SAFETY: the kernel reads a zero-terminated string.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(io::Error::last_os_error()),
        index => Ok(index),
    }
}

fn named(name: &CStr) -> io::Result<libc::ifreq> {
    // SAFETY: all-zero is a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { zeroed() };
    let bytes = name.to_bytes();
    if bytes.is_empty() || bytes.len() >= size_of::<[libc::c_char; libc::IFNAMSIZ]>() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok(request)
}

fn ioctl(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
