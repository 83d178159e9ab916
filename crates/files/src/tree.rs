//! Requests about names: look up, make, link, rename, remove.

use crate::folder::Folder;
use crate::protocol::{Answer, Arguments, Header, Outcome};
use rustix::fs::{AtFlags, FileType, Mode, RenameFlags};
use rustix::io::Errno;
use std::ffi::CStr;

/// Bits of a mode that say what may be done; the rest is the kind.
const PERMISSIONS: u32 = 0o7777;

/// The permissions in a mode.
pub fn permissions(mode: u32) -> Mode {
    Mode::from_raw_mode(mode & PERMISSIONS)
}

impl Folder {
    /// `LOOKUP`.
    ///
    /// # Errors
    ///
    /// `EINVAL` or `ENAMETOOLONG` if the message is malformed, `ESTALE` if the folder is unknown,
    /// `ENFILE` if the guest has too many nodes; otherwise that of `openat2`, such as `ENOENT`.
    pub fn answer_lookup(
        &self,
        header: &Header,
        mut arguments: Arguments<'_>,
        answer: &mut Answer,
    ) -> Outcome<()> {
        let name = arguments.name()?;
        arguments.end()?;
        self.answer_entry(header.node, name, answer)
    }

    fn answer_entry(&self, parent: u64, name: &CStr, answer: &mut Answer) -> Outcome<()> {
        let parent = self.nodes.get(parent)?;
        let (node, facts) = self.look_up(&parent, name)?;
        self.put_entry(answer, (node, &facts))
    }

    /// `FORGET`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed; the guest gets no answer.
    pub fn forget(&self, header: &Header, mut arguments: Arguments<'_>) -> Outcome<()> {
        self.nodes.forget(header.node, arguments.u64()?);
        Ok(())
    }

    /// `BATCH_FORGET`. The message's length bounds their number.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed; the guest gets no answer.
    pub fn forget_many(&self, mut arguments: Arguments<'_>) -> Outcome<()> {
        let count = arguments.u32()?;
        arguments.skip()?;
        for _ in 0..count {
            let node = arguments.u64()?;
            self.nodes.forget(node, arguments.u64()?);
        }
        Ok(())
    }

    /// `READLINK`.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the node is unknown, `EINVAL` if it is no symbolic link; otherwise that of
    /// `readlinkat`.
    pub fn answer_readlink(&self, header: &Header, answer: &mut Answer) -> Outcome<()> {
        let node = self.nodes.get(header.node)?;
        if node.kind != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        let target = rustix::fs::readlinkat(&node.descriptor, c"", Vec::new())?;
        answer.put(target.as_bytes())
    }

    /// `SYMLINK`.
    ///
    /// # Errors
    ///
    /// As in [`Folder::answer_mkdir`]; `ENAMETOOLONG` also for the target.
    pub fn answer_symlink(
        &self,
        header: &Header,
        mut arguments: Arguments<'_>,
        answer: &mut Answer,
    ) -> Outcome<()> {
        let name = arguments.name()?;
        let target = arguments.target()?;
        arguments.end()?;
        self.answer_new(header, name, answer, |parent| {
            rustix::fs::symlinkat(target, parent, name)
        })
    }

    /// `MKNOD`.
    ///
    /// # Errors
    ///
    /// `EPERM` for a device, `EINVAL` for another kind that is not made; otherwise as in
    /// [`Folder::answer_mkdir`].
    pub fn answer_mknod(
        &self,
        header: &Header,
        mut arguments: Arguments<'_>,
        answer: &mut Answer,
    ) -> Outcome<()> {
        let mode = arguments.u32()?;
        // Device number, umask (the guest's kernel has applied it), and padding.
        for _ in 0..3 {
            arguments.skip()?;
        }
        let name = arguments.name()?;
        arguments.end()?;
        let kind = match FileType::from_raw_mode(mode) {
            kind @ (FileType::RegularFile | FileType::Fifo | FileType::Socket) => kind,
            // A device node would open a device of the host.
            FileType::CharacterDevice | FileType::BlockDevice => return Err(Errno::PERM),
            _ => return Err(Errno::INVAL),
        };
        self.answer_new(header, name, answer, |parent| {
            rustix::fs::mknodat(parent, name, kind, permissions(mode), 0)
        })
    }

    /// `MKDIR`.
    ///
    /// # Errors
    ///
    /// `EINVAL` or `ENAMETOOLONG` if the message is malformed, `ESTALE` if the folder is unknown,
    /// `ENFILE` if the guest has too many nodes; otherwise that of the host's call, such as
    /// `EEXIST`.
    pub fn answer_mkdir(
        &self,
        header: &Header,
        mut arguments: Arguments<'_>,
        answer: &mut Answer,
    ) -> Outcome<()> {
        let mode = arguments.u32()?;
        arguments.skip()?;
        let name = arguments.name()?;
        arguments.end()?;
        self.answer_new(header, name, answer, |parent| {
            rustix::fs::mkdirat(parent, name, permissions(mode))
        })
    }

    /// Makes something that belongs to the guest's user, and answers with it.
    fn answer_new(
        &self,
        header: &Header,
        name: &CStr,
        answer: &mut Answer,
        make: impl FnOnce(&std::os::fd::OwnedFd) -> Outcome<()>,
    ) -> Outcome<()> {
        let parent = self.nodes.get(header.node)?;
        let identity = self.sharing.identity;
        identity.create(header.user, header.group, || make(&parent.descriptor))?;
        self.answer_entry(header.node, name, answer)
    }

    /// `UNLINK` and `RMDIR`.
    ///
    /// # Errors
    ///
    /// `EINVAL` or `ENAMETOOLONG` if the message is malformed, `ESTALE` if the folder is unknown;
    /// otherwise that of `unlinkat`.
    pub fn remove(
        &self,
        header: &Header,
        mut arguments: Arguments<'_>,
        flags: AtFlags,
    ) -> Outcome<()> {
        let name = arguments.name()?;
        arguments.end()?;
        let parent = self.nodes.get(header.node)?;
        rustix::fs::unlinkat(&parent.descriptor, name, flags)
    }

    /// `RENAME`.
    ///
    /// # Errors
    ///
    /// `EINVAL` or `ENAMETOOLONG` if the message is malformed, `ESTALE` if a folder is unknown;
    /// otherwise that of `renameat2`.
    pub fn rename(&self, header: &Header, mut arguments: Arguments<'_>) -> Outcome<()> {
        let folder = arguments.u64()?;
        self.rename_to(header, folder, arguments, RenameFlags::empty())
    }

    /// `RENAME2`.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a whiteout or an unknown flag; otherwise as in [`Folder::rename`].
    pub fn rename_with(&self, header: &Header, mut arguments: Arguments<'_>) -> Outcome<()> {
        let folder = arguments.u64()?;
        let flags = RenameFlags::from_bits_retain(arguments.u32()?);
        arguments.skip()?;
        // A whiteout is a device.
        if !(RenameFlags::NOREPLACE | RenameFlags::EXCHANGE).contains(flags) {
            return Err(Errno::INVAL);
        }
        self.rename_to(header, folder, arguments, flags)
    }

    fn rename_to(
        &self,
        header: &Header,
        folder: u64,
        mut arguments: Arguments<'_>,
        flags: RenameFlags,
    ) -> Outcome<()> {
        let (from, to) = (arguments.name()?, arguments.name()?);
        arguments.end()?;
        let (old, new) = (self.nodes.get(header.node)?, self.nodes.get(folder)?);
        rustix::fs::renameat_with(&old.descriptor, from, &new.descriptor, to, flags)
    }

    /// `LINK`.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the existing node is unknown; otherwise as in [`Folder::answer_mkdir`].
    pub fn answer_link(
        &self,
        header: &Header,
        mut arguments: Arguments<'_>,
        answer: &mut Answer,
    ) -> Outcome<()> {
        let existing = self.nodes.get(arguments.u64()?)?;
        let name = arguments.name()?;
        arguments.end()?;
        let parent = self.nodes.get(header.node)?;
        let (descriptors, link) = self.link_to(&existing.descriptor);
        let flags = AtFlags::SYMLINK_FOLLOW;
        rustix::fs::linkat(descriptors, link, &parent.descriptor, name, flags)?;
        self.answer_entry(header.node, name, answer)
    }
}
