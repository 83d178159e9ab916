//! What all verbs need: the node, and output to stdout.

use crate::args::MachineUse;
use crate::client::Client;
use crate::failure::{Failure, Kind, Outcome, Result};
use crate::place::{self, Folders, Found};
use crate::render::harmless_json;
use clap::ValueEnum;
use serde::Serialize;
use std::cell::Cell;
use std::future::Future;
use std::io::Write;
use tokio::sync::Notify;

/// Settings and state of this command.
pub struct Context {
    /// Where VMs run.
    pub machine: MachineUse,
    /// Jiffy's folders on this host.
    pub folders: Folders,
    /// When this process reached main, CLOCK_MONOTONIC.
    pub began_ns: u64,
    /// Whether the node that was found is in the machine.
    in_machine: Cell<bool>,
    /// The node of the machine if this command started it and has not forwarded ports to it yet.
    new_machine: Cell<Option<Client>>,
    /// Notifies that the machine was started, or that the verb has ended.
    machine_started: Notify,
}

impl Context {
    /// The context of this command.
    pub fn new(machine: MachineUse, began_ns: u64) -> Context {
        Context {
            machine,
            folders: Folders::find(),
            began_ns,
            in_machine: Cell::new(false),
            new_machine: Cell::new(None),
            machine_started: Notify::new(),
        }
    }

    /// The option with which another `jiffy` finds the same node; `None` for the default.
    pub fn machine_option(&self) -> Option<String> {
        let value = self.machine.to_possible_value()?;
        let is_default = self.machine == MachineUse::Auto;
        (!is_default).then(|| format!("--machine={}", value.get_name()))
    }

    /// Is the node that was found in the machine?
    pub fn in_machine(&self) -> bool {
        self.in_machine.get()
    }

    /// Finds the node; starts it if it does not run.
    ///
    /// # Errors
    ///
    /// If [`place::find`] fails.
    pub fn node(&self) -> Result<Found> {
        let found = place::find(self.machine, &self.folders)?;
        self.in_machine.set(found.in_machine);
        if found.machine_start.is_some() {
            self.machine_is_new(found.client.clone());
        }
        Ok(found)
    }

    /// This command has started the machine with this node.
    pub fn machine_is_new(&self, client: Client) {
        self.in_machine.set(true);
        self.new_machine.set(Some(client));
        self.machine_started.notify_one();
    }

    /// The node of the machine, once, if this command started it.
    pub fn take_new_machine(&self) -> Option<Client> {
        self.new_machine.take()
    }

    /// A client of the node, which is started if it does not run.
    ///
    /// # Errors
    ///
    /// If [`place::find`] fails.
    pub fn client(&self) -> Result<Client> {
        Ok(self.node()?.client)
    }

    /// Runs a verb that talks to a node. It runs on this thread, because that is the fastest to set
    /// up.
    ///
    /// # Errors
    ///
    /// If the verb fails, or the event loop can't be set up. If the machine has ended, the failure
    /// says that instead of the lost connection.
    // If it were inlined, the futures of all verbs would share one stack frame of 50 KiB,
    // and each of its pages is a page fault.
    #[inline(never)]
    pub fn block_on<F>(&self, verb: impl FnOnce() -> F) -> Result<Outcome>
    where
        F: Future<Output = Result<Outcome>>,
    {
        let result = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Failure::io("the event loop can't be set up", error))?
            .block_on(async {
                let verb = async {
                    let result = verb().await;
                    self.machine_started.notify_one();
                    result
                };
                // At once, not after the verb: it may be a session of hours.
                let ports = async {
                    self.machine_started.notified().await;
                    self.forward_ports_of_new_machine().await;
                };
                tokio::join!(verb, ports).0
            });
        match result {
            // If the machine has ended, report that instead of the lost connection.
            Err(failure) if failure.kind == Kind::Unreachable && self.in_machine.get() => {
                Err(place::machine::why_it_ended(&self.folders).unwrap_or(failure))
            }
            result => result,
        }
    }
}

/// Writes text to stdout.
///
/// # Errors
///
/// If stdout can't be written.
pub fn show(text: &str) -> Result<()> {
    std::io::stdout()
        .write_all(text.as_bytes())
        .and_then(|()| std::io::stdout().flush())
        .map_err(|error| Failure::io("stdout can't be written", error))
}

/// Writes a value to stdout as JSON.
///
/// # Errors
///
/// If the value can't be written as JSON, or stdout can't be written.
pub fn show_json(value: &impl Serialize) -> Result<()> {
    show(&pretty_json(value)?)
}

/// A value as JSON that can't control a terminal: a guest may have written parts of it.
fn pretty_json(value: &impl Serialize) -> Result<String> {
    let mut text = serde_json::to_string_pretty(value)
        .map_err(|error| Failure::new(format!("the answer can't be written as JSON: {error}")))?;
    text.push('\n');
    Ok(harmless_json(text))
}

/// Calls `act` with each name. A failure is reported on stderr; then the other names are still done,
/// and the outcome is [`Outcome::Partly`].
///
/// # Errors
///
/// If the reader of stdout has closed it.
pub async fn each(
    names: &[String],
    mut act: impl AsyncFnMut(&str) -> Result<()>,
) -> Result<Outcome> {
    let mut outcome = Outcome::Done;
    for name in names {
        match act(name).await {
            Ok(()) => {}
            Err(failure) if failure.kind == Kind::BrokenPipe => {
                return Err(failure);
            }
            Err(failure) => {
                failure.report();
                outcome = Outcome::Partly;
            }
        }
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_does_not_control_the_terminal() {
        let detail = "ended \u{9b}2J\u{1b}[2J";
        let json = pretty_json(&[detail]).unwrap();
        assert!(json.contains(r"ended \u009b2J\u001b[2J"), "{json}");
        assert_eq!(
            serde_json::from_str::<[String; 1]>(&json).unwrap(),
            [detail]
        );
    }
}
