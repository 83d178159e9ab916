//! A VM without a VMM for a while: its memory is in its folder.
//!
//! What survives a crash at any point is decided by two things on disk: the
//! record's state, and whether the state file is in the folder `hibernated`.
//!
//! | record | state file | VMM | what the next daemon does |
//! |---|---|---|---|
//! | running | no matter | alive | resumes it: it was being captured |
//! | hibernated | there | alive | ends it: all of it is on disk |
//! | hibernated | there | gone | nothing: it sleeps |
//! | starting | there | gone | it sleeps again: it never went on |
//! | starting | there | alive | waits for it to get ready |
//!
//! The state file goes as soon as the guest goes on.

use crate::clock::unix_seconds;
use crate::error::{Error, Result};
use crate::vm::actor::{Actor, Gate, Notice, Running};
use crate::vm::control;
use crate::vm::end::EndReason;
use crate::vm::log::Writer;
use crate::vm::process::Ended;
use crate::vm::record::Failure;
use crate::vm::start::Prepared;
use crate::vm::timeline::PagerFaults;
use jiffy_wire::api::VmState;
use jiffy_wire::vmm::ControlRequest;
use std::fs;
use std::path::{Path, PathBuf};
use tokio::sync::oneshot;
use tracing::{info, warn};

/// The folder in a VM's folder.
pub fn folder(vm_folder: &Path) -> PathBuf {
    vm_folder.join("hibernated")
}

/// Can the VM in this folder go on from its disk?
pub fn is_asleep(vm_folder: &Path) -> bool {
    folder(vm_folder).join("state").exists()
}

impl Actor {
    /// The VM's memory is on disk: from here on it sleeps.
    pub(super) fn hibernate(&mut self, reply: oneshot::Sender<Result<()>>) {
        let before = self.record.clone();
        let runs = |running: &Running| running.stopping.is_none();
        if self.record.state != VmState::Running || !self.running.as_ref().is_some_and(runs) {
            let error = format!("The VM {} ended meanwhile.", self.record.name);
            let _ = reply.send(Err(Error::wrong_state(error)));
            return;
        }
        self.record.state = VmState::Hibernated;
        self.record.ended = Some(unix_seconds());
        self.record.pid = None;
        // On disk before its VMM ends: a record that says that it runs would
        // make it a VM that died.
        if let Err(error) = self.record.save(&self.folder()) {
            self.record = before;
            let error = Error::io("write the VM's record", &self.folder(), &error);
            let _ = reply.send(Err(error));
            return;
        }
        if let Some(running) = &mut self.running {
            running.deadline = None;
            running.sleeps = Some(reply);
            // Its disks are written back, and its state is on disk.
            running.process.kill();
        }
    }

    /// The VMM of a VM that is to sleep is gone.
    pub(super) fn sleeps_on(&mut self) -> bool {
        let Some(running) = &mut self.running else {
            return false;
        };
        let Some(reply) = running.sleeps.take() else {
            return self.sleeps_again();
        };
        self.lie_down();
        info!(vm = %self.record.name, "VM hibernated");
        let _ = reply.send(Ok(()));
        true
    }

    /// A VM that was to wake and never went on sleeps again.
    fn sleeps_again(&mut self) -> bool {
        let wakes = self
            .running
            .as_ref()
            .is_some_and(|running| running.gate == Gate::Waking && running.stopping.is_none());
        if !wakes || !is_asleep(&self.folder()) {
            return false;
        }
        let why = super::end::why_a_vmm_ended(&self.folder());
        warn!(vm = %self.record.name, why, "a hibernated VM could not be woken");
        self.lie_down();
        self.record.state = VmState::Hibernated;
        self.record.pid = None;
        self.record.failure = Some(Failure {
            message: format!("The VM {} could not be woken: {why}", self.record.name),
            hint: Some("It is still hibernated.".into()),
        });
        self.changed();
        true
    }

    fn lie_down(&mut self) {
        if let Some(running) = self.running.take() {
            // Nobody else may write to what its memory belongs to.
            self.kept_volumes = running.volumes;
        }
        self.input.send_replace(None);
        let _ = fs::remove_dir_all(self.settings.paths.vm_run(&self.record.id));
        self.leave_pager();
        self.changed();
    }

    /// Starts the VMM of a VM that sleeps.
    pub(super) fn try_wake(&mut self, mut prepared: Prepared) -> Result<()> {
        let folder = self.folder();
        // The guest counts its output from here; clients read on.
        let log = Writer::open(&folder)
            .and_then(|mut log| log.begin().map(|_| log))
            .map_err(|error| Error::io("write the command's log", &folder, &error))?;
        let before = self.record.clone();
        self.record.state = VmState::Starting;
        self.record.failure = None;
        // See the table above: a VM that goes on must not be taken for one
        // that sleeps.
        let spawned = self
            .record
            .save(&folder)
            .map_err(|error| Error::io("write the VM's record", &folder, &error))
            .and_then(|()| self.spawn(&prepared));
        match spawned {
            Ok(spawned) => {
                prepared.volumes = std::mem::take(&mut self.kept_volumes);
                self.runs(spawned, log, prepared);
                Ok(())
            }
            Err(error) => {
                self.record = before;
                self.changed();
                Err(error)
            }
        }
    }

    /// A guest that was restored goes on.
    pub(super) fn awake(&mut self) {
        let Some(running) = &self.running else {
            return;
        };
        if running.gate != Gate::Waking {
            return;
        }
        let sleeping = folder(&self.folder());
        let _ = fs::remove_file(sleeping.join("state"));
        if self.record.paged.is_none() {
            // What is mapped needs no name.
            let _ = fs::remove_dir_all(&sleeping);
        }
        info!(vm = %self.record.name, "VM awake");
        let socket = self.settings.paths.control_socket(&self.record.id);
        tokio::spawn(async move {
            let order = ControlRequest::SetBalloon { target_mib: 0 };
            if let Err(why) = control::order(&socket, order).await {
                warn!(why, "a VM that woke keeps its balloon");
            }
        });
    }

    /// A VM that sleeps and never wakes.
    pub(super) fn end_asleep(&mut self, reason: EndReason) {
        self.kept_volumes.clear();
        self.conclude(Some(reason), Ended::Unknown);
    }

    /// The memory of a VM that has ended.
    pub(super) fn forget_memory(&mut self) {
        self.leave_pager();
        let _ = fs::remove_dir_all(folder(&self.folder()));
    }

    fn leave_pager(&mut self) {
        if self.record.paged.take().is_some() {
            let settings = std::sync::Arc::clone(&self.settings);
            let id = self.record.id.clone();
            tokio::spawn(async move { settings.pager.forget(&id).await });
        }
    }

    /// Asks the pager what it has done for the VM.
    pub(super) fn ask_for_faults(&self) {
        let (Some(running), Some(_)) = (&self.running, &self.record.paged) else {
            return;
        };
        let settings = std::sync::Arc::clone(&self.settings);
        let id = self.record.id.clone();
        let notify = running.notify.clone();
        tokio::spawn(async move {
            if let Some(stats) = settings.pager.stats(&id).await {
                let _ = notify.send(Notice::Faults(PagerFaults {
                    count: stats.faults,
                    total_ns: stats.fault_ns,
                    first_ns: stats.first_fault_ns,
                }));
            }
        });
    }
}
