//! Balloons: memory that a guest gives back.

use super::Node;
use jiffy_vmhost::agent::{self, AgentError};
use jiffy_vmhost::control;
use jiffy_vmhost::handle::VmHandle;
use jiffy_wire::agent::{OLDEST, Request, Stat};
use jiffy_wire::vmm::{BalloonStatus, ControlRequest, ControlResponse};
use std::path::Path;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use tracing::debug;

/// Most polls without progress: half a second in which the guest runs, too. Counted instead of
/// timed, so that a stall of the whole host does not count.
const SQUEEZE_LOOKS: u32 = 100;
/// Least growth that counts as progress, MiB: a guest at its limit grows slowly for long.
const SQUEEZE_STEP: u32 = 2;
/// How often the size of a growing balloon is read.
const SQUEEZE_POLL: Duration = Duration::from_millis(5);
/// How long an agent has to report free memory.
const STAT_TIME: Duration = Duration::from_secs(10);

/// Memory that a guest does not need, MiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Spare {
    /// What it can give up: its MemAvailable, less what is left to it.
    pub(super) all: u32,
    /// The part of MemAvailable that the host gains: caches. The host has the free pages already.
    pub(super) caches: u32,
}

impl Node {
    /// Inflates the balloon further, to take what the guest can spare. A guest without a balloon, or
    /// one that does not give up memory, stays as it is.
    pub(super) async fn squeeze(&self, vm: &VmHandle, spare: Spare, limit: Duration) {
        if spare.all == 0 {
            return;
        }
        let control = self.host.paths.control_socket(&vm.id);
        let Some(mut last) = status(&control).await else {
            debug!(vm = %vm.name, "a VM without a balloon keeps its memory");
            return;
        };
        let target_mib = last.actual_mib.saturating_add(spare.all);
        let target_mib = target_mib.min(vm.view.borrow().vm.memory_mib);
        let asked = ControlRequest::SetBalloon { target_mib };
        if control::order(&control, asked).await.is_err() {
            return;
        }
        let until = Instant::now() + limit;
        let (mut moved_to, mut unmoved) = (last.actual_mib, 0);
        while last.actual_mib < target_mib && Instant::now() < until && unmoved < SQUEEZE_LOOKS {
            sleep(SQUEEZE_POLL).await;
            let Some(now) = status(&control).await else {
                return;
            };
            unmoved += 1;
            if now.actual_mib >= moved_to + SQUEEZE_STEP {
                (moved_to, unmoved) = (now.actual_mib, 0);
            }
            last = now;
        }
        debug!(vm = %vm.name, target_mib, actual_mib = last.actual_mib, "balloon squeezed");
    }

    /// Tells the guest to take back all memory of its balloon. The guest does so from then on
    /// without further requests, and so do children of a VM that is captured meanwhile.
    pub(super) async fn deflate(&self, vm: &VmHandle) {
        let control = self.host.paths.control_socket(&vm.id);
        let deflate = ControlRequest::SetBalloon { target_mib: 0 };
        if let Err(why) = control::order(&control, deflate).await {
            debug!(vm = %vm.name, why, "a VM's balloon can't be deflated");
        }
    }
}

/// What a guest can spare if this many MiB are left to it; nothing if it does not answer.
pub(super) async fn spare(agent_socket: &Path, left: u64) -> Spare {
    let spare = spare_within(agent_socket, left, STAT_TIME).await;
    spare.unwrap_or_else(|error| {
        debug!(%error, "a guest did not report its free memory");
        Spare::default()
    })
}

/// What a guest can spare if this many MiB are left to it; it has this long to answer.
pub(super) async fn spare_within(
    agent_socket: &Path,
    left: u64,
    within: Duration,
) -> Result<Spare, AgentError> {
    let request = Request::Stat { version: OLDEST };
    let stat: Stat = agent::ask_once(agent_socket, &request, within).await?;
    Ok(spare_of(&stat, left))
}

fn spare_of(stat: &Stat, left: u64) -> Spare {
    let mib = |bytes: u64| u32::try_from(bytes >> 20).unwrap_or(u32::MAX);
    let available = stat.memory_available.saturating_sub(left << 20);
    Spare {
        all: mib(available),
        caches: mib(available.saturating_sub(stat.memory_free)),
    }
}

async fn status(control: &Path) -> Option<BalloonStatus> {
    match control::request(control, ControlRequest::Balloon).await {
        Ok(ControlResponse::Balloon(status)) => Some(status),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_caches_are_available_memory_minus_free_memory() {
        let stat = |available: u64, free: u64| Stat {
            memory_available: available << 20,
            memory_free: free << 20,
            ..Stat::default()
        };
        let spare = |all, caches| Spare { all, caches };
        assert_eq!(spare_of(&stat(100, 60), 8), spare(92, 32));
        assert_eq!(spare_of(&stat(100, 99), 8), spare(92, 0));
        assert_eq!(spare_of(&stat(7, 0), 8), spare(0, 0));
        assert_eq!(spare_of(&stat(u64::MAX >> 20, 0), 0).all, u32::MAX);
    }
}
