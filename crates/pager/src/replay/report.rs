//! Figures, as a table and as JSON.

use super::Touches;
use super::strategy::{Kind, Strategy};
use jiffy_store::ImageReader;
use jiffy_sys::clock::monotonic_ns;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::fmt;

/// Measurements of one run of a strategy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figures {
    /// Recorded chunks.
    pub count: usize,
    /// Reads of a file, or page faults.
    pub requests: u64,
    /// Time from the first chunk to the last, nanoseconds.
    pub total_ns: u64,
    /// Mean time until a chunk was present, nanoseconds.
    pub mean_ns: u64,
    /// Minimum.
    pub min_ns: u64,
    /// Median.
    pub p50_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// Maximum.
    pub max_ns: u64,
    /// Recorded bytes over the total time.
    pub mib_per_s: f64,
    /// CPU time of the whole process, nanoseconds.
    pub cpu_ns: u64,
}

/// Measures the times of samples.
pub(super) struct Meter {
    bytes: u64,
    begun: u64,
    cpu_begun: u64,
    sample_begun: u64,
    samples: Vec<u64>,
    pub faults: u64,
}

impl Meter {
    pub fn start(touches: &Touches) -> Meter {
        Meter {
            bytes: touches.offsets.len() as u64 * touches.chunk_size,
            samples: Vec::with_capacity(touches.offsets.len()),
            sample_begun: 0,
            faults: 0,
            cpu_begun: cpu_ns(),
            begun: monotonic_ns(),
        }
    }

    pub fn begin(&mut self) {
        self.sample_begun = monotonic_ns();
    }

    pub fn end(&mut self) {
        self.end_shared(1);
    }

    /// Ends a measurement that `count` samples share equally.
    pub fn end_shared(&mut self, count: usize) {
        let took = monotonic_ns() - self.sample_begun;
        let each = took / count.max(1) as u64;
        self.samples.extend(std::iter::repeat_n(each, count));
    }

    /// Adds samples that took no time.
    pub fn pad(&mut self, count: usize) {
        self.samples.resize(count.max(self.samples.len()), 0);
    }

    pub fn finish(mut self) -> Figures {
        let total_ns = monotonic_ns() - self.begun;
        let cpu_ns = cpu_ns() - self.cpu_begun;
        self.samples.sort_unstable();
        let count = self.samples.len();
        let at = |per_cent: usize| {
            let rank = (count * per_cent).div_ceil(100).max(1) - 1;
            self.samples.get(rank).copied().unwrap_or(0)
        };
        Figures {
            count,
            requests: self.faults,
            total_ns,
            mean_ns: self.samples.iter().sum::<u64>() / count.max(1) as u64,
            min_ns: at(0),
            p50_ns: at(50),
            p99_ns: at(99),
            max_ns: at(100),
            mib_per_s: self.bytes as f64 / (1 << 20) as f64 / (total_ns.max(1) as f64 / 1e9),
            cpu_ns,
        }
    }
}

fn cpu_ns() -> u64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A line of the report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// The strategy's name.
    pub name: String,
    /// By reads or by faults.
    pub kind: &'static str,
    /// How bytes are stored.
    pub stored: String,
    /// Bytes of a chunk.
    pub chunk_size: u32,
    /// The recorded chunks are stored first and prefetched.
    pub prefetch: bool,
    /// Bytes filled around a fault.
    pub fault_around: u64,
    /// The file's bytes on the disk.
    pub file_bytes: u64,
    /// The measurements.
    #[serde(flatten)]
    pub figures: Figures,
    /// How many times as fast as the sparse file, page by page, of the same
    /// kind in the same run.
    pub times_sparse: Option<f64>,
}

/// The result of a replay.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Recorded chunks.
    pub chunks: usize,
    /// Bytes of a recorded chunk.
    pub chunk_size: u64,
    /// Recorded bytes.
    pub bytes: u64,
    /// Bytes of RAM.
    pub image_bytes: u64,
    /// Bytes of the image's file.
    pub image_file_bytes: u64,
    /// One line for each strategy.
    pub strategies: Vec<Line>,
}

impl Report {
    pub(super) fn new(touches: &Touches, image: &ImageReader) -> Report {
        let chunks = touches.offsets.len();
        Report {
            chunks,
            chunk_size: touches.chunk_size,
            bytes: chunks as u64 * touches.chunk_size,
            image_bytes: image.size(),
            image_file_bytes: image.file_bytes(),
            strategies: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, strategy: &Strategy, figures: Figures, file_bytes: u64) {
        let kind = match strategy.kind {
            Kind::Read => "read",
            Kind::Fault => "fault",
        };
        // The first of its kind.
        let sparse = self
            .strategies
            .iter()
            .find(|line| line.kind == kind && line.stored == "sparse")
            .map(|line| line.figures.total_ns as f64 / figures.total_ns.max(1) as f64);
        self.strategies.push(Line {
            name: strategy.name(),
            kind,
            stored: strategy.stored(),
            chunk_size: strategy.chunk_size,
            prefetch: strategy.prefetch,
            fault_around: strategy.fault_around,
            file_bytes,
            figures,
            times_sparse: sparse,
        });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} chunks of {} KiB ({:.1} MiB) of an image of {} MiB in {:.1} MiB\n",
            self.chunks,
            self.chunk_size >> 10,
            mib(self.bytes),
            self.image_bytes >> 20,
            mib(self.image_file_bytes),
        )?;
        writeln!(
            f,
            "{:<34} {:>8} {:>9} {:>8} {:>7} {:>7} {:>8} {:>8} {:>8} {:>9} {:>8} {:>7}",
            "strategy",
            "requests",
            "total ms",
            "mean us",
            "min us",
            "p50 us",
            "p99 us",
            "max us",
            "MiB/s",
            "file MiB",
            "CPU ms",
            "x sparse",
        )?;
        for line in &self.strategies {
            let figures = &line.figures;
            let times = line
                .times_sparse
                .map_or(String::new(), |times| format!("{times:.1}"));
            writeln!(
                f,
                "{:<34} {:>8} {:>9.2} {:>8.2} {:>7.2} {:>7.2} {:>8.1} {:>8.0} {:>8.0} {:>9.1} {:>8.1} {:>7}",
                line.name,
                figures.requests,
                figures.total_ns as f64 / 1e6,
                figures.mean_ns as f64 / 1e3,
                figures.min_ns as f64 / 1e3,
                figures.p50_ns as f64 / 1e3,
                figures.p99_ns as f64 / 1e3,
                figures.max_ns as f64 / 1e3,
                figures.mib_per_s,
                mib(line.file_bytes),
                figures.cpu_ns as f64 / 1e6,
                times,
            )?;
        }
        Ok(())
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}
