//! Performs the requests.

use super::packet::{Answer, Attributes, Failed, Fields, MAX_REQUEST, kind};
use rustix::fs::{AtFlags, CWD, RenameFlags, Timespec, Timestamps};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions, Permissions, ReadDir};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{
    DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt, chown, fchown, lchown, symlink,
};
use std::path::{Path, PathBuf};

/// Extensions that are offered, with their versions.
pub const EXTENSIONS: [(&str, &str); 7] = [
    ("posix-rename@openssh.com", "1"),
    ("hardlink@openssh.com", "1"),
    ("fsync@openssh.com", "1"),
    ("lsetstat@openssh.com", "1"),
    ("statvfs@openssh.com", "2"),
    ("limits@openssh.com", "1"),
    ("expand-path@openssh.com", "1"),
];

/// Most open files and folders.
const MAX_HANDLES: usize = 1000;
/// Longest answer to a read, in bytes.
const MAX_READ: usize = 255 * 1024;
/// Most names in an answer.
const MAX_NAMES: usize = 100;

/// Flags of OPEN.
mod flag {
    pub const READ: u32 = 1;
    pub const WRITE: u32 = 2;
    pub const APPEND: u32 = 4;
    pub const CREATE: u32 = 8;
    pub const TRUNCATE: u32 = 16;
    pub const EXCLUSIVE: u32 = 32;
}

/// Open files and folders of a client.
#[derive(Debug, Default)]
pub struct Files {
    open: BTreeMap<u32, Handle>,
    next: u32,
}

#[derive(Debug)]
enum Handle {
    File(File),
    Folder(ReadDir),
}

type Result = std::result::Result<Answer, Failed>;

impl Files {
    /// Performs a request. `kind` is its type, `fields` what follows its id.
    ///
    /// # Errors
    ///
    /// If the request is malformed or of an unknown type, names a handle that is not open, or a
    /// system call fails; the error becomes the answer.
    pub fn perform(&mut self, kind: u8, id: u32, fields: &mut Fields) -> Result {
        match kind {
            kind::OPEN => self.open(id, fields),
            kind::OPENDIR => {
                let folder = fs::read_dir(path(fields)?)?;
                self.add_handle(id, Handle::Folder(folder))
            }
            kind::CLOSE => {
                let handle = handle(fields)?;
                self.open.remove(&handle).ok_or(Failed::Handle)?;
                Ok(Answer::done(id))
            }
            kind::READ => self.read(id, fields),
            kind::WRITE => self.write(id, fields),
            kind::READDIR => self.read_folder(id, fields),
            kind::FSTAT => Ok(facts(id, &self.file(fields)?.metadata()?)),
            kind::FSETSTAT => {
                let file = self.file(fields)?;
                set_file(file, fields.attributes().ok_or(Failed::BadMessage)?)?;
                Ok(Answer::done(id))
            }
            kind::EXTENDED => self.extended(id, fields),
            _ => perform_on_path(kind, id, fields),
        }
    }

    fn open(&mut self, id: u32, fields: &mut Fields) -> Result {
        let path = path(fields)?;
        let flags = number(fields)?;
        let attributes = fields.attributes().ok_or(Failed::BadMessage)?;
        let has = |flag| flags & flag != 0;
        let (read, write) = (has(flag::READ), has(flag::WRITE));
        let file = OpenOptions::new()
            .read(read || !write)
            .write(write)
            .append(write && has(flag::APPEND))
            .create(write && has(flag::CREATE))
            .create_new(write && has(flag::CREATE) && has(flag::EXCLUSIVE))
            .truncate(write && has(flag::TRUNCATE) && !has(flag::APPEND))
            .mode(attributes.mode.unwrap_or(0o666) & 0o7777)
            .open(path)?;
        self.add_handle(id, Handle::File(file))
    }

    fn add_handle(&mut self, id: u32, handle: Handle) -> Result {
        if self.open.len() >= MAX_HANDLES {
            return Err(io::Error::from(rustix::io::Errno::MFILE).into());
        }
        while self.open.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        self.open.insert(self.next, handle);
        let mut answer = Answer::to(id, kind::HANDLE);
        answer.bytes(&self.next.to_be_bytes());
        self.next = self.next.wrapping_add(1);
        Ok(answer)
    }

    fn file(&self, fields: &mut Fields) -> std::result::Result<&File, Failed> {
        match self.open.get(&handle(fields)?) {
            Some(Handle::File(file)) => Ok(file),
            _ => Err(Failed::Handle),
        }
    }

    fn read(&self, id: u32, fields: &mut Fields) -> Result {
        let file = self.file(fields)?;
        let offset = fields.long().ok_or(Failed::BadMessage)?;
        let length = number(fields)? as usize;
        let mut bytes = vec![0; length.min(MAX_READ)];
        match file.read_at(&mut bytes, offset)? {
            0 if length > 0 => Err(Failed::End),
            count => {
                let mut answer = Answer::to(id, kind::DATA);
                answer.bytes(&bytes[..count]);
                Ok(answer)
            }
        }
    }

    fn write(&self, id: u32, fields: &mut Fields) -> Result {
        let file = self.file(fields)?;
        let offset = fields.long().ok_or(Failed::BadMessage)?;
        let bytes = fields.bytes().ok_or(Failed::BadMessage)?;
        // With O_APPEND, Linux ignores the offset (pwrite(2)).
        file.write_all_at(bytes, offset)?;
        Ok(Answer::done(id))
    }

    fn read_folder(&mut self, id: u32, fields: &mut Fields) -> Result {
        let Some(Handle::Folder(folder)) = self.open.get_mut(&handle(fields)?) else {
            return Err(Failed::Handle);
        };
        let mut names = Vec::new();
        // An answer without names would be the end, so entries that were removed meanwhile do not
        // count.
        while names.len() < MAX_NAMES
            && let Some(entry) = folder.next()
        {
            let entry = entry?;
            if let Ok(facts) = entry.metadata() {
                names.push((entry.file_name(), Some(facts)));
            }
        }
        if names.is_empty() {
            return Err(Failed::End);
        }
        Ok(names_answer(id, &names))
    }

    fn extended(&mut self, id: u32, fields: &mut Fields) -> Result {
        match fields.bytes().ok_or(Failed::BadMessage)? {
            b"posix-rename@openssh.com" => fs::rename(path(fields)?, path(fields)?)?,
            b"hardlink@openssh.com" => fs::hard_link(path(fields)?, path(fields)?)?,
            b"fsync@openssh.com" => self.file(fields)?.sync_all()?,
            b"lsetstat@openssh.com" => {
                let path = path(fields)?;
                set_link(path, fields.attributes().ok_or(Failed::BadMessage)?)?;
            }
            b"statvfs@openssh.com" => return file_system(id, path(fields)?),
            b"limits@openssh.com" => {
                let mut answer = Answer::to(id, kind::EXTENDED_REPLY);
                answer.long(MAX_REQUEST as u64);
                answer.long(MAX_READ as u64);
                answer.long(MAX_READ as u64);
                answer.long(MAX_HANDLES as u64);
                return Ok(answer);
            }
            b"expand-path@openssh.com" => {
                let path = expanded(path(fields)?)?;
                return Ok(names_answer(
                    id,
                    &[(absolute(&path)?.into_os_string(), None)],
                ));
            }
            _ => return Err(Failed::Unsupported),
        }
        Ok(Answer::done(id))
    }
}

/// Performs a request about a path.
fn perform_on_path(kind: u8, id: u32, fields: &mut Fields) -> Result {
    match kind {
        kind::STAT => return Ok(facts(id, &fs::metadata(path(fields)?)?)),
        kind::LSTAT => return Ok(facts(id, &fs::symlink_metadata(path(fields)?)?)),
        kind::REALPATH => {
            let path = absolute(path(fields)?)?;
            return Ok(names_answer(id, &[(path.into_os_string(), None)]));
        }
        kind::READLINK => {
            let target = fs::read_link(path(fields)?)?;
            return Ok(names_answer(id, &[(target.into_os_string(), None)]));
        }
        kind::SETSTAT => {
            let path = path(fields)?;
            set_path(path, fields.attributes().ok_or(Failed::BadMessage)?)?;
        }
        kind::REMOVE => fs::remove_file(path(fields)?)?,
        kind::MKDIR => {
            let path = path(fields)?;
            let attributes = fields.attributes().ok_or(Failed::BadMessage)?;
            let mode = attributes.mode.unwrap_or(0o777) & 0o7777;
            fs::DirBuilder::new().mode(mode).create(path)?;
        }
        kind::RMDIR => fs::remove_dir(path(fields)?)?,
        kind::RENAME => {
            let (from, to) = (path(fields)?, path(fields)?);
            // In version 3 a rename never replaces an existing file.
            rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?;
        }
        // OpenSSH and its clients send the target first, contrary to the draft.
        kind::SYMLINK => symlink(path(fields)?, path(fields)?)?,
        _ => return Err(Failed::Unsupported),
    }
    Ok(Answer::done(id))
}

fn path<'a>(fields: &mut Fields<'a>) -> std::result::Result<&'a Path, Failed> {
    fields.path().ok_or(Failed::BadMessage)
}

fn number(fields: &mut Fields) -> std::result::Result<u32, Failed> {
    fields.number().ok_or(Failed::BadMessage)
}

fn handle(fields: &mut Fields) -> std::result::Result<u32, Failed> {
    let bytes = fields.bytes().ok_or(Failed::BadMessage)?;
    let number = bytes.try_into().map_err(|_| Failed::Handle)?;
    Ok(u32::from_be_bytes(number))
}

fn facts(id: u32, facts: &Metadata) -> Answer {
    let mut answer = Answer::to(id, kind::ATTRS);
    answer.attributes(facts);
    answer
}

fn names_answer(id: u32, names: &[(OsString, Option<Metadata>)]) -> Answer {
    let mut answer = Answer::to(id, kind::NAME);
    answer.names(names);
    answer
}

fn set_path(path: &Path, set: Attributes) -> io::Result<()> {
    if let Some(size) = set.size {
        OpenOptions::new().write(true).open(path)?.set_len(size)?;
    }
    if let Some((user, group)) = set.owner {
        chown(path, Some(user), Some(group))?;
    }
    if let Some(mode) = set.mode {
        fs::set_permissions(path, Permissions::from_mode(mode & 0o7777))?;
    }
    if let Some(times) = set.times {
        rustix::fs::utimensat(CWD, path, &timestamps(times), AtFlags::empty())?;
    }
    Ok(())
}

/// Like [`set_path`], for a symlink itself, which has no size or mode to set.
fn set_link(path: &Path, set: Attributes) -> io::Result<()> {
    if set.size.is_some() || set.mode.is_some() {
        return Err(rustix::io::Errno::OPNOTSUPP.into());
    }
    if let Some((user, group)) = set.owner {
        lchown(path, Some(user), Some(group))?;
    }
    if let Some(times) = set.times {
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::utimensat(CWD, path, &timestamps(times), flags)?;
    }
    Ok(())
}

fn set_file(file: &File, set: Attributes) -> io::Result<()> {
    if let Some(size) = set.size {
        file.set_len(size)?;
    }
    if let Some((user, group)) = set.owner {
        fchown(file, Some(user), Some(group))?;
    }
    if let Some(mode) = set.mode {
        file.set_permissions(Permissions::from_mode(mode & 0o7777))?;
    }
    if let Some(times) = set.times {
        rustix::fs::futimens(file, &timestamps(times))?;
    }
    Ok(())
}

fn timestamps((accessed, modified): (u32, u32)) -> Timestamps {
    let time = |seconds: u32| Timespec {
        tv_sec: seconds.into(),
        tv_nsec: 0,
    };
    Timestamps {
        last_access: time(accessed),
        last_modification: time(modified),
    }
}

/// An absolute path without links. Like OpenSSH's, it may end in names that do not exist.
fn absolute(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    match fs::canonicalize(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            match (path.parent(), path.file_name()) {
                (Some(parent), Some(name)) => Ok(absolute(parent)?.join(name)),
                _ => Ok(path),
            }
        }
        real => real,
    }
}

/// A path in which `~` or `~USER` at the start is that user's home folder.
fn expanded(path: &Path) -> std::result::Result<PathBuf, Failed> {
    let bytes = path.as_os_str().as_bytes();
    let Some(rest) = bytes.strip_prefix(b"~") else {
        return Ok(path.to_owned());
    };
    let end = rest.iter().position(|byte| *byte == b'/');
    let (user, rest) = rest.split_at(end.unwrap_or(rest.len()));
    let home = match str::from_utf8(user) {
        // The working directory is the home folder.
        Ok("") => std::env::current_dir()?,
        Ok(user) => crate::login::home(user).ok_or(io::Error::from(io::ErrorKind::NotFound))?,
        Err(_) => return Err(io::Error::from(io::ErrorKind::NotFound).into()),
    };
    let mut whole = home.into_os_string();
    whole.push(OsString::from_vec(rest.to_vec()));
    Ok(whole.into())
}

/// The answer to statvfs@openssh.com.
fn file_system(id: u32, path: &Path) -> Result {
    let facts = rustix::fs::statvfs(path)?;
    let mut answer = Answer::to(id, kind::EXTENDED_REPLY);
    for number in [
        facts.f_bsize,
        facts.f_frsize,
        facts.f_blocks,
        facts.f_bfree,
        facts.f_bavail,
        facts.f_files,
        facts.f_ffree,
        facts.f_favail,
        facts.f_fsid,
        // OpenSSH passes on these two flags only: read only, no set-user-ID.
        facts.f_flag.bits() & 3,
        facts.f_namemax,
    ] {
        answer.long(number);
    }
    Ok(answer)
}
