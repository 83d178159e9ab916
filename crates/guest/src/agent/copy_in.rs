//! Copies into the guest.
//!
//! Runs in a process of its own and may block. Symlinks created by the copy are not followed: every
//! path is opened from the copy's root, one folder at a time. A file is created atomically.

use super::copy_out::Pipe;
use crate::program::prepare::reason;
use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};
use jiffy_wire::agent::{CopyDone, CopyEntry, CopyFrame, CopyKind};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{self, AtFlags, CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;

/// Deepest tree that is accepted; each level has one open descriptor.
const DEEPEST: usize = 256;

/// Handles the frames of a copy and sends the answer. Returns whether the copy was complete.
pub fn serve(pipe: &mut Pipe, path: &str) -> bool {
    let mut target = Target::new(path);
    let result = target.take_all(pipe);
    if result.is_err() {
        target.abandon();
    }
    let whole = result.is_ok();
    let done = CopyDone {
        entries: target.entries,
        error: result.err(),
    };
    pipe.send(&done).is_ok() && whole
}

/// State of a copy.
struct Target {
    path: String,
    entries: u64,
    root_seen: bool,
    /// The folders from the copy's root to the current one.
    folders: Vec<Folder>,
    file: Option<File>,
}

struct Folder {
    handle: OwnedFd,
    /// Path below the root of the copy; empty for the root.
    path: String,
    entry: CopyEntry,
}

/// A file that is written under a temporary name.
struct File {
    /// The folder that contains it; `None` for a file given by an absolute path.
    folder: Option<OwnedFd>,
    temporary: String,
    name: String,
    handle: OwnedFd,
    left: u64,
    entry: CopyEntry,
}

impl Target {
    fn new(path: &str) -> Target {
        Target {
            path: path.into(),
            entries: 0,
            root_seen: false,
            folders: Vec::new(),
            file: None,
        }
    }

    fn take_all(&mut self, pipe: &mut Pipe) -> Result<(), String> {
        if !self.path.starts_with('/') || self.path.contains('\0') {
            return Err(format!("{:?} is not an absolute path", self.path));
        }
        loop {
            let frame = pipe.next::<CopyFrame>()?;
            match frame.ok_or("the connection ended before the copy did")? {
                CopyFrame::Entry(entry) => {
                    self.finish_file()?;
                    self.entry(entry)?;
                    self.entries += 1;
                }
                CopyFrame::Data(bytes) => self.data(&bytes)?,
                CopyFrame::End => {
                    self.finish_file()?;
                    if !self.root_seen {
                        return Err("the copy was empty".into());
                    }
                    return self.leave_folders(0);
                }
                CopyFrame::Failed { message } => return Err(message),
            }
        }
    }

    fn entry(&mut self, entry: CopyEntry) -> Result<(), String> {
        if !self.root_seen {
            self.root_seen = true;
            return self.root(entry);
        }
        check_relative(&entry.path)?;
        let (parent, name) = match entry.path.rsplit_once('/') {
            Some((parent, name)) => (parent, name),
            None => ("", entry.path.as_str()),
        };
        let depth = self
            .folders
            .iter()
            .position(|folder| folder.path == parent)
            .ok_or_else(|| format!("{:?} was sent before its folder", entry.path))?;
        self.leave_folders(depth + 1)?;
        let folder = self.folders[depth]
            .handle
            .try_clone_cloexec()
            .map_err(|error| self.failure(&entry.path, error))?;
        let name = name.to_string();
        self.make(Some(folder), &name, entry)
    }

    /// Handles the first entry, the target of the copy. Its path is empty or the source's name,
    /// which is used if the target is a folder.
    fn root(&mut self, entry: CopyEntry) -> Result<(), String> {
        let given = entry.path.clone();
        if !given.is_empty() {
            check_relative(&given)?;
            if given.contains('/') {
                return Err(format!("{given:?} is not a name"));
            }
        }
        let existing = fs::stat(self.path.as_str()).ok();
        let is_folder = existing
            .is_some_and(|status| FileType::from_raw_mode(status.st_mode) == FileType::Directory);
        let entry = CopyEntry {
            path: String::new(),
            ..entry
        };
        if is_folder && !given.is_empty() {
            // The folder may be reached through a link, because the user named it. Anyone may have
            // created the entry of the given name in it.
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let folder = fs::open(self.path.as_str(), flags, Mode::empty())
                .map_err(|error| self.failure("", error))?;
            let base = self.path.trim_end_matches('/');
            self.path = format!("{base}/{given}");
            return self.make(Some(folder), &given, entry);
        }
        if is_folder && entry.kind != CopyKind::Folder {
            return Err(format!(
                "{} is a folder: give the name of the new file",
                self.path
            ));
        } else if !is_folder && self.path.ends_with('/') && entry.kind != CopyKind::Folder {
            return Err(format!("there is no folder {}", self.path));
        }
        let path = match self.path.trim_end_matches('/') {
            "" => "/",
            path => path,
        };
        let path = path.to_string();
        self.make(None, &path, entry)
    }

    fn make(
        &mut self,
        folder: Option<OwnedFd>,
        name: &str,
        entry: CopyEntry,
    ) -> Result<(), String> {
        let at = folder.as_ref().map_or(CWD, |folder| folder.as_fd());
        match &entry.kind {
            CopyKind::Folder => {
                let handle =
                    enter_folder(at, name).map_err(|error| self.failure(&entry.path, error))?;
                if self.folders.len() >= DEEPEST {
                    return Err(format!(
                        "{:?} is more than {DEEPEST} folders deep",
                        entry.path
                    ));
                }
                self.folders.push(Folder {
                    handle,
                    path: entry.path.clone(),
                    entry,
                });
                Ok(())
            }
            CopyKind::Symlink(target) => make_link(at, name, target, &entry)
                .map_err(|error| self.failure(&entry.path, error)),
            CopyKind::File(size) => {
                let left = *size;
                let temporary = temporary_name(name);
                let flags = OFlags::WRONLY
                    | OFlags::CREATE
                    | OFlags::EXCL
                    | OFlags::NOFOLLOW
                    | OFlags::CLOEXEC;
                // The name contains this process's id, so such a file is left over from an
                // interrupted copy.
                let _ = fs::unlinkat(at, temporary.as_str(), AtFlags::empty());
                let handle = fs::openat(at, temporary.as_str(), flags, Mode::from_raw_mode(0o600))
                    .map_err(|error| self.failure(&entry.path, error))?;
                self.file = Some(File {
                    folder,
                    temporary,
                    name: name.into(),
                    handle,
                    left,
                    entry,
                });
                Ok(())
            }
        }
    }

    fn data(&mut self, bytes: &[u8]) -> Result<(), String> {
        let Some(file) = &mut self.file else {
            return Err("received bytes that belong to no file".into());
        };
        match file.left.checked_sub(bytes.len() as u64) {
            Some(left) => file.left = left,
            None => return Err(format!("{:?} is longer than announced", file.entry.path)),
        }
        let written = crate::files::write_all(&file.handle, bytes);
        let path = file.entry.path.clone();
        written.map_err(|error| self.failure(&path, error))
    }

    /// Sets the file's owner, mode and time and renames it to its final name.
    fn finish_file(&mut self) -> Result<(), String> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let File { entry, left, .. } = file;
        if *left > 0 {
            return Err(format!(
                "{:?} is {left} bytes shorter than announced",
                entry.path
            ));
        }
        let at = file.folder.as_ref().map_or(CWD, |folder| folder.as_fd());
        let result = set_attributes(&file.handle, entry)
            .and_then(|()| fs::renameat(at, file.temporary.as_str(), at, file.name.as_str()));
        let path = entry.path.clone();
        result.map_err(|error| self.failure(&path, error))?;
        self.file = None;
        Ok(())
    }

    /// Closes folders down to this depth. Modes and times are set last, because adding entries
    /// changes them.
    fn leave_folders(&mut self, depth: usize) -> Result<(), String> {
        while self.folders.len() > depth {
            let Some(folder) = self.folders.pop() else {
                break;
            };
            set_attributes(&folder.handle, &folder.entry)
                .map_err(|error| self.failure(&folder.path, error))?;
        }
        Ok(())
    }

    /// Removes an incomplete file.
    fn abandon(&mut self) {
        if let Some(file) = self.file.take() {
            let at = file.folder.as_ref().map_or(CWD, |folder| folder.as_fd());
            let _ = fs::unlinkat(at, file.temporary.as_str(), AtFlags::empty());
        }
    }

    fn failure(&self, path: &str, error: Errno) -> String {
        let base = self.path.trim_end_matches('/');
        let whole = if path.is_empty() {
            base.to_string()
        } else {
            format!("{base}/{path}")
        };
        match error {
            Errno::LOOP | Errno::NOTDIR => {
                format!("{whole}: a part of the path is not a folder (links are not followed)")
            }
            error => format!("{whole}: {}", reason(error)),
        }
    }
}

/// Duplicates the descriptor of a folder.
trait TryClone {
    fn try_clone_cloexec(&self) -> Result<OwnedFd, Errno>;
}

impl TryClone for OwnedFd {
    fn try_clone_cloexec(&self) -> Result<OwnedFd, Errno> {
        rustix::io::fcntl_dupfd_cloexec(self, 3)
    }
}

/// Checks a path like `a/b/c`: no empty part, no `.` or `..`, not absolute.
fn check_relative(path: &str) -> Result<(), String> {
    let fine = path.split('/').all(|part| !matches!(part, "" | "." | "..")) && !path.contains('\0');
    if fine {
        Ok(())
    } else {
        Err(format!("{path:?} is not a path inside the copy"))
    }
}

/// A hidden name in the folder of `name` that contains this process's id.
fn temporary_name(name: &str) -> String {
    let (folder, last) = match name.rsplit_once('/') {
        Some((folder, last)) => (format!("{folder}/"), last),
        None => (String::new(), name),
    };
    // Names have at most 255 bytes. The process id makes the name unique.
    let mut end = last.len().min(200);
    while !last.is_char_boundary(end) {
        end -= 1;
    }
    let pid = rustix::process::getpid().as_raw_nonzero();
    format!("{folder}.{}.jiffy-{pid}", &last[..end])
}

/// Opens a folder; creates it if it is missing. Does not follow a link, except for the copy's own
/// target, which the user named.
fn enter_folder(at: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, Errno> {
    match fs::mkdirat(at, name, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    let mut flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    flags.set(OFlags::NOFOLLOW, !name.starts_with('/'));
    fs::openat(at, name, flags, Mode::empty())
}

fn make_link(at: BorrowedFd<'_>, name: &str, target: &str, entry: &CopyEntry) -> Result<(), Errno> {
    let temporary = temporary_name(name);
    let _ = fs::unlinkat(at, temporary.as_str(), AtFlags::empty());
    fs::symlinkat(target, at, temporary.as_str())?;
    let placed = fs::chownat(
        at,
        temporary.as_str(),
        uid(entry),
        gid(entry),
        AtFlags::SYMLINK_NOFOLLOW,
    )
    .and_then(|()| {
        fs::utimensat(
            at,
            temporary.as_str(),
            &times(entry),
            AtFlags::SYMLINK_NOFOLLOW,
        )
    })
    .and_then(|()| fs::renameat(at, temporary.as_str(), at, name));
    if placed.is_err() {
        let _ = fs::unlinkat(at, temporary.as_str(), AtFlags::empty());
    }
    placed
}

/// Sets the attributes; the owner first, because changing it clears the set-user-id bit.
fn set_attributes(handle: &OwnedFd, entry: &CopyEntry) -> Result<(), Errno> {
    fs::fchown(handle, uid(entry), gid(entry))?;
    fs::fchmod(handle, Mode::from_raw_mode(entry.mode & 0o7777))?;
    fs::futimens(handle, &times(entry))
}

fn uid(entry: &CopyEntry) -> Option<Uid> {
    // The kernel treats the largest number as "unchanged".
    (entry.uid != u32::MAX).then(|| Uid::from_raw(entry.uid))
}

fn gid(entry: &CopyEntry) -> Option<Gid> {
    (entry.gid != u32::MAX).then(|| Gid::from_raw(entry.gid))
}

fn times(entry: &CopyEntry) -> Timestamps {
    let time = Timespec {
        tv_sec: entry.mtime,
        tv_nsec: 0,
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_paths_inside_the_copy_are_taken() {
        for good in ["a", "a/b", "..a/b..", "a/.b"] {
            assert!(check_relative(good).is_ok(), "{good}");
        }
        for bad in [
            "", "/", "/a", "a/", "a//b", ".", "a/..", "../a", "a/./b", "a\0b",
        ] {
            assert!(check_relative(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn a_temporary_name_stays_in_its_folder_and_fits(
            folder in "(/[a-zé]{1,5}){0,3}", name in "[a-zé€]{1,120}"
        ) {
            let whole = if folder.is_empty() { name } else { format!("{folder}/{name}") };
            let temporary = temporary_name(&whole);
            let (there, last) = temporary.rsplit_once('/').unwrap_or(("", &temporary));
            prop_assert_eq!(there, folder);
            prop_assert!(last.len() <= 255 && last.starts_with('.'));
        }
    }
}
