//! Writes RAM of captured VMs to disk.

use super::captured::{Captured, PAGE};
use crate::error::{Error, Result};
use crate::room::disk::Room;
use jiffy_store::Outline;
use jiffy_store::optimise::{Contents, options_of};
use jiffy_store::partial::is_partial;
use jiffy_store::{
    Backing, ChunkSource, Codec, ImageError, ImageReader, Kind, LayeredFile, Recording, WriteError,
    WriteOptions, write_image, write_raw,
};
use jiffy_sys::causes;
use jiffy_sys::priority::{AWAITED, lowered};
use jiffy_wire::api::MemoryForm;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::warn;

/// Zstandard level for snapshots that are kept.
const LEVEL: i32 = 3;
/// Most ancestors of an image: a restore opens each of their files, and each keeps chunks on disk
/// that only it needs.
const MAX_GENERATIONS: usize = 16;

/// Other files in which parts of RAM may be stored already.
#[derive(Debug)]
pub struct DedupSources<'a> {
    /// The folder of the capture that this VM continued from.
    pub base: Option<&'a Path>,
    /// Digest of the root file system, whose file is in the same folder.
    pub root: &'a str,
    /// The root file system as a backing file, if RAM may refer to it.
    pub backing: Option<Backing>,
}

/// RAM's file in a capture's folder.
pub fn file_in(folder: &Path, form: MemoryForm) -> PathBuf {
    folder.join(match form {
        MemoryForm::Raw => "ram.raw",
        MemoryForm::Image => "ram.image",
    })
}

/// RAM as it was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// The form of its file.
    pub form: MemoryForm,
    /// Bytes that it takes on disk.
    pub bytes: u64,
}

/// RAM of a captured VM. The layout and the layers are asked only once which ranges have data.
struct CapturedRam {
    file: LayeredFile,
    data: Vec<Range<u64>>,
}

impl CapturedRam {
    fn of(captured: &Captured) -> io::Result<CapturedRam> {
        let layout = captured.layout()?;
        let layers = captured
            .layers
            .iter()
            .map(|layer| Ok(File::from(layer.try_clone()?)))
            .collect::<io::Result<Vec<_>>>()?;
        let file = LayeredFile::new(layers, &layout)?;
        let data = file.data_ranges()?;
        Ok(CapturedRam { file, data })
    }
}

impl ChunkSource for CapturedRam {
    fn size(&self) -> u64 {
        self.file.size()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_at(offset, buffer)
    }

    fn data_ranges(&self) -> io::Result<Vec<Range<u64>>> {
        Ok(self.data.clone())
    }
}

/// RAM or a disk of which the room for what was read is given back: what is read is written at once.
struct Reserving<'a, S> {
    source: &'a S,
    unread: Arc<AtomicU64>,
}

impl<S: ChunkSource> ChunkSource for Reserving<'_, S> {
    fn size(&self) -> u64 {
        self.source.size()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.source.read_at(offset, buffer)?;
        let read = buffer.len() as u64;
        let less = |unread: u64| Some(unread.saturating_sub(read));
        let _ = self
            .unread
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        Ok(())
    }

    fn data_ranges(&self) -> io::Result<Vec<Range<u64>>> {
        self.source.data_ranges()
    }
}

/// Bytes of the chunks of RAM or a disk that have data.
fn bytes_in(data: &[Range<u64>], chunk: u64) -> u64 {
    let (mut bytes, mut end) = (0, 0);
    for range in data {
        let start = (range.start / chunk * chunk).max(end);
        end = range.end.next_multiple_of(chunk);
        bytes += end - start;
    }
    bytes
}

fn unreadable(error: io::Error) -> Error {
    Error::vm_failed(format!(
        "The memory of the VM can't be read as its VMM described it: {error}."
    ))
}

/// Writes RAM into a capture's folder, synced, or refuses if there may be no room: blocking. It is
/// written as it is if at most `raw_up_to` bytes of it are no holes.
///
/// # Errors
///
/// If the layout or a layer can't be read, there may be no room, or the file can't be written.
pub fn write(
    folder: &Path,
    raw_up_to: Option<u64>,
    captured: &Captured,
    sources: DedupSources<'_>,
    room: &Room,
) -> Result<Written> {
    let ram = CapturedRam::of(captured).map_err(unreadable)?;
    let form = match raw_up_to {
        Some(most) if bytes_in(&ram.data, PAGE) <= most => MemoryForm::Raw,
        _ => MemoryForm::Image,
    };
    let target = &file_in(folder, form);
    let base = sources.base.filter(|_| form == MemoryForm::Image);
    let base = base.and_then(|base| built_on(base, folder, ram.size(), sources.root));
    let options = options(base);
    let unread = Arc::new(AtomicU64::new(0));
    // How much differs from a parent is known only when all is compared.
    let _room = match options.parent {
        Some(_) => None,
        None => {
            let bytes = bytes_in(&ram.data, options.chunk_size.into());
            unread.store(bytes, Ordering::Relaxed);
            let what = "The memory of the VM needs up to";
            Some(room.reserve(target, what, unread.clone())?)
        }
    };
    let source = Reserving {
        source: &ram,
        unread,
    };
    let written = match form {
        MemoryForm::Raw => write_raw(target, &source).map(|_| ()),
        MemoryForm::Image => {
            let options = WriteOptions {
                backing: sources.backing,
                ..options
            };
            write_image(target, &source, &options).map(|_| ())
        }
    };
    written.map_err(|error| write_failed(target, &error))?;
    let bytes = bytes_of(target);
    let bytes = bytes.map_err(|error| Error::io("look at a snapshot", target, &error))?;
    Ok(Written { form, bytes })
}

/// Writes an image's contents as a plain file, or refuses if there may be no room: blocking. `what`
/// begins the refusal. Much of an image may be stored once, so the file's size says nothing about it.
pub(super) fn unpack(target: &Path, image: &ImageReader, room: &Room, what: &str) -> Result<()> {
    let contents = Contents(image);
    let unreadable = |error: io::Error| Error::io("store a VM's disk", target, &error);
    let bytes = bytes_in(&contents.data_ranges().map_err(unreadable)?, 1);
    let unread = Arc::new(AtomicU64::new(bytes));
    let _room = room.reserve(target, what, unread.clone())?;
    let source = Reserving {
        source: &contents,
        unread,
    };
    write_raw(target, &source).map_err(|error| write_failed(target, &error))?;
    Ok(())
}

/// Checks that RAM's image and all its ancestors have a version that this release reads.
///
/// # Errors
///
/// If one can't be read, or is of another version: a sentence without its full stop.
pub fn check(path: &Path) -> std::result::Result<(), String> {
    let mut path = path.to_owned();
    for _ in 0..=MAX_GENERATIONS {
        let outline = Outline::read(&path).map_err(|error| causes::sentence(&error))?;
        let Some(parent) = outline.parent else {
            break;
        };
        path.set_file_name(parent.name);
    }
    Ok(())
}

fn options(base: Option<ImageReader>) -> WriteOptions {
    let whole = WriteOptions {
        codec: Codec::Zstd(LEVEL),
        ..WriteOptions::default()
    };
    match base {
        Some(base) => WriteOptions {
            chunk_size: base.chunk_size(),
            parent: Some(Arc::new(base)),
            ..whole
        },
        None => whole,
    }
}

/// Hard-links RAM of the capture in `base`, and all its ancestors, into `folder`, so that a child
/// there stays complete when `base` is removed. `None` if this RAM must be written whole.
fn built_on(base: &Path, folder: &Path, size: u64, root: &str) -> Option<ImageReader> {
    let built = link_all(base, folder, size, root);
    match built {
        Ok(reader) => reader,
        Err(why) => {
            warn!(base = %base.display(), why, "memory is stored in full, not as differences from its base");
            None
        }
    }
}

fn link_all(
    base: &Path,
    folder: &Path,
    size: u64,
    root: &str,
) -> std::result::Result<Option<ImageReader>, String> {
    let path = file_in(base, MemoryForm::Image);
    // A partial image may never become complete, so no child is built on it.
    if !path.exists() || is_partial(&path) {
        return Ok(None);
    }
    let open = |path: &Path| ImageReader::open(path).map_err(|error| error.to_string());
    let reader = open(&path)?;
    if reader.size() != size {
        return Ok(None);
    }
    let mut generations = vec![(reader.id(), path.clone())];
    let mut above = reader.parent();
    while let Some((_, parent)) = above {
        generations.push((parent.id(), parent.path().to_owned()));
        above = parent.parent();
    }
    if generations.len() >= MAX_GENERATIONS || !all_refer_to(&reader, root) {
        return Ok(None);
    }
    for (id, path) in &generations {
        match fs::hard_link(path, folder.join(base_name(&id.to_string()))) {
            // An image without changes has its parent's id; the existing file serves for both.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            linked => linked.map_err(|error| error.to_string())?,
        }
    }
    open(&folder.join(base_name(&reader.id().to_string()))).map(Some)
}

/// Whether an image and all its ancestors refer only to the root file system with this digest.
fn all_refer_to(image: &ImageReader, root: &str) -> bool {
    let mut generation = Some(image);
    while let Some(image) = generation {
        let digest = image.backing().map(|backing| backing.reference().digest);
        if digest.is_some_and(|digest| blake3::Hash::from(digest).to_hex().as_str() != root) {
            return false;
        }
        generation = image.parent().map(|(_, parent)| &**parent);
    }
    true
}

/// File name of an ancestor in the folder of a capture that is built on it.
fn base_name(id: &str) -> String {
    format!("ram.{id}.image")
}

/// The ancestors of a capture's RAM in this folder.
pub fn bases_in(folder: &Path) -> Vec<PathBuf> {
    let is_base = |name: &str| {
        let id = name
            .strip_prefix("ram.")
            .and_then(|rest| rest.strip_suffix(".image"));
        id.is_some_and(|id| !id.is_empty())
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_str().is_some_and(is_base))
        .map(|entry| entry.path())
        .collect()
}

/// Writes an image without parents and backing file: blocking. Its id stays the same.
///
/// # Errors
///
/// If the image can't be read or is damaged, or `target` can't be written.
pub fn write_whole(image: &ImageReader, target: &Path) -> Result<()> {
    let whole = options_of(image)
        .map(|options| WriteOptions {
            codec: Codec::Zstd(LEVEL),
            parent: None,
            parent_name: None,
            backing: None,
            ..options
        })
        .and_then(|options| lowered(AWAITED, || write_image(target, &Contents(image), &options)));
    whole
        .map(|_| ())
        .map_err(|error| write_failed(target, &error))
}

/// Bytes a file takes on disk.
///
/// # Errors
///
/// If `stat` fails.
pub fn bytes_of(path: &Path) -> io::Result<u64> {
    Ok(std::fs::metadata(path)?.blocks() * 512)
}

/// The error in one sentence; a full disk has a kind of its own.
pub fn write_failed(target: &Path, error: &WriteError) -> Error {
    if let Some(error) = causes::find::<io::Error>(error)
        && jiffy_sys::durable::is_full(error)
    {
        return Error::io("write a VM's memory", target, error);
    }
    let text = causes::sentence(error);
    Error::internal(format!("The VM's memory can't be written: {text}."))
}

/// Rewrites an image so that the chunks of its recording come first: blocking.
///
/// # Errors
///
/// If the recording can't be read or is of another image, or the image can't be read or written.
/// The image is then unchanged.
pub fn optimise(path: &Path, recording: &Path) -> Result<()> {
    let unreadable = |why: &dyn std::fmt::Display| {
        Error::internal(format!(
            "The recording of the snapshot can't be used: {why}."
        ))
    };
    let recording = Recording::read(recording).map_err(|error| unreadable(&error))?;
    let image = ImageReader::open(path).map_err(|error| unreadable(&error))?;
    jiffy_store::optimise(&image, &recording, path)
        .map(|_| ())
        .map_err(|error| write_failed(path, &error))
}

/// Bytes of the chunks of an image of RAM that are not all zeros: blocking.
///
/// # Errors
///
/// If the image can't be opened, or its table of chunks is damaged.
pub fn filled_bytes(image: &Path) -> std::result::Result<u64, ImageError> {
    let image = ImageReader::open(image)?;
    let mut filled = 0;
    for index in 0..image.chunks() {
        if image.kind(index)? != Kind::Zero {
            filled += u64::from(image.chunk_size());
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_sys::memfd::{self, Pages};
    use std::os::unix::fs::FileExt;

    #[test]
    fn nonzero_bytes_of_an_image_are_counted_in_whole_chunks() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ram.image");
        let mut bytes = vec![0; 1 << 20];
        bytes[100] = 1;
        bytes[512 << 10..].fill(7);
        let options = WriteOptions {
            chunk_size: 8192,
            ..WriteOptions::default()
        };
        write_image(&path, &bytes[..], &options).unwrap();
        assert_eq!(filled_bytes(&path).unwrap(), (512 << 10) + 8192);
        fs::write(&path, "none").unwrap();
        filled_bytes(&path).unwrap_err();
    }

    #[test]
    fn ram_with_little_data_is_written_as_it_is() {
        const RAM: u64 = 1 << 20;
        let memfd = |bytes: &[u8], size| {
            let file = memfd::create("test", size, Pages::Small).unwrap();
            file.write_all_at(bytes, 0).unwrap();
            Arc::new(file.into())
        };
        let layout = format!("{{\"size\":{RAM},\"covers\":[]}}");
        let layout = memfd(layout.as_bytes(), layout.len() as u64);
        let captured = Captured {
            state: Arc::clone(&layout),
            layout,
            layers: vec![memfd(&[7; 2 * PAGE as usize], RAM)],
            ram: RAM,
            pause_ns: 0,
        };
        let cases = [
            (None, MemoryForm::Image),
            (Some(2 * PAGE - 1), MemoryForm::Image),
            (Some(2 * PAGE), MemoryForm::Raw),
        ];
        for (raw_up_to, form) in cases {
            let folder = tempfile::tempdir().unwrap();
            let sources = DedupSources {
                base: None,
                root: "",
                backing: None,
            };
            let room = Room::default();
            let written = write(folder.path(), raw_up_to, &captured, sources, &room).unwrap();
            let file = file_in(folder.path(), form);
            assert_eq!((written.form, file.exists()), (form, true));
            assert_eq!(written.bytes, bytes_of(&file).unwrap());
        }
    }

    #[test]
    fn memory_is_based_only_on_snapshots_of_the_same_root() {
        let folder = tempfile::tempdir().unwrap();
        let [base, here] = ["base", "here"].map(|name| folder.path().join(name));
        fs::create_dir_all(&base).unwrap();
        let bytes = [7; 32 << 10];
        let root = base.join("root.erofs");
        fs::write(&root, &bytes[..8 << 10]).unwrap();
        let options = WriteOptions {
            backing: Some(Backing::open(&root).unwrap()),
            ..WriteOptions::default()
        };
        write_image(&base.join("ram.image"), &bytes[..], &options).unwrap();
        let digest = blake3::hash(&bytes[..8 << 10]).to_hex().to_string();
        let size = bytes.len() as u64;
        for (root, fits) in [(&*digest, true), ("another", false)] {
            fs::create_dir(&here).unwrap();
            fs::hard_link(base.join("root.erofs"), here.join("root.erofs")).unwrap();
            let built = built_on(&base, &here, size, root);
            assert_eq!(built.is_some(), fits);
            assert_eq!(bases_in(&here).len(), usize::from(fits));
            fs::remove_dir_all(&here).unwrap();
        }
    }
}
