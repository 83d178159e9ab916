//! Transfers between a file or block device and guest memory.

use super::SECTOR;
use super::options::{BlockError, BlockOptions};
use super::residency::{Fetcher, Residency};
use crate::GuestMemory;
use crate::virtio::queue::bounce::Bounce;
use crate::virtio::queue::segment::Segment;
use crate::virtio::queue::vectored::{Direction, Vectors};
use jiffy_sys::handed;
use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, StatxFlags};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vm_memory::GuestAddress;

/// The alignment that direct I/O needs (Linux 6.1). rustix has no name for it.
const STATX_DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);
/// Used if the kernel does not report an alignment; sufficient for all common disks.
const FALLBACK_ALIGNMENT: u32 = 4096;

/// An open, locked disk. It never changes size.
#[derive(Debug)]
pub(super) struct Disk {
    file: File,
    bytes: u64,
    read_only: bool,
    block_size: u32,
    /// Alignment of host memory, bytes; 1 without direct I/O.
    memory_alignment: usize,
    /// Which parts of the file are present, if not all are.
    residency: Option<Arc<dyn Residency>>,
}

/// Most bytes that are transferred between two checks of `stop`; a multiple of every block size. A
/// guest can ask for gigabytes in one request, by naming the same memory many times, and a pause
/// must not wait for them.
pub(super) const PIECE_BYTES: usize = 4 << 20;

/// Buffers of one thread for its transfers.
pub(super) struct Scratch {
    stop: Arc<AtomicBool>,
    vectors: Vectors,
    bounce: Bounce,
    piece: Vec<Segment>,
}

impl Scratch {
    /// Transfers end early, with [`io::ErrorKind::Interrupted`], when `stop` is set.
    pub(super) fn new(stop: Arc<AtomicBool>) -> Scratch {
        Scratch {
            stop,
            vectors: Vectors::default(),
            bounce: Bounce::default(),
            piece: Vec::new(),
        }
    }

    /// An error if `stop` is set.
    pub(super) fn check_stop(&self) -> io::Result<()> {
        match self.stop.load(Ordering::SeqCst) {
            true => Err(io::ErrorKind::Interrupted.into()),
            false => Ok(()),
        }
    }
}

impl Disk {
    /// Opens and locks a disk: exclusively if it is writable, else shared with other readers.
    pub(super) fn open(options: &BlockOptions) -> Result<Disk, BlockError> {
        let path = &options.path;
        let file = open(options)?;
        lock(&file, options)?;
        let bytes = (&file)
            .seek(SeekFrom::End(0))
            .map_err(|error| BlockError::Open(path.clone(), error))?;
        let (block_size, memory_alignment) = if options.direct {
            direct_alignment(&file)
        } else {
            (SECTOR as u32, 1)
        };
        let unit = u64::from(block_size);
        if bytes == 0 {
            return Err(BlockError::Empty(path.clone()));
        }
        if !bytes.is_multiple_of(unit) {
            let path = path.clone();
            return Err(BlockError::Size { path, bytes, unit });
        }
        Ok(Disk {
            file,
            bytes,
            read_only: options.read_only,
            block_size,
            memory_alignment,
            residency: None,
        })
    }

    /// Sets how missing parts of the file are filled before they are read.
    pub(super) fn set_residency(&mut self, residency: Arc<dyn Residency>) {
        self.residency = Some(residency);
    }

    /// The parts of the file that are present, and the fetcher of the others; `None` if nothing is
    /// ever missing.
    pub(super) fn on_demand(&self) -> Option<(&dyn Residency, &dyn Fetcher)> {
        let residency = self.residency.as_deref()?;
        Some((residency, residency.fetcher()?))
    }

    /// Whether all of these bytes are present in the disk's file.
    pub(super) fn has(&self, bytes: &Range<u64>) -> bool {
        let residency = self.residency.as_ref();
        residency.is_none_or(|residency| residency.is_present(bytes))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn read_only(&self) -> bool {
        self.read_only
    }

    /// Offsets and lengths must be multiples of this, bytes.
    pub(super) fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Reads `bytes` bytes from `offset` into `segments`. All of them must be present.
    pub(super) fn read(
        &self,
        scratch: &mut Scratch,
        memory: &GuestMemory,
        segments: &[Segment],
        offset: u64,
        bytes: u64,
    ) -> io::Result<()> {
        self.check(offset, bytes)?;
        self.transfer(scratch, Direction::Read, memory, segments, offset, bytes)
    }

    /// Writes `bytes` bytes of `segments` to `offset`.
    pub(super) fn write(
        &self,
        scratch: &mut Scratch,
        memory: &GuestMemory,
        segments: &[Segment],
        offset: u64,
        bytes: u64,
    ) -> io::Result<()> {
        self.check_writable()?;
        self.check(offset, bytes)?;
        self.transfer(scratch, Direction::Write, memory, segments, offset, bytes)
    }

    /// Transfers all bytes of `segments`, a piece at a time.
    fn transfer(
        &self,
        scratch: &mut Scratch,
        direction: Direction,
        memory: &GuestMemory,
        segments: &[Segment],
        mut offset: u64,
        bytes: u64,
    ) -> io::Result<()> {
        if bytes <= PIECE_BYTES as u64 {
            return self.transfer_piece(scratch, direction, memory, segments, offset);
        }
        let mut piece = std::mem::take(&mut scratch.piece);
        let mut rest = Rest {
            segments,
            consumed: 0,
        };
        let mut result = Ok(());
        while result.is_ok() && rest.next_piece(&mut piece) {
            result = scratch
                .check_stop()
                .and_then(|()| self.transfer_piece(scratch, direction, memory, &piece, offset));
            offset += PIECE_BYTES as u64;
        }
        scratch.piece = piece;
        result
    }

    /// Reads into `segments` from `offset`, at most [`PIECE_BYTES`], all present.
    pub(super) fn read_present(
        &self,
        scratch: &mut Scratch,
        memory: &GuestMemory,
        segments: &[Segment],
        offset: u64,
    ) -> io::Result<()> {
        self.transfer_piece(scratch, Direction::Read, memory, segments, offset)
    }

    /// Transfers the bytes of one piece.
    fn transfer_piece(
        &self,
        scratch: &mut Scratch,
        direction: Direction,
        memory: &GuestMemory,
        segments: &[Segment],
        offset: u64,
    ) -> io::Result<()> {
        let alignment = self.memory_alignment;
        let vectors = &mut scratch.vectors;
        let moved = vectors.transfer(&self.file, direction, offset, memory, segments, alignment)?;
        if !moved {
            scratch
                .bounce
                .transfer(&self.file, direction, offset, memory, segments)?;
        }
        Ok(())
    }

    /// Makes all writes durable.
    pub(super) fn flush(&self) -> io::Result<()> {
        if self.read_only {
            return Ok(());
        }
        Ok(rustix::fs::fdatasync(&self.file)?)
    }

    /// Releases a range to the file system; it reads as zeros.
    pub(super) fn discard(&self, range: &Range<u64>) -> io::Result<()> {
        self.fallocate(FallocateFlags::PUNCH_HOLE, range)
    }

    /// Zeros a range without writing it; releases it to the file system only if `unmap`. False if
    /// the file system can't.
    pub(super) fn zero(&self, range: &Range<u64>, unmap: bool) -> io::Result<bool> {
        let how = if unmap {
            FallocateFlags::PUNCH_HOLE
        } else {
            FallocateFlags::ZERO_RANGE
        };
        match self.fallocate(how, range) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// Writes zeros to a range, which is on the disk.
    pub(super) fn write_zeros(&self, scratch: &mut Scratch, range: &Range<u64>) -> io::Result<()> {
        for start in range.clone().step_by(PIECE_BYTES) {
            scratch.check_stop()?;
            let bytes = (range.end - start).min(PIECE_BYTES as u64);
            scratch.bounce.write_zeros(&self.file, start, bytes)?;
        }
        Ok(())
    }

    fn fallocate(&self, how: FallocateFlags, range: &Range<u64>) -> io::Result<()> {
        self.check_writable()?;
        let bytes = range.end.saturating_sub(range.start);
        self.check(range.start, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let how = how | FallocateFlags::KEEP_SIZE;
        loop {
            match rustix::fs::fallocate(&self.file, how, range.start, bytes) {
                Err(rustix::io::Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }

    /// Checks that a range is on the disk and block-aligned.
    pub(super) fn check(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let block = u64::from(self.block_size);
        let end = offset.checked_add(bytes);
        let inside = end.is_some_and(|end| end <= self.bytes);
        if inside && offset.is_multiple_of(block) && bytes.is_multiple_of(block) {
            Ok(())
        } else {
            Err(io::ErrorKind::InvalidInput.into())
        }
    }

    fn check_writable(&self) -> io::Result<()> {
        if self.read_only {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        Ok(())
    }
}

/// The rest of a list of segments.
struct Rest<'a> {
    segments: &'a [Segment],
    /// Bytes of the first segment that are done.
    consumed: usize,
}

impl Rest<'_> {
    /// Takes the next [`PIECE_BYTES`], or the rest; false if nothing is left.
    fn next_piece(&mut self, piece: &mut Vec<Segment>) -> bool {
        piece.clear();
        let mut room = PIECE_BYTES;
        while room > 0
            && let [first, later @ ..] = self.segments
        {
            let length = (first.length - self.consumed).min(room);
            let address = GuestAddress(first.address.0 + self.consumed as u64);
            piece.push(Segment { address, length });
            room -= length;
            self.consumed += length;
            if self.consumed == first.length {
                self.segments = later;
                self.consumed = 0;
            }
        }
        !piece.is_empty()
    }
}

fn open(options: &BlockOptions) -> Result<File, BlockError> {
    let path = &options.path;
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => BlockError::Missing(path.clone()),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
            if !options.read_only =>
        {
            BlockError::NotWritable(path.clone(), error)
        }
        io::ErrorKind::InvalidInput if options.direct => BlockError::NoDirect(path.clone()),
        _ => BlockError::Open(path.clone(), error),
    };
    if let Some(file) = handed::take(path) {
        let file = File::from(file);
        check_kind(path, &file.metadata().map_err(failed)?)?;
        return Ok(file);
    }
    // Checked before opening, because opening a pipe would block.
    check_kind(path, &std::fs::metadata(path).map_err(failed)?)?;
    let mut flags = libc::O_NONBLOCK;
    if options.direct {
        flags |= libc::O_DIRECT;
    }
    let file = OpenOptions::new()
        .read(true)
        .write(!options.read_only)
        .custom_flags(flags)
        .open(path)
        .map_err(failed)?;
    check_kind(path, &file.metadata().map_err(failed)?)?;
    Ok(file)
}

fn check_kind(path: &Path, metadata: &std::fs::Metadata) -> Result<(), BlockError> {
    let kind = metadata.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(());
    }
    Err(BlockError::Kind(path.to_owned()))
}

fn lock(file: &File, options: &BlockOptions) -> Result<(), BlockError> {
    let how = if options.read_only {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    match rustix::fs::flock(file, how) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(BlockError::InUse(options.path.clone())),
        Err(error) => {
            // Some network file systems do not support locks.
            tracing::warn!(path = ?options.path, %error, "a disk could not be locked");
            Ok(())
        }
    }
}

/// Alignment of offsets and of memory for direct I/O, bytes.
fn direct_alignment(file: &File) -> (u32, usize) {
    let known = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, STATX_DIOALIGN)
        .ok()
        .filter(|statx| statx.stx_mask & STATX_DIOALIGN.bits() != 0)
        .map(|statx| (statx.stx_dio_offset_align, statx.stx_dio_mem_align))
        .filter(|(offset, memory)| offset.is_power_of_two() && memory.is_power_of_two());
    let (offset, memory) = known.unwrap_or((FALLBACK_ALIGNMENT, FALLBACK_ALIGNMENT));
    let block_size = offset.clamp(SECTOR as u32, FALLBACK_ALIGNMENT);
    (block_size, memory.max(block_size) as usize)
}
