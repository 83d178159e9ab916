//! A process that is started before its task is known (a spare VMM).
//!
//! The parent keeps one end of a socket pair ([`pair`]) and passes the other to the process. One
//! message with descriptors gives the task; if the connection closes instead, the process ends.

#![allow(unsafe_code)] // dup2, madvise, and this process's own arguments.

use crate::fds::{self, recv_with_fds};
use crate::handed;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU8, Ordering};

/// Longest message, bytes.
pub const MAX_MESSAGE: usize = 8 << 10;

/// A socket pair that keeps message boundaries (SOCK_SEQPACKET), closed on exec.
///
/// # Errors
///
/// If socketpair(2) fails.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Waits for the message; `None` if the other end was closed. Returns its bytes and descriptors.
///
/// # Errors
///
/// As for [`recv_with_fds`], except `ConnectionReset`, which counts as closed.
pub fn wait(socket: BorrowedFd<'_>) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut fds = Vec::with_capacity(fds::MOST);
    let length = match recv_with_fds(socket, &mut bytes, &mut fds) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => 0,
        other => other?,
    };
    bytes.truncate(length);
    Ok((length > 0).then_some((bytes, fds)))
}

/// Whether the message has come, or the other end was closed. Does not wait.
///
/// # Errors
///
/// If poll(2) fails.
pub fn has_message(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let mut polled = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
    Ok(poll(&mut polled, Some(&Timespec::default()))? > 0)
}

/// Redirects standard output and standard error to this file.
///
/// # Errors
///
/// If dup2(2) fails. Standard output may be redirected already then.
pub fn write_to(output: BorrowedFd<'_>) -> io::Result<()> {
    for stream in [libc::STDOUT_FILENO, libc::STDERR_FILENO] {
        // SAFETY: both are open; dup2 replaces a standard stream atomically for all its writers.
        if unsafe { libc::dup2(output.as_raw_fd(), stream) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// An argument in this process's memory, which `/proc/PID/cmdline` shows.
#[derive(Debug)]
pub struct Argument(&'static [AtomicU8]);

impl Argument {
    /// Finds the first argument with this text.
    ///
    /// # Errors
    ///
    /// `NotFound` if there is none. `Unsupported` if `/proc/self/stat` does not tell where the
    /// arguments are. Otherwise if that file can't be read.
    pub fn find(text: &OsStr) -> io::Result<Argument> {
        let text = text.as_bytes();
        let area = arguments()?;
        let begins = |at: usize| at == 0 || area[at - 1].load(Ordering::Relaxed) == 0;
        let matches = |at: usize| {
            let here = area[at..].iter().map(|byte| byte.load(Ordering::Relaxed));
            here.take(text.len()).eq(text.iter().copied())
        };
        let last = area.len().checked_sub(text.len() + 1);
        (0..=last.ok_or(io::ErrorKind::NotFound)?)
            .find(|at| {
                let end = area[at + text.len()].load(Ordering::Relaxed);
                begins(*at) && end == 0 && matches(*at)
            })
            .map(|at| Argument(&area[at..at + text.len()]))
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Replaces the argument by a text of the same length.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if the text has another length.
    pub fn replace(&self, text: &OsStr) -> io::Result<()> {
        let text = text.as_bytes();
        if text.len() != self.0.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (to, byte) in self.0.iter().zip(text) {
            to.store(*byte, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// The memory of all arguments; each ends with a zero.
fn arguments() -> io::Result<&'static [AtomicU8]> {
    let stat = io::read_to_string(handed::open_proc("stat")?)?;
    // proc_pid_stat(5): the second field is the name in brackets; arg_start and arg_end are fields
    // 48 and 49.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let mut ends = fields.split(' ').skip(48 - 3).map(str::parse::<usize>);
    match (ends.next(), ends.next()) {
        (Some(Ok(start)), Some(Ok(end))) if start > 0 && start < end => {
            // SAFETY: the kernel put the arguments on the first stack, which is writable and exists
            // as long as the process. Nothing else is in this memory, and the program has read its
            // arguments before this is called.
            Ok(unsafe { std::slice::from_raw_parts(start as *const AtomicU8, end - start) })
        }
        _ => Err(io::Error::from(io::ErrorKind::Unsupported)),
    }
}

/// Populates this process's mappings of its program (MADV_POPULATE_READ, and MADV_POPULATE_WRITE
/// for writable ones), so that later code takes no page faults there. Affects only time; has no
/// effect before Linux 5.14.
///
/// # Errors
///
/// If `/proc/self/maps` can't be read. An madvise(2) that fails is no error.
pub fn touch_program() -> io::Result<()> {
    let Ok(program) = handed::program() else {
        return Ok(());
    };
    let mut is_program = false;
    for line in io::read_to_string(handed::open_proc("maps")?)?.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (Some(range), Some(may)) = (fields.next(), fields.next()) else {
            continue;
        };
        let file = fields.nth(3).unwrap_or_default();
        // The .bss, an anonymous mapping, follows the program's mappings.
        is_program = file == program.as_os_str() || (is_program && file.is_empty());
        let ends = range.split_once('-').map(|(start, end)| {
            let number = |text| usize::from_str_radix(text, 16);
            (number(start), number(end))
        });
        let Some((Ok(start), Ok(end))) = ends.filter(|_| is_program || file == "[heap]") else {
            continue;
        };
        let advice = match may.as_bytes() {
            [_, b'w', ..] => libc::MADV_POPULATE_WRITE,
            [b'r', ..] => libc::MADV_POPULATE_READ,
            _ => continue,
        };
        // SAFETY: populating changes no contents.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, advice) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fds::send_with_fds;
    use std::fs::{self, File};
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsFd;

    #[test]
    fn a_message_arrives_whole_with_its_descriptors_or_not_at_all() {
        let (ours, theirs) = pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"passed").unwrap();
        file.rewind().unwrap();
        let text = vec![b'x'; 5000];
        send_with_fds(&ours, &text, &[file.as_fd()]).unwrap();
        drop(ours);
        let (bytes, mut fds) = wait(theirs.as_fd()).unwrap().unwrap();
        assert_eq!((bytes, fds.len()), (text, 1));
        let mut passed = String::new();
        let mut file = File::from(fds.remove(0));
        file.read_to_string(&mut passed).unwrap();
        assert_eq!(passed, "passed");
        assert!(wait(theirs.as_fd()).unwrap().is_none());
    }

    #[test]
    fn a_replaced_argument_is_visible_in_proc_cmdline() {
        let line = || fs::read("/proc/self/cmdline").unwrap();
        let before = line();
        let first = before.split(|byte| *byte == 0).next().unwrap().to_vec();
        let argument = Argument::find(OsStr::from_bytes(&first)).unwrap();
        let other = vec![b'y'; first.len()];
        argument.replace(OsStr::from_bytes(&other)).unwrap();
        let after = line();
        argument.replace(OsStr::from_bytes(&first)).unwrap();
        assert_eq!(after.len(), before.len());
        assert_eq!(after[..first.len()], other);
        assert_eq!(after[first.len()..], before[first.len()..]);
        assert_eq!(line(), before);

        let longer = [&first[..], b"y"].concat();
        let error = argument.replace(OsStr::from_bytes(&longer)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let inside = OsStr::from_bytes(&first[1..]);
        assert!(Argument::find(inside).is_err(), "a part is no argument");
    }

    #[test]
    fn touching_the_programs_pages_succeeds() {
        touch_program().unwrap();
    }
}
