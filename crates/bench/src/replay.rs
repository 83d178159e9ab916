//! The pager without a VM, on this host: a recorded restore replayed.

use crate::figure::{Clock, Figure};
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::path::Path;
use std::process::Command;

/// Reading and decompressing on one core, as much a second of CPU time.
pub const THROUGHPUT: &str = "pager/replay/throughput";
/// A page fault served, the one in the middle.
pub const FAULT: &str = "pager/fault/p50";

const READ: &str = "read/lz4/8K/prefetch";
const SERVED: &str = "fault/lz4/8K";
/// Replays; of each strategy the pager itself reports the middle one of three.
const REPLAYS: usize = 5;

/// What `jiffy-pager replay --format json` prints, as far as it is of use.
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
}

/// Replays with that program.
pub fn figures(program: &Path, recording: &Path, image: &Path) -> Result<Vec<Figure>> {
    let (mut throughput, mut fault) = (Vec::new(), Vec::new());
    for _ in 0..REPLAYS {
        throughput.push(replay(program, recording, image, READ)?.mib_per_cpu_second()?);
        fault.push(replay(program, recording, image, SERVED)?.fault_us()?);
    }
    let figures = [
        Figure::of(THROUGHPUT, "jiffy", Clock::Wall, "MiB/s", throughput),
        Figure::of(FAULT, "jiffy", Clock::Wall, "us", fault),
    ];
    Ok(figures.into_iter().flatten().collect())
}

fn replay(program: &Path, recording: &Path, image: &Path, only: &str) -> Result<Report> {
    let output = Command::new(program)
        .arg("replay")
        .arg(recording)
        .arg("--image")
        .arg(image)
        .args(["--only", only, "--format", "json"])
        .output()
        .with_context(|| program.display().to_string())?;
    ensure!(
        output.status.success(),
        "{}: {}",
        program.display(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    serde_json::from_slice(&output.stdout).context("what the replay printed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_taken_from_the_strategies_by_name() {
        let line = |name: &str| {
            format!(r#"{{"name":"{name}","cpu_ns":500000000,"p50_ns":7500,"kind":"x"}}"#)
        };
        let text = format!(
            r#"{{"chunks":1,"bytes":1073741824,"strategies":[{},{}]}}"#,
            line(READ),
            line(SERVED)
        );
        let report: Report = serde_json::from_str(&text).unwrap();
        assert_eq!(report.mib_per_cpu_second().unwrap(), 2048.0);
        assert_eq!(report.fault_us().unwrap(), 7.5);
        assert!(report.line("fault/lz4").is_err());
    }
}
