//! `jiffy-vmm run`.

use crate::arguments::RunOptions;
use crate::logging;
use anyhow::{Context, anyhow};
use jiffy_sys::termination::TerminationFd;
use jiffy_sys::{activity, clock, handed};
use jiffy_vmm::control::ControlSocket;
use jiffy_vmm::sandbox;
use jiffy_vmm::spare::{self, Ahead};
use jiffy_vmm::watch::{ConsoleInput, watch};
use jiffy_vmm::{Builder, Events, StartError, config, error::sentence};
use jiffy_wire::vmm::{ExitReason, ExitRecord, Serial};
use std::fs::File;
use std::os::fd::FromRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The span whose start is this process's first instruction in `main`.
const VMM_MAIN: &str = "VMM main";

/// Runs a VM to its end and writes its exit record. Returns whether the VM shut down or was
/// stopped.
pub fn run(options: &RunOptions, begun_ns: u64) -> bool {
    logging::set_up();
    // A VMM has few allocations, and each further heap would cost memory in every VM.
    jiffy_sys::arenas::share_one();
    for (name, number) in &options.handed {
        if let Err(error) = handed::add_inherited(name.clone(), *number) {
            eprintln!("jiffy-vmm: --fd {}={number}: {error}", name.display());
            return false;
        }
    }
    let Some(spare_fd) = options.spare_fd else {
        let events = options.events_fd.map(|fd| inherited("--events-fd", fd));
        return run_from(options, &options.config, None, events.transpose(), begun_ns);
    };
    let taken = inherited("--spare-fd", spare_fd).and_then(|socket| {
        spare::wait(socket.into(), &options.config, options.sandbox)
            .map_err(|error| anyhow!(sentence(&error)))
    });
    match taken {
        Ok(Some(taken)) => {
            let begun_ns = clock::monotonic_ns();
            let events = Ok(Some(taken.events));
            run_from(options, &taken.config, Some(taken.ahead), events, begun_ns)
        }
        Ok(None) => true,
        Err(error) => {
            eprintln!("jiffy-vmm: {error:#}");
            false
        }
    }
}

fn run_from(
    options: &RunOptions,
    config: &Path,
    ahead: Option<Ahead>,
    events: anyhow::Result<Option<File>>,
    begun_ns: u64,
) -> bool {
    let mut exit_record = None;
    let events = events
        .and_then(|events| Events::new(events).context("the events descriptor can't be used"));
    let (events, record) = match events {
        Err(error) => (None, Failure::from(error).record()),
        Ok(events) => {
            let events = Arc::new(events);
            events.moment(VMM_MAIN, begun_ns);
            let record = run_vm(options, config, ahead, &events, &mut exit_record);
            (Some(events), record.unwrap_or_else(Failure::record))
        }
    };
    if let Some(path) = &exit_record {
        let json = serde_json::to_vec_pretty(&record).expect("a record is plain data");
        if let Err(error) = handed::write(path, &json) {
            let path = path.display();
            eprintln!("jiffy-vmm: the exit record {path} can't be written: {error}");
        }
    }
    if let Some(events) = events {
        events.exited(&record);
    }
    match record.reason {
        ExitReason::Shutdown | ExitReason::Stopped => true,
        _ => {
            eprintln!("jiffy-vmm: {}", record.message);
            if let Some(hint) = &record.hint {
                eprintln!("  hint: {hint}");
            }
            false
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
    config_file: &Path,
    ahead: Option<Ahead>,
    events: &Arc<Events>,
    exit_record: &mut Option<PathBuf>,
) -> Result<ExitRecord, Failure> {
    let mut config = config::read(config_file).map_err(StartError::from)?;
    match &ahead {
        Some(ahead) => ahead.name_sources(&mut config),
        None => sandbox::close_proc().context("procfs can't be closed")?,
    }
    for file in &config.handed {
        handed::add_inherited(file.name.clone(), file.fd).with_context(|| {
            format!(
                "the descriptor of {} was not handed over",
                file.name.display()
            )
        })?;
    }
    *exit_record = config.exit_record.clone();
    let termination = TerminationFd::block().context("signals can't be received")?;
    let mut control = match &config.control {
        None => None,
        Some(path) => Some(ControlSocket::listen(path).map_err(anyhow::Error::new)?),
    };
    let on_stdio = matches!(config.serial, Some(Serial::Stdio));
    let held = config.restore.as_ref().is_some_and(|restore| restore.hold);

    let mut vmm = Builder::new(config, events.clone())
        .sandbox(options.sandbox)
        .prepared(ahead.map(|ahead| ahead.prepared))
        .build()?;
    let serial = vmm.devices().serial().filter(|_| on_stdio).cloned();
    let console = serial
        .map(ConsoleInput::new)
        .transpose()
        .context("the console's input can't be set up")?;
    match held {
        true => vmm.hold()?,
        false => vmm.start(false)?,
    }
    vmm.settle()?;
    let ending = watch(&mut vmm, config_file, &termination, &mut control, console);
    if vmm.is_stuck() {
        std::mem::forget(vmm);
    } else if activity::is_recorded() {
        vmm.report_boot();
        // Then its threads have ended, and recorded everything.
        drop(vmm);
        events.report_activity();
    }
    Ok(ExitRecord {
        reason: ending.reason,
        message: ending.message,
        hint: None,
    })
}

/// Takes over a descriptor that the node left open for this process.
#[allow(unsafe_code)] // A number from the command line becomes a descriptor.
fn inherited(option: &str, fd: i32) -> anyhow::Result<File> {
    // SAFETY: queries a descriptor's number; no memory is touched.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(anyhow!("{option} {fd} is not an open descriptor"));
    }
    // SAFETY: it is open, the parent left it for this process, and this process has opened no
    // descriptor yet.
    Ok(unsafe { File::from_raw_fd(fd) })
}
