//! Replays a recorded restore with several strategies, without a VM.
//!
//! The recorded chunks are read in the recorded order, once with plain reads into a buffer
//! ("read"), and once by a thread that touches them in memory whose faults are served ("fault"). A
//! sample is the time until one recorded chunk is present, whatever the strategy's own chunk size
//! is.
//!
//! * [`strategy`]: the strategies that are compared.
//! * [`read`]: plain reads.
//! * [`fault`]: real userfaultfd faults.
//! * [`report`]: figures, as a table and as JSON.

mod fault;
mod raw;
mod read;
pub mod report;
pub mod strategy;

use crate::image::{StoredImage, Unreadable};
use jiffy_store::{ImageReader, Recording};
use report::Report;
use std::io;
use std::path::{Path, PathBuf};
use strategy::{Kind, Strategy};

/// A replay.
#[derive(Debug)]
pub struct Options {
    /// The recording to replay.
    pub recording: PathBuf,
    /// The recorded image, or one with the same contents.
    pub image: PathBuf,
    /// Where the strategies' files are written, and removed afterwards.
    pub scratch: PathBuf,
    /// Runs of each strategy; the median run is reported.
    pub repeat: usize,
    /// Drop the files' page cache before each run.
    pub cold: bool,
    /// Only strategies whose names contain this text, or one of several separated by commas.
    pub only: Option<String>,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The recording.
    #[error("{} cannot be replayed", path.display())]
    Recording {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The recording is of another image.
    #[error("the recording is of the image with the id {recorded}; {} has the id {found}", path.display())]
    OtherImage {
        /// The image.
        path: PathBuf,
        /// The id in the recording.
        recorded: String,
        /// The id of the image.
        found: String,
    },
    /// The recording is empty or not valid.
    #[error("the recording {what}")]
    InvalidRecording {
        /// What is wrong with it.
        what: &'static str,
    },
    /// An image cannot be read.
    #[error(transparent)]
    Image(#[from] Unreadable),
    /// A strategy's file cannot be written.
    #[error("the file of the strategy {name} cannot be made")]
    Write {
        /// The strategy.
        name: String,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A strategy cannot be run.
    #[error("the strategy {name} cannot be run")]
    Run {
        /// The strategy.
        name: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// The chunks to be read, in order.
pub(crate) struct Touches {
    /// Bytes of a recorded chunk.
    pub chunk_size: u64,
    /// Where each begins.
    pub offsets: Vec<u64>,
    /// Bytes of the address space.
    pub size: u64,
}

/// Runs all strategies; calls `progress` with the name of each before its run.
///
/// # Errors
///
/// If the recording is not valid or of another image, the image can't be read, or a strategy's file
/// can't be written or a strategy can't be run.
pub fn replay(options: &Options, mut progress: impl FnMut(&str)) -> Result<Report, ReplayError> {
    let image = StoredImage::open(&options.image)?;
    let touches = touches(options, image.reader())?;
    let folder = tempfile::tempdir_in(&options.scratch).map_err(|source| ReplayError::Run {
        name: "(scratch folder)".into(),
        source,
    })?;
    let mut report = Report::new(&touches, image.reader());
    for strategy in strategy::all() {
        let wanted = options
            .only
            .as_ref()
            .is_none_or(|only| only.split(',').any(|one| strategy.name().contains(one)));
        if wanted {
            progress(&strategy.name());
            let (figures, file_bytes) = run(&strategy, &image, &touches, options, folder.path())?;
            report.add(&strategy, figures, file_bytes);
        }
    }
    Ok(report)
}

fn touches(options: &Options, image: &ImageReader) -> Result<Touches, ReplayError> {
    let recording =
        Recording::read(&options.recording).map_err(|source| ReplayError::Recording {
            path: options.recording.clone(),
            source,
        })?;
    if recording.image != image.id() {
        return Err(ReplayError::OtherImage {
            path: options.image.clone(),
            recorded: recording.image.to_string(),
            found: image.id().to_string(),
        });
    }
    let chunk_size = u64::from(recording.chunk_size);
    let invalid = |what| Err(ReplayError::InvalidRecording { what });
    if recording.chunks.is_empty() {
        return invalid("has no chunks");
    }
    if !chunk_size.is_power_of_two() || chunk_size < 4096 {
        return invalid("has an invalid chunk size");
    }
    let offsets: Vec<u64> = recording
        .chunks
        .iter()
        .map(|chunk| u64::from(*chunk) * chunk_size)
        .collect();
    // Only whole pages are mapped; a chunk at a truncated end is left out.
    let size = image.size() / 4096 * 4096;
    if offsets
        .iter()
        .any(|offset| offset + chunk_size > size.next_multiple_of(chunk_size))
    {
        return invalid("has chunks beyond the end of the image");
    }
    let mut offsets = offsets;
    offsets.retain(|offset| offset + chunk_size <= size);
    Ok(Touches {
        chunk_size,
        offsets,
        size,
    })
}

fn run(
    strategy: &Strategy,
    image: &StoredImage,
    touches: &Touches,
    options: &Options,
    folder: &Path,
) -> Result<(report::Figures, u64), ReplayError> {
    let prepared = strategy.prepare(image, touches, folder)?;
    let failed = |source| ReplayError::Run {
        name: strategy.name(),
        source,
    };
    let mut runs = Vec::new();
    for _ in 0..options.repeat.max(1) {
        if options.cold {
            prepared.evict().map_err(failed)?;
        } else {
            prepared.warm().map_err(failed)?;
        }
        let image = prepared.open()?;
        let figures = match strategy.kind {
            Kind::Read => read::run(&*image, touches, strategy).map_err(failed)?,
            Kind::Fault => fault::run(image, touches, strategy).map_err(failed)?,
        };
        runs.push(figures);
    }
    runs.sort_by_key(|figures| figures.total_ns);
    let middle = runs.swap_remove(runs.len() / 2);
    Ok((middle, prepared.file_bytes().map_err(failed)?))
}
