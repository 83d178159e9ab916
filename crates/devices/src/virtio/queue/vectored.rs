//! Transfers between files or sockets and guest memory, without a copy. The kernel writes to guest
//! memory through raw pointers, past [`WriteLog`], so these writes are logged here.
#![allow(unsafe_code)] // System calls on memory that guests write at any time.

use super::segment::{self, Region, Segment};
use crate::GuestMemory;
use crate::write_log::WriteLog;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use vm_memory::GuestMemoryBackend as _;
use vm_memory::bitmap::Bitmap as _;

/// The kernel's limit on vectors per call (UIO_MAXIOV).
const VECTORS_MAX: usize = 1024;
/// Most segments of a message: one vector is needed for a buffer of the host, and a segment at the
/// end of a region may need two.
pub(crate) const MESSAGE_SEGMENTS_MAX: usize = VECTORS_MAX - 8;

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// File to guest.
    Read,
    /// Guest to file.
    Write,
}

/// Ranges of host memory that back guest memory. Kept to reuse its allocation.
#[derive(Default)]
pub(crate) struct Vectors(Vec<libc::iovec>);

// SAFETY: the pointers are only used by methods that first replace them by pointers into the memory
// they are called with.
unsafe impl Send for Vectors {}

impl Vectors {
    /// Transfers all bytes of `segments` from or to `offset`. `alignment` is what direct I/O needs
    /// of host addresses and lengths, bytes (1 for none). If they are not aligned, nothing is
    /// transferred, and the result is false.
    ///
    /// # Errors
    ///
    /// If the file is too short, or a system call fails.
    pub(crate) fn transfer(
        &mut self,
        file: &File,
        direction: Direction,
        mut offset: u64,
        memory: &GuestMemory,
        segments: &[Segment],
        alignment: usize,
    ) -> io::Result<bool> {
        self.0.clear();
        self.gather(memory, &mut Region::default(), segments.iter().copied())?;
        let aligned = |vector: &libc::iovec| {
            (vector.iov_base as usize).is_multiple_of(alignment)
                && vector.iov_len.is_multiple_of(alignment)
        };
        if !self.0.iter().all(aligned) {
            return Ok(false);
        }
        if direction == Direction::Read {
            log_writes(memory, segments.iter().copied());
        }
        let mut vectors = self.0.as_mut_slice();
        while !vectors.is_empty() {
            let moved = transfer_once(file, direction, offset, vectors)?;
            offset += moved as u64;
            vectors = advance(vectors, moved);
        }
        Ok(true)
    }

    /// Sends the bytes of `segments` to a non-blocking socket. Returns how many were sent: fewer if
    /// the socket is full.
    ///
    /// # Errors
    ///
    /// If the peer is gone (without SIGPIPE), or the call fails.
    pub(crate) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        memory: &GuestMemory,
        segments: impl IntoIterator<Item = Segment>,
    ) -> io::Result<usize> {
        self.0.clear();
        self.gather(memory, &mut Region::default(), segments)?;
        let mut sent = 0;
        for vector in &self.0 {
            let now = match send(socket, vector) {
                Ok(now) => now,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            };
            sent += now;
            if now < vector.iov_len {
                break;
            }
        }
        Ok(sent)
    }

    /// Fills `segments` from a non-blocking socket. Returns how many bytes were read: 0 at its end.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is nothing now; any other error of the call.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        memory: &GuestMemory,
        segments: impl IntoIterator<Item = Segment> + Clone,
    ) -> io::Result<usize> {
        self.0.clear();
        self.gather(memory, &mut Region::default(), segments.clone())?;
        let mut filled = 0;
        for vector in &self.0 {
            match receive(socket, vector) {
                Ok(now) => {
                    filled += now;
                    if now < vector.iov_len {
                        break;
                    }
                }
                // Received bytes must be delivered; the next call returns the error again.
                Err(_) if filled > 0 => break,
                Err(error) => return Err(error),
            }
        }
        let mut left = filled;
        let filled_segments = segments.into_iter().map_while(|segment| {
            let length = segment.length.min(left);
            left -= length;
            let address = segment.address;
            (length > 0).then_some(Segment { address, length })
        });
        log_writes(memory, filled_segments);
        Ok(filled)
    }

    /// Reads one message into `segments`, of which there are at most [`MESSAGE_SEGMENTS_MAX`], and
    /// the rest of it into `rest`. Returns how many bytes were read. `region` is the one in which the
    /// segments probably are.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is nothing now; any other error of the call.
    pub(crate) fn read_message<'a>(
        &mut self,
        source: BorrowedFd<'_>,
        (memory, region): (&'a GuestMemory, &mut Region<'a>),
        segments: &[Segment],
        rest: &mut [u8],
    ) -> io::Result<usize> {
        self.0.clear();
        self.gather(memory, region, segments.iter().copied())?;
        self.push(rest.as_mut_ptr(), rest.len());
        let count = self.message_count()?;
        let read = retry_interrupted(|| {
            // SAFETY: as in `transfer_once`, and `rest`, which is borrowed exclusively.
            unsafe { message_call(libc::SYS_readv, source, &self.0, count) }
        })?;
        log_writes(memory, segment::part(segments, 0, read));
        Ok(read)
    }

    /// Writes one message: `head`, and then `segments`, of which there are at most
    /// [`MESSAGE_SEGMENTS_MAX`]. Returns how many bytes were written. `region` is as in
    /// [`read_message`](Vectors::read_message).
    ///
    /// # Errors
    ///
    /// `WouldBlock` if it can't be written now; any other error of the call.
    pub(crate) fn write_message<'a>(
        &mut self,
        target: BorrowedFd<'_>,
        (memory, region): (&'a GuestMemory, &mut Region<'a>),
        head: &[u8],
        segments: impl IntoIterator<Item = Segment>,
    ) -> io::Result<usize> {
        self.0.clear();
        self.push(head.as_ptr().cast_mut(), head.len());
        self.gather(memory, region, segments)?;
        let count = self.message_count()?;
        retry_interrupted(|| {
            // SAFETY: as in `transfer_once`, and `head`; the call only reads.
            unsafe { message_call(libc::SYS_writev, target, &self.0, count) }
        })
    }

    /// The number of vectors, all of which one call must take.
    fn message_count(&self) -> io::Result<libc::c_int> {
        match self.0.len() {
            count @ 0..=VECTORS_MAX => Ok(count as libc::c_int),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Appends the host addresses of `segments`; adjacent ranges become one.
    fn gather<'a>(
        &mut self,
        memory: &'a GuestMemory,
        region: &mut Region<'a>,
        segments: impl IntoIterator<Item = Segment>,
    ) -> io::Result<()> {
        // The last range, which is not in the list yet: a frame may have a hundred segments.
        let (mut start, mut length) = (std::ptr::null_mut::<u8>(), 0);
        for segment in segments {
            let place = region.host_address(&segment).or_else(|| {
                *region = Region::of(memory, segment.address);
                region.host_address(&segment)
            });
            if let Some(place) = place {
                if place == start.wrapping_byte_add(length) {
                    length += segment.length;
                    continue;
                }
                self.push(start, length);
                (start, length) = (place, segment.length);
                continue;
            }
            self.push(start, length);
            length = 0;
            for slice in memory.get_slices(segment.address, segment.length) {
                let slice = slice.map_err(io::Error::other)?;
                self.push(slice.ptr_guard_mut().as_ptr(), slice.len());
            }
        }
        self.push(start, length);
        Ok(())
    }

    fn push(&mut self, place: *mut u8, length: usize) {
        if length > 0 {
            self.0.push(libc::iovec {
                iov_base: place.cast(),
                iov_len: length,
            });
        }
    }
}

/// Logs the kernel's writes to these segments.
fn log_writes(memory: &GuestMemory, segments: impl IntoIterator<Item = Segment>) {
    if !memory.iter().any(|region| WriteLog::of(region).is_kept()) {
        return;
    }
    for segment in segments {
        let slices = memory.get_slices(segment.address, segment.length);
        for slice in slices.flatten() {
            slice.bitmap().mark_dirty(0, slice.len());
        }
    }
}

/// Makes one system call, which transfers at least one byte.
fn transfer_once(
    file: &File,
    direction: Direction,
    offset: u64,
    vectors: &[libc::iovec],
) -> io::Result<usize> {
    let count = vectors.len().min(VECTORS_MAX) as libc::c_int;
    let offset = libc::off64_t::try_from(offset).map_err(io::Error::other)?;
    loop {
        // SAFETY: the vectors describe guest memory, mapped as long as the `GuestMemory` that
        // `transfer` borrows. No Rust reference to it exists; the kernel tolerates concurrent
        // changes by the guest. At most `vectors.len()` entries are read.
        let result = unsafe {
            match direction {
                Direction::Read => {
                    libc::preadv64(file.as_raw_fd(), vectors.as_ptr(), count, offset)
                }
                Direction::Write => {
                    libc::pwritev64(file.as_raw_fd(), vectors.as_ptr(), count, offset)
                }
            }
        };
        match result {
            // The file was shortened, or the disk is full.
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            moved if moved > 0 => return Ok(moved as usize),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// Sends one range, without copying it.
fn send(socket: BorrowedFd<'_>, vector: &libc::iovec) -> io::Result<usize> {
    retry_interrupted(|| {
        // SAFETY: the vector describes guest memory, mapped as long as the `GuestMemory` that
        // `Vectors::send` borrows. The kernel only reads it, and tolerates concurrent changes.
        unsafe {
            libc::send(
                socket.as_raw_fd(),
                vector.iov_base,
                vector.iov_len,
                libc::MSG_NOSIGNAL,
            )
        }
    })
}

/// Receives into one range.
fn receive(socket: BorrowedFd<'_>, vector: &libc::iovec) -> io::Result<usize> {
    retry_interrupted(|| {
        // SAFETY: as in `send`; no Rust reference to the memory that the kernel writes exists.
        unsafe { libc::read(socket.as_raw_fd(), vector.iov_base, vector.iov_len) }
    })
}

/// Calls `readv` or `writev`. libc's functions are points of cancellation, which cost forty
/// instructions.
///
/// # Safety
///
/// As for the call.
unsafe fn message_call(
    number: libc::c_long,
    file: BorrowedFd<'_>,
    vectors: &[libc::iovec],
    count: libc::c_int,
) -> isize {
    // SAFETY: the caller vouches for the vectors, of which `count` are read.
    unsafe { libc::syscall(number, file.as_raw_fd(), vectors.as_ptr(), count) as isize }
}

/// Repeats a call that a signal interrupted.
fn retry_interrupted(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(moved) = usize::try_from(call()) {
            return Ok(moved);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// The rest after `moved` bytes.
fn advance(mut vectors: &mut [libc::iovec], mut moved: usize) -> &mut [libc::iovec] {
    while let Some(first) = vectors.first_mut() {
        if moved < first.iov_len {
            first.iov_base = first.iov_base.cast::<u8>().wrapping_add(moved).cast();
            first.iov_len -= moved;
            break;
        }
        moved -= first.iov_len;
        vectors = &mut vectors[1..];
    }
    vectors
}
