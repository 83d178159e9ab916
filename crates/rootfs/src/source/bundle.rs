//! Access to files by name, in a folder or in a plain tar that is not unpacked.

use super::SourceError;
use crate::archive::{Archive, ArchiveError, EntryKind};
use crate::layer::Blob;
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// The list of the images in a Docker archive.
pub(super) const DOCKER_MANIFEST: &str = "manifest.json";
/// Most members of a tar that holds images.
const MAX_MEMBERS: usize = 100_000;
/// Most links followed from a name to its member.
const MAX_LINKS: usize = 8;

/// Files of an OCI layout or a Docker archive.
#[derive(Debug)]
pub(super) enum Bundle {
    /// Files below this folder.
    Folder(PathBuf),
    /// Members of a tar.
    Tar {
        path: PathBuf,
        members: BTreeMap<String, Member>,
    },
}

#[derive(Debug)]
pub(super) enum Member {
    File(Blob),
    Link(String),
}

impl Bundle {
    /// The members of a plain tar, if it is an OCI or Docker archive. `None` at the first name that
    /// such an archive doesn't have, unless it is `known` to be one: then it may have further files.
    ///
    /// # Errors
    ///
    /// If what begins like such an archive, or is known to be one, can't be read to its end.
    pub fn of_tar(
        path: &std::path::Path,
        tar: &Blob,
        known: bool,
    ) -> Result<Option<Bundle>, ArchiveError> {
        let mut archive = Archive::new(tar.stream());
        let mut members = BTreeMap::new();
        loop {
            let entry = match archive.next_entry() {
                Ok(Some(entry)) => entry,
                Ok(None) => break,
                Err(_) if !known && members.is_empty() => return Ok(None),
                Err(error) => return Err(error),
            };
            let name = match std::str::from_utf8(&entry.path) {
                Ok(name) => name.trim_start_matches("./").trim_matches('/').to_owned(),
                Err(_) if known => continue,
                Err(_) => return Ok(None),
            };
            if !known && !is_bundle_member(&name) || members.len() >= MAX_MEMBERS {
                return Ok(None);
            }
            let member = match entry.kind {
                EntryKind::File if entry.sparse.is_none() => Member::File(Blob {
                    file: tar.file.clone(),
                    offset: tar.offset + entry.offset,
                    len: entry.size,
                }),
                EntryKind::Symlink(target) | EntryKind::HardLink(target)
                    if name.ends_with(".tar") =>
                {
                    Member::Link(String::from_utf8_lossy(&target).into_owned())
                }
                EntryKind::Folder => continue,
                _ if known => continue,
                _ => return Ok(None),
            };
            members.insert(name, member);
        }
        let has = |name: &str| members.contains_key(name);
        let bundle = has(DOCKER_MANIFEST) || (has("oci-layout") && has("index.json"));
        Ok(bundle.then(|| Bundle::Tar {
            path: path.to_owned(),
            members,
        }))
    }

    /// Whether it has a file of that name.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Bundle::Folder(folder) => folder.join(name).is_file(),
            Bundle::Tar { members, .. } => members.contains_key(name),
        }
    }

    /// Opens a file; the name comes from a manifest.
    ///
    /// # Errors
    ///
    /// If there is no such file, or it can't be opened or is not a regular one.
    pub fn blob(&self, name: &str) -> Result<Blob, SourceError> {
        match self {
            Bundle::Folder(folder) => {
                let path = folder.join(name);
                open_file(&path).map_err(|source| SourceError::Read { path, source })
            }
            Bundle::Tar { path, members } => {
                let missing = || SourceError::Missing {
                    path: path.clone(),
                    name: name.to_owned(),
                };
                let mut at = name.trim_start_matches("./").to_owned();
                for _ in 0..MAX_LINKS {
                    match members.get(&at).ok_or_else(missing)? {
                        Member::File(blob) => return Ok(blob.clone()),
                        Member::Link(target) => at = below(&at, target),
                    }
                }
                Err(missing())
            }
        }
    }

    /// Reads all of a small file, at most `limit` bytes.
    ///
    /// # Errors
    ///
    /// As for [`blob`](Bundle::blob), or if the file has more than `limit` bytes or can't be read.
    pub fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>, SourceError> {
        let blob = self.blob(name)?;
        blob.read(limit).map_err(|source| SourceError::Read {
            path: self.place(name),
            source,
        })
    }

    /// The path of one of its files, for messages.
    pub fn place(&self, name: &str) -> PathBuf {
        match self {
            Bundle::Folder(path) | Bundle::Tar { path, .. } => path.join(name),
        }
    }
}

/// Opens a regular file. Does not block on a pipe without a writer.
pub(super) fn open_file(path: &std::path::Path) -> io::Result<Blob> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Blob::whole(file)
}

/// Whether OCI or `docker save` archives have files of that name.
fn is_bundle_member(name: &str) -> bool {
    let hex = |text: &str| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let (first, rest) = name.split_once('/').unwrap_or((name, ""));
    match first {
        "" | "oci-layout" | "index.json" | "manifest.json" | "repositories" => rest.is_empty(),
        "blobs" => true,
        _ => {
            let stem = first.split('.').next().unwrap_or_default();
            hex(stem) && (rest.is_empty() || ["VERSION", "json", "layer.tar"].contains(&rest))
        }
    }
}

/// Resolves a link's target to a member's name.
fn below(link: &str, target: &str) -> String {
    let mut parts: Vec<&str> = link.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}
