//! Runs of host memory that back guest memory, for readv(2) and writev(2).
#![allow(unsafe_code)] // Calls on memory that guests write at any time.

use crate::GuestMemory;
use crate::write_log::WriteLog;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use vm_memory::bitmap::Bitmap as _;
use vm_memory::{GuestAddress, GuestMemoryBackend as _, GuestMemoryRegion as _};

/// The kernel's limit on vectors per call (UIO_MAXIOV).
pub(super) const IOV_MAX: usize = 1024;

/// Runs of memory, in order. Each is either guest memory or a buffer of the host, whose lifetime
/// the caller guarantees.
#[derive(Debug, Default)]
pub(super) struct Vectors {
    runs: Vec<libc::iovec>,
    /// Guest address of each run; `None` for a host's buffer.
    places: Vec<Option<GuestAddress>>,
}

// SAFETY: pointers to guest memory are valid in any thread as long as that memory is mapped, and
// the code that uses them holds it (see `push_guest`).
unsafe impl Send for Vectors {}

impl Vectors {
    pub(super) fn clear(&mut self) {
        self.runs.clear();
        self.places.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.runs.len()
    }

    /// Appends guest memory; false if part of it does not exist. The memory must stay mapped as
    /// long as these vectors are used: devices hold it while they work.
    pub(super) fn push_guest(
        &mut self,
        memory: &GuestMemory,
        mut address: GuestAddress,
        mut length: usize,
    ) -> bool {
        while length > 0 {
            let Some(region) = memory.find_region(address) else {
                return false;
            };
            let offset = address.0 - region.start_addr().0;
            let now = length.min((region.len() - offset) as usize);
            self.runs.push(libc::iovec {
                iov_base: region.as_ptr().wrapping_byte_add(offset as usize).cast(),
                iov_len: now,
            });
            self.places.push(Some(address));
            length -= now;
            address = GuestAddress(address.0.wrapping_add(now as u64));
        }
        true
    }

    /// Appends a buffer of the host, which must outlive its use here.
    pub(super) fn push_host(&mut self, buffer: &mut [u8]) {
        self.runs.push(libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        });
        self.places.push(None);
    }

    pub(super) fn pop(&mut self) {
        self.runs.pop();
        self.places.pop();
    }

    /// Drops the first `count` runs.
    pub(super) fn drain(&mut self, count: usize) {
        self.runs.drain(..count);
        self.places.drain(..count);
    }

    /// Drops all but the first `count` runs.
    pub(super) fn truncate(&mut self, count: usize) {
        self.runs.truncate(count);
        self.places.truncate(count);
    }

    /// Drops the first `bytes` bytes.
    pub(super) fn advance(&mut self, mut bytes: usize) {
        let mut whole = 0;
        for (run, place) in self.runs.iter_mut().zip(&mut self.places) {
            if bytes < run.iov_len {
                run.iov_base = run.iov_base.wrapping_byte_add(bytes);
                run.iov_len -= bytes;
                *place = place.map(|place| GuestAddress(place.0 + bytes as u64));
                break;
            }
            bytes -= run.iov_len;
            whole += 1;
        }
        self.drain(whole);
    }

    /// Bytes of the first `count` runs.
    pub(super) fn bytes(&self, count: usize) -> usize {
        self.runs[..count].iter().map(|run| run.iov_len).sum()
    }

    /// Reads a message from `source` into them.
    pub(super) fn read_from(&self, source: BorrowedFd<'_>) -> io::Result<usize> {
        let count = self.runs.len().min(IOV_MAX);
        // SAFETY: the runs are guest memory, mapped while the device works, or buffers of the
        // caller; no Rust reference to guest memory exists.
        let result =
            unsafe { libc::readv(source.as_raw_fd(), self.runs.as_ptr(), count as libc::c_int) };
        byte_count(result)
    }

    /// Writes `head` and then all runs to `target`.
    pub(super) fn write_to(&mut self, target: BorrowedFd<'_>, head: &[u8]) -> io::Result<usize> {
        self.runs.insert(
            0,
            libc::iovec {
                iov_base: head.as_ptr().cast_mut().cast(),
                iov_len: head.len(),
            },
        );
        let count = self.runs.len().min(IOV_MAX);
        // SAFETY: as above; `head` is only read, and outlives the call.
        let result =
            unsafe { libc::writev(target.as_raw_fd(), self.runs.as_ptr(), count as libc::c_int) };
        self.runs.remove(0);
        byte_count(result)
    }

    /// Copies `bytes` into the runs from byte `offset` on; bytes that do not fit are dropped.
    pub(super) fn store(&self, mut offset: usize, mut bytes: &[u8]) {
        for run in &self.runs {
            if bytes.is_empty() {
                return;
            }
            if offset >= run.iov_len {
                offset -= run.iov_len;
                continue;
            }
            let now = bytes.len().min(run.iov_len - offset);
            // SAFETY: `now` bytes from `offset` on are within the run, which is memory as in
            // `read_from`; guest memory and `bytes` do not overlap.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    bytes.as_ptr(),
                    run.iov_base.cast::<u8>().wrapping_add(offset),
                    now,
                );
            }
            bytes = &bytes[now..];
            offset = 0;
        }
    }

    /// Copies the first bytes of the runs into `bytes`; returns how many.
    pub(super) fn load(&self, bytes: &mut [u8]) -> usize {
        let mut filled = 0;
        for run in &self.runs {
            let now = run.iov_len.min(bytes.len() - filled);
            // SAFETY: as in `store`.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    run.iov_base.cast::<u8>(),
                    bytes[filled..].as_mut_ptr(),
                    now,
                );
            }
            filled += now;
            if filled == bytes.len() {
                break;
            }
        }
        filled
    }

    /// Logs that the first `bytes` bytes were written: the kernel writes them through raw pointers,
    /// past the log.
    pub(super) fn log_writes(&self, memory: &GuestMemory, mut bytes: usize) {
        for (run, place) in self.runs.iter().zip(&self.places) {
            if bytes == 0 {
                return;
            }
            let now = bytes.min(run.iov_len);
            if let Some(place) = place
                && let Some(region) = memory.find_region(*place)
            {
                let offset = place.0 - region.start_addr().0;
                WriteLog::of(region).mark_dirty(offset as usize, now);
            }
            bytes -= now;
        }
    }
}

fn byte_count(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
