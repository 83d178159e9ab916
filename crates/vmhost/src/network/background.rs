//! Background work of the network: removes links of VMs that have ended, deletes their tracked
//! connections, prepares a link for the next VM, and restores rules that another program has
//! removed.

use super::on::On;
use super::{Network, State};
use jiffy_sys::causes;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tracing::{debug, warn};

/// Delay from a VM's end to the removal of its link, so that its user does not wait for that.
const LEAVE: Duration = Duration::from_millis(50);
/// Further delay until tracked connections are deleted, for many VMs at once.
const FORGET: Duration = Duration::from_secs(1);

/// Time between two checks of the rules and of the host's forwarding settings.
const CHECK: Duration = Duration::from_secs(10);

impl Network {
    /// Waits until a link has to be prepared, because the last one was taken. Waits forever without
    /// a network.
    pub async fn prepared_link_taken(&self) {
        match &self.0 {
            State::On(on) => on.wanted.notified().await,
            State::Off(_) | State::ByPasst(_) => std::future::pending().await,
        }
    }

    /// Prepares a link for the next VM, if there is none.
    pub async fn prepare_link(self: &Arc<Self>) {
        blocking(self, |on| {
            if let Err(error) = on.prepare_link() {
                debug!(%error, "a link for the next VM could not be prepared");
            }
        })
        .await;
    }

    fn if_enabled(&self, act: impl FnOnce(&On)) {
        if let State::On(on) = &self.0 {
            act(on);
        }
    }
}

/// Detaches VMs that have ended, and reconciles the rules while there are VMs.
pub async fn clean_up(network: Arc<Network>) {
    let State::On(on) = &network.0 else { return };
    let mut check = interval(CHECK);
    check.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = on.left.notified() => {
                sleep(LEAVE).await;
                blocking(&network, detach_all).await;
            }
            () = on.released.notified() => {
                sleep(FORGET).await;
                blocking(&network, forget_connections).await;
            }
            _ = check.tick() => blocking(&network, reconcile_rules).await,
        }
    }
}

async fn blocking(network: &Arc<Network>, act: fn(&On)) {
    let network = Arc::clone(network);
    let _ = tokio::task::spawn_blocking(move || network.if_enabled(act)).await;
}

fn detach_all(on: &On) {
    // One at a time, so that starting VMs get the lock in between.
    loop {
        let mut inner = on.lock();
        let Some(vm) = inner.leaving.keys().next().copied() else {
            return;
        };
        let freed = inner.leaving.remove(&vm);
        on.detach(&mut inner, vm, freed);
    }
}

/// Without rules, VMs would reach what is denied by default: a restart of a firewall's service often
/// removes the rules of all programs.
fn reconcile_rules(on: &On) {
    let mut inner = on.lock();
    // A link that was prepared belongs to no VM.
    if inner.host.attached() <= usize::from(inner.ahead.is_some()) {
        return;
    }
    match inner.host.reconcile_rules() {
        Ok(false) => {}
        Ok(true) => warn!(
            "another program changed the nftables table `inet jiffy`, or the host's routes use other links: it is created again"
        ),
        Err(error) => {
            let error = causes::sentence(&error);
            warn!(error, "the network's rules could not be checked");
        }
    }
}

fn forget_connections(on: &On) {
    if let Err(error) = on.lock().host.forget_released() {
        let error = causes::sentence(&error);
        debug!(
            error,
            "tracked connections of VMs that have ended could not be deleted"
        );
    }
}
