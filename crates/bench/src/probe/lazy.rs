//! Measures restores from a compressed image; `jiffy-pager` serves the page faults.

use super::Running;
use super::restore::{Memory, RAM, SNAPSHOT, Stage, timed};
use crate::plan::{IMAGE, LazyMode, RECORDING, Sample};
use anyhow::{Context, Result, bail};
use jiffy_store::{ImageReader, Recording, WriteOptions, optimise, write_image};
use jiffy_wire::lines;
use jiffy_wire::pager::{PagerRequest, PagerResponse, PagerStats};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const PAGER: &str = "/lib/jiffy/jiffy-pager";
const CONTROL: &str = "/tmp/bench-pager.sock";
const SOCKET: &str = "/tmp/bench-pager-vm.sock";
const NAME: &str = "bench";

/// Measures one restore; the first one starts the pager.
///
/// # Errors
///
/// If the pager can't be started, or the restored guest writes no marker.
pub fn restore(
    stage: &mut Stage,
    kept: &mut Option<Pager>,
    how: LazyMode,
    spare: bool,
) -> Result<Sample> {
    stage.end_parent()?;
    let pager = match kept.take() {
        None => Pager::start(stage, how)?,
        Some(pager) if how == LazyMode::First => pager.restart()?,
        Some(pager) => pager,
    };
    kept.insert(pager).restore(stage, spare)
}

/// A pager, and the image it serves.
pub struct Pager {
    _process: Running,
    how: LazyMode,
    /// Whether the image is optimised: the recorded working set is stored first.
    optimised: bool,
}

impl Pager {
    /// Writes the captured RAM as an image. Unless chunks are fetched on demand, records a
    /// restore and optimises the image.
    fn start(stage: &Stage, how: LazyMode) -> Result<Pager> {
        write_image(
            Path::new(IMAGE),
            &File::open(RAM)?,
            &WriteOptions::default(),
        )
        .context(IMAGE)?;
        let mut pager = Pager {
            _process: start()?,
            how,
            optimised: false,
        };
        if how != LazyMode::OnDemand {
            pager.record(stage)?;
            pager.optimised = true;
        }
        Ok(pager)
    }

    /// Restarts the pager, so that it has not served the image yet.
    fn restart(self) -> Result<Pager> {
        let (how, optimised) = (self.how, self.optimised);
        drop(self);
        let process = start()?;
        // Waits, because a process that has just run does not preempt others when it wakes up.
        std::thread::sleep(Duration::from_millis(50));
        Ok(Pager {
            _process: process,
            how,
            optimised,
        })
    }

    /// Records a restore.
    fn record(&self, stage: &Stage) -> Result<()> {
        self.serve(Some(RECORDING.into()))?;
        let (_, child) = timed(stage, &memory(false), false)?;
        // Also record what it touches right after the marker.
        std::thread::sleep(Duration::from_millis(20));
        drop(child);
        self.forget()?;
        let recording = Recording::read(Path::new(RECORDING)).context(RECORDING)?;
        let plain = ImageReader::open(Path::new(IMAGE)).context(IMAGE)?;
        optimise(&plain, &recording, Path::new(&self.image(true))).context("optimise")?;
        Ok(())
    }

    fn image(&self, optimised: bool) -> String {
        match optimised {
            true => format!("{SNAPSHOT}/ram.optimised"),
            false => IMAGE.into(),
        }
    }

    fn serve(&self, record: Option<PathBuf>) -> Result<()> {
        let _ = std::fs::remove_file(SOCKET);
        done(&PagerRequest::Serve {
            name: NAME.into(),
            socket: SOCKET.into(),
            image: self.image(self.optimised).into(),
            record,
            prefetch: self.optimised,
        })
    }

    fn forget(&self) -> Result<()> {
        done(&PagerRequest::Forget { name: NAME.into() })
    }

    /// Measures one restore from the spawn of the VMM, or from the order to a spare; the `Serve`
    /// request before it is a span.
    fn restore(&self, stage: &Stage, spare: bool) -> Result<Sample> {
        let start = super::now_ns();
        self.serve(None)?;
        let told = super::now_ns() - start;
        let (mut sample, child) = timed(stage, &memory(self.optimised), spare)?;
        let stats = match ask(&PagerRequest::Stats { name: NAME.into() })? {
            PagerResponse::Stats(stats) => stats,
            other => bail!("the pager answers {other:?}"),
        };
        if self.how == LazyMode::Again {
            // The pager stores the working set in memory for the next restore.
            std::thread::sleep(Duration::from_millis(50));
        }
        drop(child);
        self.forget()?;
        sample.spans.insert("pager told".into(), told);
        sample.counters.extend(counters(&stats));
        Ok(sample)
    }
}

fn memory(working_set: bool) -> Memory {
    Memory::Paged(SOCKET.into(), working_set)
}

fn counters(stats: &PagerStats) -> BTreeMap<String, u64> {
    [
        ("pager_faults", stats.faults),
        ("pager_fault_ns", stats.fault_ns),
        ("pager_prefetched_chunks", stats.prefetched_chunks),
        ("pager_bytes_read", stats.bytes_read),
        ("pager_bytes_filled", stats.bytes_filled),
        ("pager_bytes_shared", stats.bytes_shared),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

fn start() -> Result<Running> {
    let (ready, ready_end) = rustix::pipe::pipe()?;
    let number = ready_end.as_raw_fd().to_string();
    let process = Command::new(PAGER)
        .args(["serve", "--control", CONTROL, "--ready-fd", &number])
        .args(["--folder", "/tmp", "--folder", SNAPSHOT])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .context(PAGER)?;
    let process = Running(process);
    drop(ready_end);
    let mut line = String::new();
    BufReader::new(File::from(ready)).read_line(&mut line)?;
    if line != "ready\n" {
        bail!("{PAGER} ended before it was ready");
    }
    Ok(process)
}

fn done(request: &PagerRequest) -> Result<()> {
    match ask(request)? {
        PagerResponse::Ok => Ok(()),
        other => bail!("the pager answers {other:?}"),
    }
}

fn ask(request: &PagerRequest) -> Result<PagerResponse> {
    let mut stream = UnixStream::connect(CONTROL).context(CONTROL)?;
    let line = lines::encode(request)?;
    stream.write_all(&line)?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    Ok(serde_json::from_str(&answer)?)
}
