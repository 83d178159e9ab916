//! `jiffy-pager`: fills VMs' memory and disks from images of the store.

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use jiffy_pager::pool::Settings;
use jiffy_pager::replay;
use jiffy_pager::server::Server;
use jiffy_sys::fds;
use jiffy_sys::termination::TerminationFd;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// A VM needs three descriptors.
const DESCRIPTORS: u64 = 1 << 16;

/// Fill VMs' memory and disks from images of the store
#[derive(Debug, Parser)]
#[command(name = "jiffy-pager", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve VMs and disks until SIGTERM; the control socket says which ones
    Serve(Serve),
    /// Replay a recorded restore with several strategies, without a VM
    Replay(Replay),
}

#[derive(Debug, clap::Args)]
struct Replay {
    /// Recording of a restore, written by the pager
    recording: PathBuf,
    /// Image that was restored, or one with the same contents
    #[arg(long)]
    image: PathBuf,
    /// Folder for the strategies' files [default: the image's folder]
    #[arg(long, value_name = "FOLDER")]
    scratch: Option<PathBuf>,
    /// Runs of each strategy; the median run is reported
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeat: u16,
    /// Drop the files' page cache before each run
    #[arg(long)]
    cold: bool,
    /// Run only strategies whose names contain this text, or one of several separated by commas
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Output format
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// A table
    Text,
    /// One JSON object
    Json,
}

#[derive(Debug, clap::Args)]
struct Serve {
    /// Unix socket to listen on for requests
    #[arg(long, value_name = "SOCKET")]
    control: PathBuf,
    /// Inherited descriptor that gets the line "ready" once requests are accepted
    #[arg(long, value_name = "N")]
    ready_fd: Option<i32>,
    /// Number of threads for all VMs [default: one per processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: Option<u16>,
    /// KiB to fill around a fault, a power of two up to 2048; 0 for only its chunk [default: 0]
    #[arg(long, value_name = "KIB")]
    fault_around: Option<u32>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(
            EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info")),
        )
        .init();
    let result = match arguments.command {
        Command::Serve(serve) => run(&serve),
        Command::Replay(replay) => run_replay(replay),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("jiffy-pager: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(serve: &Serve) -> Result<()> {
    let stop = TerminationFd::block().context("SIGTERM cannot be waited for")?;
    let ready = serve
        .ready_fd
        .map(|number| {
            fds::inherited(number).with_context(|| format!("--ready-fd {number} is not open"))
        })
        .transpose()?;
    jiffy_sys::descriptors::raise_limit(DESCRIPTORS);
    let server = Server::start(&serve.control, settings(serve)?)
        .with_context(|| format!("{} cannot be listened on", serve.control.display()))?;
    if let Some(ready) = ready {
        // Whoever wanted to know may have gone.
        let _ = File::from(ready).write_all(b"ready\n");
    }
    server
        .run(stop.as_fd())
        .context("the sockets cannot be waited for")
}

fn run_replay(arguments: Replay) -> Result<()> {
    let beside = match arguments.image.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    };
    let options = replay::Options {
        recording: arguments.recording,
        image: arguments.image,
        scratch: arguments.scratch.unwrap_or(beside),
        repeat: arguments.repeat.into(),
        cold: arguments.cold,
        only: arguments.only,
    };
    let report = replay::replay(&options, |name| tracing::debug!("{name}"))?;
    match arguments.format {
        Format::Text => print!("{report}"),
        Format::Json => println!("{}", serde_json::to_string_pretty(&report)?),
    }
    Ok(())
}

fn settings(serve: &Serve) -> Result<Settings> {
    let mut settings = Settings::default();
    if let Some(workers) = serve.workers {
        settings.workers = usize::from(workers);
    }
    if let Some(kib) = serve.fault_around {
        anyhow::ensure!(
            kib == 0 || kib.is_power_of_two() && kib <= 2048,
            "--fault-around is a power of two up to 2048, or 0 for none"
        );
        settings.fault_around = u64::from(kib) << 10;
    }
    Ok(settings)
}
