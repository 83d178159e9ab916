//! Imports a source into an image file.

use crate::apply::{Counts, Whiteouts, apply};
use crate::config::ImageConfig;
use crate::erofs::{self, Inputs, Plan};
use crate::error::ImportError;
use crate::layer::{self, Bounds, Spool};
use crate::limits::Limits;
use crate::scratch::Scratch;
use crate::source::{Choice, Contents, LayerInput, Source, SourceKind, folder};
use crate::tree::Tree;
use std::fs::File;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Result of an import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// BLAKE3 of the image, hexadecimal.
    pub digest: String,
    /// Bytes of the image.
    pub size: u64,
    /// Files, folders, links, devices and whiteouts read from the source.
    pub entries: u64,
    /// Extended attributes left out, because EROFS can't store their kind.
    pub dropped_xattrs: u64,
    /// The image's run configuration.
    pub config: ImageConfig,
}

/// Progress of an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// Layers are being read, unpacked and checked.
    Reading {
        /// Bytes of all layers read so far, as stored (compressed).
        done: u64,
        /// Bytes of all layers as stored; 0 if not known.
        total: u64,
    },
    /// The image is being written.
    Writing {
        /// Bytes written so far.
        done: u64,
        /// Bytes of the image.
        total: u64,
    },
}

/// Called with the progress; `Break` cancels the import with [`ImportError::Cancelled`].
pub type Watch<'a> = &'a mut dyn FnMut(Progress) -> ControlFlow<()>;

/// Writes `source` as an EROFS image to `out`, which appears complete or not at all. The same contents
/// give the same bytes, whatever the format of the source.
///
/// Blocks. Memory grows with the number of entries, not with their contents. Packed layers are
/// unpacked into an unnamed file in `out`'s folder.
///
/// # Errors
///
/// If the source can't be read, has no entries, or is refused: a layer's digest or size is wrong, a
/// name can't be stored, or `limits` are exceeded. Also if `out` can't be written, or `watch`
/// cancels it. Nothing is left behind.
pub fn import(
    source: Source,
    out: &Path,
    limits: &Limits,
    watch: Watch<'_>,
) -> Result<Imported, ImportError> {
    let target = Target::new(out)?;
    let scratch = target.scratch();
    let imported = write_source(source, target.file(), &scratch, true, limits, watch)?;
    target.publish()?;
    Ok(imported)
}

/// [`import`] into an empty file, which is not synced, with temporary files of the caller's choice.
/// The digest is empty: it is left to those who own the file.
///
/// # Errors
///
/// As for [`import`]. What was written to `image` stays.
pub fn import_into(
    source: Source,
    image: &File,
    scratch: &Scratch,
    limits: &Limits,
    watch: Watch<'_>,
) -> Result<Imported, ImportError> {
    write_source(source, image, scratch, false, limits, watch)
}

fn write_source(
    source: Source,
    image: &File,
    scratch: &Scratch,
    hashed: bool,
    limits: &Limits,
    watch: Watch<'_>,
) -> Result<Imported, ImportError> {
    let mut tree = Tree::new(limits.entries, limits.metadata_bytes);
    let mut inputs = Inputs::default();
    let whiteouts = match source.kind {
        SourceKind::RootTar | SourceKind::Folder => Whiteouts::None,
        _ => Whiteouts::Oci,
    };
    let config = source.config;
    let counts = read_source(
        source.contents,
        whiteouts,
        &mut tree,
        &mut inputs,
        scratch,
        limits,
        watch,
    )?;
    if counts.entries == 0 {
        return Err(ImportError::Empty);
    }
    let plan = Plan::new(&tree, None, limits.image_bytes)?;
    let digest = write(&plan, &inputs, image, hashed, watch)?.unwrap_or_default();
    Ok(Imported {
        digest,
        size: plan.size(),
        entries: counts.entries,
        dropped_xattrs: counts.dropped,
        config,
    })
}

/// Imports a stream of any format that [`Source::stream`] accepts.
///
/// # Errors
///
/// If the stream is not such an archive or can't be unpacked, or [`import`] fails.
pub fn import_tar(reader: impl Read, out: &Path, limits: Limits) -> Result<Imported, ImportError> {
    let mut choice = Choice::new(folder_of(out));
    choice.limits = limits;
    let source = Source::stream(reader, &choice)?;
    import(source, out, &limits, &mut |_| ControlFlow::Continue(()))
}

/// Reads all names and attributes of a source into the tree; contents stay in their files.
pub(crate) fn read_source(
    contents: Contents,
    whiteouts: Whiteouts,
    tree: &mut Tree,
    inputs: &mut Inputs,
    scratch: &Scratch,
    limits: &Limits,
    watch: Watch<'_>,
) -> Result<Counts, ImportError> {
    let layers = match contents {
        Contents::Folder(path) => {
            let mut tick = || watch(Progress::Reading { done: 0, total: 0 });
            let walked = folder::walk(&path, tree, &mut tick)?;
            inputs.folder = Some(walked.folder);
            return Ok(Counts {
                entries: walked.entries,
                dropped: walked.dropped,
            });
        }
        Contents::Layers(layers) => layers,
    };
    let total = layers.iter().map(|layer| layer.blob.len).sum();
    let of = layers.len();
    let mut reading = Reading {
        tree,
        inputs,
        whiteouts,
        limits,
        spool: Spool::new(scratch)?,
        counts: Counts::default(),
        unpacked: 0,
        seen: AtomicU64::new(0),
        total,
    };
    for (index, input) in layers.into_iter().enumerate() {
        let name = input.name.clone();
        reading.layer(input, watch).map_err(|error| match error {
            ImportError::Cancelled => ImportError::Cancelled,
            error if of == 1 && name.is_empty() => error,
            error => ImportError::InLayer {
                number: index + 1,
                of,
                name,
                source: Box::new(error),
            },
        })?;
    }
    Ok(reading.counts)
}

/// State while layers are read.
struct Reading<'a> {
    tree: &'a mut Tree,
    inputs: &'a mut Inputs,
    whiteouts: Whiteouts,
    limits: &'a Limits,
    spool: Spool,
    counts: Counts,
    /// Unpacked bytes of the layers read so far.
    unpacked: u64,
    seen: AtomicU64,
    total: u64,
}

impl Reading<'_> {
    fn layer(&mut self, input: LayerInput, watch: Watch<'_>) -> Result<(), ImportError> {
        let number = self.inputs.files.len() as u32;
        let bounds = Bounds {
            bytes: self.limits.unpacked_bytes - self.unpacked,
            ratio: self.limits.ratio,
        };
        let (seen, total) = (&self.seen, self.total);
        let mut tick = || {
            let done = seen.load(Ordering::Relaxed);
            watch(Progress::Reading { done, total })
        };
        let (tree, counts) = (&mut *self.tree, &mut self.counts);
        let (whiteouts, max) = (self.whiteouts, self.limits.entries);
        let ((), unpacked) = layer::unpack(
            &input.blob,
            &input.expected,
            bounds,
            &mut self.spool,
            seen,
            &mut tick,
            |stream| apply(tree, stream, number, whiteouts, max, counts),
        )?;
        self.unpacked += unpacked.tar.len;
        self.inputs.files.push(unpacked.tar.file);
        Ok(())
    }
}

/// A temporary file that is renamed to its final name when it is complete.
pub(crate) struct Target<'a> {
    file: tempfile::NamedTempFile,
    out: &'a Path,
}

impl<'a> Target<'a> {
    /// A temporary file in the folder of `out`.
    ///
    /// # Errors
    ///
    /// If it can't be created.
    pub fn new(out: &'a Path) -> io::Result<Target<'a>> {
        Ok(Target {
            file: tempfile::NamedTempFile::new_in(folder_of(out))?,
            out,
        })
    }

    /// Temporary files in the same folder.
    pub fn scratch(&self) -> Scratch {
        Scratch::Folder(folder_of(self.out).to_owned())
    }

    pub fn file(&self) -> &File {
        self.file.as_file()
    }

    /// Syncs the file, renames it and syncs its folder.
    ///
    /// # Errors
    ///
    /// If the file can't be synced or renamed.
    pub fn publish(self) -> io::Result<()> {
        self.file.as_file().sync_all()?;
        let folder = folder_of(self.out);
        self.file.persist(self.out).map_err(|error| error.error)?;
        File::open(folder)?.sync_all()
    }
}

/// Writes the image. With `hashed`, returns its digest if all of it was written, `None` for a child.
pub(crate) fn write(
    plan: &Plan<'_>,
    inputs: &Inputs,
    image: &File,
    hashed: bool,
    watch: Watch<'_>,
) -> Result<Option<String>, ImportError> {
    let total = plan.size();
    let mut told = |done| watch(Progress::Writing { done, total });
    let hash = erofs::write(plan, inputs, image, hashed, &mut told)?;
    Ok(hash.map(|hash| hash.to_hex().to_string()))
}

pub(crate) fn folder_of(out: &Path) -> &Path {
    out.parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Opens an image of Jiffy's format.
pub(crate) fn open_image(path: &Path) -> Result<erofs::Readable, ImportError> {
    let failed = |source| ImportError::Image {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(|error| failed(error.into()))?;
    erofs::Readable::open(Arc::new(file)).map_err(failed)
}
