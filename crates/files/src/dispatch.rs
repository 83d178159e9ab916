//! Dispatches a message to the function that answers it.

use crate::folder::Folder;
use crate::protocol::{Answer, Arguments, HEADER, Header, Outcome, opcode};
use jiffy_wire::files::{OWN, RESTORE, SAVE};
use rustix::fs::AtFlags;
use rustix::io::Errno;
use std::sync::atomic::Ordering;

/// Requests that change something.
const CHANGES: &[u32] = &[
    opcode::SETATTR,
    opcode::SYMLINK,
    opcode::MKNOD,
    opcode::MKDIR,
    opcode::UNLINK,
    opcode::RMDIR,
    opcode::RENAME,
    opcode::RENAME2,
    opcode::LINK,
    opcode::WRITE,
    opcode::SETXATTR,
    opcode::REMOVEXATTR,
    opcode::CREATE,
    opcode::TMPFILE,
    opcode::FALLOCATE,
];

impl Folder {
    /// Serves a message and counts it. Returns the answer, which is in `answer`; `None` if the request
    /// has none.
    /// `length` is that of the message as it was sent, of which `message` may be the beginning.
    pub fn serve<'a>(
        &self,
        message: &[u8],
        length: usize,
        answer: &'a mut Answer,
    ) -> Option<&'a [u8]> {
        let answer = self.answer(message, length, answer);
        self.served.fetch_add(1, Ordering::Release);
        answer
    }

    fn answer<'a>(
        &self,
        message: &[u8],
        length: usize,
        answer: &'a mut Answer,
    ) -> Option<&'a [u8]> {
        let header = Header::of(message)?;
        answer.clear();
        let whole = length == message.len() && length == header.length as usize;
        let outcome = match message.get(HEADER..) {
            Some(arguments) if whole => self.execute(&header, Arguments(arguments), answer),
            _ => Err(Errno::INVAL),
        };
        if let Err(error) = outcome {
            tracing::trace!(opcode = header.opcode, node = header.node, %error, "refused");
        }
        header
            .is_answered()
            .then(|| answer.finish(header.unique, outcome))
    }

    fn execute(
        &self,
        header: &Header,
        arguments: Arguments<'_>,
        answer: &mut Answer,
    ) -> Outcome<()> {
        if self.sharing.read_only && CHANGES.contains(&header.opcode) {
            return Err(Errno::ROFS);
        }
        match header.opcode {
            opcode::LOOKUP => self.answer_lookup(header, arguments, answer),
            opcode::FORGET => self.forget(header, arguments),
            opcode::BATCH_FORGET => self.forget_many(arguments),
            opcode::GETATTR => self.answer_getattr(header, answer),
            opcode::SETATTR => self.answer_setattr(header, arguments, answer),
            opcode::READLINK => self.answer_readlink(header, answer),
            opcode::SYMLINK => self.answer_symlink(header, arguments, answer),
            opcode::MKNOD => self.answer_mknod(header, arguments, answer),
            opcode::MKDIR => self.answer_mkdir(header, arguments, answer),
            opcode::UNLINK => self.remove(header, arguments, AtFlags::empty()),
            opcode::RMDIR => self.remove(header, arguments, AtFlags::REMOVEDIR),
            opcode::RENAME => self.rename(header, arguments),
            opcode::RENAME2 => self.rename_with(header, arguments),
            opcode::LINK => self.answer_link(header, arguments, answer),
            opcode::OPEN => self.answer_open(header, arguments, answer),
            opcode::CREATE => self.answer_create(header, arguments, answer),
            opcode::TMPFILE => self.answer_tmpfile(header, arguments, answer),
            opcode::READ => self.answer_read(arguments, answer),
            opcode::WRITE => self.answer_write(arguments, answer),
            opcode::LSEEK => self.answer_lseek(arguments, answer),
            opcode::FALLOCATE => self.allocate(arguments),
            opcode::FLUSH => self.flush(arguments),
            opcode::FSYNC => self.sync(arguments, false),
            opcode::FSYNCDIR => self.sync(arguments, true),
            opcode::RELEASE | opcode::RELEASEDIR => self.release(arguments),
            opcode::OPENDIR => self.answer_opendir(header, answer),
            opcode::READDIR => self.answer_readdir(header, arguments, answer, false),
            opcode::READDIRPLUS => self.answer_readdir(header, arguments, answer, true),
            opcode::STATFS => self.answer_statfs(header, answer),
            opcode::ACCESS => self.access(header, arguments),
            opcode::GETXATTR => self.answer_getxattr(header, arguments, answer),
            opcode::SETXATTR => self.set_attribute(header, arguments),
            opcode::LISTXATTR => self.answer_listxattr(header, arguments, answer),
            opcode::REMOVEXATTR => self.remove_attribute(header, arguments),
            opcode::INIT => self.answer_init(arguments, answer),
            // A request that was begun is not interrupted.
            opcode::INTERRUPT => Ok(()),
            opcode::DESTROY => {
                self.clear();
                Ok(())
            }
            SAVE if header.unique == OWN => self.answer_save(arguments, answer),
            RESTORE if header.unique == OWN => self.restore_part(arguments),
            // Locks, which the guest's kernel then handles itself, and ioctls.
            _ => Err(Errno::NOSYS),
        }
    }
}
