//! The command line.

use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// Serve disks to other virtual machine monitors
#[derive(Debug, Parser)]
#[command(name = "jiffy-disk", version)]
pub struct Options {
    /// What to do
    #[command(subcommand)]
    pub verb: Verb,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Serve a raw file or a block device over vhost-user until SIGTERM or SIGINT
    Serve(Serve),
}

/// A disk to serve.
#[derive(Debug, Args)]
pub struct Serve {
    /// Raw file or block device
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Unix socket to listen on
    #[arg(long, value_name = "SOCKET")]
    pub socket: PathBuf,
    /// Let guests write to the disk [default: read-only]
    #[arg(long)]
    pub writable: bool,
    /// Number of queues that are offered, 1 to 16
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub queues: u16,
}
