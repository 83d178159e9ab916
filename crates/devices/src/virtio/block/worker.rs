//! The thread that serves a disk's queue.
//!
//! It executes one request after the other. A request that waits for bytes that are missing in the
//! disk's file is put aside, and later ones continue: requests are answered in any order (Virtio
//! 1.3 §2.7.13), and as many may wait as the queue has entries.

use super::QUEUE_SIZE;
use super::disk::Disk;
use super::executor::{Executor, Outcome, Waiting};
use crate::GuestMemory;
use crate::virtio::device::{ActiveQueue, Interrupt};
use crate::virtio::queue::doorbell::{descriptor, make_blocking};
use crate::virtio::queue::limit::Limiter;
use crate::virtio::queue::ring::{next_chain, put_back};
use crate::virtio::queue::signal::driver_wants_interrupt;
use jiffy_sys::activity;
use jiffy_sys::log_limit::LogLimit;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use virtio_queue::{QueueOwnedT, QueueT};

/// Everything the thread owns.
pub(super) struct Worker {
    pub(super) executor: Executor,
    pub(super) disk: Arc<Disk>,
    /// Requests that wait for bytes, with their heads, in the order in which they were taken.
    pub(super) waiting: Vec<(u16, Waiting)>,
    pub(super) limiter: Arc<Limiter>,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) interrupt: Arc<dyn Interrupt>,
    pub(super) active: ActiveQueue,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) log: Arc<LogLimit>,
}

impl Worker {
    /// Serves the queue until it is stopped; returns the queue with its position. Each request that
    /// it took is answered, or is in the queue again to be executed again.
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
                self.give_up_waiting();
                broken = true;
            }
            if self.stopped() {
                break;
            }
            match self.sleep() {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::error!(%error, "the doorbell of a disk can't be read");
                    self.interrupt.needs_reset();
                    break;
                }
            }
        }
        self.give_back();
        self.active
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Waits for the doorbell, or for an answer that a request waits for.
    fn sleep(&self) -> io::Result<()> {
        let doorbell = &self.active.doorbell;
        let rung = match self.disk.on_demand() {
            Some((_, fetcher)) if !self.waiting.is_empty() => fetcher.wait(descriptor(doorbell))?,
            _ => true,
        };
        match rung {
            true => activity::wait("serves", || doorbell.read()).map(drop),
            false => Ok(()),
        }
    }

    /// Answers all requests that can be answered, until it is stopped.
    fn serve(&mut self) -> Result<(), virtio_queue::Error> {
        let memory = self.memory.clone();
        let memory = memory.as_ref();
        loop {
            self.active.queue.disable_notification(memory)?;
            while !self.stopped() {
                self.take_answers()?;
                if self.waiting.len() >= usize::from(QUEUE_SIZE) {
                    // A driver that keeps to the rules never has that many in flight.
                    return Ok(());
                }
                let Some(chain) = next_chain(&mut self.active.queue, memory)? else {
                    break;
                };
                let mut admit = |cost| {
                    self.limiter
                        .admit(cost, descriptor(&self.active.doorbell), &self.stop)
                };
                match self.executor.answer(memory, chain, &mut admit) {
                    Outcome::Done(written) => self.give_used(chain.head(), written)?,
                    Outcome::Waits(waiting) => self.waiting.push((chain.head(), waiting)),
                    Outcome::Stopped => {
                        self.active.queue.go_to_previous_position();
                        break;
                    }
                }
            }
            let more = self.active.queue.enable_notification(memory)?;
            if !more || self.stopped() {
                return Ok(());
            }
        }
    }

    /// Continues requests whose answers have come.
    fn take_answers(&mut self) -> Result<(), virtio_queue::Error> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let disk = self.disk.clone();
        let Some((_, fetcher)) = disk.on_demand() else {
            return Ok(());
        };
        let memory = self.memory.clone();
        for (ticket, fetched) in fetcher.answers() {
            let waits = |(_, waiting): &(u16, Waiting)| waiting.ticket() == ticket;
            let Some(at) = self.waiting.iter().position(waits) else {
                continue;
            };
            let (head, waiting) = self.waiting.remove(at);
            match self.executor.resume(&memory, waiting, fetched) {
                Outcome::Done(written) => self.give_used(head, written)?,
                Outcome::Waits(waiting) => self.waiting.insert(at, (head, waiting)),
                Outcome::Stopped => {
                    self.put_back(head);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Returns an answered request to the driver.
    fn give_used(&mut self, head: u16, written: u32) -> Result<(), virtio_queue::Error> {
        let memory = self.memory.as_ref();
        self.active.queue.add_used(memory, head, written)?;
        // Checked after each request, because the next one may take long.
        if driver_wants_interrupt(&mut self.active.queue, memory) {
            self.interrupt.used_buffers();
        }
        Ok(())
    }

    /// Puts waiting requests back into the queue: the device that continues, here or in another VM,
    /// takes them again.
    fn give_back(&mut self) {
        for head in self.give_up_waiting().into_iter().rev() {
            self.put_back(head);
        }
    }

    /// Gives up all waiting requests; returns their heads.
    fn give_up_waiting(&mut self) -> Vec<u16> {
        if let Some((_, fetcher)) = self.disk.on_demand()
            && !self.waiting.is_empty()
        {
            fetcher.give_up();
        }
        let heads = self.waiting.drain(..).map(|(head, _)| head);
        heads.collect()
    }

    /// Puts a request before the next one in the queue.
    fn put_back(&mut self, head: u16) {
        if let Err(error) = put_back(&mut self.active.queue, &self.memory, head) {
            tracing::error!(%error, "a request of a disk can't be put back");
            self.interrupt.needs_reset();
        }
    }
}
