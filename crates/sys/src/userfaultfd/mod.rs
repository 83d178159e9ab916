//! userfaultfd(2): page faults of one process, served by another.
//!
//! The process that owns the memory creates a [`Userfaultfd`], registers ranges and sends the
//! descriptor to another process ([`crate::fds`]), which reads the events and fills the pages. A
//! thread that touches a missing page sleeps until the page is filled or the thread is woken (then
//! it faults again).
//!
//! * [`Userfaultfd`]: the calls.
//! * [`Arena`]: memory for such a range, safe to access.

mod arena;
mod ioctl;
#[cfg(test)]
mod tests;

pub use arena::Arena;

use crate::handed;
use ioctl::call;
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// `UFFD_FEATURE_*` bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// `madvise(MADV_DONTNEED)` and `MADV_REMOVE` are reported as [`Event::Remove`], and block
    /// until that was read.
    pub const EVENT_REMOVE: Features = Features(1 << 3);
    /// Missing pages of huge page files.
    pub const MISSING_HUGETLBFS: Features = Features(1 << 4);
    /// Missing pages of memfds and tmpfs.
    pub const MISSING_SHMEM: Features = Features(1 << 5);
    /// `munmap` is reported as [`Event::Unmap`].
    pub const EVENT_UNMAP: Features = Features(1 << 6);

    /// The features for a VM's memory: missing pages of all kinds of memory, and
    /// pages that a balloon discards.
    pub const GUEST_MEMORY: Features = Features(
        Features::EVENT_REMOVE.0 | Features::MISSING_HUGETLBFS.0 | Features::MISSING_SHMEM.0,
    );
}

/// An event of registered memory.
#[derive(Debug)]
pub enum Event {
    /// A thread waits for the page at this address.
    Fault {
        /// Address in the owner's address space.
        address: u64,
        /// Whether the access is a write.
        write: bool,
    },
    /// The owner discards these pages. Until they are discarded, fills fail with
    /// [`FillError::Changing`].
    Remove {
        /// First byte.
        start: u64,
        /// End of the range, exclusive.
        end: u64,
    },
    /// The owner has unmapped this range.
    Unmap {
        /// First byte.
        start: u64,
        /// End of the range, exclusive.
        end: u64,
    },
    /// Another event (fork, remap), which only a descriptor from another process can
    /// report. A forked child's userfaultfd is closed.
    Other(u8),
}

/// Why pages were not filled.
#[derive(Debug)]
pub enum FillError {
    /// The first page exists already. Threads that wait for it may need a [`Userfaultfd::wake`].
    Exists,
    /// The owner's mappings are changing (`EAGAIN`): read the events, then try again.
    Changing,
    /// The range is not mapped, or not registered (`ENOENT`).
    Unmapped,
    /// The owner's address space does not exist any more (`ESRCH`).
    Gone,
    /// Another error.
    Other(io::Error),
}

impl std::fmt::Display for FillError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            FillError::Exists => "the page is already present",
            FillError::Changing => "the mappings are changing",
            FillError::Unmapped => "the range is not registered",
            FillError::Gone => "the process has ended",
            FillError::Other(_) => "the page could not be filled",
        })
    }
}

impl std::error::Error for FillError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            FillError::Other(error) => Some(error),
            _ => None,
        }
    }
}

/// The number of the ioctl behind [`Userfaultfd::unregister`], for sandboxes.
pub const UNREGISTER: u32 = ioctl::UNREGISTER.number();
/// The numbers of the ioctls that fill memory and wake waiting threads, likewise.
pub const FILLING: [u32; 3] = [
    ioctl::COPY.number(),
    ioctl::ZEROPAGE.number(),
    ioctl::WAKE.number(),
];

/// Most events that [`Userfaultfd::read_events`] takes at once.
pub const EVENTS: usize = 8;
/// Device that creates userfaultfds which also serve the kernel's faults (Linux 6.1).
pub const DEVICE: &str = "/dev/userfaultfd";

/// Set if preadv2(2) with RWF_NOWAIT is not supported (Debian 12's 6.1).
static READ_MAY_BLOCK: AtomicBool = AtomicBool::new(false);

/// A userfaultfd: of this process, or received from another.
#[derive(Debug)]
pub struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// Creates one for this process's memory: with `/dev/userfaultfd` if that can be opened, else
    /// with the system call, which needs `CAP_SYS_PTRACE` or `vm.unprivileged_userfaultfd=1`. It is
    /// non-blocking and closed on exec, and also serves the kernel's (KVM's) accesses.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if the kernel lacks one of the features. Otherwise if userfaultfd(2) fails:
    /// `EPERM` without these rights.
    pub fn create(features: Features) -> io::Result<Userfaultfd> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        let device = match handed::take(Path::new(DEVICE)) {
            Some(device) => Ok(device),
            None => rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()),
        };
        let made = match device {
            Ok(device) => ioctl::new_from_device(device.as_raw_fd(), flags),
            Err(_) => ioctl::new_by_syscall(flags),
        }?;
        let mut api = ioctl::Api {
            api: ioctl::API_VERSION,
            features: features.0,
            ioctls: 0,
        };
        call(made.as_raw_fd(), ioctl::API, &mut api)?;
        Ok(Userfaultfd(made))
    }

    /// Takes a descriptor from another process, checks that it is a userfaultfd and makes it
    /// non-blocking.
    ///
    /// # Errors
    ///
    /// `InvalidData` if it is another kind of file. Otherwise if its link in `/proc/self/fd` can't
    /// be read, or fcntl(2) fails.
    pub fn from_received(fd: OwnedFd) -> io::Result<Userfaultfd> {
        let link = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())?;
        if link.as_bytes() != b"anon_inode:[userfaultfd]" {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the descriptor is not a userfaultfd",
            ));
        }
        let received = Userfaultfd(fd);
        received.make_non_blocking()?;
        Ok(received)
    }

    /// Duplicates the descriptor.
    ///
    /// # Errors
    ///
    /// If no descriptor is free.
    pub fn try_clone(&self) -> io::Result<Userfaultfd> {
        Ok(Userfaultfd(self.0.try_clone()?))
    }

    /// Reports missing pages of this range from now on. `start` is an address, `length` bytes; both
    /// are whole pages.
    ///
    /// # Errors
    ///
    /// If `UFFDIO_REGISTER` fails: such as `EINVAL` for a range that is not mapped, `EBUSY` if
    /// another userfaultfd has it.
    ///
    /// # Safety
    ///
    /// The holder of the descriptor decides the contents of untouched memory in the range. No
    /// memory of Rust's own (heap, stacks, references that expect zeros) may be in it.
    #[allow(unsafe_code)]
    pub unsafe fn register(&self, start: u64, length: u64) -> io::Result<()> {
        let mut register = ioctl::Register {
            range: ioctl::Range { start, length },
            mode: ioctl::REGISTER_MODE_MISSING,
            ioctls: 0,
        };
        call(self.0.as_raw_fd(), ioctl::REGISTER, &mut register)
    }

    /// Stops reporting faults of this range (an address, and bytes) and wakes threads that wait.
    /// Missing pages then read as zero.
    ///
    /// # Errors
    ///
    /// If `UFFDIO_UNREGISTER` fails.
    pub fn unregister(&self, start: u64, length: u64) -> io::Result<()> {
        let mut range = ioctl::Range { start, length };
        call(self.0.as_raw_fd(), ioctl::UNREGISTER, &mut range)
    }

    /// Fills missing pages from `address` on with `bytes`, both in whole pages, and wakes threads
    /// that wait for them. Returns the number of bytes filled: fewer if a later page exists already
    /// or the mappings change meanwhile.
    ///
    /// # Errors
    ///
    /// If no page was filled, with the reason.
    pub fn copy(&self, address: u64, bytes: &[u8]) -> Result<u64, FillError> {
        let mut copy = ioctl::Copy {
            destination: address,
            source: bytes.as_ptr() as u64,
            length: bytes.len() as u64,
            mode: 0,
            copied: 0,
        };
        let result = call(self.0.as_raw_fd(), ioctl::COPY, &mut copy);
        outcome(result, copy.copied, copy.length)
    }

    /// Fills missing pages from `address` on, `length` bytes, with zeros; otherwise like
    /// [`Userfaultfd::copy`].
    ///
    /// # Errors
    ///
    /// As for [`Userfaultfd::copy`]; `Other` with `InvalidInput` for huge pages.
    pub fn zero(&self, address: u64, length: u64) -> Result<u64, FillError> {
        let mut zero = ioctl::ZeroPage {
            range: ioctl::Range {
                start: address,
                length,
            },
            mode: 0,
            zeroed: 0,
        };
        let result = call(self.0.as_raw_fd(), ioctl::ZEROPAGE, &mut zero);
        outcome(result, zero.zeroed, length)
    }

    /// Wakes all threads that wait for a page of this range (an address, and bytes). They fault
    /// again if it is still missing.
    ///
    /// # Errors
    ///
    /// If `UFFDIO_WAKE` fails.
    pub fn wake(&self, start: u64, length: u64) -> io::Result<()> {
        let mut range = ioctl::Range { start, length };
        call(self.0.as_raw_fd(), ioctl::WAKE, &mut range)
    }

    /// Appends pending events, at most [`EVENTS`], and returns how many.
    ///
    /// # Errors
    ///
    /// If the read fails. After an error other than `Interrupted` the descriptor is unusable.
    pub fn read_events(&self, into: &mut Vec<Event>) -> io::Result<usize> {
        let mut messages = [0; ioctl::MESSAGE * EVENTS];
        let bytes = match self.read(&mut messages) {
            Ok(bytes) => bytes,
            Err(Errno::AGAIN) => return Ok(0),
            Err(error) => return Err(error.into()),
        };
        into.extend(
            messages[..bytes]
                .chunks_exact(ioctl::MESSAGE)
                .map(|message| parse(message.try_into().expect("a whole message"))),
        );
        Ok(bytes / ioctl::MESSAGE)
    }

    /// Reads the next event, if there is one.
    ///
    /// # Errors
    ///
    /// As for [`read_events`](Self::read_events); `UnexpectedEof` for a part of an event.
    pub fn next_event(&self) -> io::Result<Option<Event>> {
        let mut message = [0; ioctl::MESSAGE];
        match self.read(&mut message) {
            Ok(ioctl::MESSAGE) => Ok(Some(parse(&message))),
            Ok(_) => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            Err(Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads without blocking: with RWF_NOWAIT where the kernel supports it, because the
    /// process that sent the descriptor shares its O_NONBLOCK flag.
    fn read(&self, into: &mut [u8]) -> Result<usize, Errno> {
        if !READ_MAY_BLOCK.load(Ordering::Relaxed) {
            let at_the_cursor = u64::MAX;
            let mut room = [IoSliceMut::new(into)];
            match rustix::io::preadv2(&self.0, &mut room, at_the_cursor, ReadWriteFlags::NOWAIT) {
                Err(Errno::OPNOTSUPP) => READ_MAY_BLOCK.store(true, Ordering::Relaxed),
                outcome => return outcome,
            }
        }
        self.read_by_flag(into)
    }

    /// Without RWF_NOWAIT: sets O_NONBLOCK right before each read. If the sender clears it
    /// in between, the read blocks.
    fn read_by_flag(&self, into: &mut [u8]) -> Result<usize, Errno> {
        self.make_non_blocking()?;
        rustix::io::read(&self.0, into)
    }

    fn make_non_blocking(&self) -> Result<(), Errno> {
        // No other flag of it matters.
        rustix::fs::fcntl_setfl(&self.0, OFlags::NONBLOCK)
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Userfaultfd> for OwnedFd {
    fn from(uffd: Userfaultfd) -> OwnedFd {
        uffd.0
    }
}

/// The result of a fill. The kernel returns `EAGAIN` with a count if it filled a part, and without
/// one if the mappings change.
fn outcome(result: io::Result<()>, done: i64, length: u64) -> Result<u64, FillError> {
    let error = match result {
        Ok(()) => return Ok(length),
        Err(error) => error,
    };
    match error.raw_os_error() {
        Some(libc::EAGAIN) if done > 0 => Ok((done as u64).min(length)),
        Some(libc::EAGAIN) => Err(FillError::Changing),
        Some(libc::EEXIST) => Err(FillError::Exists),
        Some(libc::ENOENT) => Err(FillError::Unmapped),
        Some(libc::ESRCH) => Err(FillError::Gone),
        _ => Err(FillError::Other(error)),
    }
}

/// `struct uffd_msg`, linux/userfaultfd.h.
fn parse(message: &[u8; ioctl::MESSAGE]) -> Event {
    let word = |at: usize| u64::from_ne_bytes(message[at..at + 8].try_into().expect("eight bytes"));
    match message[0] {
        ioctl::EVENT_PAGEFAULT => Event::Fault {
            address: word(16),
            write: word(8) & ioctl::PAGEFAULT_FLAG_WRITE != 0,
        },
        ioctl::EVENT_REMOVE => Event::Remove {
            start: word(8),
            end: word(16),
        },
        ioctl::EVENT_UNMAP => Event::Unmap {
            start: word(8),
            end: word(16),
        },
        kind => {
            if kind == ioctl::EVENT_FORK {
                let fd = u32::from_ne_bytes(message[8..12].try_into().expect("four bytes"));
                // SAFETY: reading this event created a descriptor in this process without another
                // owner.
                #[allow(unsafe_code)]
                drop(unsafe { OwnedFd::from_raw_fd(fd as i32) });
            }
            Event::Other(kind)
        }
    }
}
