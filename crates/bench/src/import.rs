//! Compares the cost of an import with `umoci unpack` and `mkfs.erofs` on this host: runs
//! `crates/rootfs/examples/import_ratio.rs`.

use crate::figure::{Clock, Figure};
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::process::Command;

/// Ratio of Jiffy's CPU time to that of the other tools.
pub const RATIO: &str = "image/import/ratio";
/// Ratio of Jiffy's elapsed time to that of the other tools.
pub const WALL_RATIO: &str = "image/import/wall-ratio";

/// Number of rounds.
const ROUNDS: &str = "3";

/// Output of the example: one value per round.
#[derive(Deserialize)]
struct Report {
    wall_ratios: Vec<f64>,
    cpu_ratios: Vec<f64>,
}

/// Runs the example, which is in the folder `examples` beside this program.
///
/// # Errors
///
/// If the example is not built or fails, or its answer can't be parsed.
pub fn figures() -> Result<Vec<Figure>> {
    let program = std::env::current_exe()?.with_file_name("examples");
    let program = program.join("import_ratio");
    let output = Command::new(&program)
        .args(["--json", "--rounds", ROUNDS])
        .output()
        .with_context(|| format!("{}: run `make bench`", program.display()))?;
    ensure!(
        output.status.success(),
        "{}: {}",
        program.display(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let report: Report = serde_json::from_slice(&output.stdout).context("import_ratio's answer")?;
    let figure = |case, values| Figure::of(case, "jiffy", Clock::Wall, "times", values);
    let figures = [
        figure(RATIO, report.cpu_ratios),
        figure(WALL_RATIO, report.wall_ratios),
    ];
    Ok(figures.into_iter().flatten().collect())
}
