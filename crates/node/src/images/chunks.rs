//! Images of chunks: what file systems are kept in beside, or in place of, the
//! file that VMs read, so that they can be shared piece by piece.
//!
//! They lie in one folder, named by what they hold: `ID.jimg`. A child names
//! its parent so too. Of one that came from a registry only what was read is
//! here; `ID.origins.json` says where the rest is. The folder is one that
//! other nodes can be told to look into first.

use crate::durable;
use crate::error::{Error, Result, is_full};
use jiffy_store::partial::is_partial;
use jiffy_store::{Codec, ImageId, ImageReader, WriteError, WriteOptions, write_image};
use jiffy_wire::pager::Origin;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of a chunk. Small ones move less that nobody asked for; large ones
/// pack better. A guest reads ahead 128 KiB at most.
const CHUNK: u32 = 16 << 10;
/// How hard chunks are packed.
const LEVEL: i32 = 3;
const FORMAT: &str = "jiffy-origins";
const VERSION: u32 = 1;

/// The images of chunks of a node.
#[derive(Debug, Clone)]
pub struct Chunks {
    folder: PathBuf,
}

impl Chunks {
    /// Those in this folder.
    pub fn new(folder: PathBuf) -> Chunks {
        Chunks { folder }
    }

    /// What the image with this id is called, here and in artifacts.
    pub fn file_name(id: &str) -> String {
        format!("{id}.jimg")
    }

    /// Where the image with this id is.
    pub fn path(&self, id: &str) -> PathBuf {
        self.folder.join(Chunks::file_name(id))
    }

    /// Is it here, whole or not?
    pub fn has(&self, id: &str) -> bool {
        self.path(id).exists()
    }

    /// Is only part of it here?
    pub fn is_partial(&self, id: &str) -> bool {
        is_partial(&self.path(id))
    }

    /// Where what is missing of it can be had.
    pub fn origins(&self, id: &str) -> Vec<Origin> {
        durable::load(&self.origins_file(id), FORMAT, VERSION).unwrap_or_default()
    }

    /// Bytes of it that are here.
    pub fn stored(&self, id: &str) -> u64 {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(self.path(id)).map_or(0, |data| data.blocks() * 512)
    }

    /// Writes the image of chunks of a file system, and gives its id: blocking.
    pub fn make(&self, root: &Path, parent: Option<&str>) -> Result<String> {
        let failed = |error: &io::Error| Error::io("cut an image into chunks", root, error);
        let source = File::open(root).map_err(|error| failed(&error))?;
        let draft = tempfile::Builder::new()
            .prefix(".new-")
            .tempdir_in(&self.folder)
            .map_err(|error| failed(&error))?;
        let parent = match parent {
            Some(id) if !self.is_partial(id) => {
                let parent = ImageReader::open(&self.path(id)).map_err(|error| damaged(&error))?;
                // A child's chunks are as large as its parent's.
                (parent.chunk_size() == CHUNK).then(|| Arc::new(parent))
            }
            // Of a parent that is not all here nothing could be compared.
            _ => None,
        };
        let options = WriteOptions {
            chunk_size: CHUNK,
            codec: Codec::Zstd(LEVEL),
            parent_name: parent
                .as_ref()
                .map(|parent| Chunks::file_name(&parent.id().to_string())),
            parent,
            ..WriteOptions::default()
        };
        let path = draft.path().join("image.jimg");
        let written =
            write_image(&path, &source, &options).map_err(|error| write_failed(&error, &path))?;
        let id = written.id.to_string();
        let to = self.path(&id);
        if !to.exists() {
            fs::rename(&path, &to)
                .and_then(|()| jiffy_sys::durable::sync_folder_of(&to))
                .map_err(|error| Error::io("name an image of chunks", &to, &error))?;
        }
        Ok(id)
    }

    /// Begins an image of which only the last bytes are here: blocking.
    pub fn begin(&self, id: &str, length: u64, tail: &[u8], origins: &[Origin]) -> Result<()> {
        if self.has(id) {
            return Ok(());
        }
        let path = self.path(id);
        durable::save(&self.origins_file(id), FORMAT, VERSION, &origins, true)
            .map_err(|error| Error::io("write where an image's bytes are", &path, &error))?;
        jiffy_store::partial::create(&path, length, tail, parse_id(id)?)
            .map_err(|error| write_failed(&error, &path))
    }

    /// Where its parts lie that are fetched together: the boot set's end, if it
    /// has one, and the beginning of its tables.
    pub fn cuts(&self, id: &str) -> Result<(u64, u64)> {
        let image = ImageReader::open(&self.path(id)).map_err(|error| damaged(&error))?;
        let tail = image.file_bytes() + HEADER - image.metadata_bytes();
        Ok((image.hot_range().end, tail))
    }

    /// Removes all that is not wanted; gives the bytes that are free again.
    pub fn remove_unused(&self, wanted: impl Fn(&str) -> bool) -> u64 {
        let mut bytes = 0;
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(id) = name.strip_suffix(".jimg").filter(|id| parse_id(id).is_ok()) else {
                continue;
            };
            if wanted(id) {
                continue;
            }
            bytes += self.stored(id);
            let path = self.path(id);
            let _ = fs::remove_file(&path);
            let _ = fs::remove_file(jiffy_store::partial::map_path(&path));
            let _ = fs::remove_file(self.origins_file(id));
        }
        bytes
    }

    fn origins_file(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}.origins.json"))
    }
}

/// Bytes before the first chunk (docs/image-format.md).
const HEADER: u64 = 64;

/// The id that these 32 digits are.
pub fn parse_id(text: &str) -> Result<ImageId> {
    let wrong = || {
        let shown: String = text.chars().take(40).collect();
        Error::invalid(format!("{shown:?} is no id of an image of chunks."))
    };
    let small = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if text.len() != 32 || !text.as_bytes().iter().all(small) {
        return Err(wrong());
    }
    u128::from_str_radix(text, 16)
        .map(|number| ImageId(number.to_be_bytes()))
        .map_err(|_| wrong())
}

fn damaged(error: &jiffy_store::ImageError) -> Error {
    Error::internal(format!(
        "An image of chunks can't be read: {}.",
        chain(error)
    ))
}

fn write_failed(error: &WriteError, path: &Path) -> Error {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(error) = cause.downcast_ref::<io::Error>()
            && is_full(error)
        {
            return Error::io("write an image of chunks", path, error);
        }
        source = cause.source();
    }
    Error::internal(format!(
        "An image of chunks can't be written: {}.",
        chain(error)
    ))
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = cause.source();
    }
    text.trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_has_only_what_its_parent_has_not() {
        let folder = tempfile::tempdir().unwrap();
        let chunks = Chunks::new(folder.path().to_owned());
        let root = folder.path().join("root");
        let noise: Vec<u8> = (0..40 * CHUNK as usize)
            .map(|at| blake3::hash(&(at / 32).to_le_bytes()).as_bytes()[at % 32])
            .collect();
        fs::write(&root, &noise).unwrap();
        let parent = chunks.make(&root, None).unwrap();
        assert_eq!(chunks.make(&root, None).unwrap(), parent);
        let changed = [&noise[..], &[7; 5000]].concat();
        fs::write(&root, &changed).unwrap();
        let child = chunks.make(&root, Some(&parent)).unwrap();
        assert!(chunks.stored(&child) * 4 < chunks.stored(&parent));
        let image = ImageReader::open(&chunks.path(&child)).unwrap();
        let mut last = vec![0; CHUNK as usize];
        image.read_chunk(image.chunks() - 1, &mut last).unwrap();
        assert_eq!(&last[..5000], &[7; 5000]);
        let (_, tail) = chunks.cuts(&child).unwrap();
        assert!(tail >= HEADER && tail < image.file_bytes());
        drop(image);

        // The same from its last bytes only.
        let whole = fs::read(chunks.path(&parent)).unwrap();
        let (_, tail) = chunks.cuts(&parent).unwrap();
        let other = tempfile::tempdir().unwrap();
        let there = Chunks::new(other.path().to_owned());
        let origins = [Origin::Folder {
            folder: folder.path().to_owned(),
        }];
        let tail = &whole[tail as usize..];
        there
            .begin(&parent, whole.len() as u64, tail, &origins)
            .unwrap();
        assert!(there.has(&parent) && there.is_partial(&parent));
        assert_eq!(there.origins(&parent), origins);
        assert!(
            there
                .begin(&child, whole.len() as u64, tail, &origins)
                .is_err()
        );
        assert!(there.remove_unused(|_| false) > 0);
        assert_eq!(
            fs::read_dir(other.path())
                .unwrap()
                .filter(|entry| {
                    entry
                        .as_ref()
                        .unwrap()
                        .file_name()
                        .to_string_lossy()
                        .contains(&parent)
                })
                .count(),
            0
        );
    }

    #[test]
    fn an_id_has_32_digits() {
        let id = parse_id("00112233445566778899aabbccddeeff").unwrap();
        assert_eq!(id.to_string(), "00112233445566778899aabbccddeeff");
        for wrong in [
            "",
            "0",
            "00112233445566778899AABBCCDDEEFF",
            "../../../etc/passwd0000000000000",
        ] {
            assert!(parse_id(wrong).is_err(), "{wrong}");
        }
    }
}
