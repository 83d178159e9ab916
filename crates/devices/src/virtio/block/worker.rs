//! The thread that serves the queue, one request after the other.

use super::executor::Executor;
use crate::GuestMemory;
use crate::log_limit::LogLimit;
use crate::virtio::device::{ActiveQueue, Interrupt};
use crate::virtio::queue::doorbell::{descriptor, make_blocking};
use crate::virtio::queue::limit::Limiter;
use crate::virtio::queue::ring::next_chain;
use crate::virtio::queue::signal::driver_wants_interrupt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use virtio_queue::{QueueOwnedT, QueueT};

/// Everything the thread owns.
pub(super) struct Worker {
    pub(super) executor: Executor,
    pub(super) limiter: Arc<Limiter>,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) interrupt: Arc<dyn Interrupt>,
    pub(super) active: ActiveQueue,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) log: Arc<LogLimit>,
}

impl Worker {
    /// Serves the queue until told to stop; returns it with its position. Each request that
    /// was taken is answered, except one that would delay the stop for too long: that one is
    /// put back into the queue, to be carried out again.
    pub(super) fn run(mut self) -> ActiveQueue {
        if let Err(error) = make_blocking(&self.active.doorbell) {
            tracing::error!(%error, "the doorbell of a disk can't be waited on");
            self.interrupt.needs_reset();
            return self.active;
        }
        let mut broken = false;
        while !self.stopped() {
            if !broken && let Err(error) = self.serve() {
                if self.log.admits() {
                    tracing::warn!(%error, "a guest broke the queue of a disk");
                }
                self.interrupt.needs_reset();
                broken = true;
            }
            if self.stopped() {
                break;
            }
            match self.active.doorbell.read() {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::error!(%error, "the doorbell of a disk can't be read");
                    self.interrupt.needs_reset();
                    break;
                }
            }
        }
        self.active
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Answers all waiting requests, or until told to stop.
    fn serve(&mut self) -> Result<(), virtio_queue::Error> {
        let memory = self.memory.clone();
        let memory = memory.as_ref();
        loop {
            self.active.queue.disable_notification(memory)?;
            while !self.stopped() {
                let Some(chain) = next_chain(&mut self.active.queue, memory)? else {
                    break;
                };
                let mut admit = |cost| {
                    self.limiter
                        .admit(cost, descriptor(&self.active.doorbell), &self.stop)
                };
                let Some(written) = self.executor.answer(memory, chain, &mut admit) else {
                    self.active.queue.go_to_previous_position();
                    break;
                };
                self.active.queue.add_used(memory, chain.head(), written)?;
                // After each request, not after all: the next may take long.
                if driver_wants_interrupt(&mut self.active.queue, memory) {
                    self.interrupt.used_buffers();
                }
            }
            let more = self.active.queue.enable_notification(memory)?;
            if !more || self.stopped() {
                return Ok(());
            }
        }
    }
}
