//! The orderly shutdown: SIGTERM to all processes, a grace period, SIGKILL, the last messages to
//! the host. [`crate::power`] then syncs, unmounts and powers off.

/// Time limits for killed processes to end, and for the host to read the last messages.
const KILL_NS: u64 = 2_000_000_000;
const DELIVERY_NS: u64 = 2_000_000_000;

/// Reason for the shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The host, the first command's end, or a program requested it.
    PowerOff,
    /// A program requested a restart.
    Restart,
}

/// The state of the shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shutdown {
    /// Reason for the shutdown.
    pub reason: Reason,
    phase: Phase,
    deadline: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Terminating,
    Killing,
    Delivering,
    Over,
}

/// The next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Continue the event loop.
    Wait,
    /// Send SIGKILL to all.
    Kill,
    /// Queue the last messages.
    LastMessages,
    /// Leave the loop.
    Leave,
}

impl Shutdown {
    /// Begins the shutdown right after SIGTERM was sent.
    pub fn begin(reason: Reason, grace_ns: u64, now: u64) -> Shutdown {
        Shutdown {
            reason,
            phase: Phase::Terminating,
            deadline: now.saturating_add(grace_ns),
        }
    }

    /// A second request may only shorten the grace period.
    pub fn shorten_grace(&mut self, grace_ns: u64, now: u64) {
        if self.phase == Phase::Terminating {
            self.deadline = self.deadline.min(now.saturating_add(grace_ns));
        }
    }

    /// When to call [`Self::advance`] again, CLOCK_MONOTONIC nanoseconds.
    pub fn deadline(&self) -> u64 {
        self.deadline
    }

    /// Next step: `no_programs` means that no program is left, `delivered` that the host has
    /// taken all messages.
    pub fn advance(&mut self, now: u64, no_programs: bool, delivered: bool) -> Step {
        let late = now >= self.deadline;
        match self.phase {
            Phase::Terminating if no_programs => {
                self.enter(Phase::Delivering, now + DELIVERY_NS, Step::LastMessages)
            }
            Phase::Terminating if late => self.enter(Phase::Killing, now + KILL_NS, Step::Kill),
            Phase::Killing if no_programs || late => {
                self.enter(Phase::Delivering, now + DELIVERY_NS, Step::LastMessages)
            }
            Phase::Delivering if delivered || late => self.enter(Phase::Over, now, Step::Leave),
            Phase::Over => Step::Leave,
            _ => Step::Wait,
        }
    }

    fn enter(&mut self, phase: Phase, deadline: u64, step: Step) -> Step {
        self.phase = phase;
        self.deadline = deadline;
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn shutdown_without_programs_is_immediate() {
        let mut shutdown = Shutdown::begin(Reason::PowerOff, 10 * SECOND, 0);
        assert_eq!(shutdown.advance(1, true, false), Step::LastMessages);
        assert_eq!(shutdown.advance(1, true, false), Step::Wait);
        assert_eq!(shutdown.advance(2, true, true), Step::Leave);
    }

    #[test]
    fn programs_are_killed_when_the_grace_period_ends() {
        let mut shutdown = Shutdown::begin(Reason::PowerOff, SECOND, 0);
        assert_eq!(shutdown.advance(SECOND - 1, false, false), Step::Wait);
        assert_eq!(shutdown.advance(SECOND, false, false), Step::Kill);
        assert_eq!(shutdown.advance(SECOND + 1, false, false), Step::Wait);
        // SIGKILL does not end a process that is stuck in the kernel.
        assert_eq!(
            shutdown.advance(SECOND + KILL_NS, false, false),
            Step::LastMessages
        );
    }

    #[test]
    fn a_disconnected_host_does_not_delay_the_shutdown() {
        let mut shutdown = Shutdown::begin(Reason::PowerOff, 0, 0);
        assert_eq!(shutdown.advance(0, true, false), Step::LastMessages);
        assert_eq!(shutdown.advance(DELIVERY_NS, true, false), Step::Leave);
    }

    #[test]
    fn a_second_shutdown_request_only_shortens_the_grace_period() {
        let mut shutdown = Shutdown::begin(Reason::PowerOff, SECOND, 0);
        shutdown.shorten_grace(5 * SECOND, 0);
        assert_eq!(shutdown.deadline(), SECOND);
        shutdown.shorten_grace(0, 7);
        assert_eq!(shutdown.deadline(), 7);
    }
}
