//! `jiffy-pager`: fills VMs' memory and disks from images of the store.

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use jiffy_pager::origins::client::{self, Reader};
use jiffy_pager::pool::Settings;
use jiffy_pager::server::{Server, listen_control};
use jiffy_pager::{confinement, replay};
use jiffy_sys::fds;
use jiffy_sys::termination::TerminationFd;
use rustix::io::FdFlags;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};
use tracing_subscriber::EnvFilter;

/// The only environment variable that the pager keeps.
const LOG: &str = EnvFilter::DEFAULT_ENV;
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
    /// Serve memory of VMs and disks, as requested on the control socket, until SIGTERM
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
    /// Folder with images, caches, recordings or sockets of VMs, which alone are reached; may be
    /// repeated [default: all]
    #[arg(long, value_name = "FOLDER")]
    folder: Vec<PathBuf>,
    /// Inherited descriptor that gets the line "ready" once requests are accepted
    #[arg(long, value_name = "N")]
    ready_fd: Option<i32>,
    /// Inherited channel to jiffy-origins; without it, this program starts jiffy-origins
    #[arg(long, value_name = "N", hide = true)]
    origins_fd: Option<i32>,
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
    let Some(origins) = serve.origins_fd else {
        let error = exec_without_environment();
        return Err(error).context("the pager can't be executed with a clean environment");
    };
    // The process was executed as /proc/self/exe, so its name is wrong.
    rustix::thread::set_name(c"jiffy-pager").context("the process can't be named")?;
    let stop = TerminationFd::block().context("SIGTERM cannot be waited for")?;
    let ready = serve
        .ready_fd
        .map(|number| {
            fds::inherited(number).with_context(|| format!("--ready-fd {number} is not open"))
        })
        .transpose()?;
    jiffy_sys::descriptors::raise_limit(DESCRIPTORS);
    let settings = settings(serve)?;
    let listener = listen_control(&serve.control)
        .with_context(|| format!("{} cannot be listened on", serve.control.display()))?;
    let reader = Reader::new(fds::inherited(origins).ok());
    // A daemon of release 0.1 names no folders.
    let all = [PathBuf::from("/")];
    let folders = match serve.folder.as_slice() {
        [] => &all[..],
        named => named,
    };
    if !confinement::enter(folders).context("the pager can't be confined")? {
        tracing::info!(
            "this kernel has no Landlock: only file permissions restrict which files are reached"
        );
    }
    let server = Server::start(&serve.control, listener, reader, settings)
        .context("the pager can't be started")?;
    if let Some(ready) = ready {
        // The reader may have gone.
        let _ = File::from(ready).write_all(b"ready\n");
    }
    server.run(stop).context("the sockets cannot be waited for")
}

/// Starts `jiffy-origins`, which needs the environment for the registries' credentials and proxies,
/// and executes this program again without it.
fn exec_without_environment() -> io::Error {
    let origins = client::start().and_then(|channel| {
        rustix::io::fcntl_setfd(&channel, FdFlags::empty())?;
        Ok(channel)
    });
    let number = match &origins {
        Ok(channel) => channel.as_raw_fd(),
        Err(error) => {
            tracing::warn!(%error, "jiffy-origins did not start: chunks that are in a registry or at a peer cannot be read");
            -1
        }
    };
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let mut command = process::Command::new("/proc/self/exe");
    command
        .env_clear()
        .envs(std::env::vars_os().filter(|(name, _)| name == LOG));
    command.arg0(&arguments[0]).args(&arguments[1..]);
    command.arg(format!("--origins-fd={number}")).exec()
}

fn run_replay(arguments: Replay) -> Result<()> {
    let beside = folder_of(&arguments.image);
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

fn folder_of(file: &Path) -> PathBuf {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
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
