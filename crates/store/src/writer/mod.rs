//! Writes an image, on all cores, as one stream.
//!
//! * [`plan`]: which chunks, in which order, in pieces for the threads.
//! * [`workers`]: threads that read, hash and compress.
//! * [`stream`]: one thread that writes the chunks in order, then the manifest.

mod plan;
mod stream;
#[cfg(test)]
mod tests;
mod workers;

use crate::backing::Backing;
use crate::codec::{Codec, train};
use crate::error::WriteError;
use crate::format::{self, ImageId, MAX_CHUNK, MIN_CHUNK, ParentRef};
use crate::reader::ImageReader;
use crate::source::ChunkSource;
use crate::temporary::{Existing, Temporary};
use plan::Plan;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use stream::Stream;
use workers::Job;

/// Most bytes of the working set that are stored raw for quick restores.
const QUICK_BYTES: u32 = 16 << 20;

/// How an image is written.
#[derive(Debug, Clone)]
pub struct WriteOptions {
    /// Bytes of a chunk: a power of two from 4 KiB to 2 MiB. 8 KiB by default.
    pub chunk_size: u32,
    /// How chunks are compressed. LZ4 by default.
    pub codec: Codec,
    /// Whether a dictionary is trained on a sample of the contents and stored in the image; only
    /// for zstd.
    pub dictionary: bool,
    /// A chunk that does not shrink to this percentage of its size stays raw. 50 by default.
    pub raw_above_percent: u8,
    /// An image of earlier contents, with chunks of the same size: unchanged chunks are not stored
    /// again.
    pub parent: Option<Arc<ImageReader>>,
    /// The child's name for its parent, which the resolving function gets; by default the parent's
    /// file name.
    pub parent_name: Option<String>,
    /// A file whose chunks are referred to instead of being stored: the image is then readable only
    /// beside it.
    pub backing: Option<Backing>,
    /// Threads that compress; 0, the default, for one per core.
    pub threads: usize,
    /// The chunks that a restore needs, in the order of need. They are stored first and contiguous,
    /// even if the parent or the backing file has them.
    pub working_set: Option<Vec<u32>>,
    /// Whether the first 16 MiB of the working set are stored raw: a VM waits for them, and reading
    /// them from the page cache is faster than decompressing them.
    pub quick_working_set: bool,
}

impl Default for WriteOptions {
    fn default() -> WriteOptions {
        WriteOptions {
            chunk_size: 8 << 10,
            codec: Codec::default(),
            dictionary: false,
            raw_above_percent: 50,
            parent: None,
            parent_name: None,
            backing: None,
            threads: 0,
            working_set: None,
            quick_working_set: false,
        }
    }
}

/// Statistics of a written image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The id of the contents.
    pub id: ImageId,
    /// Bytes of the contents.
    pub size: u64,
    /// Bytes of a chunk.
    pub chunk_size: u32,
    /// How many chunks there are.
    pub chunks: u32,
    /// How many of them are zero.
    pub zero: u32,
    /// How many are stored raw.
    pub raw: u32,
    /// How many are stored compressed.
    pub compressed: u32,
    /// How many are in the parent.
    pub in_parent: u32,
    /// How many are in the backing file.
    pub in_backing: u32,
    /// How many have the bytes of an earlier one and are stored once.
    pub duplicates: u32,
    /// Bytes of the chunks in the file.
    pub stored_bytes: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
}

/// Writes `source` as an image called `target`: under a temporary name, synced, renamed over an
/// existing file, and the folder synced. After an error or a crash, `target` is unchanged.
///
/// # Errors
///
/// If the options contradict the format, the source or the parent can't be read, a chunk can't be
/// compressed, or the file can't be written.
pub fn write_image(
    target: &Path,
    source: &(impl ChunkSource + Sync + ?Sized),
    options: &WriteOptions,
) -> Result<Written, WriteError> {
    let temporary = Temporary::create(target)?;
    let written = match write_to(temporary.file(), source, options) {
        Err(WriteError::Target { source, .. }) => return Err(temporary.failed(source)),
        other => other?,
    };
    temporary.commit(Existing::Replace)?;
    Ok(written)
}

/// Writes `source` as an image into a stream, in order and without seeking, so a pipe or a
/// connection is sufficient.
///
/// # Errors
///
/// If the options contradict the format, the source or the parent can't be read, a chunk can't be
/// compressed, or `output` can't be written.
pub fn write_to(
    output: impl Write,
    source: &(impl ChunkSource + Sync + ?Sized),
    options: &WriteOptions,
) -> Result<Written, WriteError> {
    let size = source.size();
    let parent = check(size, options)?;
    let chunk_size = options.chunk_size;
    let working_set = options.working_set.as_deref().unwrap_or_default();
    let plan = Plan::new(source, chunk_size, working_set)?;
    let dictionary = match options.codec {
        Codec::Zstd(_) if options.dictionary => sample_and_train(source, &plan, chunk_size)?,
        _ => None,
    };
    let threads = match options.threads {
        0 => std::thread::available_parallelism().map_or(1, |cores| cores.get()),
        threads => threads,
    };
    let job = Job {
        source,
        options,
        hot: plan.hot(),
        quick: match options.quick_working_set && options.codec != Codec::None {
            true => plan.first(QUICK_BYTES, options.chunk_size),
            false => plan::Set::default(),
        },
        dictionary: dictionary.as_deref(),
    };
    let mut stream = Stream::begin(output, size, options)?;
    workers::run(&job, plan, threads, |batch| stream.add(batch))?;
    let backing = options.backing.as_ref().map(|backing| &backing.reference);
    stream.finish(dictionary.as_deref().unwrap_or_default(), parent, backing)
}

fn check(size: u64, options: &WriteOptions) -> Result<Option<ParentRef>, WriteError> {
    let refuse = |sentence: String| Err(WriteError::Options(sentence));
    let chunk_size = options.chunk_size;
    if !format::is_chunk_size(chunk_size) {
        return refuse(format!(
            "a chunk cannot have {chunk_size} bytes; it has a power of two from {MIN_CHUNK} to \
             {MAX_CHUNK} bytes"
        ));
    }
    let Some(chunks) = format::chunks(size, chunk_size) else {
        return refuse(format!(
            "{size} bytes are too many for chunks of {chunk_size} bytes"
        ));
    };
    if options.raw_above_percent > 100 {
        return refuse(format!(
            "raw_above_percent is {}; it must be at most 100",
            options.raw_above_percent
        ));
    }
    if let Codec::Zstd(level) = options.codec
        && !(1..=22).contains(&level)
    {
        return refuse(format!("zstd has levels 1 to 22, not {level}"));
    }
    let working_set = options.working_set.iter().flatten();
    if let Some(beyond) = working_set.copied().find(|index| *index >= chunks) {
        return refuse(format!(
            "the working set has chunk {beyond}; the image has only {chunks} chunks"
        ));
    }
    if let Some(backing) = &options.backing
        && !format::is_name(&backing.reference.name)
    {
        return refuse(format!(
            "'{}' cannot be a backing file's name",
            backing.reference.name
        ));
    }
    let Some(parent) = &options.parent else {
        return Ok(None);
    };
    if parent.chunk_size() != chunk_size {
        return refuse(format!(
            "the parent has chunks of {} bytes, this image would have chunks of {chunk_size}",
            parent.chunk_size()
        ));
    }
    let name = match &options.parent_name {
        Some(name) => name.clone(),
        None => match parent.path().file_name() {
            Some(name) => name.to_string_lossy().into_owned(),
            None => String::new(),
        },
    };
    if !format::is_name(&name) {
        return refuse(format!("'{name}' cannot be a parent's name"));
    }
    let id = parent.id();
    Ok(Some(ParentRef { id, name }))
}

/// Trains a dictionary on chunks that are taken evenly from all that are not holes.
fn sample_and_train(
    source: &(impl ChunkSource + ?Sized),
    plan: &Plan,
    chunk_size: u32,
) -> Result<Option<Vec<u8>>, WriteError> {
    /// About a hundred times the dictionary, as zstd's documents recommend.
    const BYTES: u64 = 8 << 20;
    let chunk_size = chunk_size as usize;
    let mut samples = Vec::new();
    let mut lengths = Vec::new();
    for index in plan.sample(BYTES / chunk_size as u64) {
        let start = samples.len();
        let offset = u64::from(index) * chunk_size as u64;
        samples.resize(start + chunk_size, 0);
        source
            .read_at(offset, &mut samples[start..])
            .map_err(|source| WriteError::Source { offset, source })?;
        if crate::codec::is_zero(&samples[start..]) {
            samples.truncate(start);
        } else {
            lengths.push(chunk_size);
        }
    }
    Ok(train(&samples, &lengths))
}
