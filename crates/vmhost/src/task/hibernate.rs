//! Hibernation: the VM has no VMM, and its memory is in its folder.
//!
//! Two things on disk decide what happens after a crash: the record's state, and whether the
//! state file is in the folder `hibernated`.
//!
//! | record | state file | VMM | what the next daemon does |
//! |---|---|---|---|
//! | running | either | alive | resumes it and deflates its balloon: it was being captured |
//! | hibernated | exists | alive | ends it: its memory is on disk |
//! | hibernated | exists | gone | nothing: it is hibernated |
//! | starting | exists | gone | marks it as hibernated: its programs did not run |
//! | starting | exists | alive | waits until it is ready |
//!
//! The state file is removed as soon as the guest has passed its gate. The VMM notes that in the file
//! `hibernated/passed` before, as there may be no daemon then: with that note the state file counts as
//! removed.

use crate::folders::{
    gate_record, hibernated_in, is_asleep, remove_hibernated_memory, remove_woken_state,
};
use crate::launch::{Plan, Spawned};
use crate::log::Writer;
use crate::process::Ended;
use crate::task::actor::{Actor, Notice, Running};
use crate::task::end::EndReason;
use crate::task::phase::{Course, Guest, PendingReply, Phase, Waking};
use crate::timeline::PagerFaults;
use jiffy_content::clock::unix_seconds;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::Failure;
use jiffy_content::snapshots::remove_in_background;
use jiffy_wire::api::VmState;
use tokio::sync::oneshot;
use tokio::task::block_in_place;
use tracing::{info, warn};

impl Actor {
    /// The VM's memory is on disk: starts hibernation.
    pub(super) fn hibernate(&mut self, reply: oneshot::Sender<Result<()>>) {
        let runs = |running: &Running| matches!(running.course, Course::Runs);
        if self.record.state != VmState::Running || !self.phase.running().is_some_and(runs) {
            let error = format!("The VM {} ended meanwhile.", self.record.name);
            let _ = reply.send(Err(Error::wrong_state(error)));
            return;
        }
        self.record.state = VmState::Hibernated;
        self.record.ended = Some(unix_seconds());
        self.record.pid = None;
        // The record must be on disk before the VMM ends: if it said `running`, the next daemon
        // would report that the VM died.
        let asked = self.after_saving(reply);
        if let Some(running) = self.phase.running_mut() {
            running.deadline = None;
            running.course = Course::Hibernates(asked);
        }
        self.changed();
    }

    /// A reply that waits until the change that follows this call is on disk.
    fn after_saving(&mut self, reply: oneshot::Sender<Result<()>>) -> PendingReply {
        let (told, saved) = oneshot::channel();
        self.saver.waiting.push(told);
        PendingReply { saved, reply }
    }

    /// The record was written: continues a hibernation or wake that waits for it.
    pub(super) fn record_saved(&mut self) {
        match &mut self.phase {
            Phase::Waking(waking) => {
                if let Ok(saved) = waking.asked.saved.try_recv() {
                    self.spawn_waking(saved);
                }
            }
            Phase::Active(running) | Phase::Draining(running, _) => {
                if let Course::Hibernates(asked) = &mut running.course
                    && let Ok(saved) = asked.saved.try_recv()
                {
                    self.end_vmm_of_hibernated(saved);
                }
            }
            Phase::Idle | Phase::Asleep(_) => {}
        }
    }

    /// Kills the VMM of a VM whose memory is on disk, if its record was saved.
    fn end_vmm_of_hibernated(&mut self, saved: Result<()>) {
        let Some(running) = self.phase.running_mut() else {
            return;
        };
        let Err(error) = saved else {
            // Safe: its disks are written back, and its memory is on disk.
            return running.process.kill();
        };
        self.record.state = VmState::Running;
        self.record.ended = None;
        self.record.pid = Some(running.process.pid);
        if let Course::Hibernates(asked) = std::mem::replace(&mut running.course, Course::Runs) {
            let _ = asked.reply.send(Err(error));
        }
        self.changed();
    }

    /// The VMM has ended: true if the VM hibernates, or failed to wake.
    pub(super) fn stays_hibernated(&mut self) -> bool {
        let Some(running) = self.phase.running_mut() else {
            return false;
        };
        match std::mem::replace(&mut running.course, Course::Runs) {
            Course::Hibernates(asked) => {
                self.release_vmm();
                info!(vm = %self.record.name, "VM hibernated");
                let _ = asked.reply.send(Ok(()));
                true
            }
            other => {
                running.course = other;
                self.failed_to_wake()
            }
        }
    }

    /// Returns a VM whose wake failed to hibernation: its programs did not run, so that its memory
    /// on disk is still valid.
    fn failed_to_wake(&mut self) -> bool {
        let wakes = |running: &Running| {
            let stops = matches!(running.course, Course::Stops(_));
            matches!(running.guest, Guest::Waking) && !stops
        };
        if !self.phase.running().is_some_and(wakes) || !is_asleep(&self.folder()) {
            return false;
        }
        let why = self.why_not_restored();
        let _ = std::fs::remove_file(gate_record(&self.folder()));
        warn!(vm = %self.record.name, why, "a hibernated VM could not be woken");
        // Published together with the end of the wake: who waits for that end looks at the state.
        self.record.state = VmState::Hibernated;
        self.record.pid = None;
        self.record.failure = Some(Failure {
            message: format!("The VM {} could not be woken: {why}", self.record.name),
            hint: Some("It is still hibernated.".into()),
        });
        self.release_vmm();
        true
    }

    /// Why the VMM of a restored VM has ended.
    pub(super) fn why_not_restored(&self) -> String {
        let gives_up = |running: &Running| matches!(running.course, Course::GivesUp);
        if self.phase.running().is_some_and(gives_up) {
            let seconds = self.host.start_timeout.as_secs();
            return format!("its guest was not ready after {seconds} s.");
        }
        super::end::why_a_vmm_ended(&self.folder())
    }

    /// The guest was not ready in time: true if the VM can be as before its restore. Its VMM is
    /// killed.
    pub(super) fn gives_up_restore(&mut self) -> bool {
        let is_asleep = is_asleep(&self.folder());
        let Some(running) = self.phase.running_mut() else {
            return false;
        };
        let can = match running.guest {
            Guest::Golden { .. } => true,
            Guest::Waking => is_asleep,
            Guest::Restored | Guest::Woken | Guest::Up | Guest::PowersOff => false,
        };
        if can && matches!(running.course, Course::Runs) {
            running.course = Course::GivesUp;
            running.process.kill();
            return true;
        }
        false
    }

    /// Releases a VMM that has ended, but keeps the volume leases: other VMs must not change
    /// volumes that belong to the memory on disk.
    fn release_vmm(&mut self) {
        if let Some((running, _)) = self.phase.take_drained() {
            self.phase = Phase::Asleep(running.volumes);
        }
        self.input.send_replace(None);
        let _ = jiffy_sys::durable::remove_any(&self.host.paths.vm_run(&self.record.id));
        self.host.network.keep_asleep(&self.record);
        self.leave_pager();
        self.changed();
    }

    /// Starts the VMM of a hibernated VM, after the record is saved: the next daemon must not take
    /// a running VM for a hibernated one.
    pub(super) fn wake(&mut self, plan: Box<Plan>, reply: oneshot::Sender<Result<()>>) {
        let volumes = match &mut self.phase {
            Phase::Asleep(volumes)
                if self.record.state == VmState::Hibernated && !self.removal.is_requested() =>
            {
                std::mem::take(volumes)
            }
            _ => {
                let error = format!("The VM {} is not hibernated.", self.record.name);
                let _ = reply.send(Err(Error::wrong_state(error)));
                return;
            }
        };
        self.record.state = VmState::Starting;
        self.record.failure = None;
        // Part of the record saved first: a daemon that finds the VMM must not end its pager.
        self.note_memory(&plan);
        let asked = self.after_saving(reply);
        self.phase = Phase::Waking(Waking {
            volumes,
            asked,
            plan,
        });
        self.changed();
    }

    /// The record of the waking VM was saved, or could not be.
    fn spawn_waking(&mut self, saved: Result<()>) {
        let phase = std::mem::replace(&mut self.phase, Phase::Idle);
        let Phase::Waking(Waking {
            volumes,
            asked,
            mut plan,
        }) = phase
        else {
            self.phase = phase;
            return;
        };
        let spawned = saved.and_then(|()| self.try_wake(&mut plan));
        let woken = match spawned {
            Ok((spawned, log)) => {
                plan.volumes = volumes;
                self.enter_running(spawned, log, *plan);
                Ok(())
            }
            Err(error) => {
                let run = self.host.paths.vm_run(&self.record.id);
                let _ = jiffy_sys::durable::remove_any(&run);
                self.host.network.keep_asleep(&self.record);
                self.phase = Phase::Asleep(volumes);
                self.record.state = VmState::Hibernated;
                // The caller that asked for the wake tells the pager.
                self.record.paged = None;
                self.changed();
                Err(error)
            }
        };
        let _ = asked.reply.send(woken);
    }

    fn try_wake(&mut self, plan: &mut Plan) -> Result<(Spawned, Writer)> {
        if self.record.state != VmState::Starting || self.removal.is_requested() {
            let error = format!("The VM {} is being removed.", self.record.name);
            return Err(Error::wrong_state(error));
        }
        let folder = self.folder();
        // The guest counts its output from 0 again; clients continue reading.
        let opened = block_in_place(|| {
            let mut log = Writer::open_anew(&folder)?;
            log.begin().map(|_| log)
        });
        let log = opened.map_err(|error| Error::io("write the command's log", &folder, &error))?;
        Ok((self.spawn(plan)?, log))
    }

    /// A woken guest has passed its gate: removes the memory on disk.
    pub(super) fn awake(&mut self) {
        let folder = self.folder();
        match &self.record.paged {
            // The pager still reads the memory.
            Some(_) => remove_woken_state(&folder),
            // The VMM has it mapped, so it can be unlinked.
            None => remove_hibernated_memory(&folder, self.record.root.as_ref()),
        }
        self.host.network.restore_ports(&self.record.id);
        info!(vm = %self.record.name, "VM awake");
    }

    /// Ends a hibernated VM for good. False if it has a VMM to end.
    pub(super) fn end_hibernated(&mut self, reason: EndReason) -> bool {
        let meanwhile = |vm: &str| Error::wrong_state(format!("The VM {vm} was ended meanwhile."));
        if let Some(running) = self.phase.running_mut() {
            // Still hibernating: ends like a running VM.
            if let Course::Hibernates(_) = &running.course
                && let Course::Hibernates(asked) =
                    std::mem::replace(&mut running.course, Course::Runs)
            {
                let _ = asked.reply.send(Err(meanwhile(&self.record.name)));
                self.record.state = VmState::Running;
                self.record.pid = Some(running.process.pid);
            }
            return false;
        }
        // Releases its volumes.
        match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Waking(waking) => {
                let error = meanwhile(&self.record.name);
                let _ = waking.asked.reply.send(Err(error));
            }
            _ if self.record.state != VmState::Hibernated => return false,
            _ => {}
        }
        self.conclude(Some(reason), Ended::Unknown);
        true
    }

    /// Drops the memory of a VM that has ended.
    pub(super) fn forget_memory(&mut self) {
        self.leave_pager();
        let _ = remove_in_background(&hibernated_in(&self.folder()));
    }

    /// Stops using the pager. The pager is told after the record is saved: a daemon that reads the
    /// old record would ask the pager for a VM it has forgotten. If writes fail, the pager serves
    /// the VM until one succeeds.
    pub(super) fn leave_pager(&mut self) {
        if self.record.paged.take().is_none() {
            return;
        }
        let saved = self.saver.on_disk();
        self.changed();
        let host = std::sync::Arc::clone(&self.host);
        let (id, ticket) = (self.record.id.clone(), self.pager_ticket);
        tokio::spawn(async move {
            // An error means that the record was removed, so nobody will read it.
            let _ = saved.await;
            host.pager.forget(&id, ticket).await;
        });
    }

    /// Asks the pager for its fault statistics of the VM.
    pub(super) fn ask_for_faults(&mut self) {
        let (Some(running), Some(_)) = (self.phase.running_mut(), &self.record.paged) else {
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

    /// Takes the pager's answer, or notes that there is none.
    pub(super) fn take_faults(&mut self, faults: Option<PagerFaults>) {
        if let Some(faults) = faults {
            self.recorder.faults(faults);
        }
        if let Some(running) = self.phase.running_mut() {
            running.faults_asked = running.faults_asked.saturating_sub(1);
        }
        if self.saver.is_idle() {
            self.acknowledge_end();
        }
    }
}
