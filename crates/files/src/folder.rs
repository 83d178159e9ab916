//! The shared folder: what all requests use.

use crate::budget::Budget;
use crate::handles::Handles;
use crate::identity::Identity;
use crate::nodes::{Node, Nodes, ROOT};
use crate::protocol::{Answer, Outcome};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Statx, StatxFlags};
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

/// Seconds for which the guest may cache names and attributes. It sees changes of the host after
/// that time.
const VALID: u64 = 1;

/// How a folder is shared.
#[derive(Debug, Clone, Copy)]
pub struct Sharing {
    /// Whether all changes are refused.
    pub read_only: bool,
    /// Whose files they are.
    pub identity: Identity,
    /// Most descriptors that the guest may make the server hold.
    pub descriptors: usize,
}

/// A folder that is shared with one guest.
#[derive(Debug)]
pub struct Folder {
    /// How it is shared.
    pub sharing: Sharing,
    /// What the guest knows.
    pub nodes: Nodes,
    /// What the guest has open.
    pub handles: Handles,
    /// How many descriptors are left.
    pub budget: Arc<Budget>,
    /// How many messages were executed.
    pub served: AtomicU64,
    /// Bytes of a session that is being sent or received.
    pub session: Mutex<Vec<u8>>,
    own_descriptors: OwnedFd,
}

impl Folder {
    /// Shares a folder. `own_descriptors` is `/proc/self/fd`, by which the server opens what it has
    /// an `O_PATH` descriptor of.
    pub fn new(folder: OwnedFd, own_descriptors: OwnedFd, sharing: Sharing) -> Folder {
        let budget = Budget::new(sharing.descriptors);
        Folder {
            sharing,
            nodes: Nodes::new(folder, Arc::clone(&budget)),
            handles: Handles::new(Arc::clone(&budget)),
            budget,
            served: AtomicU64::new(0),
            session: Mutex::default(),
            own_descriptors,
        }
    }

    /// Forgets the guest's nodes and handles.
    pub fn clear(&self) {
        self.handles.clear();
        self.nodes.clear();
    }

    /// The folder of descriptors, and the name of this one in it: a link to the file itself, which
    /// no rename can change.
    pub fn link_to(&self, descriptor: impl AsFd) -> (BorrowedFd<'_>, CString) {
        let number = descriptor.as_fd().as_raw_fd().to_string();
        // Digits have no zero byte.
        (
            self.own_descriptors.as_fd(),
            CString::new(number).unwrap_or_default(),
        )
    }

    /// Opens the file of an `O_PATH` descriptor.
    ///
    /// # Errors
    ///
    /// Those of `openat`, such as `EACCES`.
    pub fn reopen(&self, descriptor: impl AsFd, flags: OFlags) -> Outcome<OwnedFd> {
        let (folder, name) = self.link_to(descriptor);
        let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
        rustix::fs::openat(folder, name, flags, Mode::empty())
    }

    /// Opens a name in a folder with `O_PATH`. A symbolic link is not followed.
    ///
    /// # Errors
    ///
    /// Those of `openat2`, such as `ENOENT`.
    pub fn find(&self, parent: &Node, name: &CStr) -> Outcome<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // No EAGAIN after a concurrent rename: the kernel returns it only for `..`.
        let inside = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(&parent.descriptor, name, flags, Mode::empty(), inside)
    }

    /// The path of a descriptor's file, as the host names it now. That of a removed file is not its
    /// own, so the caller compares the files.
    ///
    /// # Errors
    ///
    /// Those of `readlinkat`.
    pub fn path_of(&self, descriptor: impl AsFd) -> Outcome<CString> {
        let (folder, name) = self.link_to(descriptor);
        rustix::fs::readlinkat(folder, name, Vec::new())
    }

    /// Opens a path below the folder with `O_PATH`, the folder itself if it is empty. No symbolic
    /// link is followed. The path has no `..`.
    ///
    /// # Errors
    ///
    /// Those of `openat2`; `ELOOP` if a part of the path is a symbolic link.
    pub fn find_path(&self, path: &CStr) -> Outcome<OwnedFd> {
        let root = self.nodes.get(ROOT)?;
        if path.is_empty() {
            return self.reopen(&root.descriptor, OFlags::PATH);
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let inside =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(&root.descriptor, path, flags, Mode::empty(), inside)
    }

    /// Looks a name up, and adds a node for the guest. Returns the node's number and attributes.
    ///
    /// # Errors
    ///
    /// Those of [`Folder::find`] and [`Folder::remember`].
    pub fn look_up(&self, parent: &Node, name: &CStr) -> Outcome<(u64, Statx)> {
        self.remember(self.find(parent, name)?)
    }

    /// Adds a node for the file of an `O_PATH` descriptor.
    ///
    /// # Errors
    ///
    /// `ENFILE` if the guest has too many; otherwise that of `statx`.
    pub fn remember(&self, descriptor: OwnedFd) -> Outcome<(u64, Statx)> {
        let facts = facts(&descriptor)?;
        Ok((self.nodes.remember(descriptor, &facts)?, facts))
    }

    /// Appends `fuse_entry_out` with this node.
    ///
    /// # Errors
    ///
    /// `EIO` if the message becomes too long.
    pub fn put_entry(&self, answer: &mut Answer, (node, facts): (u64, &Statx)) -> Outcome<()> {
        answer.put_u64(node)?;
        // Generation: numbers are not used again.
        answer.put_u64(0)?;
        answer.put_u64(VALID)?;
        answer.put_u64(VALID)?;
        answer.put_u64(0)?;
        self.put_attributes(answer, facts)
    }

    /// Appends `fuse_attr_out`.
    ///
    /// # Errors
    ///
    /// `EIO` if the message becomes too long.
    pub fn put_attributes_alone(&self, answer: &mut Answer, facts: &Statx) -> Outcome<()> {
        answer.put_u64(VALID)?;
        answer.put_u64(0)?;
        self.put_attributes(answer, facts)
    }

    /// Appends `fuse_attr`.
    fn put_attributes(&self, answer: &mut Answer, facts: &Statx) -> Outcome<()> {
        let times = [facts.stx_atime, facts.stx_mtime, facts.stx_ctime];
        for number in [facts.stx_ino, facts.stx_size, facts.stx_blocks] {
            answer.put_u64(number)?;
        }
        for time in times {
            answer.put_u64(time.tv_sec.cast_unsigned())?;
        }
        for time in times {
            answer.put_u32(time.tv_nsec)?;
        }
        let (user, group) = self.sharing.identity.shown(facts.stx_uid, facts.stx_gid);
        for number in [
            facts.stx_mode.into(),
            facts.stx_nlink,
            user,
            group,
            device(facts.stx_rdev_major, facts.stx_rdev_minor),
            facts.stx_blksize,
            0,
        ] {
            answer.put_u32(number)?;
        }
        Ok(())
    }
}

/// A device's number as FUSE has it (`new_encode_dev` of the kernel).
fn device(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major & 0xfff) << 8 | (minor & 0xf_ff00) << 12
}

/// Attributes of a descriptor's file.
///
/// # Errors
///
/// Those of `statx`.
pub fn facts(descriptor: impl AsFd) -> Outcome<Statx> {
    facts_with(descriptor, StatxFlags::empty())
}

/// As [`facts`], with more of them.
///
/// # Errors
///
/// Those of `statx`.
pub fn facts_with(descriptor: impl AsFd, more: StatxFlags) -> Outcome<Statx> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID | more;
    rustix::fs::statx(descriptor, c"", AtFlags::EMPTY_PATH, wanted)
}
