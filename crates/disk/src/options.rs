//! The command line.

use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// Serves disks to other monitors.
#[derive(Debug, Parser)]
#[command(name = "jiffy-disk", version)]
pub struct Options {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Serve a file over vhost-user until a signal comes
    Serve(Serve),
}

/// A disk to serve.
#[derive(Debug, Args)]
pub struct Serve {
    /// A raw file or a block device
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// The Unix socket to listen on
    #[arg(long, value_name = "SOCKET")]
    pub socket: PathBuf,
    /// Let guests write to it
    #[arg(long)]
    pub writable: bool,
    /// Queues offered, 1 to 16
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub queues: u16,
}
