//! `jiffy bench`.

use clap::{Args, Subcommand, ValueEnum, ValueHint};
use std::path::PathBuf;

/// `jiffy bench`
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Replay the page faults of a recorded restore, without a VM, with each
    /// strategy of storing and fetching memory
    Pager(BenchPager),
}

/// `jiffy bench pager`
#[derive(Debug, Args)]
#[command(after_long_help = "\
After the first restore of a snapshot its folder has both files, `recording` \
and `ram.image`. The exit status is that of jiffy-pager.")]
pub struct BenchPager {
    /// Recording of a restore, written by jiffy-pager
    #[arg(value_hint = ValueHint::FilePath)]
    pub recording: PathBuf,
    /// Image that was restored, or one with the same contents [default:
    /// `ram.image` beside the recording]
    #[arg(long, value_hint = ValueHint::FilePath)]
    pub image: Option<PathBuf>,
    /// Folder for the files of each strategy [default: the image's folder]
    #[arg(long, value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub scratch: Option<PathBuf>,
    /// Runs of each strategy; the median is reported
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub repeat: Option<u16>,
    /// Drop the files' page cache before each run
    #[arg(long)]
    pub cold: bool,
    /// Run only strategies whose names contain this text
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Output format
    #[arg(long, value_enum, default_value = "text")]
    pub format: BenchFormat,
}

/// Output formats of benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchFormat {
    Text,
    Json,
}
