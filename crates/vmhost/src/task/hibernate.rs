//! A VM without a VMM for a while: its memory is in its folder.
//!
//! What survives a crash at any point is decided by two things on disk: the
//! record's state, and whether the state file is in the folder `hibernated`.
//!
//! | record | state file | VMM | what the next daemon does |
//! |---|---|---|---|
//! | running | no matter | alive | resumes it and deflates its balloon: it was being captured |
//! | hibernated | there | alive | ends it: all of it is on disk |
//! | hibernated | there | gone | nothing: it sleeps |
//! | starting | there | gone | it sleeps again: it never went on |
//! | starting | there | alive | waits for it to get ready |
//!
//! The state file goes as soon as the guest goes on.

use crate::control;
use crate::folders::{hibernated_in, is_asleep};
use crate::launch::Plan;
use crate::log::Writer;
use crate::process::Ended;
use crate::task::actor::{Actor, Asked, Gate, Notice, Running};
use crate::task::end::EndReason;
use crate::timeline::PagerFaults;
use jiffy_content::clock::unix_seconds;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::Failure;
use jiffy_content::snapshots::remove_behind;
use jiffy_wire::api::VmState;
use jiffy_wire::vmm::ControlRequest;
use std::fs;
use tokio::sync::oneshot;
use tracing::{info, warn};

impl Actor {
    /// The VM's memory is on disk: from here on it sleeps.
    pub(super) fn hibernate(&mut self, reply: oneshot::Sender<Result<()>>) {
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
        let asked = self.once_saved(reply);
        if let Some(running) = &mut self.running {
            running.deadline = None;
            running.sleeps = Some(asked);
        }
    }

    fn once_saved(&mut self, reply: oneshot::Sender<Result<()>>) -> Asked {
        let (told, saved) = oneshot::channel();
        self.saver.waiting.push(told);
        self.changed();
        Asked { saved, reply }
    }

    /// The record was written: perhaps something waits for that.
    pub(super) fn go_to_bed_or_rise(&mut self) {
        if let Some((asked, _)) = &mut self.rousing
            && let Ok(saved) = asked.saved.try_recv()
            && let Some((asked, plan)) = self.rousing.take()
        {
            let woken = saved.and_then(|()| self.try_wake(*plan));
            if woken.is_err() {
                let _ = jiffy_sys::durable::remove_any(&self.host.paths.vm_run(&self.record.id));
                self.record.state = VmState::Hibernated;
                self.changed();
            }
            let _ = asked.reply.send(woken);
        }
        let Some(running) = &mut self.running else {
            return;
        };
        let Some(Ok(saved)) = running.sleeps.as_mut().map(|asked| asked.saved.try_recv()) else {
            return;
        };
        match saved {
            // Its disks are written back, and its state is on disk.
            Ok(()) => running.process.kill(),
            Err(error) => {
                self.record.state = VmState::Running;
                self.record.ended = None;
                self.record.pid = Some(running.process.pid);
                if let Some(asked) = running.sleeps.take() {
                    let _ = asked.reply.send(Err(error));
                }
                self.changed();
            }
        }
    }

    /// The VMM of a VM that is to sleep is gone.
    pub(super) fn sleeps_on(&mut self) -> bool {
        let Some(running) = &mut self.running else {
            return false;
        };
        let Some(asked) = running.sleeps.take() else {
            return self.sleeps_again();
        };
        self.lie_down();
        info!(vm = %self.record.name, "VM hibernated");
        let _ = asked.reply.send(Ok(()));
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
        let _ = jiffy_sys::durable::remove_any(&self.host.paths.vm_run(&self.record.id));
        self.leave_pager();
        self.changed();
    }

    /// Starts the VMM of a VM that sleeps, once the record says so: a VM that
    /// goes on must not be taken for one that sleeps.
    pub(super) fn rouse(&mut self, plan: Box<Plan>, reply: oneshot::Sender<Result<()>>) {
        if self.record.state != VmState::Hibernated
            || self.running.is_some()
            || !self.removal.is_empty()
        {
            let error = format!("The VM {} is not hibernated.", self.record.name);
            let _ = reply.send(Err(Error::wrong_state(error)));
            return;
        }
        self.record.state = VmState::Starting;
        self.record.failure = None;
        let asked = self.once_saved(reply);
        self.rousing = Some((asked, plan));
    }

    fn try_wake(&mut self, mut plan: Plan) -> Result<()> {
        if self.record.state != VmState::Starting || !self.removal.is_empty() {
            let error = format!("The VM {} is being removed.", self.record.name);
            return Err(Error::wrong_state(error));
        }
        let folder = self.folder();
        // The guest counts its output from here; clients read on.
        let log = Writer::open_anew(&folder)
            .and_then(|mut log| log.begin().map(|_| log))
            .map_err(|error| Error::io("write the command's log", &folder, &error))?;
        let spawned = self.spawn(&mut plan)?;
        plan.volumes = std::mem::take(&mut self.kept_volumes);
        self.runs(spawned, log, plan);
        Ok(())
    }

    /// A guest that slept is through its gate: what it slept in is needed no more, and it
    /// gets back what the balloon took.
    pub(super) fn awake(&mut self) {
        let Some(running) = &self.running else {
            return;
        };
        if running.gate != Gate::Waking {
            return;
        }
        let sleeping = hibernated_in(&self.folder());
        let _ = fs::remove_file(sleeping.join("state"));
        if self.record.paged.is_none() {
            // What is mapped needs no name.
            let _ = remove_behind(&sleeping);
        }
        info!(vm = %self.record.name, "VM awake");
        let socket = self.host.paths.control_socket(&self.record.id);
        tokio::spawn(async move {
            let order = ControlRequest::SetBalloon { target_mib: 0 };
            if let Err(why) = control::order(&socket, order).await {
                warn!(why, "a VM that woke keeps its balloon");
            }
        });
    }

    /// Ends a VM that sleeps, for good. False if it has a VMM to end.
    pub(super) fn ends_asleep(&mut self, reason: EndReason) -> bool {
        let meanwhile = |vm: &str| Error::wrong_state(format!("The VM {vm} was ended meanwhile."));
        if let Some(running) = &mut self.running {
            // About to fall asleep: it is as awake as any.
            if let Some(asked) = running.sleeps.take() {
                let _ = asked.reply.send(Err(meanwhile(&self.record.name)));
                self.record.state = VmState::Running;
                self.record.pid = Some(running.process.pid);
            }
            return false;
        }
        if let Some((asked, _)) = self.rousing.take() {
            let _ = asked.reply.send(Err(meanwhile(&self.record.name)));
        } else if self.record.state != VmState::Hibernated {
            return false;
        }
        self.kept_volumes.clear();
        self.conclude(Some(reason), Ended::Unknown);
        true
    }

    /// The memory of a VM that has ended.
    pub(super) fn forget_memory(&mut self) {
        self.leave_pager();
        let _ = remove_behind(&hibernated_in(&self.folder()));
    }

    /// Needs no pager any more. The record says so first: a daemon that has it
    /// otherwise would ask the pager for a VM that it knows no more.
    pub(super) fn leave_pager(&mut self) {
        if self.record.paged.take().is_none() {
            return;
        }
        let (written, known) = oneshot::channel();
        self.saver.waiting.push(written);
        self.changed();
        let host = std::sync::Arc::clone(&self.host);
        let (id, ticket) = (self.record.id.clone(), self.pager_ticket);
        tokio::spawn(async move {
            // If it can't be written, or is removed, nobody will read it.
            let _ = known.await;
            host.pager.forget(&id, ticket).await;
        });
    }

    /// Asks the pager what it has done for the VM.
    pub(super) fn ask_for_faults(&mut self) {
        let (Some(running), Some(_)) = (&mut self.running, &self.record.paged) else {
            return;
        };
        running.faults_asked += 1;
        let host = std::sync::Arc::clone(&self.host);
        let id = self.record.id.clone();
        let notify = running.notify.clone();
        tokio::spawn(async move {
            let stats = host.pager.stats(&id).await;
            let _ = notify.send(Notice::Faults(stats.map(Into::into)));
        });
    }

    /// The pager has answered, or will not.
    pub(super) fn take_faults(&mut self, faults: Option<PagerFaults>) {
        if let Some(faults) = faults {
            self.recorder.faults(faults);
        }
        if let Some(running) = &mut self.running {
            running.faults_asked = running.faults_asked.saturating_sub(1);
        }
        if self.saver.is_idle() {
            self.acknowledge_end();
        }
    }
}
