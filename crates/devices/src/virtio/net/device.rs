//! The network device with its queues and threads.

use super::backend::{Backend, Endpoint};
use super::config::Link;
use super::control::Control;
use super::counters::Totals;
use super::error::NetError;
use super::guard::Gate;
use super::options::NetArgs;
use super::receive::Receive;
use super::state::{NetState, RestoreError};
use super::transmit::Transmit;
use super::worker::{Pair, Task, Worker};
use super::{CONTROL_QUEUE_SIZE, PAIRS_MAX, RECEIVE_QUEUE_SIZE, TRANSMIT_QUEUE_SIZE};
use crate::virtio::device::{
    ActivateError, Activation, ActiveQueue, Interrupt, VirtioDevice, WorkerRole,
};
use crate::virtio::queue::RateLimit;
use crate::virtio::queue::ring::Ring;
use crate::virtio::work::Work;
use jiffy_sys::log_limit::LogLimit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::*;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

/// A network interface of the guest.
#[derive(Debug)]
pub struct Net {
    link: Arc<Link>,
    features: u64,
    queue_sizes: Vec<u16>,
    /// Pairs that no worker uses.
    pairs: Vec<Option<Pair>>,
    /// The guest must announce itself to its neighbours once it runs.
    announce: bool,
    running: Option<Running>,
    log: Arc<LogLimit>,
}

/// The work of one pair.
type PairWork = Work<(Pair, Vec<ActiveQueue>)>;

#[derive(Debug)]
struct Running {
    /// By the numbers of their pairs.
    workers: Vec<(usize, PairWork)>,
    /// Queues of pairs that the driver did not enable.
    idle: Vec<ActiveQueue>,
}

/// The queues of a pair.
struct Queues {
    number: usize,
    receive: ActiveQueue,
    transmit: ActiveQueue,
    control: Option<ActiveQueue>,
}

impl Net {
    /// Creates the device; checks the flags of a TAP interface.
    ///
    /// # Errors
    ///
    /// If the MAC address or the MTU is not valid, if the number of queue pairs is 0 or too large,
    /// if a descriptor is not a queue of a TAP interface with the necessary flags, or if the socket
    /// of passt or a poll set can't be used.
    pub fn new(mut args: NetArgs) -> Result<Net, NetError> {
        args.check()?;
        let gate = args.guard.take().map(|guard| Arc::new(Gate::new(guard)));
        let backend = std::mem::replace(&mut args.backend, Backend::None);
        let endpoints = backend.open(gate.as_ref())?;
        let count = match u16::try_from(endpoints.len()) {
            Ok(count) if (1..=PAIRS_MAX).contains(&count) => count,
            _ => return Err(NetError::Pairs(endpoints.len())),
        };
        let connected = endpoints.iter().all(Endpoint::is_connected);
        let offloads = endpoints.iter().fold(u64::MAX, |features, endpoint| {
            features & endpoint.features()
        });
        let pairs = endpoints
            .into_iter()
            .map(|endpoint| Pair::new(endpoint).map(Some));
        let mut queue_sizes = [RECEIVE_QUEUE_SIZE, TRANSMIT_QUEUE_SIZE].repeat(count.into());
        queue_sizes.push(CONTROL_QUEUE_SIZE);
        Ok(Net {
            link: Arc::new(Link::new(&args, gate, count, connected)),
            features: offered(args.mtu, count) | offloads,
            queue_sizes,
            pairs: pairs.collect::<Result<_, _>>().map_err(NetError::Poll)?,
            announce: false,
            running: None,
            log: Arc::default(),
        })
    }

    /// Restores a device. Its address may differ from the saved one: then the guest must take it on
    /// before it sends anything. If it is the same, the guest is asked to announce itself to its
    /// neighbours. Its driver may use offloads of the backend that it was saved with.
    ///
    /// # Errors
    ///
    /// As for [`new`](Net::new), and if the saved device had another number of queue pairs, or used
    /// none of them or more.
    pub fn restore(args: NetArgs, state: &NetState) -> Result<Net, RestoreError> {
        let mut net = Net::new(args)?;
        for pair in net.pairs.iter().flatten() {
            net.features |= pair.endpoint.tolerated();
        }
        state.check(net.link.pairs)?;
        net.link
            .used_pairs
            .store(state.used_pairs, Ordering::SeqCst);
        net.announce = state.mac == net.link.mac;
        Ok(net)
    }

    /// What a snapshot keeps; the device must be paused.
    pub fn save(&self) -> NetState {
        NetState {
            mac: self.link.mac,
            mtu: self.link.mtu,
            pairs: self.link.pairs,
            used_pairs: self.link.used_pairs.load(Ordering::SeqCst),
            announce: self.link.is_announce_wanted(),
        }
    }

    /// Replaces the limits of what the guest receives and sends; waiting frames get them, too.
    pub fn set_limits(&self, receive: RateLimit, send: RateLimit) {
        self.link.receive_limiter.set(receive);
        self.link.send_limiter.set(send);
        let workers = self.running.iter().flat_map(|running| &running.workers);
        for (_, work) in workers {
            if let Err(error) = work.notify() {
                tracing::error!(%error, "a network device's worker could not be notified of its new limits, which apply from the next frame");
            }
        }
    }

    /// The current counts.
    pub fn totals(&self) -> Totals {
        self.link.counters.totals()
    }

    /// Sorts the queues of an activation into pairs. Queues that belong to none are returned.
    fn pair_queues(
        &self,
        features: u64,
        queues: Vec<Option<ActiveQueue>>,
    ) -> Result<(Vec<Queues>, Vec<ActiveQueue>), ActivateError> {
        // For a driver that does not support several pairs, the third queue is the control queue.
        let pairs = match features & (1 << VIRTIO_NET_F_MQ) {
            0 => 1,
            _ => usize::from(self.link.pairs),
        };
        let mut queues: Vec<_> = queues.into_iter().collect();
        queues.resize_with(self.queue_sizes.len(), || None);
        let mut control = match features & (1 << VIRTIO_NET_F_CTRL_VQ) {
            0 => None,
            _ => queues[2 * pairs].take(),
        };
        let mut sorted = Vec::new();
        let mut idle = Vec::new();
        for number in 0..pairs {
            let index = 2 * number as u16;
            match (queues[2 * number].take(), queues[2 * number + 1].take()) {
                (Some(receive), Some(transmit)) => sorted.push(Queues {
                    number,
                    receive,
                    transmit,
                    control: control.take(),
                }),
                (None, _) if number == 0 => return Err(ActivateError::MissingQueue(index)),
                (_, None) if number == 0 => return Err(ActivateError::MissingQueue(index + 1)),
                (receive, transmit) => idle.extend(receive.into_iter().chain(transmit)),
            }
        }
        idle.extend(queues.into_iter().flatten());
        Ok((sorted, idle))
    }

    /// Starts the worker of a pair.
    fn start(
        &mut self,
        queues: Queues,
        activation: &Shared<'_>,
    ) -> Result<PairWork, ActivateError> {
        let number = queues.number;
        let pair = self.pairs[number].take();
        // A worker took the pair and did not return it.
        let mut pair = pair.ok_or(ActivateError::MissingQueue(2 * number as u16))?;
        let wakeup = pair.wakeup().map_err(ActivateError::Worker)?;
        let ring = |active| {
            Ring::new(
                "net",
                active,
                activation.interrupt.clone(),
                self.log.clone(),
            )
        };
        let (features, link) = (activation.features, &self.link);
        let pending = pair.pending.take();
        let stop = Arc::new(AtomicBool::new(false));
        let worker = Worker {
            receive: Receive::new(ring(queues.receive), features, link.clone(), pending),
            transmit: Transmit::new(
                ring(queues.transmit),
                features,
                link.clone(),
                self.log.clone(),
            ),
            control: queues
                .control
                .map(|queue| Control::new(ring(queue), features, link.clone())),
            pair,
            features,
            memory: activation.memory.clone(),
            interrupt: activation.interrupt.clone(),
            link: link.clone(),
            stop: stop.clone(),
            held_interrupt: Task::Idle,
        };
        let work = Work::start(
            "network device",
            activation.workers,
            (WorkerRole::Net, &format!("net {number}")),
            (stop, wakeup),
            || worker.run(),
        );
        work.map_err(ActivateError::Worker)
    }
}

/// What all workers of an activation share.
struct Shared<'a> {
    memory: Arc<crate::GuestMemory>,
    interrupt: Arc<dyn Interrupt>,
    features: u64,
    workers: &'a dyn crate::virtio::device::Workers,
}

/// Features that do not depend on the backend.
fn offered(mtu: Option<u16>, pairs: u16) -> u64 {
    let always = [
        VIRTIO_NET_F_MAC,
        VIRTIO_NET_F_STATUS,
        VIRTIO_NET_F_MRG_RXBUF,
        VIRTIO_NET_F_CTRL_VQ,
        VIRTIO_NET_F_GUEST_ANNOUNCE,
        VIRTIO_RING_F_EVENT_IDX,
    ];
    let mtu = mtu.map(|_| VIRTIO_NET_F_MTU);
    let several = (pairs > 1).then_some(VIRTIO_NET_F_MQ);
    let features = always.into_iter().chain(mtu).chain(several);
    features.fold(0, |bits, feature| bits | 1 << feature)
}

impl VirtioDevice for Net {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.link.read_config(offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let features = activation.features;
        let (queues, idle) = self.pair_queues(features, activation.queues)?;
        if std::mem::take(&mut self.announce) && features & (1 << VIRTIO_NET_F_GUEST_ANNOUNCE) != 0
        {
            self.link.set_announce(true);
            activation.interrupt.config_changed();
        }
        let shared = Shared {
            memory: activation.memory,
            interrupt: activation.interrupt,
            features,
            workers: &*activation.workers,
        };
        self.running = Some(Running {
            workers: Vec::new(),
            idle,
        });
        for queues in queues {
            let number = queues.number;
            match self.start(queues, &shared) {
                Ok(work) => {
                    let running = self.running.as_mut().expect("it is being started");
                    running.workers.push((number, work));
                }
                Err(error) => {
                    self.deactivate();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let Some(running) = self.running.take() else {
            return Vec::new();
        };
        running.workers.iter().for_each(|(_, work)| work.stop());
        let mut queues = running.idle;
        for (number, work) in running.workers {
            if let Some((pair, returned)) = work.join() {
                self.pairs[number] = Some(pair);
                queues.extend(returned);
            }
        }
        queues
    }

    fn reset(&mut self) {
        self.link.used_pairs.store(1, Ordering::SeqCst);
        self.link.set_announce(false);
        for pair in self.pairs.iter_mut().flatten() {
            pair.pending = None;
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.deactivate();
    }
}
