//! The end on request: first the guest in order, then the VMM, then SIGKILL.

use crate::agent;
use crate::control;
use crate::handle::is_active;
use crate::task::actor::{Actor, Notice};
use crate::task::end::EndReason;
use crate::task::phase::{Course, Phase};
use jiffy_content::error::{Error, Result};
use jiffy_content::images::config::stop_signal;
use jiffy_content::model::vm::MainState;
use jiffy_wire::agent::{OLDEST, Request, Stat};
use jiffy_wire::api::VmState;
use jiffy_wire::vmm::{ControlRequest, ControlResponse};
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

/// What programs have after SIGTERM unless told otherwise.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(10);
/// What the agent has to take the request, and the guest to say that it powers off
/// after its programs' grace.
const POWER_OFF_TIME: Duration = Duration::from_secs(5);
/// What a guest that said that it powers off has for its last words, to write its
/// disks back and to unmount them; or the init that it handed PID 1 to, which has
/// 90 s of it (`guest::power`).
const WRITE_BACK_TIME: Duration = Duration::from_secs(120);
/// What the VMM has to end itself.
const VMM_TIME: Duration = Duration::from_secs(2);

/// A VM on its way to the end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stopping {
    /// Who wanted it.
    pub(super) reason: EndReason,
    step: Step,
}

/// How far that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    /// The agent was asked to shut the guest down.
    Agent,
    /// The guest's programs are over: it writes back.
    PoweringOff,
    /// The VMM was asked to stop.
    Control,
    /// The VMM was sent SIGKILL.
    Killed,
}

impl Actor {
    /// The orderly end.
    pub(super) fn stop(&mut self, grace: Duration) -> Result<()> {
        self.refuse_unless_active()?;
        if self.record.state == VmState::Starting {
            // Nobody in there to ask.
            return self.kill(EndReason::Stopped);
        }
        let Phase::Active(running) = &mut self.phase else {
            return Ok(());
        };
        if matches!(running.course, Course::Runs) && self.record.powering_off {
            // It is about to end by itself, and hears nothing any more.
            running.course = Course::Stops(Stopping {
                reason: EndReason::Stopped,
                step: Step::PoweringOff,
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
            // A first command that ends powers the VM off. With a signal of
            // its own it has all the time; the rest gets SIGTERM then.
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
                            // That life of the VM is over.
                            () = notify.closed() => return,
                        },
                        Err(error) => debug!(%error, "the first command got no signal"),
                    }
                }
                if let Err(error) = agent::tell(&vsock, &request, POWER_OFF_TIME).await {
                    debug!(%error, "the agent didn't shut the guest down");
                    let _ = notify.send(Notice::ShutdownRefused);
                }
            });
        }
        // What it writes back is not cut short by being asked again.
        if running.stopping().is_some_and(|it| it.step == Step::Agent) {
            let until = Instant::now() + grace + POWER_OFF_TIME;
            running.deadline = Some(running.deadline.map_or(until, |old| old.min(until)));
        }
        self.record.state = VmState::Stopping;
        self.changed();
        Ok(())
    }

    /// The guest says that its programs are over. It counts once: else a guest
    /// could put its end off for ever.
    pub(super) fn powering_off(&mut self) {
        self.record.powering_off = true;
        self.writes_back();
    }

    fn writes_back(&mut self) {
        if let Phase::Active(running) = &mut self.phase
            && let Course::Stops(stopping) = &mut running.course
            && stopping.step == Step::Agent
        {
            stopping.step = Step::PoweringOff;
            running.deadline = Some(Instant::now() + WRITE_BACK_TIME);
        }
    }

    /// The quick end: the VMM is asked, and killed if that takes too long.
    pub(super) fn kill(&mut self, reason: EndReason) -> Result<()> {
        if self.ends_asleep(reason) {
            return Ok(());
        }
        self.refuse_unless_active()?;
        let Phase::Active(running) = &mut self.phase else {
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

    /// The next, harder step.
    pub(super) fn escalate(&mut self) {
        let Phase::Active(running) = &mut self.phase else {
            return;
        };
        let Course::Stops(stopping) = &mut running.course else {
            return;
        };
        if running.ended.is_some() {
            return;
        }
        match stopping.step {
            Step::Agent | Step::PoweringOff => {
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

    /// The agent didn't take the request.
    pub(super) fn escalate_from_agent(&mut self) {
        if self.step() != Some(Step::Agent) {
            return;
        }
        // A guest whose command has ended powers off; it may have said so to the daemon
        // before this one.
        match self.record.main {
            MainState::Ended(_) => self.writes_back(),
            _ => self.escalate_in_time(),
        }
    }

    /// The time of this step is over.
    pub(super) fn escalate_in_time(&mut self) {
        // That it powers off may stand behind output that waits for a client.
        match self.step() {
            Some(Step::Agent) if self.is_held_up() => self.writes_back(),
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

    /// Asks an adopted VM's agent whether it is there.
    pub(super) fn probe_agent(&self) {
        let Phase::Active(running) = &self.phase else {
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
