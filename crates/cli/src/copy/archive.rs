//! Tar archives on stdin and stdout.

use super::{check_path, mode, owner};
use crate::failure::{Failure, Result};
use jiffy_wire::agent::{CopyEntry, CopyFrame, CopyKind};
use jiffy_wire::frame::MAX_DATA;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::path::Path;
use tar::{Builder, EntryType, Header};

/// Bytes of a tar's block.
const BLOCK: u64 = 512;

/// Writes a copy as a tar.
pub struct TarWriter<W: Write> {
    tar: Builder<W>,
    /// The root's name; `.` for the contents of a folder.
    name: String,
    size: u64,
    left: u64,
    entries: u64,
}

impl<W: Write> TarWriter<W> {
    /// A writer of a tar whose entries are all below `name`.
    pub fn new(out: W, name: String) -> TarWriter<W> {
        TarWriter {
            tar: Builder::new(out),
            name,
            size: 0,
            left: 0,
            entries: 0,
        }
    }

    /// Takes the next frame; true after the last one.
    ///
    /// # Errors
    ///
    /// If the VM sends a failure, an unsafe path, too many bytes or no entry, or the tar can't be
    /// written.
    pub fn take(&mut self, frame: CopyFrame) -> Result<bool> {
        match frame {
            CopyFrame::Entry(entry) => {
                self.pad()?;
                check_path(&entry)?;
                self.entries += 1;
                self.entry(&entry).map_err(unwritable)?;
                Ok(false)
            }
            CopyFrame::Data(data) => {
                let Some(left) = self.left.checked_sub(data.len() as u64) else {
                    return Err(Failure::new("the VM sent more bytes than it announced"));
                };
                self.left = left;
                self.tar.get_mut().write_all(&data).map_err(unwritable)?;
                Ok(false)
            }
            CopyFrame::End => {
                self.pad()?;
                if self.entries == 0 {
                    return Err(Failure::new("the VM sent an empty copy"));
                }
                self.tar.finish().map_err(unwritable)?;
                self.tar.get_mut().flush().map_err(unwritable)?;
                Ok(true)
            }
            CopyFrame::Failed { message } => Err(Failure::new(message)),
        }
    }

    fn entry(&mut self, entry: &CopyEntry) -> io::Result<()> {
        let path = match entry.path.as_str() {
            "" => self.name.clone(),
            path => format!("{}/{path}", self.name),
        };
        let mut header = Header::new_gnu();
        header.set_mode(entry.mode & 0o7777);
        header.set_uid(entry.uid.into());
        header.set_gid(entry.gid.into());
        header.set_mtime(entry.mtime.max(0) as u64);
        header.set_size(0);
        match &entry.kind {
            CopyKind::Folder => {
                header.set_entry_type(EntryType::Directory);
                self.tar.append_data(&mut header, path + "/", io::empty())
            }
            CopyKind::Symlink(target) => {
                header.set_entry_type(EntryType::Symlink);
                self.tar.append_link(&mut header, path, target)
            }
            CopyKind::File(size) => {
                header.set_entry_type(EntryType::Regular);
                header.set_size(*size);
                (self.size, self.left) = (*size, *size);
                // The bytes follow in later frames.
                self.tar.append_data(&mut header, path, io::empty())
            }
        }
    }

    /// Pads the last file to a whole block.
    fn pad(&mut self) -> Result<()> {
        if self.left > 0 {
            return Err(Failure::new("the VM sent fewer bytes than it announced"));
        }
        let over = std::mem::take(&mut self.size) % BLOCK;
        if over > 0 {
            let zeros = [0; BLOCK as usize];
            self.tar
                .get_mut()
                .write_all(&zeros[..(BLOCK - over) as usize])
                .map_err(unwritable)?;
        }
        Ok(())
    }
}

fn unwritable(error: io::Error) -> Failure {
    Failure::io("the tar can't be written", error)
}

/// Reads a tar, and produces the frames of a copy into an existing folder.
pub struct TarReader {
    root: CopyEntry,
    keep_owners: bool,
    /// Folders that the tar has named. They are repeated where the tar is not in depth-first order.
    folders: HashMap<String, CopyEntry>,
    /// The folder of the last entry.
    current: String,
}

impl TarReader {
    /// `root` describes the existing folder, which the copy does not change.
    pub fn new(root: CopyEntry, keep_owners: bool) -> TarReader {
        TarReader {
            root,
            keep_owners,
            folders: HashMap::new(),
            current: String::new(),
        }
    }

    /// Passes the frames of a whole tar to `send`, whose first error stops it, and a note for each
    /// entry that can't be copied to `note`.
    ///
    /// # Errors
    ///
    /// If the tar can't be read or is malformed, has a path that leaves the destination or is not
    /// UTF-8, or `send` fails.
    pub fn read(
        mut self,
        tar: impl Read,
        mut send: impl FnMut(CopyFrame) -> io::Result<()>,
        mut note: impl FnMut(String),
    ) -> Result<()> {
        let failed = |error| Failure::io("the tar on stdin can't be read", error);
        send(CopyFrame::Entry(self.root.clone())).map_err(failed)?;
        let mut archive = tar::Archive::new(tar);
        for entry in archive.entries().map_err(failed)? {
            let mut entry = entry.map_err(failed)?;
            let path = entry.path().map_err(failed)?.into_owned();
            let path = normal(&path)?;
            if path.is_empty() {
                continue;
            }
            let header = entry.header();
            let kind = match header.entry_type() {
                EntryType::Directory => CopyKind::Folder,
                EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                    CopyKind::File(entry.size())
                }
                EntryType::Symlink => {
                    let target = entry.link_name().map_err(failed)?.unwrap_or_default();
                    CopyKind::Symlink(text(&target)?)
                }
                EntryType::XGlobalHeader => continue,
                other => {
                    note(format!("left out {path}: {}", what(other)));
                    continue;
                }
            };
            let copied = CopyEntry {
                mode: mode(header.mode().map_err(failed)?, self.keep_owners),
                // Some tools leave these fields empty.
                uid: owner(header.uid().unwrap_or(0) as u32, self.keep_owners),
                gid: owner(header.gid().unwrap_or(0) as u32, self.keep_owners),
                mtime: header.mtime().unwrap_or(0) as i64,
                path,
                kind,
            };
            self.name_folders(&copied.path, &mut send).map_err(failed)?;
            if copied.kind == CopyKind::Folder {
                self.current.clone_from(&copied.path);
                self.folders.insert(copied.path.clone(), copied.clone());
            }
            send(CopyFrame::Entry(copied)).map_err(failed)?;
            let mut buffer = vec![0; MAX_DATA];
            loop {
                match entry.read(&mut buffer).map_err(failed)? {
                    0 => break,
                    count => {
                        send(CopyFrame::Data(buffer[..count].to_vec())).map_err(failed)?;
                    }
                }
            }
        }
        send(CopyFrame::End).map_err(failed)
    }

    /// A copy must be in depth-first order, which a tar need not be: repeats the folders of `path`
    /// that are not those of the last entry.
    fn name_folders(
        &mut self,
        path: &str,
        send: &mut impl FnMut(CopyFrame) -> io::Result<()>,
    ) -> io::Result<()> {
        let above = path.rsplit_once('/').map_or("", |(above, _)| above);
        let ends = above.match_indices('/').map(|(end, _)| end);
        for end in ends.chain([above.len()]) {
            let folder = &above[..end];
            let open = folder.is_empty()
                || self.current == folder
                || self.current.starts_with(&format!("{folder}/"));
            if open {
                continue;
            }
            let entry = self.folders.entry(folder.to_owned()).or_insert(CopyEntry {
                path: folder.to_owned(),
                kind: CopyKind::Folder,
                mode: 0o755,
                uid: owner(self.root.uid, self.keep_owners),
                gid: owner(self.root.gid, self.keep_owners),
                mtime: self.root.mtime,
            });
            send(CopyFrame::Entry(entry.clone()))?;
        }
        self.current = above.to_owned();
        Ok(())
    }
}

/// Normalises a path of a tar, relative to the folder it is unpacked in.
fn normal(path: &Path) -> Result<String> {
    use std::path::Component;
    let mut parts = Vec::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => parts.push(text(Path::new(name))?),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(Failure::new(format!(
                    "the tar on stdin names a path outside itself: {}",
                    path.display()
                )));
            }
        }
    }
    Ok(parts.join("/"))
}

fn text(path: &Path) -> Result<String> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        Failure::new(format!(
            "{} can't be copied: its name is not UTF-8",
            path.display()
        ))
    })
}

fn what(kind: EntryType) -> &'static str {
    match kind {
        EntryType::Link => "a hard link (pack with `tar --hard-dereference`)",
        EntryType::Char | EntryType::Block => "a device",
        EntryType::Fifo => "a named pipe",
        _ => "an entry of an unknown type",
    }
}
