//! Replays a recorded restore with the pager, on this host and without a VM.

use crate::figure::{Clock, Figure};
use anyhow::{Context, Result, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Deserialize;
use std::path::Path;
use std::process::Command;

/// Bytes read and decompressed per second of CPU time, on one core.
pub const THROUGHPUT: &str = "pager/replay/throughput";
/// Median time of a served page fault. The faulting thread and the pager share a core, which is
/// then never idle. A host that is itself a VM takes tens of microseconds to wake an idle core, and
/// that is not the pager's time.
pub const FAULT: &str = "pager/fault/p50";
/// Speed-up of an optimised image over page faults from a sparse file, until all recorded pages are
/// present. Both files are in the page cache. On all cores, like `jiffy bench pager`.
pub const TIMES_SPARSE: &str = "pager/fault/times-sparse";
/// The same on one core. On several cores of a host that is itself a VM, each fault would wait for
/// two wake-ups, which slows down the sparse file most.
pub const TIMES_SPARSE_ONE_CORE: &str = "pager/fault/times-sparse-one-core";
/// The same on one core with a cold page cache.
pub const TIMES_SPARSE_COLD: &str = "pager/fault/times-sparse-cold";

const READ: &str = "read/lz4/8K/prefetch";
const SERVED: &str = "fault/lz4/8K";
const AHEAD: &str = "fault/lz4/8K/optimised";
const SPARSE: &str = "fault/sparse/4K";
/// Number of replays; each runs all strategies.
const REPLAYS: usize = 7;
/// Runs of a strategy in a replay; the pager reports the median.
const TURNS: &str = "9";

/// Location of a strategy's files when a run begins.
#[derive(Clone, Copy, PartialEq)]
enum Files {
    /// In the page cache.
    InMemory,
    /// On disk only.
    OnDisk,
}

/// The used part of the output of `jiffy-pager replay --format json`.
#[derive(Deserialize)]
struct Report {
    bytes: u64,
    strategies: Vec<Line>,
}

#[derive(Deserialize)]
struct Line {
    name: String,
    cpu_ns: u64,
    p50_ns: u64,
    times_sparse: Option<f64>,
}

impl Report {
    fn line(&self, name: &str) -> Result<&Line> {
        let found = self.strategies.iter().find(|line| line.name == name);
        found.with_context(|| format!("the replay has no strategy {name}"))
    }

    fn mib_per_cpu_second(&self) -> Result<f64> {
        let seconds = self.line(READ)?.cpu_ns.max(1) as f64 / 1e9;
        Ok(self.bytes as f64 / f64::from(1 << 20) / seconds)
    }

    fn fault_us(&self) -> Result<f64> {
        Ok(self.line(SERVED)?.p50_ns as f64 / 1e3)
    }

    fn times_sparse(&self) -> Result<f64> {
        let times = self.line(AHEAD)?.times_sparse;
        times.context("the replay has no sparse file to compare with")
    }
}

/// Replays with that pager program.
///
/// # Errors
///
/// If the pager fails, its report lacks a strategy, or the CPU affinity can't be set.
pub fn figures(program: &Path, recording: &Path, image: &Path) -> Result<Vec<Figure>> {
    let (mut throughput, mut fault) = (Vec::new(), Vec::new());
    let (mut times, mut times_one_core, mut times_cold) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..REPLAYS {
        let all = [READ, SPARSE, SERVED, AHEAD];
        let report = on_one_core(|| replay(program, recording, image, &all, Files::InMemory))?;
        throughput.push(report.mib_per_cpu_second()?);
        fault.push(report.fault_us()?);
        times_one_core.push(report.times_sparse()?);
        let both = [SPARSE, AHEAD];
        let report = replay(program, recording, image, &both, Files::InMemory)?;
        times.push(report.times_sparse()?);
        let report = on_one_core(|| replay(program, recording, image, &both, Files::OnDisk))?;
        times_cold.push(report.times_sparse()?);
    }
    let figures = [
        Figure::of(THROUGHPUT, "jiffy", Clock::Wall, "MiB/s", throughput),
        Figure::of(FAULT, "jiffy", Clock::Wall, "us", fault),
        Figure::of(TIMES_SPARSE, "jiffy", Clock::Wall, "times", times),
        Figure::of(
            TIMES_SPARSE_ONE_CORE,
            "jiffy",
            Clock::Wall,
            "times",
            times_one_core,
        ),
        Figure::of(TIMES_SPARSE_COLD, "jiffy", Clock::Wall, "times", times_cold),
    ];
    Ok(figures.into_iter().flatten().collect())
}

/// Pins this process and its children to one core.
fn on_one_core<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let all = sched_getaffinity(None).context("reading the CPU affinity")?;
    let last = (0..CpuSet::MAX_CPU).rev().find(|core| all.is_set(*core));
    let mut one = CpuSet::new();
    one.set(last.context("there is no core")?);
    sched_setaffinity(None, &one).context("pinning to one core")?;
    let done = work();
    sched_setaffinity(None, &all).context("restoring the CPU affinity")?;
    done
}

fn replay(
    program: &Path,
    recording: &Path,
    image: &Path,
    only: &[&str],
    files: Files,
) -> Result<Report> {
    let output = Command::new(program)
        .arg("replay")
        .arg(recording)
        .arg("--image")
        .arg(image)
        .args(["--only", &only.join(","), "--repeat", TURNS])
        .args(["--format", "json"])
        .args((files == Files::OnDisk).then_some("--cold"))
        .output()
        .with_context(|| program.display().to_string())?;
    ensure!(
        output.status.success(),
        "{}: {}",
        program.display(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    serde_json::from_slice(&output.stdout).context("parsing the output of the replay")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replay_figures_are_found_by_strategy_name() {
        let line = |name: &str| {
            format!(
                r#"{{"name":"{name}","cpu_ns":500000000,"p50_ns":7500,"kind":"x","times_sparse":6.5}}"#
            )
        };
        let text = format!(
            r#"{{"chunks":1,"bytes":1073741824,"strategies":[{},{},{}]}}"#,
            line(READ),
            line(SERVED),
            line(AHEAD)
        );
        let report: Report = serde_json::from_str(&text).unwrap();
        assert_eq!(report.mib_per_cpu_second().unwrap(), 2048.0);
        assert_eq!(report.fault_us().unwrap(), 7.5);
        assert_eq!(report.times_sparse().unwrap(), 6.5);
        assert!(report.line("fault/lz4").is_err());
    }
}
