//! Requests that list folders.

use crate::folder::Folder;
use crate::handles::Handle;
use crate::nodes::Node;
use crate::protocol::{Answer, Arguments, Header, Outcome};
use jiffy_sys::mutex::lock;
use jiffy_wire::files::DATA_MAX;
use rustix::fs::{RawDir, RawDirEntry, SeekFrom};
use rustix::io::Errno;
use std::mem::MaybeUninit;

/// Bytes of `fuse_dirent` before the name.
const ENTRY: usize = 24;
/// Bytes of `fuse_entry_out`.
const ENTRY_OUT: usize = 128;
/// The inode number of something whose number does not matter (`FUSE_UNKNOWN_INO`).
const UNKNOWN: u64 = 0xffff_ffff;
/// Most bytes of entries that are read from the host at once.
const BATCH: usize = 32 * 1024;
/// Bytes of the host's longest entry (`linux_dirent64`): 19 before a name of 255 and its end.
const LONGEST: usize = (19usize + 255 + 1).next_multiple_of(8);

impl Folder {
    /// `READDIR`, and `READDIRPLUS`, whose entries are looked up as well.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the message is malformed or asks for more than [`DATA_MAX`] bytes, `EBADF` or
    /// `ESTALE` as in [`Handles::folder`](crate::handles::Handles::folder), `ESTALE` if the node is
    /// unknown; otherwise that of the host's call, if no entry was read before.
    pub fn answer_readdir(
        &self,
        header: &Header,
        mut arguments: Arguments<'_>,
        answer: &mut Answer,
        look_up: bool,
    ) -> Outcome<()> {
        let handle = self.handles.folder(arguments.u64()?)?;
        let offset = arguments.u64()?;
        let size = arguments.u32()? as usize;
        if size > DATA_MAX || i64::try_from(offset).is_err() {
            return Err(Errno::INVAL);
        }
        let node = self.nodes.get(header.node)?;
        let _only_user = lock(&handle.position);
        rustix::fs::seek(&handle.descriptor, SeekFrom::Start(offset))?;
        let parent = look_up.then_some(&*node);
        self.list(&handle, parent, size, answer)
    }

    fn list(
        &self,
        handle: &Handle,
        parent: Option<&Node>,
        size: usize,
        answer: &mut Answer,
    ) -> Outcome<()> {
        // Entries that do not fit into the answer are read again for the next request. Of those with
        // short names, an answer with attributes holds a quarter of its bytes at most.
        let wanted = if parent.is_some() { size / 4 } else { size };
        let mut buffer = vec![MaybeUninit::uninit(); wanted.clamp(LONGEST, BATCH)];
        let mut entries = RawDir::new(&handle.descriptor, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Ok(entry) => entry,
                // What is in the answer already counts as looked up.
                Err(_) if answer.payload() > 0 => break,
                Err(error) => return Err(error),
            };
            let extra = if parent.is_some() { ENTRY_OUT } else { 0 };
            let length = (ENTRY + entry.file_name().count_bytes()).next_multiple_of(8) + extra;
            if answer.payload() + length > size {
                break;
            }
            if let Some(parent) = parent {
                self.put_looked_up(answer, parent, &entry)?;
            }
            put_entry(answer, &entry)?;
        }
        Ok(())
    }

    /// Appends `fuse_entry_out`: zeros if the guest must look the name up itself.
    fn put_looked_up(
        &self,
        answer: &mut Answer,
        parent: &Node,
        entry: &RawDirEntry<'_>,
    ) -> Outcome<()> {
        let name = entry.file_name();
        if !is_dots(name.to_bytes())
            && !self.budget.is_short()
            && let Ok((node, facts)) = self.look_up(parent, name)
        {
            return self.put_entry(answer, (node, &facts));
        }
        answer.put(&[0; ENTRY_OUT])
    }
}

fn is_dots(name: &[u8]) -> bool {
    [&b"."[..], b".."].contains(&name)
}

/// Appends `fuse_dirent`.
fn put_entry(answer: &mut Answer, entry: &RawDirEntry<'_>) -> Outcome<()> {
    let name = entry.file_name().to_bytes();
    answer.put_u64(match is_dots(name) {
        // The parent of the root is outside of the folder.
        true => UNKNOWN,
        false => entry.ino(),
    })?;
    answer.put_u64(entry.next_entry_cookie())?;
    answer.put_u32(name.len() as u32)?;
    answer.put_u32(entry.file_type().as_raw_mode() >> 12)?;
    answer.put(name)?;
    let padding = name.len().next_multiple_of(8) - name.len();
    answer.put(&[0; 8][..padding])
}
