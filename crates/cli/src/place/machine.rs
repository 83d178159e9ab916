//! The node in the machine.

use super::folders::Folders;
use crate::client::Endpoint;
use crate::failure::{Failure, Result, reason};
use indicatif::{ProgressBar, ProgressStyle};
use jiffy_machine::{Forward, Machine, MachineError, Options, Paths, PortsLock, Stage};
use std::collections::BTreeSet;
use std::error::Error;
use std::time::Duration;

/// The machine's node, and whether the machine had to be started.
pub struct Reached {
    /// Where the node listens.
    pub endpoint: Endpoint,
    /// Whether the machine was started.
    pub started: bool,
}

/// The machine that belongs to these folders.
pub fn machine(folders: &Folders) -> Result<Machine> {
    Ok(Machine::open(Paths {
        data: folders.data()?.to_owned(),
        run: folders.run.clone(),
        share: folders.share.clone(),
    }))
}

/// Reaches the machine's node. The machine is started if it does not run; this is reported once on
/// stderr, with the reason `why` VMs run there.
pub fn reach(folders: &Folders, why: &str) -> Result<Reached> {
    if let Some(endpoint) = running(folders) {
        return Ok(Reached {
            endpoint,
            started: false,
        });
    }
    start(folders, Options::default(), &format!("{why}; "))
}

/// Starts the machine, or finds it running.
pub fn start(folders: &Folders, options: Options, why: &str) -> Result<Reached> {
    let mut progress = None;
    let started = machine(folders)?.start(options, &mut |stage| {
        progress
            .get_or_insert_with(|| Progress::new(why))
            .stage(stage);
    });
    let was_started = progress.is_some();
    if let Some(progress) = progress {
        progress.end();
    }
    let endpoint = started.map_err(failure)?;
    Ok(Reached {
        endpoint: Endpoint::Tcp {
            address: endpoint.address,
            token: endpoint.token,
        },
        started: was_started,
    })
}

/// Called when the node is slow to answer: the machine may be paused because this host's disk was
/// full. Resumes it, or returns why that is not possible.
pub fn nudge(folders: &Folders) -> Result<()> {
    let machine = machine(folders)?;
    match machine.why_it_ended() {
        Some(MachineError::HostDiskFull { .. }) => machine
            .start(Options::default(), &mut |_| {})
            .map(|_| ())
            .map_err(failure),
        // If the machine has ended, the connection breaks.
        _ => Ok(()),
    }
}

/// Locks the list of forwarded ports; `None` if another command holds it.
pub fn try_lock_ports(folders: &Folders) -> Result<Option<PortsLock>> {
    machine(folders)?.try_lock_ports().map_err(failure)
}

/// Forwards these ports of this host to the machine, and no other ports of VMs.
pub fn forward(folders: &Folders, lock: &PortsLock, ports: &BTreeSet<Forward>) -> Result<()> {
    machine(folders)?.forward(lock, ports).map_err(failure)
}

/// The machine's node if it runs.
pub fn running(folders: &Folders) -> Option<Endpoint> {
    let endpoint = machine(folders).ok()?.endpoint()?;
    Some(Endpoint::Tcp {
        address: endpoint.address,
        token: endpoint.token,
    })
}

/// Why the machine does not answer, if it has ended or is paused.
pub fn why_it_ended(folders: &Folders) -> Option<Failure> {
    let cause = match machine(folders).ok()?.why_it_ended()? {
        MachineError::Died { console, .. } => {
            Failure::new("the machine ended unexpectedly, and the VMs in it with it").hint(format!(
                "the next command starts it again; its console is in {}",
                console.display()
            ))
        }
        error => failure(error),
    };
    Some(cause.kind(crate::failure::Kind::Unreachable))
}

/// Converts an error of the machine, with its cause and a hint.
pub fn failure(error: MachineError) -> Failure {
    let mut message = error.to_string();
    if let Some(source) = error.source() {
        let why = match source.downcast_ref::<std::io::Error>() {
            Some(error) => reason(error),
            None => source.to_string(),
        };
        message.push_str(": ");
        message.push_str(&why);
    }
    let failure = Failure::new(message);
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// Prints one sentence, and on a terminal a spinner until the machine is ready.
struct Progress {
    bar: ProgressBar,
}

impl Progress {
    fn new(why: &str) -> Progress {
        // This line stays when the spinner is removed.
        eprintln!("jiffy: {why}starting the machine");
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("  {spinner} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(120));
        Progress { bar }
    }

    fn stage(&self, stage: Stage) {
        self.bar.set_message(match stage {
            Stage::Disk => "creating its disk",
            Stage::Qemu => "booting its system",
            Stage::System { .. } => "waiting for its node",
            Stage::Ready { .. } => "ready",
        });
    }

    fn end(self) {
        self.bar.finish_and_clear();
    }
}
