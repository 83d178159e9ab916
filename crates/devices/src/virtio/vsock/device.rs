//! The virtio device around the engine.

use super::engine::{self, Engine};
use super::error::{VsockError, check_cid};
use super::listener::Listener;
use super::muxer::Muxer;
use super::rings::{QUEUE_SIZES, Rings};
use super::state::VsockState;
use super::tokens;
use crate::virtio::device::{
    ActivateError, Activation, ActiveQueue, Job, VirtioDevice, WorkerRole, Workers,
};
use crate::virtio::poll::PollSet;
use jiffy_sys::log_limit::LogLimit;
use jiffy_sys::mutex::lock;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// How long slow programs may read the guest's last bytes before the device ends.
const LINGER: Duration = Duration::from_secs(1);

/// The options of a socket device.
#[derive(Debug, Clone)]
pub struct VsockArgs {
    /// The guest's context id, 3 to 4294967294 (Virtio 1.3 §5.10.4).
    pub cid: u64,
    /// Path of the Unix socket to listen on, and prefix of `<path>_<port>`.
    pub path: PathBuf,
}

/// The socket device.
pub struct Vsock {
    cid: u64,
    /// The guest was saved with another context id, and was not told the new one.
    cid_changed: bool,
    log: Arc<LogLimit>,
    poll: Arc<PollSet>,
    engine: Arc<Mutex<Engine>>,
    worker: Option<Worker>,
    /// How long programs may read the guest's last bytes.
    linger: Duration,
}

/// The worker's job, and the descriptor that stops it.
struct Worker {
    stop: EventFd,
    job: Job,
}

impl Vsock {
    /// Listens at `args.path`. Programs may connect from now on, and wait until the guest's driver
    /// is ready.
    ///
    /// # Errors
    ///
    /// If the context id is reserved, if the socket can't be created at the path, where another
    /// program may listen, or if a poll set can't be created.
    pub fn new(args: VsockArgs) -> Result<Vsock, VsockError> {
        Vsock::make(args, None)
    }

    /// Restores a device. At activation, before `activate` returns, its guest is told that all its
    /// connections are gone, so the interrupt controllers must be restored before.
    ///
    /// # Errors
    ///
    /// As for [`new`](Vsock::new), and if no device could have saved the state.
    pub fn restore(args: VsockArgs, state: &VsockState) -> Result<Vsock, VsockError> {
        state.check()?;
        Vsock::make(args, Some(state))
    }

    fn make(args: VsockArgs, state: Option<&VsockState>) -> Result<Vsock, VsockError> {
        check_cid(args.cid)?;
        let listener = Listener::bind(&args.path)?;
        let poll = Arc::new(PollSet::new().map_err(VsockError::Poll)?);
        let mut muxer =
            Muxer::new(args.cid, args.path, listener, poll.clone()).map_err(VsockError::Poll)?;
        if let Some(state) = state {
            muxer.reset_saved(state);
        }
        Ok(Vsock {
            cid: args.cid,
            cid_changed: state.is_some_and(|state| state.cid != args.cid),
            log: Arc::default(),
            poll,
            engine: Arc::new(Mutex::new(Engine::new(muxer, state.is_some()))),
            worker: None,
            linger: LINGER,
        })
    }

    /// Replaces [`LINGER`], for tests that must not depend on it.
    #[cfg(test)]
    pub(super) fn linger_for(&mut self, time: Duration) {
        self.linger = time;
    }

    /// Replaces the time that connecting to a host program may take, for tests that must not depend
    /// on it.
    #[cfg(test)]
    pub(super) fn dial_for(&self, time: Duration) {
        lock(&self.engine).muxer_mut().dial_for(time);
    }

    /// What a snapshot keeps. The device must be paused; the transport saves its queues.
    pub fn save(&self) -> VsockState {
        VsockState {
            cid: self.cid,
            connections: lock(&self.engine).muxer().saved(),
        }
    }

    /// Takes queues into use without a thread; `activate` starts one.
    fn attach(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let event_idx = activation.features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        let interrupt = activation.interrupt;
        let rings = Rings::new(
            activation.memory,
            interrupt.clone(),
            activation.queues,
            event_idx,
            &self.log,
        )?;
        let mut engine = lock(&self.engine);
        engine
            .attach(rings, &self.poll)
            .map_err(ActivateError::Worker)?;
        if std::mem::take(&mut self.cid_changed) {
            // Before the event that makes Linux read the id: a driver that was saved between the
            // two halves of the old one must read it again.
            interrupt.config_changed();
        }
        engine.announce_reset();
        Ok(())
    }

    fn start_worker(&mut self, workers: &dyn Workers) -> io::Result<()> {
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        self.poll.add(&stop, tokens::STOP, EventSet::IN)?;
        let (engine, poll) = (self.engine.clone(), self.poll.clone());
        let body = Box::new(move || engine::run(&engine, &poll));
        let job = workers.spawn(WorkerRole::Vsock, "vsock", body)?;
        self.worker = Some(Worker { stop, job });
        Ok(())
    }

    fn stop_worker(&mut self) {
        let Some(Worker { stop, job }) = self.worker.take() else {
            return;
        };
        if let Err(error) = stop.write(1) {
            // A count of one fits; only a closed descriptor could fail.
            tracing::error!(%error, "the vsock worker could not be notified to stop");
        }
        if job.join().is_err() {
            tracing::error!("the vsock worker panicked");
        }
        // Otherwise its token would stay in the poll set until the descriptor is closed, below.
        let _ = self.poll.remove(&stop);
    }

    /// One turn of the worker, without a thread.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn step(&mut self) {
        engine::step(&self.engine, &self.poll, Some(std::time::Duration::ZERO))
            .expect("the poll set works");
    }

    /// [`VirtioDevice::activate`] without a thread.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn activate_by_hand(&mut self, activation: Activation) {
        self.attach(activation).expect("all queues are there");
    }

    /// Bytes of the guest that no program has read.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn held_bytes(&self) -> usize {
        lock(&self.engine).muxer().held_bytes()
    }

    /// Sockets in use.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn connection_count(&self) -> usize {
        lock(&self.engine).muxer().connection_count()
    }
}

impl VirtioDevice for Vsock {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        // No VIRTIO_VSOCK_F_* is offered: a device without them supports streams only (Virtio 1.3
        // §5.10.3).
        1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        // struct virtio_vsock_config { le64 guest_cid; }
        let config = self.cid.to_le_bytes();
        for (index, byte) in (0..).zip(data) {
            let place = offset.checked_add(index).map(usize::try_from);
            *byte = match place {
                Some(Ok(place)) => config.get(place).copied().unwrap_or(0),
                _ => 0,
            };
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let workers = activation.workers.clone();
        self.attach(activation)?;
        self.start_worker(&*workers).map_err(|error| {
            lock(&self.engine).detach(&self.poll);
            ActivateError::Worker(error)
        })
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        self.stop_worker();
        lock(&self.engine).detach(&self.poll)
    }
}

impl Drop for Vsock {
    fn drop(&mut self) {
        self.stop_worker();
        lock(&self.engine)
            .muxer_mut()
            .linger(Instant::now() + self.linger);
    }
}
