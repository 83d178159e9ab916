//! Snapshots, and VMs that pause, fork, hibernate and wake.

use super::{JsonFormat, ListFormat, TimelineOutput, timeline_output};
use clap::{Args, Subcommand, ValueHint};
use std::path::PathBuf;

/// `jiffy pause`, `resume` and `wake`
#[derive(Debug, Args)]
pub struct Vms {
    /// Names, ids or beginnings of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `--timeline`
#[derive(Debug, Args)]
pub struct ShowTimeline {
    /// Show on stderr where the time went, or write it to a file
    #[arg(
        long,
        value_name = "FORMAT[:FILE]",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "table",
        value_parser = timeline_output
    )]
    pub timeline: Option<TimelineOutput>,
}

/// `jiffy hibernate`
#[derive(Debug, Args)]
pub struct Hibernate {
    #[command(flatten)]
    pub show: ShowTimeline,
    /// Names, ids or beginnings of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `jiffy fork`
#[derive(Debug, Args)]
#[command(after_long_help = FORK_HELP)]
pub struct Fork {
    /// How many children
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: Option<u32>,
    /// The child's name; several are called NAME-1, NAME-2, …
    #[arg(long)]
    pub name: Option<String>,
    #[command(flatten)]
    pub show: ShowTimeline,
    /// Output: the children's names, or json
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<JsonFormat>,
    /// Its name, id or the beginning of its id
    #[arg(value_name = "VM")]
    pub vm: String,
}

const FORK_HELP: &str = "\
A child has the parent's memory and programs as they are now, shared until one \
of them writes, and an identity of its own: name, host name, machine id, \
randomness. Connections of the parent's programs to the outside are closed in \
the child. Its volumes are clones of the parent's and go with it.";

/// `jiffy snapshot`
#[derive(Debug, Subcommand)]
pub enum Snapshot {
    /// Keep a running VM's memory, state and volumes under a name; the VM
    /// goes on
    Create {
        /// End the VM once it is captured
        #[arg(long)]
        stop: bool,
        #[command(flatten)]
        show: ShowTimeline,
        /// Output: the name, or json
        #[arg(long, value_enum, value_name = "FORMAT")]
        format: Option<JsonFormat>,
        /// Its name, id or the beginning of its id
        #[arg(value_name = "VM")]
        vm: String,
        /// The name it gets
        name: String,
    },
    /// List snapshots
    Ls {
        /// Those too that jiffy keeps itself, to start later runs from
        #[arg(short, long)]
        all: bool,
        /// How to show it
        #[arg(long, value_enum, default_value = "table")]
        format: ListFormat,
    },
    /// Remove snapshots that no VM needs
    Rm {
        /// Their names
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Show what a snapshot is and what its memory consists of
    Inspect {
        /// Figures by kind of chunk (the default)
        #[arg(long, conflicts_with_all = ["map", "png"])]
        summary: bool,
        /// Each range of memory and how it is kept
        #[arg(long, conflicts_with = "png")]
        map: bool,
        /// Write a picture of the address space to this file
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        png: Option<PathBuf>,
        /// How to show it
        #[arg(long, value_enum, default_value = "table", conflicts_with = "png")]
        format: ListFormat,
        /// Its name
        name: String,
    },
    /// Forget the snapshots that jiffy keeps itself to start later runs from
    Prune {
        /// Output: what was forgotten, or json
        #[arg(long, value_enum, value_name = "FORMAT")]
        format: Option<JsonFormat>,
    },
    /// Store what the first VM from a snapshot touched at its front, and fetch
    /// it in one go from now on
    Optimise {
        /// Their names
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
}
