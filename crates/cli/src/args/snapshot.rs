//! Snapshots, and VMs that pause, fork, hibernate and wake.

use super::queue::WaitOptions;
use super::{JsonFormat, ListFormat, TimelineOutput, timeline_output};
use clap::{Args, Subcommand, ValueHint};
use std::path::PathBuf;

/// `jiffy wake`
#[derive(Debug, Args)]
pub struct Wake {
    #[command(flatten)]
    pub wait: WaitOptions,
    /// VMs: names, ids or unique prefixes of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `jiffy pause` and `resume`
#[derive(Debug, Args)]
pub struct Vms {
    /// VMs: names, ids or unique prefixes of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `--timeline`
#[derive(Debug, Args)]
pub struct ShowTimeline {
    /// Write the timeline to stderr or to a file
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
    /// VMs: names, ids or unique prefixes of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `jiffy fork`
#[derive(Debug, Args)]
#[command(after_long_help = FORK_HELP)]
pub struct Fork {
    /// Number of children [default: 1]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: Option<u32>,
    /// Name of the child; several are called NAME-1, NAME-2, …
    #[arg(long)]
    pub name: Option<String>,
    #[command(flatten)]
    pub wait: WaitOptions,
    #[command(flatten)]
    pub show: ShowTimeline,
    /// Output: the children's names, or json
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<JsonFormat>,
    /// The VM: its name, its id or a unique prefix of its id
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
    /// Save a running VM's memory, state and volumes as a snapshot; the VM
    /// keeps running
    Create {
        /// End the VM after the capture
        #[arg(long)]
        stop: bool,
        #[command(flatten)]
        show: ShowTimeline,
        /// Output: the name, or json
        #[arg(long, value_enum, value_name = "FORMAT")]
        format: Option<JsonFormat>,
        /// The VM: its name, its id or a unique prefix of its id
        #[arg(value_name = "VM")]
        vm: String,
        /// Name of the new snapshot
        name: String,
    },
    /// List snapshots
    Ls {
        /// Also list golden snapshots, which jiffy makes to start later runs from
        #[arg(short, long)]
        all: bool,
        /// Output format
        #[arg(long, value_enum, default_value = "table")]
        format: ListFormat,
    },
    /// Remove snapshots that no VM uses
    Rm {
        /// Their names
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Show a snapshot's details and what its memory consists of
    Inspect {
        /// Figures by kind of chunk (the default)
        #[arg(long, conflicts_with_all = ["map", "png"])]
        summary: bool,
        /// List each range of memory and how it is stored
        #[arg(long, conflicts_with = "png")]
        map: bool,
        /// Write a picture of the address space to this file
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        png: Option<PathBuf>,
        /// Output format
        #[arg(long, value_enum, default_value = "table", conflicts_with = "png")]
        format: ListFormat,
        /// Its name
        name: String,
    },
    /// Remove golden snapshots, which jiffy makes to start later runs from
    Prune {
        /// Output: the names of removed snapshots, or json
        #[arg(long, value_enum, value_name = "FORMAT")]
        format: Option<JsonFormat>,
    },
    /// Store the working set of the first restore at the front of the image, so
    /// that later restores read it at once
    Optimise {
        /// Their names
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
}
