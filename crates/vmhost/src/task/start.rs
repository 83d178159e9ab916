//! Starts: a plan becomes a running VMM.

use super::actor::{Actor, Running};
use super::phase::{Course, Guest, Phase};
use crate::handle::is_active;
use crate::launch::{self, Beginning, Plan, SavedRam, Spawned};
use crate::log::Writer;
use crate::supervisor::Supervisor;
use crate::timeline::Recorder;
use jiffy_content::clock::unix_seconds;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::MainState;
use jiffy_wire::api::VmState;
use tokio::task::block_in_place;
use tokio::time::Instant;
use tracing::{info, warn};

impl Actor {
    pub(super) fn start(&mut self, plan: Plan) -> Result<()> {
        let name = &self.record.name;
        if is_active(self.record.state) {
            return Err(Error::wrong_state(format!("The VM {name} already runs.")));
        }
        if self.removal.is_requested() || (self.record.spec.remove && self.record.ended.is_some()) {
            return Err(Error::wrong_state(format!(
                "The VM {name} is being removed."
            )));
        }
        if self.record.state == VmState::Hibernated {
            return Err(Error::wrong_state(format!("The VM {name} is hibernated."))
                .hint(format!("Wake it with `jiffy wake {name}`.")));
        }
        let started = self.try_start(plan);
        if started.is_err() {
            let _ = jiffy_sys::durable::remove_any(&self.host.paths.vm_run(&self.record.id));
        }
        started
    }

    fn try_start(&mut self, mut plan: Plan) -> Result<()> {
        let folder = self.folder();
        let was_started = self.record.started.is_some();
        // An earlier log is read to its end.
        let opened = block_in_place(|| {
            let mut log = match was_started {
                false => Writer::create(&folder),
                true => Writer::open_anew(&folder),
            }?;
            log.begin().map(|start| (log, start))
        });
        let (log, log_start) =
            opened.map_err(|error| Error::io("write the command's log", &folder, &error))?;
        let spawned = self.spawn(&mut plan)?;
        let record = &mut self.record;
        record.started = Some(unix_seconds());
        record.main = MainState::Pending;
        record.main_pid = None;
        record.warnings.clear();
        record.log_start = log_start;
        self.enter_running(spawned, log, plan);
        Ok(())
    }

    /// Spawns the VMM, and begins a new timeline with it.
    pub(super) fn spawn(&mut self, plan: &mut Plan) -> Result<Spawned> {
        let gate_time = self.host.start_timeout;
        // A slow disk or a busy kernel must not hold up other VMs' tasks.
        let spawned = block_in_place(|| {
            launch::spawn(
                &self.host.paths,
                &self.host.launcher,
                &self.host.spares,
                &self.host.network,
                &self.record,
                plan,
                gate_time,
            )
        })?;
        let (pid, vm) = (spawned.process.pid, &self.record.name);
        self.host.scheduler.starts(pid, vm, plan.low_priority);
        let mut recorder = Recorder::new(&self.host.clock);
        recorder.received(plan.received_ns);
        if let Some(waited_ns) = plan.room.as_ref().and_then(|room| room.waited_ns) {
            recorder.waited(waited_ns);
        }
        recorder.image_ready(plan.lookup_ns, plan.ready_ns);
        match spawned.was_standby {
            true => recorder.taken_over(spawned.spawn_ns.0, spawned.spawn_ns.1),
            false => recorder.spawned(spawned.spawn_ns.0, spawned.spawn_ns.1),
        }
        if spawned.was_spare {
            recorder.from_spare();
        }
        if matches!(plan.beginning, Beginning::Restore(_)) {
            recorder.restored();
        }
        if let Some(attachment) = plan.network.take() {
            recorder.attached(attachment.times_ns);
            self.record.addresses = attachment.taken_over();
        }
        self.recorder = recorder;
        Ok(spawned)
    }

    /// Enters the active phase with a spawned VMM.
    pub(super) fn enter_running(&mut self, spawned: Spawned, log: Writer, plan: Plan) {
        let guest = self.note_beginning(&plan);
        let record = &mut self.record;
        record.state = VmState::Starting;
        record.ended = None;
        record.failure = None;
        record.pid = Some(spawned.process.pid);
        let mut running = Running::new(
            spawned.process,
            Some(spawned.events),
            Supervisor::new(spawned.listener, spawned.first, &record.id),
            log,
            Instant::now() + self.host.start_timeout,
            plan.volumes,
        );
        running.guest = guest;
        running.room = plan.room;
        info!(vm = %record.name, id = %record.id, pid = ?record.pid, "VM starting");
        self.log_end.send_replace(running.log.end());
        self.phase = Phase::Active(Box::new(running));
        self.changed();
    }

    /// If a golden snapshot can't be restored, drops it and boots the VM instead. The user sees no
    /// difference.
    pub(super) fn fall_back_to_boot(&mut self) -> bool {
        let Phase::Draining(running, how) = &mut self.phase else {
            return false;
        };
        if !matches!(
            (&running.guest, &running.course),
            (Guest::Golden { .. }, Course::Runs | Course::GivesUp)
        ) {
            return false;
        }
        let gave_up = matches!(running.course, Course::GivesUp);
        let guest = std::mem::replace(&mut running.guest, Guest::Up);
        let Guest::Golden {
            name: golden,
            mut fallback,
        } = guest
        else {
            return false;
        };
        fallback.room = running.room.take();
        let killed = how.was_killed_externally() && !gave_up;
        let folder = self.folder();
        if killed {
            info!(vm = %self.record.name, golden, "the VMM was killed before the golden snapshot was restored: the VM boots");
        } else {
            let why = self.why_not_restored();
            warn!(vm = %self.record.name, golden, why, "a golden snapshot can't be restored: it is dropped, and the VM boots");
            self.host.goldens.drop_damaged(&golden);
        }
        self.phase = Phase::Idle;
        let booted = block_in_place(|| Writer::open(&folder))
            .map_err(|error| Error::io("write the command's log", &folder, &error))
            .and_then(|log| Ok((self.spawn(&mut fallback)?, log)));
        match booted {
            Ok((spawned, log)) => self.enter_running(spawned, log, *fallback),
            Err(error) => self.fail_start(error),
        }
        true
    }

    /// Records how the VM starts.
    fn note_beginning(&mut self, plan: &Plan) -> Guest {
        self.note_memory(plan);
        let record = &mut self.record;
        record.root = Some(plan.root.clone());
        let Beginning::Restore(restoring) = &plan.beginning else {
            record.origin = None;
            return Guest::Up;
        };
        match (&restoring.origin, &restoring.golden) {
            (None, _) => Guest::Waking,
            (origin, Some(golden)) => {
                record.origin = origin.clone();
                match plan.fallback() {
                    Some(fallback) => Guest::Golden {
                        name: golden.clone(),
                        fallback: Box::new(fallback),
                    },
                    None => Guest::Restored,
                }
            }
            (origin, None) => {
                record.origin = origin.clone();
                Guest::Restored
            }
        }
    }

    /// Records which memory the pager serves to the VM.
    pub(super) fn note_memory(&mut self, plan: &Plan) {
        self.record.paged = None;
        if let Beginning::Restore(restoring) = &plan.beginning
            && let SavedRam::Paged { paged, serving } = &restoring.memory
        {
            self.record.paged = Some(paged.clone());
            self.pager_ticket = serving.ticket;
        }
    }
}
