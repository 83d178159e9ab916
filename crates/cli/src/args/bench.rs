//! Measurements.

use clap::{Args, Subcommand, ValueEnum, ValueHint};
use std::path::PathBuf;

/// `jiffy bench`
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Replay a recorded restore, without a VM, against ways to store and
    /// fetch memory
    Pager(BenchPager),
}

/// `jiffy bench pager`
#[derive(Debug, Args)]
#[command(after_long_help = "\
A snapshot's folder holds both files once a VM has been run from it: \
`recording` and `ram.image`. Exit status: that of jiffy-pager.")]
pub struct BenchPager {
    /// What a restore touched, as jiffy-pager recorded it
    #[arg(value_hint = ValueHint::FilePath)]
    pub recording: PathBuf,
    /// The image it was recorded of, or one with the same contents; without
    /// it, `ram.image` beside the recording
    #[arg(long, value_hint = ValueHint::FilePath)]
    pub image: Option<PathBuf>,
    /// Where the files that are compared are written; without it, the image's
    /// folder
    #[arg(long, value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub scratch: Option<PathBuf>,
    /// Runs of each strategy; the one in the middle is reported
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub repeat: Option<u16>,
    /// Forget what is in memory of a file before each run
    #[arg(long)]
    pub cold: bool,
    /// Only strategies whose names contain this
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// How to show it
    #[arg(long, value_enum, default_value = "text")]
    pub format: BenchFormat,
}

/// Formats of measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchFormat {
    Text,
    Json,
}
