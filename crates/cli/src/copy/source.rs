//! Reads a file or folder on this host as frames.

use super::{mode, owner};
use crate::client::FrameWriter;
use crate::failure::{Failure, Result};
use jiffy_wire::agent::{CopyEntry, CopyFrame, CopyKind};
use jiffy_wire::frame::MAX_DATA;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Sends `root` and everything below it, without the final frame. Sockets, pipes and devices are
/// skipped, with a note for each.
///
/// `name` is the root's name in an existing folder, or empty. `as_root` replaces the root's
/// metadata: for the contents of a folder that are copied into an existing one, which must not
/// change.
///
/// # Errors
///
/// If a file can't be read or has a name that is not UTF-8, or the connection is lost.
pub async fn send_tree(
    frames: &mut FrameWriter,
    root: &Path,
    keep_owners: bool,
    name: &str,
    as_root: Option<CopyEntry>,
    mut note: impl FnMut(&str),
) -> Result<()> {
    let mut waiting: Vec<(PathBuf, String)> = vec![(root.to_owned(), String::new())];
    while let Some((path, inside)) = waiting.pop() {
        let facts = fs::symlink_metadata(&path).map_err(|error| unreadable(&path, error))?;
        let Some(kind) = kind(&path, &facts)? else {
            note(&format!(
                "left out {}: a {} can't be copied",
                path.display(),
                special_kind(&facts)
            ));
            continue;
        };
        if let CopyKind::Folder = kind {
            waiting.extend(children(&path, &inside)?);
        }
        let entry = match &as_root {
            Some(entry) if inside.is_empty() => entry.clone(),
            _ => CopyEntry {
                path: match inside.is_empty() {
                    true => name.to_owned(),
                    false => inside,
                },
                mode: mode(facts.mode(), keep_owners),
                uid: owner(facts.uid(), keep_owners),
                gid: owner(facts.gid(), keep_owners),
                mtime: facts.mtime(),
                kind,
            },
        };
        let size = match entry.kind {
            CopyKind::File(size) => Some(size),
            _ => None,
        };
        frames.send(&CopyFrame::Entry(entry)).await?;
        if let Some(size) = size {
            send_file(frames, &path, size).await?;
        }
    }
    Ok(())
}

/// The kind of an entry; `None` if it can't be copied.
fn kind(path: &Path, facts: &Metadata) -> Result<Option<CopyKind>> {
    let kind = facts.file_type();
    Ok(if kind.is_dir() {
        Some(CopyKind::Folder)
    } else if kind.is_file() {
        Some(CopyKind::File(facts.len()))
    } else if kind.is_symlink() {
        let target = fs::read_link(path).map_err(|error| unreadable(path, error))?;
        Some(CopyKind::Symlink(utf8(&target)?))
    } else {
        None
    })
}

fn special_kind(facts: &Metadata) -> &'static str {
    let kind = facts.file_type();
    if kind.is_socket() {
        "socket"
    } else if kind.is_fifo() {
        "named pipe"
    } else {
        "device"
    }
}

/// The entries of a folder in reverse order of their names, because they are popped.
fn children(folder: &Path, inside: &str) -> Result<Vec<(PathBuf, String)>> {
    let failed = |error| unreadable(folder, error);
    let mut children = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = utf8(Path::new(path.file_name().unwrap_or_default()))?;
        let inside = match inside {
            "" => name,
            _ => format!("{inside}/{name}"),
        };
        children.push((path, inside));
    }
    children.sort_by(|a, b| b.1.cmp(&a.1));
    Ok(children)
}

async fn send_file(frames: &mut FrameWriter, path: &Path, size: u64) -> Result<()> {
    let failed = |error| unreadable(path, error);
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .open(path)
        .map_err(failed)?;
    let mut left = size;
    let mut file: std::io::Take<File> = file.take(size);
    let mut buffer = vec![0; MAX_DATA];
    while left > 0 {
        let count = file.read(&mut buffer).map_err(failed)?;
        if count == 0 {
            return Err(Failure::new(format!(
                "{} became shorter while it was copied",
                path.display()
            )));
        }
        left -= count as u64;
        frames
            .send(&CopyFrame::Data(buffer[..count].to_vec()))
            .await?;
    }
    Ok(())
}

fn utf8(path: &Path) -> Result<String> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        Failure::new(format!(
            "{} can't be copied: its name is not UTF-8",
            path.display()
        ))
        .hint("rename it, or pack a tar inside the VM with `jiffy exec`")
    })
}

fn unreadable(path: &Path, error: std::io::Error) -> Failure {
    Failure::io(format_args!("{} can't be read", path.display()), error)
}
