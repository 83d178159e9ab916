//! Executes requests, independent of the transport.

use super::SECTOR;
use super::disk::{Disk, Scratch};
use super::on_demand::{Step, WaitingRead};
use super::options::ID_BYTES;
use super::request::{Buffers, Operation, Request};
use super::residency::Fetched;
use crate::GuestMemory;
use crate::virtio::queue::chain::Chain;
use crate::virtio::queue::limit::Cost;
use crate::virtio::queue::segment::Segment;
use jiffy_sys::log_limit::LogLimit;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP};
use vm_memory::{Bytes, GuestAddress};

/// The outcome of a request.
#[derive(Debug)]
pub enum Outcome {
    /// It was answered; this many bytes were written to the guest.
    Done(u32),
    /// It was stopped in the middle. It is executed again later, from its start.
    Stopped,
    /// It waits for bytes that are missing in the disk's file. Only for a disk that has a
    /// [`Residency`](super::Residency).
    Waits(Waiting),
}

/// A request that waits; [`Executor::resume`] continues it.
#[derive(Debug)]
pub struct Waiting(WaitingRead);

impl Waiting {
    /// The id of the answer that it waits for.
    pub(super) fn ticket(&self) -> u64 {
        self.0.ticket
    }
}

/// What one thread needs to execute requests.
pub struct Executor {
    disk: Arc<Disk>,
    id: [u8; ID_BYTES],
    /// The driver does not flush, so every write must be durable when it is answered (Virtio 1.3
    /// §5.2.6.2).
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

    /// Executes one request.
    ///
    /// `admit` is called first, and again before zeros are written in place of a request to zero
    /// ranges. It may wait (rate limits); its error counts as a stop.
    pub fn answer(
        &mut self,
        memory: &GuestMemory,
        chain: Chain,
        admit: &mut dyn FnMut(Cost) -> io::Result<()>,
    ) -> Outcome {
        match self.buffers.parse(memory, chain) {
            Ok(request) => {
                let admitted = admit(request.cost());
                let done = admitted.and_then(|()| self.execute(memory, &request, admit));
                self.finish(memory, request.status, done)
            }
            Err(refused) => {
                tracing::debug!(%refused, "a guest's block request was refused");
                match refused.status() {
                    Some((address, status)) => write_status(memory, address, status, 0),
                    None => Outcome::Done(0),
                }
            }
        }
    }

    /// Continues a request that waited.
    pub(super) fn resume(
        &mut self,
        memory: &GuestMemory,
        waiting: Waiting,
        fetched: io::Result<Fetched>,
    ) -> Outcome {
        let (status, length) = (waiting.0.status, waiting.0.length);
        let step = fetched.and_then(|fetched| {
            self.disk
                .answered(&mut self.scratch, memory, waiting.0, fetched)
        });
        self.finish(memory, status, step.map(|step| progress(step, length)))
    }

    /// Writes the status of a finished request.
    fn finish(
        &self,
        memory: &GuestMemory,
        status: GuestAddress,
        progress: io::Result<Progress>,
    ) -> Outcome {
        match progress {
            Ok(Progress::Waits(read)) => Outcome::Waits(Waiting(read)),
            Ok(Progress::Written(bytes)) => {
                write_status(memory, status, VIRTIO_BLK_S_OK as u8, bytes)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Outcome::Stopped,
            Err(error) => write_status(memory, status, failure(&error, &self.log), 0),
        }
    }

    fn execute(
        &mut self,
        memory: &GuestMemory,
        request: &Request,
        admit: &mut dyn FnMut(Cost) -> io::Result<()>,
    ) -> io::Result<Progress> {
        let bytes = request.data_bytes;
        let scratch = &mut self.scratch;
        match &request.operation {
            Operation::Read(offset) => {
                let data = self.buffers.writable_data();
                self.disk.check(*offset, bytes)?;
                let wanted = *offset..*offset + bytes;
                if !self.disk.has(&wanted) {
                    let step =
                        self.disk
                            .begin_waiting(scratch, memory, data, wanted, request.status)?;
                    return Ok(progress(step, bytes));
                }
                self.disk.read(scratch, memory, data, *offset, bytes)?;
                return Ok(progress(Step::Done, bytes));
            }
            Operation::Write(offset) => {
                let data = self.buffers.readable_data();
                self.disk.write(scratch, memory, data, *offset, bytes)?;
            }
            Operation::Flush => return self.disk.flush().map(|()| Progress::Written(0)),
            Operation::Identify => {
                let written = identify(&self.id, memory, self.buffers.writable_data())?;
                return Ok(Progress::Written(written));
            }
            Operation::Discard(ranges) => {
                for range in ranges.as_slice() {
                    scratch.check_stop()?;
                    self.disk.discard(&range.bytes)?;
                }
            }
            Operation::WriteZeroes(ranges) => {
                for range in ranges.as_slice() {
                    scratch.check_stop()?;
                    if self.disk.zero(&range.bytes, range.unmap)? {
                        continue;
                    }
                    // It takes the disk as long as any write.
                    admit(Cost {
                        operations: 0,
                        bytes: range.bytes.end - range.bytes.start,
                    })?;
                    self.disk.write_zeros(scratch, &range.bytes)?;
                }
            }
        }
        if self.write_through {
            self.disk.flush()?;
        }
        Ok(Progress::Written(0))
    }
}

/// The progress of a request that did not fail.
enum Progress {
    /// It is done; this many data bytes were written to the guest.
    Written(u32),
    Waits(WaitingRead),
}

fn progress(step: Step, bytes: u64) -> Progress {
    match step {
        Step::Done => Progress::Written(u32::try_from(bytes).unwrap_or(u32::MAX)),
        Step::Waits(read) => Progress::Waits(read),
    }
}

/// Writes the status byte; the outcome counts it with the data bytes.
fn write_status(
    memory: &GuestMemory,
    address: GuestAddress,
    status: u8,
    data_written: u32,
) -> Outcome {
    Outcome::Done(match memory.write_obj(status, address) {
        Ok(()) => data_written.saturating_add(1),
        Err(_) => 0,
    })
}

/// Writes as much of the serial number as fits.
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
        // The guest's fault, not the host's.
        io::ErrorKind::InvalidInput | io::ErrorKind::ReadOnlyFilesystem => {
            tracing::debug!(%error, sector_bytes = SECTOR, "a guest's block request failed");
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
