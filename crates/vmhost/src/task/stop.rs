//! Ending a VM on request: first the guest shuts down, then the VMM is stopped, then it gets
//! SIGKILL.

use crate::agent;
use crate::control;
use crate::handle::is_active;
use crate::task::actor::{Actor, Notice};
use crate::task::end::EndReason;
use crate::task::phase::{Course, Guest, Phase};
use jiffy_content::error::{Error, Result};
use jiffy_content::images::config::stop_signal;
use jiffy_content::model::vm::MainState;
use jiffy_wire::agent::{OLDEST, Request, Stat};
use jiffy_wire::api::VmState;
use jiffy_wire::vmm::{ControlRequest, ControlResponse};
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

/// Default time that programs have after SIGTERM.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(10);
/// How long the agent has to accept the request, and the guest to report its power-off after the
/// programs' grace period. A guest that is ended sooner loses what it has not written to its disks.
const POWER_OFF_TIME: Duration = Duration::from_secs(15);
/// How long a guest that reported its power-off has to send its last messages, and to write back
/// and unmount its disks. An init that PID 1 was handed to has 90 s of this (`guest::power`).
const WRITE_BACK_TIME: Duration = Duration::from_secs(120);
/// How long the VMM has to exit.
const VMM_TIME: Duration = Duration::from_secs(2);

/// A VM that is being ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stopping {
    /// The reason.
    pub(super) reason: EndReason,
    step: Step,
}

/// Steps of ending a VM, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    /// The agent was asked to shut the guest down.
    Agent,
    /// The guest's programs have ended, as far as is known, and it writes its disks back.
    WritesBack,
    /// The VMM was asked to stop.
    Control,
    /// The VMM was sent SIGKILL.
    Killed,
}

impl Actor {
    /// Starts an orderly shutdown.
    pub(super) fn stop(&mut self, grace: Duration) -> Result<()> {
        self.refuse_unless_active()?;
        if self.record.state == VmState::Starting {
            // The guest has no agent to ask.
            return self.kill(EndReason::Stopped);
        }
        let Some(running) = self.phase.running_mut() else {
            return Ok(());
        };
        if let (Course::Runs, Guest::PowersOff) = (&running.course, &running.guest) {
            // It accepts no requests.
            running.course = Course::Stops(Stopping {
                reason: EndReason::Stopped,
                step: Step::WritesBack,
            });
            running.deadline = Some(Instant::now() + WRITE_BACK_TIME);
        }
        if matches!(running.course, Course::Runs) {
            running.course = Course::Stops(Stopping {
                reason: EndReason::Stopped,
                step: Step::Agent,
            });
            let vsock = self.host.paths.vsock_socket(&self.record.id);
            let notify = running.notify.clone();
            let shutdown = |grace: Duration| Request::Shutdown {
                version: OLDEST,
                grace_ms: grace.as_millis().try_into().unwrap_or(u32::MAX),
            };
            // The VM powers off when its first command ends. If the image defines a stop signal,
            // the command gets the whole grace period; other programs then get SIGTERM.
            let own_signal = stop_signal(&self.record.spec.config)
                .filter(|_| self.record.main == MainState::Started);
            let request = match own_signal {
                Some(_) => shutdown(Duration::ZERO),
                None => shutdown(grace),
            };
            tokio::spawn(async move {
                if let Some(signal) = own_signal {
                    let version = OLDEST;
                    let ask = Request::SignalMain { version, signal };
                    match agent::tell(&vsock, &ask, POWER_OFF_TIME).await {
                        Ok(()) => tokio::select! {
                            () = tokio::time::sleep(grace) => {}
                            // The VM has ended meanwhile.
                            () = notify.closed() => return,
                        },
                        Err(error) => debug!(%error, "the first command could not be signalled"),
                    }
                }
                if let Err(error) = agent::tell(&vsock, &request, POWER_OFF_TIME).await {
                    debug!(%error, "the agent didn't shut the guest down");
                    let _ = notify.send(Notice::ShutdownRefused);
                }
            });
        }
        // A second request must not shorten the time for the write-back.
        if running.stopping().is_some_and(|it| it.step == Step::Agent) {
            let until = Instant::now() + grace + POWER_OFF_TIME;
            running.deadline = Some(running.deadline.map_or(until, |old| old.min(until)));
        }
        self.record.state = VmState::Stopping;
        self.changed();
        Ok(())
    }

    /// The guest reports that its programs have ended. Only the first report counts, so that a
    /// guest can't delay its end forever.
    pub(super) fn powers_off(&mut self) {
        // Its programs ran; the mark that reports its gate may be unread.
        self.gate_passed();
        if let Some(running) = self.phase.running_mut() {
            running.guest = Guest::PowersOff;
        }
        self.writes_back();
    }

    fn writes_back(&mut self) {
        if let Some(running) = self.phase.running_mut()
            && let Course::Stops(stopping) = &mut running.course
            && stopping.step == Step::Agent
        {
            stopping.step = Step::WritesBack;
            running.deadline = Some(Instant::now() + WRITE_BACK_TIME);
        }
    }

    /// Ends the VM without its guest: the VMM is asked to stop, and killed after a timeout.
    pub(super) fn kill(&mut self, reason: EndReason) -> Result<()> {
        if self.end_hibernated(reason) {
            return Ok(());
        }
        self.refuse_unless_active()?;
        let Some(running) = self.phase.running_mut() else {
            return Ok(());
        };
        if running
            .stopping()
            .is_none_or(|stopping| stopping.step < Step::Control)
        {
            running.course = Course::Stops(Stopping {
                reason,
                step: Step::Agent,
            });
            self.escalate();
        }
        self.record.state = VmState::Stopping;
        self.changed();
        Ok(())
    }

    fn refuse_unless_active(&self) -> Result<()> {
        if is_active(self.record.state) {
            return Ok(());
        }
        Err(Error::wrong_state(format!(
            "The VM {} does not run.",
            self.record.name
        )))
    }

    /// Takes the next, harsher step.
    pub(super) fn escalate(&mut self) {
        let Phase::Active(running) = &mut self.phase else {
            return;
        };
        let Course::Stops(stopping) = &mut running.course else {
            return;
        };
        match stopping.step {
            Step::Agent | Step::WritesBack => {
                stopping.step = Step::Control;
                running.deadline = Some(Instant::now() + VMM_TIME);
                let socket = self.host.paths.control_socket(&self.record.id);
                let notify = running.notify.clone();
                tokio::spawn(async move {
                    let asked = control::request(&socket, ControlRequest::Stop);
                    if !matches!(timeout(VMM_TIME, asked).await, Ok(Ok(ControlResponse::Ok))) {
                        let _ = notify.send(Notice::ControlRefused);
                    }
                });
            }
            Step::Control | Step::Killed => {
                if stopping.step == Step::Control {
                    warn!(vm = %self.record.name, "the VMM did not stop and is killed");
                }
                stopping.step = Step::Killed;
                running.process.kill();
            }
        }
    }

    /// The agent did not accept the request.
    pub(super) fn escalate_from_agent(&mut self) {
        if self.step() != Some(Step::Agent) {
            return;
        }
        // A guest whose command has ended powers off by itself, and may have reported so to the
        // earlier daemon.
        match self.record.main {
            MainState::Ended(_) => self.writes_back(),
            _ => self.escalate_in_time(),
        }
    }

    /// The deadline of this step has passed.
    pub(super) fn escalate_in_time(&mut self) {
        // The guest's report of its power-off may be queued behind output that waits for a client.
        match self.step() {
            Some(Step::Agent) if self.is_output_held() => self.writes_back(),
            _ => self.escalate(),
        }
    }

    pub(super) fn escalate_from_control(&mut self) {
        if self.step() == Some(Step::Control) {
            self.escalate();
        }
    }

    fn step(&self) -> Option<Step> {
        let running = self.phase.running()?;
        running.stopping().map(|stopping| stopping.step)
    }

    /// Checks whether an adopted VM's agent answers.
    pub(super) fn probe_agent(&self) {
        let Some(running) = self.phase.running() else {
            return;
        };
        let vsock = self.host.paths.vsock_socket(&self.record.id);
        let notify = running.notify.clone();
        let within = self.host.start_timeout;
        tokio::spawn(async move {
            let request = Request::Stat { version: OLDEST };
            if agent::ask_once::<Stat>(&vsock, &request, within)
                .await
                .is_ok()
            {
                let _ = notify.send(Notice::AgentAnswers);
            }
        });
    }
}
