//! Measures VMs' network.
//!
//! * [`answer`]: from a start to a byte from a server in the guest.
//! * [`host`]: the host's side of a VM's network.
//! * [`streams`]: traffic between a guest and the host.

mod answer;
mod host;
mod streams;

pub use answer::{ask, import_image};

use super::command;
use crate::network::MODULES;
use crate::plan::{Network, Sample};
use anyhow::{Result, ensure};
use rustix::thread::UnshareFlags;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// State shared by the runs of a case.
#[derive(Default)]
pub struct State {
    host: Option<host::HostSide>,
    tap: Option<streams::HostTap>,
}

/// Measures one run of a network case. Run 0 prepares the machine for it.
///
/// # Errors
///
/// If a kernel module or the network namespace can't be made ready, or the run fails.
pub fn run(what: &Network, run: u32, state: &mut State) -> Result<Sample> {
    // The node's own network is in the machine's namespace.
    if run == 0 && !matches!(what, Network::ToAnswer(_)) {
        load_modules()?;
        own_namespace()?;
    }
    match what {
        Network::HostSetup => host::HostSide::of(&mut state.host)?.set_up(run),
        Network::HostSetupBy(commands) => host::by_commands(commands),
        Network::ToAnswer(start) => answer::to_answer(*start, run),
        Network::PeerToAnswer { host, argv } => answer::peer_to_answer(host, argv),
        Network::Traffic { argv, tap, traffic } => {
            streams::measure(argv, *tap, *traffic, &mut state.tap)
        }
    }
}

/// Moves this thread, and with it all that it starts, to an empty network namespace.
fn own_namespace() -> Result<()> {
    #[allow(
        deprecated,
        reason = "of the probe's only thread, and the network only: nothing is shared"
    )]
    rustix::thread::unshare(UnshareFlags::NEWNET)?;
    Ok(())
}

/// Loads the modules that peers need, if there are any.
fn load_modules() -> Result<()> {
    let Ok(entries) = fs::read_dir(MODULES) else {
        return Ok(());
    };
    let files: Result<BTreeSet<PathBuf>, _> = entries
        .map(|entry| entry.map(|entry| entry.path()))
        .collect();
    for file in files? {
        let output = Command::new("insmod").arg(&file).output()?;
        let message = String::from_utf8_lossy(&output.stderr);
        // The machine has loaded some of them.
        ensure!(
            output.status.success() || message.contains("exists"),
            "{}: {}",
            file.display(),
            message.trim()
        );
    }
    Ok(())
}

/// Runs commands, each to its end.
fn run_all(commands: &[Vec<String>]) -> Result<()> {
    for argv in commands {
        let output = command(argv)?.output()?;
        ensure!(
            output.status.success(),
            "{}: {}",
            argv.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}
