//! Requests about files that are open, and about opening them.

use crate::folder::Folder;
use crate::handles::Handle;
use crate::protocol::{Answer, Arguments, Header, Outcome};
use crate::tree::permissions;
use jiffy_wire::files::DATA_MAX;
use rustix::fs::{FallocateFlags, FileType, OFlags, SeekFrom};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// `FOPEN_NOFLUSH`: the server has nothing to flush when a descriptor is closed.
const NO_FLUSH: u32 = 1 << 5;
/// `FUSE_FSYNC_FDATASYNC`.
const DATA_ONLY: u32 = 1;
/// Flags with which a file is opened; the guest's kernel handles all others.
const HONORED: OFlags = OFlags::TRUNC
    .union(OFlags::APPEND)
    .union(OFlags::SYNC)
    .union(OFlags::DSYNC);

/// Flags with which a folder is opened.
pub const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY);

/// The flags of a file that is opened again: its contents are not lost.
fn again(flags: OFlags) -> OFlags {
    flags & !OFlags::TRUNC
}

/// The flags of a file that was open when the guest was captured.
///
/// # Errors
///
/// `EINVAL` if no file is opened so.
pub fn flags_again(raw: u32) -> Outcome<OFlags> {
    match flags_of(raw)? {
        flags if flags.bits() == raw && !flags.contains(OFlags::TRUNC) => Ok(flags),
        _ => Err(Errno::INVAL),
    }
}

/// The flags of a file that a guest wants to open.
fn flags_of(raw: u32) -> Outcome<OFlags> {
    let flags = OFlags::from_bits_retain(raw);
    let access = flags & OFlags::ACCMODE;
    if ![OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR].contains(&access) {
        return Err(Errno::INVAL);
    }
    Ok(access | flags & HONORED)
}

impl Folder {
    /// `OPEN`. Only files have contents on the host: FIFOs, sockets and devices are the guest's
    /// own, and opening the host's could take forever.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed, `EROFS` for a change in a folder that is only read,
    /// `ESTALE` if the node is unknown, `EISDIR`, `ELOOP` or `ENXIO` if it is no file, `ENFILE` if
    /// the guest has too many open; otherwise that of `openat`.
    pub fn answer_open(
        &self,
        header: &Header,
        mut arguments: Arguments<'_>,
        answer: &mut Answer,
    ) -> Outcome<()> {
        let flags = flags_of(arguments.u32()?)?;
        let changes = flags.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::TRUNC);
        if self.sharing.read_only && changes {
            return Err(Errno::ROFS);
        }
        let node = self.nodes.get(header.node)?;
        match node.kind {
            FileType::RegularFile => {}
            FileType::Directory => return Err(Errno::ISDIR),
            FileType::Symlink => return Err(Errno::LOOP),
            _ => return Err(Errno::NXIO),
        }
        let slot = self.handles.reserve()?;
        let file = self.reopen(&node.descriptor, flags)?;
        put_open(answer, self.handles.add(file, again(flags), slot), NO_FLUSH)
    }

    /// `OPENDIR`.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the node is unknown, `ENOTDIR` if it is no folder, `ENFILE` if the guest has too
    /// many open; otherwise that of `openat`.
    pub fn answer_opendir(&self, header: &Header, answer: &mut Answer) -> Outcome<()> {
        let node = self.nodes.get(header.node)?;
        if node.kind != FileType::Directory {
            return Err(Errno::NOTDIR);
        }
        let slot = self.handles.reserve()?;
        let folder = self.reopen(&node.descriptor, FOLDER)?;
        put_open(answer, self.handles.add(folder, FOLDER, slot), 0)
    }

    /// `CREATE`: makes a file and opens it.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed, `ESTALE` if the node is unknown or something that is
    /// no file has the name by now, `ENFILE` if the guest has too many open; otherwise that of the
    /// host's call.
    pub fn answer_create(
        &self,
        header: &Header,
        mut arguments: Arguments<'_>,
        answer: &mut Answer,
    ) -> Outcome<()> {
        let raw = arguments.u32()?;
        let mode = permissions(arguments.u32()?);
        arguments.skip()?;
        arguments.skip()?;
        let name = arguments.name()?;
        arguments.end()?;
        let flags = flags_of(raw)?;
        let parent = self.nodes.get(header.node)?;
        let slot = self.handles.reserve()?;
        let identity = self.sharing.identity;
        // With O_EXCL nothing of the host's is opened: neither a FIFO nor what a link leads to.
        let new = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = identity.create(header.user, header.group, || {
            rustix::fs::openat(&parent.descriptor, name, new, mode)
        });
        let (file, path) = match made {
            Ok(file) => {
                let path = self.reopen(&file, OFlags::PATH)?;
                (file, path)
            }
            Err(Errno::EXIST) if raw & OFlags::EXCL.bits() == 0 => {
                let path = self.find(&parent, name)?;
                let facts = crate::folder::facts(&path)?;
                if crate::nodes::kind_of(&facts) != FileType::RegularFile {
                    // The host created it meanwhile: the guest's kernel looks it up again.
                    return Err(Errno::STALE);
                }
                (self.reopen(&path, flags)?, path)
            }
            Err(error) => return Err(error),
        };
        self.answer_created((file, again(flags), slot), path, answer)
    }

    /// `TMPFILE`: makes a file without a name and opens it.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed, `ESTALE` if the node is unknown, `ENFILE` if the guest
    /// has too many open; otherwise that of the host's call.
    pub fn answer_tmpfile(
        &self,
        header: &Header,
        mut arguments: Arguments<'_>,
        answer: &mut Answer,
    ) -> Outcome<()> {
        let raw = arguments.u32()?;
        let mode = permissions(arguments.u32()?);
        let flags = flags_of(raw)? & !OFlags::TRUNC;
        let parent = self.nodes.get(header.node)?;
        let slot = self.handles.reserve()?;
        let exclusive = OFlags::from_bits_retain(raw) & OFlags::EXCL;
        let new = flags | OFlags::TMPFILE | exclusive | OFlags::CLOEXEC;
        let identity = self.sharing.identity;
        let file = identity.create(header.user, header.group, || {
            rustix::fs::openat(&parent.descriptor, c".", new, mode)
        })?;
        let path = self.reopen(&file, OFlags::PATH)?;
        self.answer_created((file, flags, slot), path, answer)
    }

    fn answer_created(
        &self,
        (file, flags, slot): (OwnedFd, OFlags, crate::budget::Slot),
        path: OwnedFd,
        answer: &mut Answer,
    ) -> Outcome<()> {
        let (node, facts) = self.remember(path)?;
        self.put_entry(answer, (node, &facts))?;
        put_open(answer, self.handles.add(file, flags, slot), NO_FLUSH)
    }

    /// `READ`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed or asks for more than [`DATA_MAX`] bytes, `EBADF` or
    /// `ESTALE` as in [`Handles::file`](crate::handles::Handles::file); otherwise that of `pread`.
    pub fn answer_read(&self, mut arguments: Arguments<'_>, answer: &mut Answer) -> Outcome<()> {
        let (file, offset, size) = self.place(&mut arguments)?;
        if size > DATA_MAX {
            return Err(Errno::INVAL);
        }
        answer
            .fill(size, |place| {
                rustix::io::pread(&file.descriptor, place, offset)
            })
            .map(drop)
    }

    /// `WRITE`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed or has more than [`DATA_MAX`] bytes of data, `EBADF` or
    /// `ESTALE` as in [`Handles::file`](crate::handles::Handles::file); otherwise that of `pwrite`.
    pub fn answer_write(&self, mut arguments: Arguments<'_>, answer: &mut Answer) -> Outcome<()> {
        let (file, offset, size) = self.place(&mut arguments)?;
        // Write flags, lock owner, flags, padding.
        arguments.skip()?;
        arguments.u64()?;
        arguments.u64()?;
        let data = arguments.rest();
        if data.len() != size || size > DATA_MAX {
            return Err(Errno::INVAL);
        }
        let written = rustix::io::pwrite(&file.descriptor, data, offset)?;
        answer.put_u32(written as u32)?;
        answer.put_u32(0)
    }

    /// Which file, where, and how many bytes.
    fn place(&self, arguments: &mut Arguments<'_>) -> Outcome<(Arc<Handle>, u64, usize)> {
        let file = self.handles.file(arguments.u64()?)?;
        let offset = arguments.u64()?;
        let size = arguments.u32()?;
        Ok((file, offset, size as usize))
    }

    /// `FLUSH`: nothing of the file is held back.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed, `EBADF` or `ESTALE` as in
    /// [`Handles::file`](crate::handles::Handles::file).
    pub fn flush(&self, mut arguments: Arguments<'_>) -> Outcome<()> {
        self.handles.file(arguments.u64()?).map(drop)
    }

    /// `RELEASE` and `RELEASEDIR`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed, `EBADF` if there is no such handle.
    pub fn release(&self, mut arguments: Arguments<'_>) -> Outcome<()> {
        self.handles.remove(arguments.u64()?)
    }

    /// `FSYNC` and `FSYNCDIR`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed, `EBADF` or `ESTALE` as in
    /// [`Handles::file`](crate::handles::Handles::file); otherwise that of `fsync` or `fdatasync`.
    pub fn sync(&self, mut arguments: Arguments<'_>, is_folder: bool) -> Outcome<()> {
        let number = arguments.u64()?;
        let handle = match is_folder {
            true => self.handles.folder(number)?,
            false => self.handles.file(number)?,
        };
        match arguments.u32()? & DATA_ONLY {
            0 => rustix::fs::fsync(&handle.descriptor),
            _ => rustix::fs::fdatasync(&handle.descriptor),
        }
    }

    /// `LSEEK`: where data or a hole begins. The guest's kernel knows all other positions.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed or asks for another kind of position, `EBADF` or
    /// `ESTALE` as in [`Handles::file`](crate::handles::Handles::file); otherwise that of `lseek`,
    /// such as `ENXIO` beyond the end.
    pub fn answer_lseek(&self, mut arguments: Arguments<'_>, answer: &mut Answer) -> Outcome<()> {
        let file = self.handles.file(arguments.u64()?)?;
        let offset = arguments.u64()?;
        let whence = arguments.u32()?.cast_signed();
        if i64::try_from(offset).is_err() {
            return Err(Errno::INVAL);
        }
        let from = match whence {
            libc::SEEK_DATA => SeekFrom::Data(offset),
            libc::SEEK_HOLE => SeekFrom::Hole(offset),
            _ => return Err(Errno::INVAL),
        };
        answer.put_u64(rustix::fs::seek(&file.descriptor, from)?)
    }

    /// `FALLOCATE`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed, `EBADF` or `ESTALE` as in
    /// [`Handles::file`](crate::handles::Handles::file), `EOPNOTSUPP` for other modes; otherwise
    /// that of `fallocate`.
    pub fn allocate(&self, mut arguments: Arguments<'_>) -> Outcome<()> {
        let file = self.handles.file(arguments.u64()?)?;
        let (offset, length) = (arguments.u64()?, arguments.u64()?);
        let mode = FallocateFlags::from_bits_retain(arguments.u32()?);
        let known =
            FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !known.contains(mode) {
            return Err(Errno::OPNOTSUPP);
        }
        rustix::fs::fallocate(&file.descriptor, mode, offset, length)
    }
}

/// Appends `fuse_open_out`.
fn put_open(answer: &mut Answer, handle: u64, flags: u32) -> Outcome<()> {
    answer.put_u64(handle)?;
    answer.put_u32(flags)?;
    answer.put_u32(0)
}
