//! Applies a layer's entries to the tree.

use crate::archive::{Archive, Entry, EntryKind};
use crate::error::ImportError;
use crate::layer::LayerStream;
use crate::tree::{Attributes, Content, Input, Kind, NameError, Piece, Tree};
use crate::xattrs::{MAX_XATTR_NAME, MAX_XATTRS, is_storable};
use std::collections::HashSet;

/// How a layer marks names of lower layers as removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whiteouts {
    /// Not at all: there is no lower layer.
    None,
    /// `.wh.NAME` and `.wh..wh..opq` (OCI image-spec `layer.md`).
    Oci,
    /// The OCI form, or the form of an overlay's upper folder: character devices 0/0 and the
    /// attribute `trusted.overlay.opaque` (Linux `Documentation/filesystems/overlayfs.rst`).
    OciOrOverlay,
}

const WHITEOUT: &[u8] = b".wh.";
/// Prefix of names reserved by aufs. They belong to no layer, except [`OPAQUE`].
const AUFS: &[u8] = b".wh..wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Totals over all layers.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Entries read, whiteouts included.
    pub entries: u64,
    /// Extended attributes left out, because an image can't hold their kind.
    pub dropped: u64,
}

/// Applies all entries of a layer's tar to the tree. `input` is the number of the file from which
/// contents are read later ([`Input::File`]).
pub(crate) fn apply(
    tree: &mut Tree,
    stream: &mut LayerStream<'_>,
    input: u32,
    whiteouts: Whiteouts,
    max_entries: u64,
    counts: &mut Counts,
) -> Result<(), ImportError> {
    let base = stream.base;
    let mut archive = Archive::new(stream);
    let mut hidden = HashSet::new();
    tree.begin_layer();
    while let Some(entry) = archive.next_entry()? {
        counts.entries += 1;
        if counts.entries > max_entries {
            return Err(ImportError::TooManyEntries(max_entries));
        }
        let path = entry.path.clone();
        let mut layer = Layer {
            tree,
            input,
            base,
            whiteouts,
            hidden: &mut hidden,
            counts,
        };
        layer.entry(entry).map_err(|error| match error {
            ApplyError::Name(source) => ImportError::Name {
                path: String::from_utf8_lossy(&path).into_owned(),
                source,
            },
            ApplyError::Other(error) => error,
        })?;
    }
    tree.end_layer();
    Ok(())
}

enum ApplyError {
    Name(NameError),
    Other(ImportError),
}

impl From<NameError> for ApplyError {
    fn from(error: NameError) -> ApplyError {
        ApplyError::Name(error)
    }
}

struct Layer<'a> {
    tree: &'a mut Tree,
    input: u32,
    base: u64,
    whiteouts: Whiteouts,
    /// Names that an overlay's whiteouts of this layer hide.
    hidden: &'a mut HashSet<Vec<u8>>,
    counts: &'a mut Counts,
}

impl Layer<'_> {
    fn entry(&mut self, mut entry: Entry) -> Result<(), ApplyError> {
        if self.whiteouts != Whiteouts::None && self.oci_whiteout(&entry.path)? {
            return Ok(());
        }
        let overlay = self.overlay_attributes(&mut entry)?;
        let is_whiteout = overlay.is_whiteout
            || match &entry.kind {
                EntryKind::CharDevice(0, 0) => true,
                // Overlayfs links whiteouts to one inode, and guests of older releases send links.
                EntryKind::HardLink(target) => self.hidden.contains(target),
                _ => false,
            };
        if self.whiteouts == Whiteouts::OciOrOverlay && is_whiteout {
            self.tree.white_out(&entry.path)?;
            self.hidden.insert(entry.path);
            return Ok(());
        }
        let attributes = self.attributes(&mut entry).map_err(ApplyError::Other)?;
        let kind = match entry.kind {
            EntryKind::HardLink(target) => {
                return Ok(self.tree.hard_link(&entry.path, &target)?);
            }
            EntryKind::File => Kind::File(self.content(&entry)),
            EntryKind::Symlink(target) => Kind::Symlink(target.into()),
            EntryKind::Folder => Kind::folder(),
            EntryKind::CharDevice(major, minor) => Kind::CharDevice(major, minor),
            EntryKind::BlockDevice(major, minor) => Kind::BlockDevice(major, minor),
            EntryKind::Fifo => Kind::Fifo,
        };
        let folder = matches!(kind, Kind::Folder(_));
        self.tree.insert(&entry.path, kind, attributes)?;
        if folder && overlay.opaque {
            self.tree.make_opaque(&entry.path)?;
        }
        Ok(())
    }

    /// Applies an OCI whiteout or opaque mark. Returns false if the name is neither.
    fn oci_whiteout(&mut self, path: &[u8]) -> Result<bool, ApplyError> {
        let trimmed = path.strip_suffix(b"/").unwrap_or(path);
        let cut = trimmed.iter().rposition(|byte| *byte == b'/');
        let (folder, name) = trimmed.split_at(cut.map_or(0, |cut| cut + 1));
        if name == OPAQUE {
            self.tree.make_opaque(folder)?;
            return Ok(true);
        }
        if name.starts_with(AUFS) || folder.starts_with(AUFS) {
            return Ok(true);
        }
        let Some(hidden) = name.strip_prefix(WHITEOUT) else {
            return Ok(false);
        };
        if [&b""[..], b".", b".."].contains(&hidden) {
            return Err(NameError::EmptyWhiteout.into());
        }
        self.tree.white_out(&[folder, hidden].concat())?;
        Ok(true)
    }

    /// Removes overlayfs's own attributes from the entry and returns their meaning. In the image
    /// they would act on any overlay that uses the image as a lower layer.
    fn overlay_attributes(&mut self, entry: &mut Entry) -> Result<Overlay, ApplyError> {
        let mut overlay = Overlay::default();
        let mut moved = false;
        entry.xattrs.retain(|name, value| {
            let own = [&b"trusted.overlay."[..], b"user.overlay."];
            let Some(name) = own.iter().find_map(|own| name.strip_prefix(*own)) else {
                return true;
            };
            match name {
                b"opaque" => overlay.opaque = value == b"y",
                b"whiteout" => overlay.is_whiteout = true,
                b"redirect" | b"metacopy" => moved = true,
                _ => {}
            }
            false
        });
        if moved && self.whiteouts == Whiteouts::OciOrOverlay {
            let path = String::from_utf8_lossy(&entry.path).into_owned();
            return Err(ApplyError::Other(ImportError::OtherLayer(path)));
        }
        Ok(overlay)
    }

    fn attributes(&mut self, entry: &mut Entry) -> Result<Attributes, ImportError> {
        let before = entry.xattrs.len();
        entry.xattrs.retain(|name, _| is_storable(name));
        self.counts.dropped += (before - entry.xattrs.len()) as u64;
        let total = crate::erofs::xattr_body(entry.xattrs.iter()).len();
        for (name, value) in &entry.xattrs {
            let rest = crate::erofs::xattr_index(name).map_or(0, |(_, rest)| rest.len());
            if rest > MAX_XATTR_NAME || value.len() > MAX_XATTRS || total > MAX_XATTRS {
                return Err(ImportError::Xattr {
                    path: String::from_utf8_lossy(&entry.path).into_owned(),
                    name: String::from_utf8_lossy(name).into_owned(),
                });
            }
        }
        Ok(Attributes {
            mode: entry.mode,
            uid: entry.uid,
            gid: entry.gid,
            mtime: entry.mtime,
            xattrs: std::mem::take(&mut entry.xattrs),
        })
    }

    fn content(&self, entry: &Entry) -> Content {
        let mut from = self.base + entry.offset;
        let mut piece = |at: u64, len: u64| {
            let piece = Piece {
                at,
                len,
                from,
                input: Input::File(self.input),
            };
            from += len;
            piece
        };
        let (size, pieces) = match &entry.sparse {
            Some(sparse) => {
                let runs = sparse.segments.iter();
                (
                    sparse.size,
                    runs.map(|run| piece(run.offset, run.len)).collect(),
                )
            }
            None if entry.size == 0 => (0, Box::from([])),
            None => (entry.size, Box::from([piece(0, entry.size)])),
        };
        Content {
            size,
            pieces,
            path: None,
        }
    }
}

/// What an entry's overlayfs attributes say.
#[derive(Default)]
struct Overlay {
    opaque: bool,
    is_whiteout: bool,
}
