//! Idle connections to ports of VMs, kept for the next request.
//!
//! hyper-util's client has a pool, but it closes connections only by their age, and puts one that was
//! opened for a request that got another into the pool later. These are closed with their VM.

use crate::outgoing::Outgoing;
use crate::shares::{Share, Shares};
use hyper::client::conn::http1::SendRequest;
use jiffy_sys::mutex::lock;
use jiffy_vmhost::handle::{Operations, View, VmHandle};
use jiffy_wire::api::VmState;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// How long a connection is kept. Servers close idle connections after two seconds or more, so they
/// seldom do it just when a request is sent; a VM may sleep after a second, and has none by then. A
/// new connection is not expensive for requests that are rarer.
pub(crate) const IDLE_TIME: Duration = Duration::from_millis(750);
/// Most idle connections to a port of a VM.
const MOST_OF_A_PORT: usize = 16;
/// A server that closes each connection after its answer, but does not say so, has done it after
/// this time.
const SETTLED: Duration = Duration::from_millis(10);

/// A VM's id, and a port.
pub(crate) type Key = (String, u16);

/// A connection to a VM's port.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) sender: SendRequest<Outgoing>,
    /// Its place among the connections with a request. Its task holds a reference until it is closed.
    pub(crate) place: Arc<Mutex<Option<Share>>>,
    pub(crate) address: SocketAddr,
    /// The operations on the VM that had begun before it was opened.
    pub(crate) operations: u64,
    /// Requests that were answered.
    pub(crate) answers: u64,
}

/// The idle connections to all VMs.
#[derive(Debug)]
pub(crate) struct Pool {
    places: Shares,
    ports: Mutex<HashMap<Key, Port>>,
}

/// The idle connections to one port.
#[derive(Debug, Default)]
struct Port {
    /// The oldest first.
    idle: VecDeque<Idle>,
    /// Whether a task closes them.
    is_watched: bool,
}

#[derive(Debug)]
struct Idle {
    server: Server,
    since: Instant,
    _place: Share,
}

impl Pool {
    /// Keeps at most `most` connections, of which one VM may have three quarters.
    pub(crate) fn new(most: usize) -> Pool {
        Pool {
            places: Shares::new(most),
            ports: Mutex::default(),
        }
    }

    /// The connection to this address of a VM that was used last, if any is open. A request that can't
    /// be repeated gets only one that its server has kept open before.
    pub(crate) fn take(
        &self,
        vm: &VmHandle,
        key: &Key,
        address: SocketAddr,
        is_repeatable: bool,
    ) -> Option<Server> {
        let operations = vm.operations_begun();
        let mut ports = lock(&self.ports);
        let port = ports.get_mut(key)?;
        let suits = |idle: &Idle| {
            let server = &idle.server;
            let is_kept = || server.answers > 1 || idle.since.elapsed() >= SETTLED;
            (server.operations, server.address) == (operations, address)
                && server.sender.is_ready()
                && (is_repeatable || is_kept())
        };
        let last = port.idle.iter().rposition(suits)?;
        port.idle.remove(last).map(|idle| idle.server)
    }

    /// Keeps a connection that waits for its next request, unless its VM has been paused, captured,
    /// stopped or the like since it was opened, or there is no place for it.
    pub(crate) fn keep(self: &Arc<Self>, vm: &Arc<VmHandle>, key: Key, server: Server) {
        let Some(place) = self.places.try_take(&vm.id) else {
            return;
        };
        // The place among those with a request is free again.
        lock(&server.place).take();
        let idle = Idle {
            server,
            since: Instant::now(),
            _place: place,
        };
        let mut ports = lock(&self.ports);
        let port = ports.entry(key.clone()).or_default();
        // What changes from now on is seen by the task.
        let watch = (!port.is_watched).then(|| Watch::of(vm));
        let is_fresh = vm.operations_begun() == idle.server.operations;
        if is_fresh && vm.view.borrow().vm.state == VmState::Running {
            port.idle.retain(|idle| !idle.server.sender.is_closed());
            if port.idle.len() >= MOST_OF_A_PORT {
                port.idle.pop_front();
            }
            port.idle.push_back(idle);
            if let Some(watch) = watch {
                port.is_watched = true;
                tokio::spawn(Arc::clone(self).close_in_time(key, watch));
            }
        } else if watch.is_some() {
            ports.remove(&key);
        }
    }

    /// Closes the idle connections to a port.
    pub(crate) fn close(&self, key: &Key) {
        let closed = lock(&self.ports)
            .get_mut(key)
            .map(|port| std::mem::take(&mut port.idle));
        drop(closed);
    }

    /// Closes the idle connections to a port when they are too old, or anything about their VM
    /// changes. Ends when there are none.
    async fn close_in_time(self: Arc<Self>, key: Key, mut watch: Watch) {
        while let Some(oldest) = self.oldest(&key) {
            tokio::select! {
                () = watch.changed() => self.close(&key),
                () = sleep_until(oldest + IDLE_TIME) => {}
            }
        }
    }

    /// Closes connections to a port that are too old. Since when the oldest of the others is idle;
    /// without any, the port is forgotten.
    fn oldest(&self, key: &Key) -> Option<Instant> {
        let mut ports = lock(&self.ports);
        let idle = &mut ports.get_mut(key)?.idle;
        let is_old = |idle: &Idle| idle.since.elapsed() >= IDLE_TIME;
        while idle.front().is_some_and(is_old) {
            idle.pop_front();
        }
        let oldest = idle.front().map(|idle| idle.since);
        if oldest.is_none() {
            ports.remove(key);
        }
        oldest
    }
}

/// Observes a VM.
struct Watch {
    view: watch::Receiver<View>,
    operations: watch::Receiver<Operations>,
}

impl Watch {
    fn of(vm: &VmHandle) -> Watch {
        let mut view = vm.view.clone();
        view.mark_unchanged();
        Watch {
            view,
            operations: vm.operations(),
        }
    }

    /// Waits until an operation begins, or the VM's published state changes.
    async fn changed(&mut self) {
        // An error means that the VM was removed.
        tokio::select! {
            _ = self.view.changed() => {}
            _ = self.operations.changed() => {}
        }
    }
}
