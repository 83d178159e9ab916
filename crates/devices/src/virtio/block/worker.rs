//! The thread that serves the queue, one request after the other.

use super::SECTOR;
use super::disk::{Disk, Scratch};
use super::doorbell::make_blocking;
use super::options::ID_BYTES;
use super::request::{Buffers, Operation, Request, Segment};
use crate::GuestMemory;
use crate::log_limit::LogLimit;
use crate::virtio::device::{ActiveQueue, Interrupt};
use crate::virtio::signal::driver_wants_interrupt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP};
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

/// Everything the thread owns.
pub(super) struct Worker {
    disk: Arc<Disk>,
    id: [u8; ID_BYTES],
    memory: Arc<GuestMemory>,
    interrupt: Arc<dyn Interrupt>,
    active: ActiveQueue,
    stop: Arc<AtomicBool>,
    /// The driver does not flush, so every write must be durable when it is
    /// answered (Virtio 1.3 §5.2.6.2).
    write_through: bool,
    log: Arc<LogLimit>,
    buffers: Buffers,
    scratch: Scratch,
}

/// What a worker is made from.
pub(super) struct WorkerParts {
    pub(super) disk: Arc<Disk>,
    pub(super) id: [u8; ID_BYTES],
    pub(super) memory: Arc<GuestMemory>,
    pub(super) interrupt: Arc<dyn Interrupt>,
    pub(super) active: ActiveQueue,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) write_through: bool,
    pub(super) log: Arc<LogLimit>,
}

impl Worker {
    /// A worker that has done nothing yet.
    pub(super) fn new(parts: WorkerParts) -> Worker {
        Worker {
            disk: parts.disk,
            id: parts.id,
            memory: parts.memory,
            interrupt: parts.interrupt,
            active: parts.active,
            scratch: Scratch::new(parts.stop.clone()),
            stop: parts.stop,
            write_through: parts.write_through,
            log: parts.log,
            buffers: Buffers::default(),
        }
    }

    /// Serves the queue until told to stop; gives it back with its position.
    /// Each request it took is answered, except one so large that the stop
    /// could not wait for it: that one is in the queue again, to be done anew.
    pub(super) fn run(mut self) -> ActiveQueue {
        if let Err(error) = make_blocking(&self.active.doorbell) {
            tracing::error!(%error, "the doorbell of a disk can't be waited on");
            self.interrupt.needs_reset();
            return self.active;
        }
        let mut broken = false;
        while !self.stopped() {
            if !broken && let Err(error) = self.serve() {
                if self.log.admits() {
                    tracing::warn!(%error, "a guest broke the queue of a disk");
                }
                self.interrupt.needs_reset();
                broken = true;
            }
            if self.stopped() {
                break;
            }
            match self.active.doorbell.read() {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::error!(%error, "the doorbell of a disk can't be read");
                    self.interrupt.needs_reset();
                    break;
                }
            }
        }
        self.active
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Answers all there is, or until told to stop.
    fn serve(&mut self) -> Result<(), virtio_queue::Error> {
        let memory = self.memory.clone();
        let memory = memory.as_ref();
        loop {
            self.active.queue.disable_notification(memory)?;
            while !self.stopped() {
                let Some(chain) = self.active.queue.iter(memory)?.next() else {
                    break;
                };
                let head = chain.head_index();
                let Some(written) = self.answer(memory, chain) else {
                    self.active.queue.go_to_previous_position();
                    break;
                };
                self.active.queue.add_used(memory, head, written)?;
                // After each request, not after all: the next may take long.
                if driver_wants_interrupt(&mut self.active.queue, memory) {
                    self.interrupt.used_buffers();
                }
            }
            let more = self.active.queue.enable_notification(memory)?;
            if !more || self.stopped() {
                return Ok(());
            }
        }
    }

    /// Carries out one request; the number of bytes written to the guest, or
    /// `None` if the order to stop came in the middle. What was done by then
    /// is done again another time, to the same effect.
    fn answer(
        &mut self,
        memory: &GuestMemory,
        chain: DescriptorChain<&GuestMemory>,
    ) -> Option<u32> {
        let (address, status, data_written) = match self.buffers.parse(memory, chain) {
            Ok(request) => {
                let (status, written) = match self.carry_out(memory, &request) {
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

/// Writes the identity, or what of it fits.
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
        // The guest asked for the impossible: its own business.
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
