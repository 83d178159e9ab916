//! Requests about extended attributes. The guest has those of users (`user.*`); all others mean
//! something to the host's kernel.

use crate::folder::Folder;
use crate::nodes::Node;
use crate::protocol::{Answer, Arguments, Header, Outcome};
use rustix::fs::{FileType, OFlags, XattrFlags};
use rustix::io::Errno;
use std::ffi::CStr;
use std::os::fd::OwnedFd;

/// How the names of users' attributes begin.
const USERS: &[u8] = b"user.";
/// Most bytes of a value, and of a list (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const MOST: usize = 64 * 1024;

/// An attribute's name. `EOPNOTSUPP` if it is not a user's.
fn name_of<'a>(arguments: &mut Arguments<'a>) -> Outcome<&'a CStr> {
    let name = arguments.attribute_name()?;
    match name.to_bytes().starts_with(USERS) {
        true => Ok(name),
        false => Err(Errno::OPNOTSUPP),
    }
}

/// Whether a user can give it attributes.
fn can_have(node: &Node) -> bool {
    matches!(node.kind, FileType::RegularFile | FileType::Directory)
}

impl Folder {
    /// `O_PATH` descriptors have no attributes.
    fn open_for_attributes(&self, node: &Node) -> Outcome<OwnedFd> {
        self.reopen(&node.descriptor, OFlags::RDONLY | OFlags::NONBLOCK)
    }

    /// The file of a request; `refusal` if a user can't give it attributes.
    fn attributed(&self, header: &Header, refusal: Errno) -> Outcome<OwnedFd> {
        let node = self.nodes.get(header.node)?;
        match can_have(&node) {
            true => self.open_for_attributes(&node),
            false => Err(refusal),
        }
    }

    /// `GETXATTR`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed, `EOPNOTSUPP` if the name does not begin with `user.`,
    /// `ESTALE` if the node is unknown, `ENODATA` if it is neither file nor folder; otherwise that
    /// of `fgetxattr`.
    pub fn answer_getxattr(
        &self,
        header: &Header,
        mut arguments: Arguments<'_>,
        answer: &mut Answer,
    ) -> Outcome<()> {
        let size = arguments.u32()? as usize;
        arguments.skip()?;
        let name = name_of(&mut arguments)?;
        arguments.end()?;
        let file = self.attributed(header, Errno::NODATA)?;
        if size == 0 {
            let length = rustix::fs::fgetxattr_query(&file, name)?;
            return put_size(answer, length);
        }
        answer
            .fill(size.min(MOST), |place| {
                rustix::fs::fgetxattr(&file, name, place)
            })
            .map(drop)
    }

    /// `SETXATTR`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed, `EOPNOTSUPP` if the name does not begin with `user.`,
    /// `ESTALE` if the node is unknown, `EPERM` if it is neither file nor folder; otherwise that of
    /// `fsetxattr`.
    pub fn set_attribute(&self, header: &Header, mut arguments: Arguments<'_>) -> Outcome<()> {
        let size = arguments.u32()? as usize;
        let flags = XattrFlags::from_bits(arguments.u32()?).ok_or(Errno::INVAL)?;
        let name = name_of(&mut arguments)?;
        let value = arguments.rest();
        if value.len() != size {
            return Err(Errno::INVAL);
        }
        rustix::fs::fsetxattr(self.attributed(header, Errno::PERM)?, name, value, flags)
    }

    /// `REMOVEXATTR`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed, `EOPNOTSUPP` if the name does not begin with `user.`,
    /// `ESTALE` if the node is unknown, `EPERM` if it is neither file nor folder; otherwise that of
    /// `fremovexattr`.
    pub fn remove_attribute(&self, header: &Header, mut arguments: Arguments<'_>) -> Outcome<()> {
        let name = name_of(&mut arguments)?;
        arguments.end()?;
        rustix::fs::fremovexattr(self.attributed(header, Errno::PERM)?, name)
    }

    /// `LISTXATTR`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed, `ESTALE` if the node is unknown, `ERANGE` if the list
    /// is longer than the guest asked for; otherwise that of `flistxattr`.
    pub fn answer_listxattr(
        &self,
        header: &Header,
        mut arguments: Arguments<'_>,
        answer: &mut Answer,
    ) -> Outcome<()> {
        let size = arguments.u32()? as usize;
        let node = self.nodes.get(header.node)?;
        let mut names = vec![0; MOST];
        let length = match can_have(&node) {
            true => rustix::fs::flistxattr(self.open_for_attributes(&node)?, &mut names)?,
            false => 0,
        };
        let all = names.get(..length).ok_or(Errno::IO)?;
        let users: Vec<&[u8]> = all
            .split_inclusive(|byte| *byte == 0)
            .filter(|name| name.starts_with(USERS))
            .collect();
        let list = users.concat();
        match size {
            0 => put_size(answer, list.len()),
            _ if list.len() > size => Err(Errno::RANGE),
            _ => answer.put(&list),
        }
    }
}

/// Appends `fuse_getxattr_out`.
fn put_size(answer: &mut Answer, size: usize) -> Outcome<()> {
    answer.put_u32(size as u32)?;
    answer.put_u32(0)
}
