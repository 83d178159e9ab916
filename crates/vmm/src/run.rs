//! `jiffy-vmm run`.

use crate::arguments::RunOptions;
use anyhow::{Context, anyhow};
use jiffy_sys::termination::TerminationFd;
use jiffy_vmm::control::ControlSocket;
use jiffy_vmm::watch::{ConsoleInput, watch};
use jiffy_vmm::{Builder, Events, StartError, config, error::sentence};
use jiffy_wire::vmm::{ExitReason, ExitRecord, Serial};
use std::fs::File;
use std::os::fd::FromRawFd;
use std::process::ExitCode;
use std::sync::Arc;

/// The span whose start is this process's first instruction in `main`.
const VMM_MAIN: &str = "VMM main";

/// Runs a VM to its end and leaves the record of it.
pub fn run(options: &RunOptions, begun_ns: u64) -> ExitCode {
    set_up_logging();
    limit_arenas();
    let mut exit_record = None;
    let (events, record) = match inherited_events(options.events_fd) {
        Err(error) => (None, Failure::from(error).record()),
        Ok(events) => {
            let events = Arc::new(events);
            events.moment(VMM_MAIN, begun_ns);
            let record = run_vm(options, &events, &mut exit_record);
            (Some(events), record.unwrap_or_else(Failure::record))
        }
    };
    if let Some(path) = &exit_record {
        let json = serde_json::to_vec_pretty(&record).expect("a record is plain data");
        if let Err(error) = jiffy_sys::durable::replace(path, &json) {
            let path = path.display();
            eprintln!("jiffy-vmm: the exit record {path} can't be written: {error}");
        }
    }
    if let Some(events) = events {
        events.exited(&record);
    }
    match record.reason {
        ExitReason::Shutdown | ExitReason::Stopped => ExitCode::SUCCESS,
        _ => {
            eprintln!("jiffy-vmm: {}", record.message);
            if let Some(hint) = &record.hint {
                eprintln!("  hint: {hint}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Why a VM did not start.
struct Failure {
    message: String,
    hint: Option<String>,
}

impl Failure {
    fn record(self) -> ExitRecord {
        ExitRecord {
            reason: ExitReason::StartFailed,
            message: self.message,
            hint: self.hint,
        }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Failure {
        Failure {
            message: format!("{error:#}"),
            hint: None,
        }
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Failure {
        Failure {
            message: sentence(&error),
            hint: error.hint(),
        }
    }
}

fn run_vm(
    options: &RunOptions,
    events: &Arc<Events>,
    exit_record: &mut Option<std::path::PathBuf>,
) -> Result<ExitRecord, Failure> {
    let config = config::read(&options.config).map_err(StartError::from)?;
    *exit_record = config.exit_record.clone();
    let termination = TerminationFd::block().context("signals can't be received")?;
    let mut control = match &config.control {
        None => None,
        Some(path) => Some(ControlSocket::listen(path).map_err(anyhow::Error::new)?),
    };
    let console = matches!(config.serial, Some(Serial::Stdio));
    let held = config.restore.as_ref().is_some_and(|restore| restore.hold);

    let mut vmm = Builder::new(config, events.clone())
        .sandbox(options.sandbox)
        .build()?;
    match held {
        true => vmm.hold()?,
        false => vmm.start(false)?,
    }
    vmm.settle()?;
    let console = vmm
        .devices()
        .serial
        .clone()
        .filter(|_| console)
        .map(ConsoleInput::new);
    let ending = watch(
        &mut vmm,
        &options.config,
        &termination,
        &mut control,
        console,
    );
    if vmm.is_stuck() {
        std::mem::forget(vmm);
    }
    Ok(ExitRecord {
        reason: ending.reason,
        message: ending.message,
        hint: None,
    })
}

/// Takes over the descriptor the node left open for us.
#[allow(unsafe_code)] // A number from the command line becomes a descriptor.
fn inherited_events(fd: Option<i32>) -> anyhow::Result<Events> {
    let file = match fd {
        None => None,
        Some(fd) => {
            // SAFETY: asks about a number; no memory is touched.
            if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
                return Err(anyhow!("--events-fd {fd} is not an open descriptor"));
            }
            // SAFETY: it is open, was left for us by our parent, and nothing
            // in this process has opened a descriptor yet.
            Some(unsafe { File::from_raw_fd(fd) })
        }
    };
    Events::new(file).context("the events descriptor can't be used")
}

/// Warnings and errors go to stderr; RUST_LOG asks for more.
fn set_up_logging() {
    if std::env::var_os("RUST_LOG").is_some() {
        tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_writer(std::io::stderr)
            .init();
    } else {
        tracing_subscriber::fmt()
            .with_max_level(tracing::Level::WARN)
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .init();
    }
}

/// One heap for all threads: a VMM's few allocations need no more, and each
/// arena is memory that every VM would pay for.
#[allow(unsafe_code)] // mallopt
fn limit_arenas() {
    // SAFETY: changes a setting of the allocator; no other thread exists yet.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}
