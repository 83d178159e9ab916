//! `jiffy sched`

use clap::{Subcommand, ValueHint};
use std::path::PathBuf;

/// `jiffy sched`
#[derive(Debug, Subcommand)]
pub enum Sched {
    /// Record which thread runs on which CPU of the VMs' host, as trace events for
    /// ui.perfetto.dev; Ctrl-C ends it early. jiffyd must be run by root
    Trace {
        /// File to write it to [default: stdout]
        #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        output: Option<PathBuf>,
        /// How long to record, 1 to 60
        #[arg(long, value_name = "N", default_value_t = 5,
            value_parser = clap::value_parser!(u32).range(1..=60))]
        seconds: u32,
    },
}
