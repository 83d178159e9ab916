//! Requests about attributes of files, and of the file system.

use crate::folder::{Folder, facts};
use crate::nodes::Node;
use crate::protocol::{Answer, Arguments, Header, Outcome};
use crate::tree::permissions;
use rustix::fs::{Access, AtFlags, FileType, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno;

// Bits of `fuse_setattr_in.valid`.
const MODE: u32 = 1 << 0;
const USER: u32 = 1 << 1;
const GROUP: u32 = 1 << 2;
const SIZE: u32 = 1 << 3;
const ACCESSED: u32 = 1 << 4;
const MODIFIED: u32 = 1 << 5;
const HANDLE: u32 = 1 << 6;
const ACCESSED_NOW: u32 = 1 << 7;
const MODIFIED_NOW: u32 = 1 << 8;

/// `fuse_setattr_in`.
struct Change {
    valid: u32,
    handle: u64,
    size: u64,
    times: [u64; 2],
    nanoseconds: [u32; 2],
    mode: u32,
    user: u32,
    group: u32,
}

impl Change {
    fn of(mut arguments: Arguments<'_>) -> Outcome<Change> {
        let valid = arguments.u32()?;
        arguments.skip()?;
        let (handle, size) = (arguments.u64()?, arguments.u64()?);
        // Owner of locks.
        arguments.u64()?;
        let times = [arguments.u64()?, arguments.u64()?];
        // The time of the last change can't be set.
        arguments.u64()?;
        let nanoseconds = [arguments.u32()?, arguments.u32()?];
        arguments.skip()?;
        let mode = arguments.u32()?;
        arguments.skip()?;
        let (user, group) = (arguments.u32()?, arguments.u32()?);
        arguments.skip()?;
        arguments.end()?;
        Ok(Change {
            valid,
            handle,
            size,
            times,
            nanoseconds,
            mode,
            user,
            group,
        })
    }

    fn has(&self, bits: u32) -> bool {
        self.valid & bits != 0
    }

    fn time(&self, which: usize, given: u32, now: u32) -> Timespec {
        let (tv_sec, tv_nsec) = match () {
            () if self.has(now) => (0, UTIME_NOW),
            () if self.has(given) => (
                self.times[which].cast_signed(),
                self.nanoseconds[which].into(),
            ),
            () => (0, UTIME_OMIT),
        };
        Timespec { tv_sec, tv_nsec }
    }
}

impl Folder {
    /// `GETATTR`.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the node is unknown; otherwise that of `statx`.
    pub fn answer_getattr(&self, header: &Header, answer: &mut Answer) -> Outcome<()> {
        let node = self.nodes.get(header.node)?;
        self.put_attributes_alone(answer, &facts(&node.descriptor)?)
    }

    /// `SETATTR`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed or the size does not apply, `ESTALE` if the node is
    /// unknown, `EPERM` if the host has no such owner; otherwise that of the host's call. What was
    /// changed before stays changed.
    pub fn answer_setattr(
        &self,
        header: &Header,
        arguments: Arguments<'_>,
        answer: &mut Answer,
    ) -> Outcome<()> {
        let change = Change::of(arguments)?;
        let node = self.nodes.get(header.node)?;
        let (descriptors, link) = self.link_to(&node.descriptor);
        if change.has(MODE) {
            let mode = permissions(change.mode);
            rustix::fs::chmodat(descriptors, &link, mode, AtFlags::empty())?;
        }
        if change.has(USER | GROUP) {
            let user = change.has(USER).then_some(change.user);
            let group = change.has(GROUP).then_some(change.group);
            let (user, group) = self.sharing.identity.owner(user, group)?;
            rustix::fs::chownat(&node.descriptor, c"", user, group, AtFlags::EMPTY_PATH)?;
        }
        if change.has(SIZE) {
            self.resize(&node, &change)?;
        }
        if change.has(ACCESSED | MODIFIED | ACCESSED_NOW | MODIFIED_NOW) {
            let times = Timestamps {
                last_access: change.time(0, ACCESSED, ACCESSED_NOW),
                last_modification: change.time(1, MODIFIED, MODIFIED_NOW),
            };
            rustix::fs::utimensat(descriptors, &link, &times, AtFlags::empty())?;
        }
        self.put_attributes_alone(answer, &facts(&node.descriptor)?)
    }

    fn resize(&self, node: &Node, change: &Change) -> Outcome<()> {
        if i64::try_from(change.size).is_err() {
            return Err(Errno::INVAL);
        }
        if node.kind != FileType::RegularFile {
            return Err(Errno::INVAL);
        }
        // A file that is open for writing stays so whatever its mode becomes.
        if change.has(HANDLE)
            && let Ok(handle) = self.handles.file(change.handle)
            && rustix::fs::ftruncate(&handle.descriptor, change.size).is_ok()
        {
            return Ok(());
        }
        let file = self.reopen(&node.descriptor, OFlags::WRONLY)?;
        rustix::fs::ftruncate(&file, change.size)
    }

    /// `ACCESS`: what the server itself may do. The guest's kernel decides by the mode.
    ///
    /// # Errors
    ///
    /// `EROFS` for writing in a folder that is only read, `EINVAL` if the message is malformed,
    /// `ESTALE` if the node is unknown; otherwise that of `faccessat`.
    pub fn access(&self, header: &Header, mut arguments: Arguments<'_>) -> Outcome<()> {
        let wanted = Access::from_bits(arguments.u32()?).ok_or(Errno::INVAL)?;
        if self.sharing.read_only && wanted.contains(Access::WRITE_OK) {
            return Err(Errno::ROFS);
        }
        let node = self.nodes.get(header.node)?;
        let (descriptors, link) = self.link_to(&node.descriptor);
        rustix::fs::accessat(descriptors, link, wanted, AtFlags::EACCESS)
    }

    /// `STATFS`.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the node is unknown; otherwise that of `fstatvfs`.
    pub fn answer_statfs(&self, header: &Header, answer: &mut Answer) -> Outcome<()> {
        let node = self.nodes.get(header.node)?;
        let facts = rustix::fs::fstatvfs(&node.descriptor)?;
        for number in [
            facts.f_blocks,
            facts.f_bfree,
            facts.f_bavail,
            facts.f_files,
            facts.f_ffree,
        ] {
            answer.put_u64(number)?;
        }
        for number in [facts.f_bsize, facts.f_namemax, facts.f_frsize] {
            answer.put_u32(u32::try_from(number).unwrap_or(u32::MAX))?;
        }
        // Padding and spare fields.
        answer.put(&[0; 28])
    }
}
