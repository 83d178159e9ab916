//! A VM whose record this daemon can't read: a newer release wrote it, or it is damaged or missing.
//!
//! The VM keeps its state: a running VM runs on, and a hibernated one stays hibernated, until the
//! release that wrote its record adopts it again. It is listed with the reason, and leases are held
//! on the volumes that its VMM's configuration names. Only a user can end it (`kill`) or remove it
//! (`rm --force`).

use super::leftovers;
use crate::folders::is_asleep;
use crate::handle::{Command, is_active};
use crate::host::Host;
use crate::network;
use crate::process::VmmProcess;
use crate::registry::Registry;
use crate::task::actor::{self, Actor};
use jiffy_content::durable::LoadError;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::VmRecord;
use jiffy_content::records;
use jiffy_content::room::memory::{Amount, Reserved};
use jiffy_content::volumes::{Lease, Volumes};
use jiffy_sys::durable::remove_any;
use jiffy_sys::regular;
use jiffy_wire::api::{VmState, VolumeUse};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tracing::{info, warn};

/// Largest configuration of a VMM that is read, bytes.
const MAX_CONFIG: u64 = 1 << 20;

/// Its task: an actor that only answers commands.
struct Unreadable {
    actor: Actor,
    /// Why most commands are refused.
    refusal: Error,
    newer: bool,
    process: Option<VmmProcess>,
    /// Its volumes, while it runs or is hibernated.
    volumes: Vec<Lease>,
    /// Its reservation of memory, while it runs.
    room: Option<Reserved>,
}

/// Registers a VM with an unreadable record; `process` is its VMM, if it runs.
pub(super) fn register(
    host: &Arc<Host>,
    registry: &Arc<Registry>,
    volumes: &Arc<Volumes>,
    id: &str,
    error: &LoadError,
    process: Option<VmmProcess>,
) {
    let folder = host.paths.vm(id);
    // Named by its id if the record's name is not available.
    let name = records::vm::name_in_any(&folder)
        .filter(|name| registry.find(name).is_err())
        .unwrap_or_else(|| id.to_owned());
    let mut record = VmRecord::unreadable(id, &name, error);
    record.pid = process.as_ref().map(|process| process.pid);
    record.state = state_of(&folder, process.is_some());
    warn!(id, name, %error, state = ?record.state, "a VM's record can't be read: the VM is left as it is");
    let failure = record.failure.clone().unwrap_or_default();
    let mut refusal = Error::wrong_state(failure.message);
    refusal.0.hint = failure.hint;
    let config = match record.state {
        VmState::Exited => None,
        _ => config_in(&folder),
    };
    if process.is_some() {
        record.addresses = network::recovered(&folder);
    }
    let room = config.as_ref().filter(|_| process.is_some());
    let room = room.map(|config| {
        let amount = Amount::of_running(config.memory.size_mib, config.vcpus);
        host.room.adopt(amount)
    });
    let disks = config.map_or_else(Vec::new, |config| config.disks);
    let held = hold_volumes(volumes, disks, &name);
    let (actor, handle) = actor::new(Arc::clone(host), Arc::clone(registry), record);
    let shown = refusal.clone();
    actor.view.send_modify(|view| view.refusal = Some(shown));
    if registry.insert(handle).is_err() {
        warn!(
            id,
            "another VM's name is this VM's id; this VM is not shown"
        );
    }
    let vm = Unreadable {
        actor,
        refusal,
        newer: error.is_newer(),
        process,
        volumes: held,
        room,
    };
    tokio::spawn(vm.run());
}

/// The state, as far as it can be told without the record.
fn state_of(folder: &Path, runs: bool) -> VmState {
    match runs {
        true => VmState::Running,
        false if is_asleep(folder) => VmState::Hibernated,
        false => VmState::Exited,
    }
}

impl Unreadable {
    async fn run(mut self) {
        loop {
            self.actor.remove_if_over().await;
            if self.actor.removal.is_done() {
                return;
            }
            let process = &self.process;
            let ended = async {
                match process {
                    Some(process) => process.ended().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                command = self.actor.mailbox.recv() => match command {
                    Some(command) => self.command(command).await,
                    None => return,
                },
                _ = ended => self.ended(),
            }
        }
    }

    async fn command(&mut self, command: Command) {
        match command {
            Command::Remove(force, reply) => match self.may_be_removed(force) {
                Ok(()) => {
                    self.end().await;
                    self.actor.record.state = VmState::Exited;
                    self.actor.removal.request(reply);
                    self.actor.publish();
                }
                Err(error) => drop(reply.send(Err(error))),
            },
            Command::Kill(reply) if self.process.is_some() => {
                self.end().await;
                let _ = reply.send(Ok(()));
            }
            Command::Timeline(reply) => {
                let _ = reply.send(self.actor.kept_timeline().unwrap_or_default());
            }
            Command::MemoryWhole(_, reply) | Command::Flush(reply) => drop(reply.send(())),
            Command::Limits(_, reply) => drop(reply.send(Err(self.refusal.clone()))),
            Command::Save(reply)
            | Command::Start(_, reply)
            | Command::Policy(_, reply)
            | Command::Memory(_, _, reply)
            | Command::Stop(_, reply)
            | Command::Kill(reply)
            | Command::Paused(_, reply)
            | Command::Hibernate(reply) => drop(reply.send(Err(self.refusal.clone()))),
            Command::Interrupt(_) | Command::Deliver(_) => {}
        }
    }

    fn may_be_removed(&self, force: bool) -> Result<()> {
        let over = self.actor.record.state == VmState::Exited;
        match force || (over && !self.newer) {
            true => Ok(()),
            false => Err(self.refusal.clone()),
        }
    }

    /// Ends its VMM on a user's request.
    async fn end(&mut self) {
        if let Some(process) = &self.process {
            let id = self.actor.record.id.clone();
            leftovers::end_vmm(&self.actor.host, &id, process.pid).await;
            self.ended();
        }
    }

    fn ended(&mut self) {
        info!(
            id = self.actor.record.id,
            "a VM whose record can't be read has ended"
        );
        self.process = None;
        self.room = None;
        let actor = &mut self.actor;
        actor.host.network.release(&actor.record);
        actor.record.addresses.clear();
        actor.record.pid = None;
        actor.record.state = state_of(&actor.folder(), false);
        if !is_active(actor.record.state) && actor.record.state != VmState::Hibernated {
            self.volumes.clear();
        }
        let _ = remove_any(&actor.host.paths.vm_run(&actor.record.id));
        actor.publish();
    }
}

/// The fields of a VMM's configuration that every version has.
#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    vcpus: u8,
    #[serde(default)]
    memory: Memory,
    disks: Vec<Disk>,
}

#[derive(Deserialize, Default)]
struct Memory {
    #[serde(default)]
    size_mib: u32,
}

#[derive(Deserialize)]
struct Disk {
    path: PathBuf,
    #[serde(default)]
    read_only: bool,
}

fn config_in(folder: &Path) -> Option<Config> {
    let config = regular::read(&folder.join("vmm.json"), MAX_CONFIG).ok()?;
    serde_json::from_slice(&config).ok()
}

/// Takes leases on the volumes among these disks.
fn hold_volumes(volumes: &Arc<Volumes>, disks: Vec<Disk>, name: &str) -> Vec<Lease> {
    let mut held = Vec::new();
    for disk in disks {
        let volume = disk.path.file_stem().and_then(|stem| stem.to_str());
        let Some(volume) = volume.filter(|it| volumes.file(it) == disk.path) else {
            continue;
        };
        let wanted = VolumeUse {
            name: volume.to_owned(),
            read_only: disk.read_only,
            ..VolumeUse::default()
        };
        match volumes.hold(&[wanted], name) {
            Ok(leases) => held.extend(leases),
            Err(error) => warn!(name, %error, "a volume of a VM can't be leased"),
        }
    }
    held
}
