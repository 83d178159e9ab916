//! Structures and numbers of linux/userfaultfd.h.
#![allow(unsafe_code)] // ioctl and a system call without wrapper.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

pub(super) const API_VERSION: u64 = 0xaa;
pub(super) const REGISTER_MODE_MISSING: u64 = 1;

/// Bytes of a `struct uffd_msg`.
pub(super) const MESSAGE: usize = 32;
pub(super) const EVENT_PAGEFAULT: u8 = 0x12;
pub(super) const EVENT_FORK: u8 = 0x13;
pub(super) const EVENT_REMOVE: u8 = 0x15;
pub(super) const EVENT_UNMAP: u8 = 0x16;
pub(super) const PAGEFAULT_FLAG_WRITE: u64 = 1;

/// `struct uffdio_api`.
#[repr(C)]
pub(super) struct Api {
    pub api: u64,
    pub features: u64,
    pub ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
pub(super) struct Range {
    pub start: u64,
    pub length: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
pub(super) struct Register {
    pub range: Range,
    pub mode: u64,
    pub ioctls: u64,
}

/// `struct uffdio_copy`.
#[repr(C)]
pub(super) struct Copy {
    pub destination: u64,
    pub source: u64,
    pub length: u64,
    pub mode: u64,
    pub copied: i64,
}

/// `struct uffdio_zeropage`.
#[repr(C)]
pub(super) struct ZeroPage {
    pub range: Range,
    pub mode: u64,
    pub zeroed: i64,
}

/// An ioctl with an argument of `T`; its number contains the size that the kernel copies.
pub(super) struct Request<T>(libc::c_ulong, std::marker::PhantomData<fn(&mut T)>);

impl<T> Request<T> {
    pub(super) const fn number(&self) -> u32 {
        self.0 as u32
    }
}

const READ: libc::c_ulong = 2;
const WRITE: libc::c_ulong = 1;
const TYPE: libc::c_ulong = 0xaa;

const fn request<T>(direction: libc::c_ulong, number: libc::c_ulong) -> Request<T> {
    let size = size_of::<T>() as libc::c_ulong;
    Request(
        direction << 30 | size << 16 | TYPE << 8 | number,
        std::marker::PhantomData,
    )
}

pub(super) const API: Request<Api> = request(READ | WRITE, 0x3f);
pub(super) const REGISTER: Request<Register> = request(READ | WRITE, 0x00);
pub(super) const UNREGISTER: Request<Range> = request(READ, 0x01);
pub(super) const WAKE: Request<Range> = request(READ, 0x02);
pub(super) const COPY: Request<Copy> = request(READ | WRITE, 0x03);
pub(super) const ZEROPAGE: Request<ZeroPage> = request(READ | WRITE, 0x04);
/// `USERFAULTFD_IOC_NEW` of `/dev/userfaultfd`.
const NEW: libc::c_ulong = TYPE << 8;

/// Makes a call. Every structure here has only numbers. The only address from which the kernel
/// reads is the source of a copy, a slice that outlives the call.
pub(super) fn call<T>(fd: RawFd, request: Request<T>, argument: &mut T) -> io::Result<()> {
    // SAFETY: the request's number encodes the size of `T`, and `argument`
    // is valid for reads and writes of it.
    let result = unsafe { libc::ioctl(fd, request.0, std::ptr::from_mut(argument)) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

pub(super) fn new_from_device(device: RawFd, flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: takes flags by value and returns a new descriptor.
    owned(unsafe { libc::ioctl(device, NEW, flags) })
}

pub(super) fn new_by_syscall(flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: takes flags by value and returns a new descriptor.
    owned(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) } as libc::c_int)
}

fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created it for this call.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
