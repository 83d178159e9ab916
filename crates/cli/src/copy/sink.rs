//! Writes frames to a file or folder on this host.
//!
//! The frames come from a guest. Every entry is opened relative to its folder, never through a
//! symbolic link, and never above the root (openat2(2)). A file gets its name only when it is
//! complete.

use super::{check_path, mode};
use crate::failure::{Failure, Result, reason};
use jiffy_wire::agent::{CopyEntry, CopyFrame, CopyKind};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, UTIME_OMIT, Uid, chmodat,
    chownat, fchmod, fchown, futimens, mkdirat, openat, openat2, renameat, statat, symlinkat,
    unlinkat, utimensat,
};
use rustix::io::Errno;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The target of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Goal {
    /// An existing folder, or a path to be created.
    pub path: PathBuf,
    /// The root's name if `path` is an existing folder; `None` copies the contents of a folder into
    /// it.
    pub name: Option<String>,
    /// `path` was written with a slash at its end, so it must be a folder.
    pub folder: bool,
}

impl Goal {
    /// Whether a file is written into the target itself: a device or a pipe, which may block.
    pub fn is_written_in_place(&self) -> bool {
        is_special_file(&self.path)
    }
}

/// Writes a copy.
pub struct Sink {
    goal: Goal,
    keep_owners: bool,
    root: Option<Root>,
    /// The folders from the root to the last entry. They get their modes once all of their entries
    /// were written.
    open: Vec<CopyEntry>,
    file: Option<Unfinished>,
    entries: u64,
}

/// The folder below which everything is opened; known once the root's frame has come.
struct Root {
    /// The root itself if it is a folder, otherwise the folder that contains it.
    folder: OwnedFd,
    /// The path for messages.
    shown: PathBuf,
    /// It existed before, so its mode and times are not changed.
    existed: bool,
}

/// A file whose bytes have not all come.
struct Unfinished {
    entry: CopyEntry,
    left: u64,
    file: File,
    /// Its folder, its temporary name and its final name; `None` for a target that is written in
    /// place (a device, a pipe).
    place: Option<(OwnedFd, String, String)>,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some((folder, temporary, _)) = &self.place {
            let _ = unlinkat(folder, temporary.as_str(), AtFlags::empty());
        }
    }
}

impl Sink {
    /// A sink; nothing is written before the first frame.
    pub fn new(goal: Goal, keep_owners: bool) -> Sink {
        Sink {
            goal,
            keep_owners,
            root: None,
            open: Vec::new(),
            file: None,
            entries: 0,
        }
    }

    /// Takes the next frame; true after the last one.
    ///
    /// # Errors
    ///
    /// If the VM sends a failure, an unsafe path, entries out of order or none, or a file can't be
    /// written.
    pub fn take(&mut self, frame: CopyFrame) -> Result<bool> {
        match frame {
            CopyFrame::Entry(entry) => {
                self.finish_file()?;
                check_path(&entry)?;
                self.entries += 1;
                if entry.path.is_empty() != (self.entries == 1) {
                    return Err(out_of_order(&entry.path));
                }
                match entry.path.is_empty() {
                    true => self.begin(entry)?,
                    false => self.entry(entry)?,
                }
                Ok(false)
            }
            CopyFrame::Data(data) => {
                self.data(&data)?;
                Ok(false)
            }
            CopyFrame::End => {
                self.finish_file()?;
                if self.entries == 0 {
                    return Err(Failure::new("the VM sent an empty copy"));
                }
                self.close_folders(0)?;
                Ok(true)
            }
            CopyFrame::Failed { message } => Err(Failure::new(message)),
        }
    }

    /// Handles the root's frame, which determines all paths.
    fn begin(&mut self, entry: CopyEntry) -> Result<()> {
        let goal = self.goal.clone();
        let is_folder = goal.path.is_dir();
        if let CopyKind::File(size) = entry.kind
            && goal.is_written_in_place()
        {
            return self.begin_in_place(entry, size);
        }
        let (parent, name) = match (&goal.name, is_folder) {
            (Some(name), true) => (goal.path.clone(), name.clone()),
            (None, true) if entry.kind == CopyKind::Folder => {
                return self.begin_in(&goal.path, entry, true);
            }
            (None, true) => {
                return Err(Failure::new(format!(
                    "{} is a folder, and the source has no file name",
                    goal.path.display()
                )));
            }
            (_, false) if goal.folder && entry.kind != CopyKind::Folder => {
                return Err(Failure::new(format!(
                    "there is no folder {}",
                    goal.path.display()
                )));
            }
            (_, false) => split_path(&goal.path)?,
        };
        let target = parent.join(&name);
        let folder = open_folder(&parent)?;
        match entry.kind {
            CopyKind::Folder => {
                let existed = make_folder(&folder, &name, &target)?;
                self.begin_in(&target, entry, existed)
            }
            CopyKind::File(size) => {
                self.root = Some(Root {
                    folder: duplicate(&folder)?,
                    shown: parent,
                    existed: true,
                });
                self.file = Some(start_file(folder, name, entry, size, &target)?);
                Ok(())
            }
            CopyKind::Symlink(ref link) => {
                make_link(&folder, &name, link, &target)?;
                self.root = Some(Root {
                    folder,
                    shown: parent,
                    existed: true,
                });
                Ok(())
            }
        }
    }

    /// A device or a pipe that the user named: it is written to, not replaced.
    fn begin_in_place(&mut self, entry: CopyEntry, size: u64) -> Result<()> {
        let path = &self.goal.path;
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let file =
            openat(CWD, path, flags, Mode::empty()).map_err(|error| unwritable(path, error))?;
        self.file = Some(Unfinished {
            left: size,
            file: file.into(),
            place: None,
            entry,
        });
        Ok(())
    }

    fn begin_in(&mut self, path: &Path, entry: CopyEntry, existed: bool) -> Result<()> {
        self.root = Some(Root {
            folder: open_folder(path)?,
            shown: path.to_owned(),
            existed,
        });
        self.open.push(entry);
        Ok(())
    }

    /// Handles an entry below the root.
    fn entry(&mut self, entry: CopyEntry) -> Result<()> {
        let (above, name) = entry.path.rsplit_once('/').unwrap_or(("", &entry.path));
        // In depth-first order its folder is still open.
        let Some(depth) = self.open.iter().position(|folder| folder.path == above) else {
            return Err(out_of_order(&entry.path));
        };
        let name = name.to_owned();
        self.close_folders(depth + 1)?;
        let root = self
            .root
            .as_ref()
            .ok_or_else(|| out_of_order(&entry.path))?;
        let target = root.shown.join(&entry.path);
        let folder = below(&root.folder, &self.open[depth].path)
            .map_err(|error| unwritable(&target, error))?;
        match &entry.kind {
            CopyKind::Folder => {
                make_folder(&folder, &name, &target)?;
                self.open.push(entry);
            }
            CopyKind::File(size) => {
                let size = *size;
                self.file = Some(start_file(folder, name, entry, size, &target)?);
            }
            CopyKind::Symlink(link) => {
                make_link(&folder, &name, link, &target)?;
                let times = times(entry.mtime);
                let _ = utimensat(&folder, name.as_str(), &times, AtFlags::SYMLINK_NOFOLLOW);
                if self.keep_owners {
                    set_owner(&folder, &name, &entry, &target)?;
                }
            }
        }
        Ok(())
    }

    fn data(&mut self, data: &[u8]) -> Result<()> {
        let Some(file) = &mut self.file else {
            return Err(Failure::new("the VM sent bytes that belong to no file"));
        };
        let Some(left) = file.left.checked_sub(data.len() as u64) else {
            return Err(Failure::new(format!(
                "the VM sent more bytes than it announced for {:?}",
                file.entry.path
            )));
        };
        file.left = left;
        file.file
            .write_all(data)
            .map_err(|error| Failure::io("the copy can't be written", error))
    }

    /// Gives the last file its name, if all of its bytes have come.
    fn finish_file(&mut self) -> Result<()> {
        let Some(mut unfinished) = self.file.take() else {
            return Ok(());
        };
        let path = unfinished.entry.path.clone();
        if unfinished.left > 0 {
            return Err(Failure::new(format!(
                "the VM sent fewer bytes than it announced for {path:?}"
            )));
        }
        let Some((folder, temporary, name)) = &unfinished.place else {
            return Ok(());
        };
        let shown = match &self.root {
            Some(root) if path.is_empty() => root.shown.join(name),
            Some(root) => root.shown.join(&path),
            None => path.into(),
        };
        let failed = |error: Errno| unwritable(&shown, error);
        let entry = &unfinished.entry;
        if self.keep_owners {
            let (uid, gid) = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
            fchown(&unfinished.file, Some(uid), Some(gid)).map_err(failed)?;
        }
        fchmod(
            &unfinished.file,
            Mode::from_raw_mode(mode(entry.mode, self.keep_owners)),
        )
        .map_err(failed)?;
        let _ = futimens(&unfinished.file, &times(entry.mtime));
        renameat(folder, temporary.as_str(), folder, name.as_str()).map_err(failed)?;
        unfinished.place = None;
        Ok(())
    }

    /// Sets the modes and times of the folders from this depth on, deepest first.
    fn close_folders(&mut self, depth: usize) -> Result<()> {
        while self.open.len() > depth {
            let Some(entry) = self.open.pop() else { break };
            let Some(root) = &self.root else { break };
            if entry.path.is_empty() && root.existed {
                continue;
            }
            let target = root.shown.join(&entry.path);
            let failed = |error: Errno| unwritable(&target, error);
            let folder = below(&root.folder, &entry.path).map_err(failed)?;
            if self.keep_owners {
                set_owner(&folder, ".", &entry, &target)?;
            }
            chmodat(
                &folder,
                ".",
                Mode::from_raw_mode(mode(entry.mode, self.keep_owners)),
                AtFlags::empty(),
            )
            .map_err(failed)?;
            let _ = utimensat(&folder, ".", &times(entry.mtime), AtFlags::empty());
        }
        Ok(())
    }
}

/// The folder of a path, and its last name. A link there is followed, because the user named it.
fn split_path(path: &Path) -> Result<(PathBuf, String)> {
    let path = match path.is_symlink() {
        true => path.canonicalize().unwrap_or_else(|_| path.to_owned()),
        false => path.to_owned(),
    };
    let name = path.file_name().and_then(|name| name.to_str());
    let Some(name) = name else {
        return Err(Failure::new(format!(
            "{} can't be the name of a copy",
            path.display()
        )));
    };
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    Ok((parent, name.to_owned()))
}

/// Whether it exists and, after following links, is neither a file nor a folder.
fn is_special_file(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|facts| !facts.is_file() && !facts.is_dir())
}

fn open_folder(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(CWD, path, flags, Mode::empty()).map_err(|error| match error {
        Errno::NOENT => Failure::new(format!("there is no folder {}", path.display())),
        Errno::NOTDIR => Failure::new(format!("{} is not a folder", path.display())),
        error => unwritable(path, error),
    })
}

/// Opens a folder below the root without following links.
fn below(root: &OwnedFd, path: &str) -> rustix::io::Result<OwnedFd> {
    let path = if path.is_empty() { "." } else { path };
    openat2(
        root,
        path,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )
}

fn duplicate(fd: &OwnedFd) -> Result<OwnedFd> {
    fd.try_clone()
        .map_err(|error| Failure::io("the descriptor of a folder can't be duplicated", error))
}

/// Creates a folder that its owner can write to for now; true if it existed.
fn make_folder(folder: &OwnedFd, name: &str, target: &Path) -> Result<bool> {
    match mkdirat(folder, name, Mode::RWXU) {
        Ok(()) => Ok(false),
        Err(Errno::EXIST) => {
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            let facts = statat(folder, name, flags).map_err(|error| unwritable(target, error))?;
            match rustix::fs::FileType::from_raw_mode(facts.st_mode).is_dir() {
                true => Ok(true),
                false => Err(Failure::new(format!(
                    "{} exists and is not a folder",
                    target.display()
                ))),
            }
        }
        Err(error) => Err(unwritable(target, error)),
    }
}

fn start_file(
    folder: OwnedFd,
    name: String,
    entry: CopyEntry,
    size: u64,
    target: &Path,
) -> Result<Unfinished> {
    // A process writes one file at a time, so its id makes the name unique.
    let temporary = format!(".jiffy-cp.{}.tmp", std::process::id());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = openat(&folder, temporary.as_str(), flags, Mode::RUSR | Mode::WUSR);
    let file = match made {
        // A killed process with the same id has left it.
        Err(Errno::EXIST) => {
            let _ = unlinkat(&folder, temporary.as_str(), AtFlags::empty());
            openat(&folder, temporary.as_str(), flags, Mode::RUSR | Mode::WUSR)
        }
        made => made,
    }
    .map_err(|error| unwritable(target, error))?;
    Ok(Unfinished {
        left: size,
        entry,
        file: file.into(),
        place: Some((folder, temporary, name)),
    })
}

/// Creates a link, and replaces an existing file or link of that name.
fn make_link(folder: &OwnedFd, name: &str, link: &str, target: &Path) -> Result<()> {
    let failed = |error| unwritable(target, error);
    match symlinkat(link, folder, name) {
        Err(Errno::EXIST) => {
            unlinkat(folder, name, AtFlags::empty()).map_err(failed)?;
            symlinkat(link, folder, name).map_err(failed)
        }
        result => result.map_err(failed),
    }
}

fn set_owner(folder: &OwnedFd, name: &str, entry: &CopyEntry, target: &Path) -> Result<()> {
    let (uid, gid) = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
    let flags = AtFlags::SYMLINK_NOFOLLOW;
    chownat(folder.as_fd(), name, Some(uid), Some(gid), flags)
        .map_err(|error| unwritable(target, error))
}

fn times(mtime: i64) -> Timestamps {
    Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
        last_modification: Timespec {
            tv_sec: mtime,
            tv_nsec: 0,
        },
    }
}

fn out_of_order(path: &str) -> Failure {
    Failure::new(format!("the VM sent an entry out of order: {path:?}"))
}

fn unwritable(path: &Path, error: Errno) -> Failure {
    Failure::new(format!(
        "{} can't be written: {}",
        path.display(),
        reason(&error.into())
    ))
}
