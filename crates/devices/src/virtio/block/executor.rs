//! Carries out requests, over whichever transport they came.

use super::SECTOR;
use super::disk::{Disk, Scratch};
use super::options::ID_BYTES;
use super::request::{Buffers, Operation, Request};
use crate::GuestMemory;
use crate::log_limit::LogLimit;
use crate::virtio::queue::chain::Chain;
use crate::virtio::queue::limit::Cost;
use crate::virtio::queue::segment::Segment;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

/// What one thread carries out requests with.
pub struct Executor {
    disk: Arc<Disk>,
    id: [u8; ID_BYTES],
    /// The driver does not flush, so every write must be durable when it is
    /// answered (Virtio 1.3 §5.2.6.2).
    write_through: bool,
    log: Arc<LogLimit>,
    buffers: Buffers,
    scratch: Scratch,
}

impl Executor {
    pub(super) fn new(
        disk: Arc<Disk>,
        id: [u8; ID_BYTES],
        log: Arc<LogLimit>,
        stop: Arc<AtomicBool>,
        write_through: bool,
    ) -> Executor {
        Executor {
            disk,
            id,
            write_through,
            log,
            buffers: Buffers::default(),
            scratch: Scratch::new(stop),
        }
    }

    /// Lets code that waits for missing bytes notice the order to stop: `bell` is readable
    /// then.
    pub(super) fn listen_to(&mut self, bell: EventFd) {
        self.scratch.order.set_bell(bell);
    }

    /// Carries out one request. Returns the number of bytes written to the guest, or `None`
    /// if the order to stop came before it was done: then it is carried out again later,
    /// with the same result.
    ///
    /// `admit` is called first, and may wait (rate limits); its error counts as the order to
    /// stop.
    pub fn answer(
        &mut self,
        memory: &GuestMemory,
        chain: Chain,
        admit: &mut dyn FnMut(Cost) -> io::Result<()>,
    ) -> Option<u32> {
        let (address, status, data_written) = match self.buffers.parse(memory, chain) {
            Ok(request) => {
                let admitted = admit(request.cost());
                let (status, written) =
                    match admitted.and_then(|()| self.carry_out(memory, &request)) {
                        Ok(written) => (VIRTIO_BLK_S_OK as u8, written),
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => return None,
                        Err(error) => (failure(&error, &self.log), 0),
                    };
                (request.status, status, written)
            }
            Err(refused) => {
                tracing::debug!(%refused, "a guest's block request");
                match refused.status() {
                    Some((address, status)) => (address, status, 0),
                    None => return Some(0),
                }
            }
        };
        Some(match memory.write_obj(status, address) {
            Ok(()) => data_written.saturating_add(1),
            Err(_) => 0,
        })
    }

    /// The number of data bytes written to the guest.
    fn carry_out(&mut self, memory: &GuestMemory, request: &Request) -> io::Result<u32> {
        let bytes = request.data_bytes;
        let scratch = &mut self.scratch;
        match &request.operation {
            Operation::Read(offset) => {
                let data = self.buffers.writable_data();
                self.disk.read(scratch, memory, data, *offset, bytes)?;
                return Ok(u32::try_from(bytes).unwrap_or(u32::MAX));
            }
            Operation::Write(offset) => {
                let data = self.buffers.readable_data();
                self.disk.write(scratch, memory, data, *offset, bytes)?;
            }
            Operation::Flush => return self.disk.flush().map(|()| 0),
            Operation::Identify => return identify(&self.id, memory, self.buffers.writable_data()),
            Operation::Discard(ranges) => {
                for range in ranges.as_slice() {
                    scratch.go_on()?;
                    self.disk.discard(&range.bytes)?;
                }
            }
            Operation::WriteZeroes(ranges) => {
                for range in ranges.as_slice() {
                    scratch.go_on()?;
                    self.disk.write_zeroes(scratch, &range.bytes, range.unmap)?;
                }
            }
        }
        if self.write_through {
            self.disk.flush()?;
        }
        Ok(0)
    }
}

/// Writes the identity, as much of it as fits.
fn identify(id: &[u8; ID_BYTES], memory: &GuestMemory, room: &[Segment]) -> io::Result<u32> {
    let mut left = id.as_slice();
    for segment in room {
        let (now, later) = left.split_at(left.len().min(segment.length));
        memory
            .write_slice(now, GuestAddress(segment.address.0))
            .map_err(io::Error::other)?;
        left = later;
    }
    Ok((ID_BYTES - left.len()) as u32)
}

fn failure(error: &io::Error, log: &LogLimit) -> u8 {
    match error.kind() {
        io::ErrorKind::Unsupported => VIRTIO_BLK_S_UNSUPP as u8,
        // The guest's mistake, not the host's.
        io::ErrorKind::InvalidInput | io::ErrorKind::ReadOnlyFilesystem => {
            tracing::debug!(%error, sector_bytes = SECTOR, "a guest's block request");
            VIRTIO_BLK_S_IOERR as u8
        }
        _ => {
            if log.admits() {
                tracing::warn!(%error, "a disk failed a request");
            }
            VIRTIO_BLK_S_IOERR as u8
        }
    }
}
