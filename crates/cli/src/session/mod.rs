//! Connects this terminal to a command in a VM.

mod capture;
mod fd;
mod input;
mod output;
mod signals;
mod terminal;

pub use capture::Captured;
pub use terminal::{foreground_terminals, on_terminal, restore, size};

use crate::client::{Client, Upgraded, vm_path};
use crate::failure::{Failure, Kind, Outcome, Result};
use input::{Input, Left};
use jiffy_wire::api::Vm;
use output::{Answer, Output};
use std::time::Duration;
use tokio::sync::Notify;

/// What this terminal provides to the command.
#[derive(Debug, Clone, Copy)]
pub struct Stdio {
    /// Forward stdin.
    pub stdin: bool,
    /// The command runs on a terminal.
    pub tty: bool,
}

/// What happens to the command when the user leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaving {
    /// A second Ctrl-C ends the VM; the detach keys leave it running.
    EndsVm,
    /// The command continues, however the user leaves.
    LeavesIt,
    /// As `LeavesIt`, and a signal leaves the session: none is forwarded.
    Watches,
    /// The node ends it when the connection closes.
    HangsUp,
}

/// How long the VM may take to end after the user gave up.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Forwards stdin, signals and the terminal's size to the command, and its
/// output to stdout and stderr (or into `capture`), until it ends.
///
/// # Errors
///
/// If the connection or the VM is lost, or stdin, stdout or stderr can't be used.
pub async fn run(
    client: &Client,
    upgraded: Upgraded,
    stdio: Stdio,
    leaving: Leaving,
    capture: Option<&mut Captured>,
) -> Result<Outcome> {
    let Upgraded { frames, vm } = upgraded;
    // Before the terminal is made raw: no signal may end jiffy and leave it raw.
    let signals = signals::Signals::new()
        .map_err(|error| Failure::io("signal handlers can't be installed", error))?;
    let raw = stdio.tty && stdio.stdin && terminal::make_raw();
    let reader_gone = Notify::new();
    let mut output = Output::new(frames.reader, capture, &reader_gone);
    let mut input = Input::new(
        frames.writer,
        signals,
        input::Options {
            stdin: stdio.stdin,
            tty: stdio.tty,
            raw,
            signals: leaving != Leaving::Watches,
            detach_keys: raw && leaving != Leaving::HangsUp,
            vm: vm.as_deref().filter(|_| leaving != Leaving::HangsUp),
            client,
        },
    );
    let ended = tokio::select! {
        biased;
        answer = output.deliver() => answer.map(Ok),
        left = input.forward(&reader_gone) => left.map(Err),
    };
    drop(input);
    terminal::restore();
    match ended {
        Ok(Ok(Answer::Exited(status))) => Ok(Outcome::Ended(status)),
        Ok(Ok(Answer::NotStarted(error))) => Ok(Outcome::NotStarted(error)),
        Ok(Ok(Answer::VmLost { message, hint })) => {
            let failure = Failure::new(message);
            Err(match hint {
                Some(hint) => failure.hint(hint),
                None => failure,
            })
        }
        Ok(Err(left)) => leave(client, vm.as_deref(), leaving, left).await,
        Err(failure) => Err(broken(client, vm.as_deref(), leaving, failure).await),
    }
}

/// Waits for a signal that ends a program. After a session none of them ends jiffy by itself.
pub async fn asked_to_end() {
    ending_signal().await;
}

/// As [`asked_to_end`]; returns the signal's number.
pub async fn ending_signal() -> i32 {
    let Ok(mut signals) = signals::Signals::new() else {
        return std::future::pending().await;
    };
    loop {
        let signal = signals.next().await;
        if signals::ENDING.contains(&signal) {
            return signal;
        }
    }
}

/// The user has left before the command ended.
async fn leave(client: &Client, vm: Option<&str>, leaving: Leaving, left: Left) -> Result<Outcome> {
    match (left, vm) {
        (Left::Detached, vm) => {
            let vm = vm.unwrap_or("VM");
            // The cursor is behind the command's last output.
            eprintln!();
            crate::failure::report(
                &format!("left {vm} running"),
                Some(&format!("`jiffy attach {vm}` connects to it again")),
            );
            Ok(Outcome::Done)
        }
        (Left::GaveUp(signal), Some(vm)) if leaving == Leaving::EndsVm => {
            match end(client, vm).await {
                Ended::Now => crate::failure::report(&format!("ended {vm}"), None),
                Ended::Before => {}
                Ended::Perhaps => crate::failure::report(
                    &format!("{vm} may still be running"),
                    Some(&format!("`jiffy kill {vm}` ends it")),
                ),
            }
            Ok(Outcome::GaveUp(signal))
        }
        (Left::GaveUp(signal), _) => Ok(Outcome::GaveUp(signal)),
    }
}

/// Whether a VM was ended.
enum Ended {
    Now,
    /// With --rm it may be removed already.
    Before,
    Perhaps,
}

/// Ends a VM whose user has left.
async fn end(client: &Client, vm: &str) -> Ended {
    let path = vm_path(vm, "/kill");
    match tokio::time::timeout(KILL_TIMEOUT, client.post::<Vm>(&path)).await {
        Ok(Ok(_)) => Ended::Now,
        Ok(Err(failure)) if failure.is_not_found() => Ended::Before,
        _ => Ended::Perhaps,
    }
}

/// A failure that ended the session, with a hint about the VM. If leaving ends the VM, so does a
/// failure of this side: its stdout is full, for example.
async fn broken(client: &Client, vm: Option<&str>, leaving: Leaving, failure: Failure) -> Failure {
    if failure.kind == Kind::Unreachable {
        return lost(vm);
    }
    match (leaving, vm) {
        (Leaving::EndsVm, Some(vm)) => match end(client, vm).await {
            Ended::Now => failure.hint(format!("the VM {vm} was ended")),
            Ended::Before => failure,
            Ended::Perhaps => failure.hint(format!(
                "the VM may still be running: `jiffy kill {vm}` ends it"
            )),
        },
        (Leaving::LeavesIt | Leaving::Watches, Some(vm)) => failure.hint(format!(
            "the VM keeps running: `jiffy attach {vm}` connects to it again"
        )),
        (Leaving::HangsUp, _) | (_, None) => failure,
    }
}

/// The error of a lost connection, with a hint about the VM.
fn lost(vm: Option<&str>) -> Failure {
    let lost = Failure::new("the connection to jiffyd was lost while the command ran")
        .kind(Kind::Unreachable);
    match vm {
        Some(vm) => lost.hint(format!(
            "the VM may still be running: `jiffy ps -a` shows it, `jiffy attach {vm}` connects to it again"
        )),
        None => lost,
    }
}
