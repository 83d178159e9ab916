//! Images of chunks: the form in which file systems are stored, beside or instead of the file
//! that VMs read, so that chunks can be shared.
//!
//! They are in one folder, named by their ids: `ID.jimg`. A child names its parent in the same way.
//! An image from a registry has only the chunks that were read so far; `ID.origins.json` names the
//! origins of the rest. The folder can be another node's peer folder.
//!
//! An id identifies the contents of an image, not the positions of its chunks, which each
//! artifact describes in its own tables. An image whose tables differ from those that are here is
//! another *packing*: it is stored beside the first as `ID.2.jimg`, with origins of its own. A
//! reader of one packing can also use the others (`store::partial::packings`). So an artifact
//! pushed with somebody else's id can't block access to the real one.

mod removal;

use crate::error::of_registry;
use crate::error::{Error, Result};
use crate::leases::{Lease, Leases};
use crate::records;
use crate::room::disk::Room;
use jiffy_registry::{Progress, RemoteFile};
use jiffy_store::Outline;
use jiffy_store::partial::{is_partial, map_path, packings};
use jiffy_store::{Codec, ImageId, ImageReader, ParentRef, WriteError, WriteOptions, write_image};
use jiffy_sys::causes;
use jiffy_sys::durable::is_full;
use jiffy_sys::mutex::lock;
use jiffy_sys::priority::{AWAITED, lowered};
use jiffy_wire::pager::Origin;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

/// Bytes of a chunk. Small chunks fetch less data that was not asked for; large chunks compress
/// better. A guest reads ahead 128 KiB at most.
pub const CHUNK: u32 = 16 << 10;
/// The part of a file in an artifact that a boot needs first.
pub const BOOT: &str = "boot";
/// All other chunks, or a file that is not cut.
pub const DATA: &str = "data";
/// Its part with the tables that say where each chunk is.
pub const TAIL: &str = "tail";
/// Most generations of an image.
pub const MAX_CHAIN: usize = 64;
/// Zstandard level.
const LEVEL: i32 = 3;
/// Suffix of the file of an image of chunks.
const SUFFIX: &str = ".jimg";
/// Suffix of the file of its map of present chunks.
const PRESENT: &str = ".present";
/// Most origins kept for an image; a guest may have to wait for each.
const MAX_ORIGINS: usize = 4;

/// Where a packing is stored or can be created. The keys are the beginnings of file names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// The whole image is here.
    Whole,
    /// Part of it is here, in the same packing.
    Same(String),
    /// This packing of it is not here; the key is free.
    Free(String),
}

/// The images of chunks of a node.
#[derive(Debug, Clone)]
pub struct Chunks {
    folder: PathBuf,
    leases: Arc<Leases>,
    /// Held while an image is begun, or origins and the access to them are added.
    recording: Arc<Mutex<()>>,
}

impl Chunks {
    /// The images of chunks in this folder, for one who removes and stores none.
    pub fn new(folder: PathBuf) -> Chunks {
        Chunks::with_leases(folder, Arc::default())
    }

    /// The images of chunks in this folder, which these leases keep from being removed.
    pub fn with_leases(folder: PathBuf, leases: Arc<Leases>) -> Chunks {
        Chunks {
            folder,
            leases,
            recording: Arc::default(),
        }
    }

    /// The file name of the image with this id, here and in artifacts.
    pub fn file_name(id: &str) -> String {
        format!("{id}{SUFFIX}")
    }

    /// The file of the image with this id.
    pub fn path(&self, id: &str) -> PathBuf {
        self.folder.join(Chunks::file_name(id))
    }

    /// The keys of an image: its id, and the names of its further packings.
    fn keys(&self, id: &str) -> Vec<String> {
        let first = self.path(id);
        let others = packings(&first);
        let key = |path: &PathBuf| {
            let stem = path.file_stem().unwrap_or_default();
            stem.to_string_lossy().into_owned()
        };
        std::iter::once(&first).chain(&others).map(key).collect()
    }

    /// The keys of the packings of an image of which only parts are here.
    pub fn partial(&self, id: &str) -> Vec<String> {
        let mut keys = self.keys(id);
        keys.retain(|key| self.is_partial(key));
        keys
    }

    /// These images and all their ancestors, those of every packing.
    pub fn with_all_parents(&self, ids: &[String]) -> Vec<String> {
        let mut all = ids.to_vec();
        let mut next = 0;
        while let Some(id) = all.get(next).cloned() {
            next += 1;
            let outlines = self.keys(&id).into_iter().map(|key| self.path(&key));
            let outlines = outlines.filter_map(|path| Outline::read(&path).ok());
            for parent in outlines.filter_map(|outline| outline.parent) {
                let parent = parent.id.to_string();
                if !all.contains(&parent) {
                    all.push(parent);
                }
            }
        }
        all
    }

    /// Finds the packing of the image with this id that this file of an artifact has, by the
    /// SHA-256 of its tables: blocking. If there are too many packings, the least recently used
    /// one is removed.
    ///
    /// # Errors
    ///
    /// If a file here can't be read or removed, `progress` is cancelled, or no file name is free.
    pub fn place_of(&self, id: &str, file: &RemoteFile, progress: &dyn Progress) -> Result<Place> {
        let mut free = None;
        let mut oldest = None;
        for (number, key) in self.keys(id).into_iter().enumerate() {
            let path = self.path(&key);
            if !path.exists() {
                free = free.or(Some(key));
                continue;
            }
            if !is_partial(&path) {
                return Ok(Place::Whole);
            }
            let same = file.has_same(TAIL, &path, progress);
            if same.map_err(|error| of_registry(&error, &path))? {
                return Ok(Place::Same(key));
            }
            // Children refer to the first packing by name, so it is not removed.
            if number > 0 {
                oldest = oldest.into_iter().chain([(last_use(&path), key)]).min();
            }
        }
        if let (None, Some((used, key))) = (&free, oldest) {
            let _one = self.recording();
            // Unless another pull has begun a new one in its place.
            if last_use(&self.path(&key)) == used {
                self.remove_packing(&key)?;
            }
            free = Some(key);
        }
        free.map(Place::Free).ok_or_else(|| {
            Error::internal(format!("No file name is free for another packing of {id}."))
        })
    }

    /// Whether any part of the image is here.
    pub fn has(&self, id: &str) -> bool {
        self.path(id).exists()
    }

    /// Whether only a part of it is here.
    pub fn is_partial(&self, id: &str) -> bool {
        is_partial(&self.path(id))
    }

    /// Where missing chunks of it can be fetched.
    pub fn origins(&self, id: &str) -> Vec<Origin> {
        records::origins::load(&self.origins_file(id)).unwrap_or_default()
    }

    /// Bytes of it that are here.
    pub fn stored(&self, id: &str) -> u64 {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(self.path(id)).map_or(0, |data| data.blocks() * 512)
    }

    /// Writes the image of chunks of a file system; returns its id and those of its ancestors,
    /// with leases on all of them: blocking. The boot set, if it is known, is stored contiguously
    /// and fetched in one request.
    ///
    /// # Errors
    ///
    /// If the file system can't be read, the parent is damaged, there is no room, or the image
    /// can't be written.
    pub fn make(
        &self,
        room: &Room,
        root: &Path,
        parent: Option<&str>,
        boot: Option<Vec<u32>>,
    ) -> Result<(Vec<String>, Vec<Lease>)> {
        let draft = tempfile::Builder::new()
            .prefix(".new-")
            .tempdir_in(&self.folder)
            .map_err(|error| cut_failed(root, &error))?;
        let path = draft.path().join("image.jimg");
        // A reader follows no more generations: after that many the image is written whole.
        let has_room = |id: &&str| {
            let chain = self.with_parents((*id).to_owned());
            chain.is_ok_and(|chain| chain.len() < MAX_CHAIN)
        };
        let id = self.write(room, root, parent.filter(has_room), boot, &path)?;
        let _lease = self.hold(std::slice::from_ref(&id));
        let to = self.path(&id);
        if !to.exists() {
            fs::rename(&path, &to)
                .and_then(|()| jiffy_sys::durable::sync_folder_of(&to))
                .map_err(|error| Error::io("name an image of chunks", &to, &error))?;
        }
        // An image that existed already has the same id, but may have other parents.
        let chain = self.with_parents(id)?;
        let leases = self.hold(&chain);
        Ok((chain, leases))
    }

    /// The image with this id and then its parents.
    fn with_parents(&self, id: String) -> Result<Vec<String>> {
        let mut chain = vec![id];
        while let Some(last) = chain.last() {
            let outline = Outline::read(&self.path(last)).map_err(|error| damaged(&error))?;
            let Some(parent) = outline.parent else {
                break;
            };
            if chain.len() == MAX_CHAIN {
                return Err(Error::internal(format!(
                    "The image of chunks {} has more than {MAX_CHAIN} generations.",
                    chain[0]
                )));
            }
            chain.push(parent.id.to_string());
        }
        Ok(chain)
    }

    /// Writes the image into `to`, outside of the folder of chunks; returns its id.
    ///
    /// # Errors
    ///
    /// As for [`Chunks::make`].
    pub fn write(
        &self,
        room: &Room,
        root: &Path,
        parent: Option<&str>,
        boot: Option<Vec<u32>>,
        to: &Path,
    ) -> Result<String> {
        let failed = |error: &io::Error| cut_failed(root, error);
        let source = File::open(root).map_err(|error| failed(&error))?;
        let metadata = source.metadata().map_err(|error| failed(&error))?;
        let size = metadata.len();
        let boot = boot.map(|mut chunks| {
            chunks.retain(|chunk| u64::from(*chunk) * u64::from(CHUNK) < size);
            chunks
        });
        let parent = match parent {
            Some(id) if !self.is_partial(id) => {
                let parent = ImageReader::open(&self.path(id)).map_err(|error| damaged(&error))?;
                // A child must have chunks of its parent's size.
                (parent.chunk_size() == CHUNK).then(|| Arc::new(parent))
            }
            // A partial parent can't be compared with.
            _ => None,
        };
        let _room = match parent {
            // Only the differences are written.
            Some(_) => None,
            None => {
                Some(room.reserve_bytes(to, "The push needs up to", metadata.blocks() * 512)?)
            }
        };
        let options = WriteOptions {
            chunk_size: CHUNK,
            codec: Codec::Zstd(LEVEL),
            parent_name: parent
                .as_ref()
                .map(|parent| Chunks::file_name(&parent.id().to_string())),
            parent,
            working_set: boot,
            ..WriteOptions::default()
        };
        let written = lowered(AWAITED, || write_image(to, &source, &options))
            .map_err(|error| write_failed(&error, to))?;
        Ok(written.id.to_string())
    }

    /// Nobody else begins an image, or adds an origin or the access to one, until this is dropped:
    /// two pulls at once would lose what the other one has added.
    pub fn recording(&self) -> MutexGuard<'_, ()> {
        lock(&self.recording)
    }

    /// Begins a partial image of which only the last bytes are here; `false` if the key is not free
    /// any more, because another pull has begun a packing with it: blocking. `origin` is called only
    /// if it is free.
    ///
    /// # Errors
    ///
    /// If `key` is no id, `origin` fails, `tail` is not that of the image, or a file can't be
    /// written.
    pub fn begin(
        &self,
        key: &str,
        length: u64,
        tail: &[u8],
        origin: impl FnOnce() -> Result<Origin>,
    ) -> Result<bool> {
        let _one = self.recording();
        if self.has(key) {
            return Ok(false);
        }
        let path = self.path(key);
        let id = key.split('.').next().unwrap_or(key);
        self.save_origins(key, &[origin()?])?;
        jiffy_store::partial::create(&path, length, tail, parse_id(id)?)
            .map_err(|error| write_failed(&error, &path))?;
        Ok(true)
    }

    /// Adds an origin from which missing chunks can be fetched; it is asked first.
    ///
    /// # Errors
    ///
    /// If `origin` fails, or the file of origins can't be written.
    pub fn add_origin(&self, id: &str, origin: impl FnOnce() -> Result<Origin>) -> Result<()> {
        let _one = self.recording();
        let known = self.origins(id);
        let origins = with_origin(&known, origin()?);
        if origins == known {
            return Ok(());
        }
        self.save_origins(id, &origins)
    }

    fn save_origins(&self, id: &str, origins: &[Origin]) -> Result<()> {
        let path = self.origins_file(id);
        records::origins::save(&path, origins)
            .map_err(|error| Error::io("write the origins of an image", &path, &error))
    }

    /// Offsets, in bytes, at which the file is cut into parts that are fetched together: the end of
    /// the boot set, if it has one, and the beginning of the tables.
    ///
    /// # Errors
    ///
    /// If the image, or a parent, can't be read or is damaged.
    pub fn cuts(&self, id: &str) -> Result<(u64, u64)> {
        self.cuts_of(&self.path(id))
    }

    /// As [`Chunks::cuts`], for a file elsewhere whose parents are here.
    ///
    /// # Errors
    ///
    /// As for [`Chunks::cuts`].
    pub fn cuts_of(&self, path: &Path) -> Result<(u64, u64)> {
        let of_parent = |_: &Path, parent: &ParentRef| Ok(self.path(&parent.id.to_string()));
        let image =
            ImageReader::open_with_parents(path, &of_parent).map_err(|error| damaged(&error))?;
        let tail = image.file_bytes() + HEADER - image.metadata_bytes();
        Ok((image.hot_range().end, tail))
    }

    fn origins_file(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}.origins.json"))
    }
}

/// When chunks were last added to or read of a partial image.
fn last_use(image: &Path) -> Option<SystemTime> {
    let map = fs::metadata(map_path(image));
    map.and_then(|map| map.modified()).ok()
}

/// These origins and a further one, which comes first and replaces an older entry for the same
/// place.
pub fn with_origin(known: &[Origin], origin: Origin) -> Vec<Origin> {
    let mut origins: Vec<Origin> = std::iter::once(origin)
        .chain(known.iter().cloned())
        .collect();
    let mut names = Vec::new();
    origins.retain(|origin| {
        let name = match origin {
            Origin::Registry(origin) => origin.reference.clone(),
            Origin::Folder { folder } => folder.display().to_string(),
        };
        let new = !names.contains(&name);
        names.push(name);
        new
    });
    origins.truncate(MAX_ORIGINS);
    origins
}

/// Bytes before the first chunk (docs/image-format.md).
const HEADER: u64 = 64;

/// Parses an id of 32 digits.
///
/// # Errors
///
/// If it is not 32 digits and letters from a to f.
pub fn parse_id(text: &str) -> Result<ImageId> {
    let wrong = || {
        let shown: String = text.chars().take(40).collect();
        Error::invalid(format!("{shown:?} is not the id of an image of chunks."))
    };
    let small = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if text.len() != 32 || !text.as_bytes().iter().all(small) {
        return Err(wrong());
    }
    u128::from_str_radix(text, 16)
        .map(|number| ImageId(number.to_be_bytes()))
        .map_err(|_| wrong())
}

fn cut_failed(root: &Path, error: &io::Error) -> Error {
    Error::io("cut a file system into chunks", root, error)
}

/// The error for a damaged image, one sentence.
pub fn damaged(error: &jiffy_store::ImageError) -> Error {
    Error::internal(format!(
        "An image of chunks can't be read: {}.",
        causes::sentence(error)
    ))
}

fn write_failed(error: &WriteError, path: &Path) -> Error {
    if let Some(error) = causes::find::<io::Error>(error)
        && is_full(error)
    {
        return Error::io("write an image of chunks", path, error);
    }
    Error::internal(format!(
        "An image of chunks can't be written: {}.",
        causes::sentence(error)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_image_stores_only_what_its_parent_lacks() {
        let folder = tempfile::tempdir().unwrap();
        let chunks = Chunks::new(folder.path().to_owned());
        let room = Room::default();
        let root = folder.path().join("root");
        let noise: Vec<u8> = (0..40 * CHUNK as usize)
            .map(|at| blake3::hash(&(at / 32).to_le_bytes()).as_bytes()[at % 32])
            .collect();
        fs::write(&root, &noise).unwrap();
        let (made, held) = chunks.make(&room, &root, None, None).unwrap();
        assert_eq!(chunks.make(&room, &root, None, None).unwrap().0, made);
        let parent = made.into_iter().next().unwrap();
        let changed = [&noise[..], &[7; 5000]].concat();
        fs::write(&root, &changed).unwrap();
        let (made, _) = chunks.make(&room, &root, Some(&parent), None).unwrap();
        let child = made[0].clone();
        assert_eq!(made, [child.clone(), parent.clone()]);
        // The image keeps its parent when it is made again without one.
        let (again, both_held) = chunks.make(&room, &root, None, None).unwrap();
        assert_eq!(again, made);
        assert!(made.iter().all(|id| chunks.held().contains(id)));
        drop(both_held);
        assert!(chunks.stored(&child) * 4 < chunks.stored(&parent));
        let image = ImageReader::open(&chunks.path(&child)).unwrap();
        let mut last = vec![0; CHUNK as usize];
        image.read_chunk(image.chunks() - 1, &mut last).unwrap();
        assert_eq!(&last[..5000], &[7; 5000]);
        let (_, tail) = chunks.cuts(&child).unwrap();
        assert!(tail >= HEADER && tail < image.file_bytes());
        drop(image);

        // The same image, begun from its last bytes only.
        let whole = fs::read(chunks.path(&parent)).unwrap();
        let (_, tail) = chunks.cuts(&parent).unwrap();
        let other = tempfile::tempdir().unwrap();
        let there = Chunks::new(other.path().to_owned());
        let origin = |path: &str| Origin::Folder {
            folder: folder.path().join(path),
        };
        let (tail, length) = (&whole[tail as usize..], whole.len() as u64);
        let begin = |id, path| there.begin(id, length, tail, || Ok(origin(path)));
        assert!(begin(&parent, "").unwrap());
        assert!(there.has(&parent) && there.is_partial(&parent));
        assert_eq!(there.origins(&parent), [origin("")]);
        assert!(begin(&child, "").is_err());
        // Another pull has found the same key free: it does not take its own origin for recorded.
        assert!(!begin(&parent, "other").unwrap());
        assert_eq!(there.origins(&parent), [origin("")]);
        // Pulls at once lose no origin of each other.
        std::thread::scope(|scope| {
            let (there, parent, origin) = (&there, &parent, &origin);
            for path in ["one", "two", "three"] {
                scope.spawn(move || there.add_origin(parent, || Ok(origin(path))).unwrap());
            }
        });
        assert_eq!(there.origins(&parent).len(), 4);
        // Held images are kept, with the files beside them.
        assert_eq!(chunks.remove_unused(|id| id == child), 0);
        drop(held);
        let held = there.hold(std::slice::from_ref(&parent));
        assert_eq!(there.held(), [parent.as_str()]);
        assert_eq!(there.remove_unused(|_| false), 0);
        there.sweep();
        assert!(there.is_partial(&parent));
        drop(held);
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
    fn after_the_most_generations_an_image_is_written_whole() {
        let folder = tempfile::tempdir().unwrap();
        let chunks = Chunks::new(folder.path().to_owned());
        let (room, root) = (Room::default(), folder.path().join("root"));
        let mut parent: Option<String> = None;
        for generation in 1..=MAX_CHAIN + 2 {
            fs::write(&root, generation.to_string().repeat(CHUNK as usize)).unwrap();
            let made = chunks.make(&room, &root, parent.as_deref(), None);
            let (made, _held) = made.unwrap();
            assert_eq!(made.len(), (generation - 1) % MAX_CHAIN + 1);
            chunks.cuts(&made[0]).unwrap();
            parent = made.into_iter().next();
        }
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
