//! Copies out of the guest.
//!
//! Runs in its own process and may block. Links are copied as links; devices, sockets and pipes are
//! left out.

use crate::files;
use crate::program::prepare::reason;
use alloc::boxed::Box;
use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};
use core::mem::MaybeUninit;
use jiffy_wire::agent::{CopyEntry, CopyFrame, CopyKind};
use jiffy_wire::frame::{self, Decoder, MAX_DATA};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{self, AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use serde::{Serialize, de::DeserializeOwned};

/// A blocking connection.
pub struct Pipe {
    socket: OwnedFd,
    decoder: Decoder,
    space: Box<[MaybeUninit<u8>]>,
}

impl Pipe {
    /// A connection of which the bytes `undecoded` were read already.
    pub fn new(socket: OwnedFd, undecoded: &[u8]) -> Pipe {
        let mut decoder = Decoder::new();
        decoder.push(undecoded);
        Pipe {
            socket,
            decoder,
            space: Box::new_uninit_slice(MAX_DATA),
        }
    }

    /// The next message; `None` at the end of the stream.
    ///
    /// # Errors
    ///
    /// If what was received is no message of this type, or the connection fails.
    #[allow(clippy::should_implement_trait)] // the type is chosen at each call
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, String> {
        loop {
            if let Some(message) = self.decoder.next().map_err(|error| error.to_string())? {
                return Ok(Some(message));
            }
            match rustix::net::recv(&self.socket, &mut self.space[..], RecvFlags::empty()) {
                Ok(((bytes, _), _)) if !bytes.is_empty() => self.decoder.push(bytes),
                Ok(_) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(format!("the connection failed: {}", reason(error))),
            }
        }
    }

    /// Sends a message completely.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE` if the message is too large for a frame; otherwise that of `send`.
    pub fn send<T: Serialize>(&mut self, message: &T) -> Result<(), Errno> {
        let bytes = frame::to_vec(message).map_err(|_| Errno::MSGSIZE)?;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            match rustix::net::send(&self.socket, rest, SendFlags::NOSIGNAL) {
                Ok(count) => rest = &rest[count..],
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Deepest tree that is sent; each level has one open descriptor.
const DEEPEST: usize = 256;
/// Most bytes that are read of a file in /proc or /sys. Such files report a size of 0 or one page,
/// whatever their content.
const KERNEL_FILE: usize = 1024 * 1024;
const PAGE: u64 = 4096;

/// Why a copy stopped.
enum Stop {
    /// An error that the peer is told.
    Failed(String),
    /// The peer is gone.
    Gone,
}

impl From<Errno> for Stop {
    fn from(_: Errno) -> Stop {
        Stop::Gone
    }
}

/// Sends a file or tree. Returns whether it was complete.
pub fn serve(pipe: &mut Pipe, path: &str) -> bool {
    let result = send_root(pipe, path).and_then(|()| Ok(pipe.send(&CopyFrame::End)?));
    if let Err(Stop::Failed(message)) = &result {
        let _ = pipe.send(&CopyFrame::Failed {
            message: message.clone(),
        });
    }
    result.is_ok()
}

fn send_root(pipe: &mut Pipe, path: &str) -> Result<(), Stop> {
    if !path.starts_with('/') || path.contains('\0') {
        return Err(Stop::Failed(format!("{path:?} is not an absolute path")));
    }
    send_entry(pipe, CWD, path, path, "", 0)
}

/// Sends the entry `name` of folder `at`. `whole` is its path for messages, `path` its path below
/// the root of the copy.
fn send_entry(
    pipe: &mut Pipe,
    at: BorrowedFd<'_>,
    name: &str,
    whole: &str,
    path: &str,
    depth: usize,
) -> Result<(), Stop> {
    let failed = |error: Errno| Stop::Failed(format!("{whole}: {}", reason(error)));
    let status = fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
    match FileType::from_raw_mode(status.st_mode) {
        FileType::RegularFile => {
            // NONBLOCK: the file may have become a pipe meanwhile.
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = fs::openat(at, name, flags, Mode::empty()).map_err(failed)?;
            send_file(pipe, &file, whole, path)
        }
        FileType::Directory => {
            if depth >= DEEPEST {
                return Err(Stop::Failed(format!(
                    "{whole} is more than {DEEPEST} folders deep"
                )));
            }
            // The root's name may end with a slash and then be a link.
            let mut flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            flags.set(OFlags::NOFOLLOW, depth > 0);
            let folder = fs::openat(at, name, flags, Mode::empty()).map_err(failed)?;
            pipe.send(&CopyFrame::Entry(entry(&status, path, CopyKind::Folder)))?;
            send_children(pipe, &folder, whole, path, depth)
        }
        FileType::Symlink => {
            let target = fs::readlinkat(at, name, Vec::new()).map_err(failed)?;
            let target = target
                .into_string()
                .map_err(|_| Stop::Failed(format!("{whole}: the link's target is not UTF-8")))?;
            Ok(pipe.send(&CopyFrame::Entry(entry(
                &status,
                path,
                CopyKind::Symlink(target),
            )))?)
        }
        _ if path.is_empty() => Err(Stop::Failed(format!(
            "{whole} is neither a file nor a folder nor a link"
        ))),
        _ => Ok(()),
    }
}

fn send_children(
    pipe: &mut Pipe,
    folder: &OwnedFd,
    whole: &str,
    path: &str,
    depth: usize,
) -> Result<(), Stop> {
    let failed = |error: Errno| Stop::Failed(format!("{whole}: {}", reason(error)));
    for child in Dir::read_from(folder).map_err(failed)? {
        let child = child.map_err(failed)?;
        let name = match child.file_name().to_str() {
            Ok("." | "..") => continue,
            Ok(name) => name,
            Err(_) => {
                let name = child.file_name().to_string_lossy();
                return Err(Stop::Failed(format!(
                    "{whole}/{name}: the name is not UTF-8"
                )));
            }
        };
        let below = if path.is_empty() {
            name.to_string()
        } else {
            format!("{path}/{name}")
        };
        let whole = format!("{}/{name}", whole.trim_end_matches('/'));
        match send_entry(pipe, folder.as_fd(), name, &whole, &below, depth + 1) {
            // Deleted after it was listed: treat it as if it never existed.
            Err(Stop::Failed(_)) if !still_there(folder.as_fd(), name) => {}
            other => other?,
        }
    }
    Ok(())
}

fn still_there(at: BorrowedFd<'_>, name: &str) -> bool {
    fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

fn send_file(pipe: &mut Pipe, file: &OwnedFd, whole: &str, path: &str) -> Result<(), Stop> {
    let failed = |error: Errno| Stop::Failed(format!("{whole}: {}", reason(error)));
    let status = fs::fstat(file).map_err(failed)?;
    if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
        return Err(Stop::Failed(format!("{whole} changed while it was copied")));
    }
    let size = status.st_size as u64;
    if size <= PAGE {
        let content = match files::read_all(file, KERNEL_FILE) {
            Ok(content) => content,
            Err(Errno::FBIG) => {
                return Err(Stop::Failed(format!(
                    "{whole} reports {size} bytes but has more than {KERNEL_FILE}: read it with a program in the guest"
                )));
            }
            // Some files of the kernel can't be read; they are skipped.
            Err(_) if size == 0 && !path.is_empty() => Vec::new(),
            Err(error) => return Err(failed(error)),
        };
        let kind = CopyKind::File(content.len() as u64);
        pipe.send(&CopyFrame::Entry(entry(&status, path, kind)))?;
        for piece in content.chunks(MAX_DATA) {
            pipe.send(&CopyFrame::Data(piece.to_vec()))?;
        }
        return Ok(());
    }
    pipe.send(&CopyFrame::Entry(entry(
        &status,
        path,
        CopyKind::File(size),
    )))?;
    let mut left = size;
    while left > 0 {
        let limit = left.min(MAX_DATA as u64) as usize;
        let mut data = Vec::with_capacity(limit);
        match rustix::io::read(file, rustix::buffer::spare_capacity(&mut data)) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(failed(error)),
        }
        data.truncate(limit);
        if data.is_empty() {
            return Err(Stop::Failed(format!(
                "{whole} became shorter while it was copied"
            )));
        }
        left -= data.len() as u64;
        pipe.send(&CopyFrame::Data(data))?;
    }
    Ok(())
}

fn entry(status: &Stat, path: &str, kind: CopyKind) -> CopyEntry {
    CopyEntry {
        path: path.to_string(),
        kind,
        mode: status.st_mode & 0o7777,
        uid: status.st_uid,
        gid: status.st_gid,
        mtime: status.st_mtime,
    }
}
