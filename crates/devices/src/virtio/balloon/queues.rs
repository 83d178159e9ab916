//! The activated queues of a balloon (Virtio 1.3 §5.5.2).

use super::PAGE;
use super::account::Account;
use super::config::{F_PAGE_POISON, F_REPORTING, F_STATISTICS};
use super::reclaim::{Budget, pages_in_ram};
use super::request::{self, Pages};
use crate::GuestMemory;
use crate::virtio::device::{ActivateError, Activation, ActiveQueue, Interrupt};
use crate::virtio::queue::ring::{answer_each, next_chain};
use crate::virtio::queue::signal::driver_wants_interrupt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::GuestAddress;

/// The queues of an activation.
pub(super) struct Queues {
    memory: Arc<GuestMemory>,
    interrupt: Arc<dyn Interrupt>,
    inflate: ActiveQueue,
    deflate: ActiveQueue,
    statistics: Option<StatisticsQueue>,
    reporting: Option<ActiveQueue>,
    /// The driver has reported the value with which it fills free pages, and relies on it.
    poisons: bool,
    pages: Pages,
}

/// The driver gives a buffer with statistics; the device returns it to request new ones (§5.5.6.3).
struct StatisticsQueue {
    active: ActiveQueue,
    /// The head of the buffer that the device holds, the last one it took.
    held: Option<u16>,
    bytes: Vec<u8>,
}

impl Queues {
    /// Assigns the queues of an activation. Queues that depend on a feature are numbered without
    /// gaps, by the negotiated features, as in Linux and QEMU.
    pub(super) fn new(activation: Activation) -> Result<Queues, ActivateError> {
        let features = activation.features;
        let mut queues = activation.queues.into_iter();
        let mut next = || queues.next().flatten();
        let inflate = next().ok_or(ActivateError::MissingQueue(0))?;
        let deflate = next().ok_or(ActivateError::MissingQueue(1))?;
        let mut next_if = |feature| match features & feature {
            0 => None,
            _ => next(),
        };
        let statistics = next_if(F_STATISTICS).map(|active| StatisticsQueue {
            active,
            held: None,
            bytes: Vec::new(),
        });
        let reporting = next_if(F_REPORTING);
        Ok(Queues {
            memory: activation.memory,
            interrupt: activation.interrupt,
            inflate,
            deflate,
            statistics,
            reporting,
            poisons: features & F_PAGE_POISON != 0,
            pages: Pages::new(),
        })
    }

    /// Returns the queues. The buffer of statistics is put back into its queue, to be taken again.
    pub(super) fn into_active(self) -> Vec<ActiveQueue> {
        let statistics = self.statistics.map(|mut queue| {
            if queue.held.is_some() {
                queue.active.queue.go_to_previous_position();
            }
            queue.active
        });
        [
            Some(self.inflate),
            Some(self.deflate),
            statistics,
            self.reporting,
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Interrupts the driver.
    pub(super) fn interrupt(&self) -> &dyn Interrupt {
        &*self.interrupt
    }

    /// Serves every queue.
    pub(super) fn serve_all(&mut self, account: &mut Account, poison: u32) {
        for index in 0..super::QUEUE_SIZES.len() as u16 {
            self.serve(index, account, poison);
        }
    }

    /// Answers the requests of one queue, at most a queue's worth.
    pub(super) fn serve(&mut self, index: u16, account: &mut Account, poison: u32) {
        let is = |queue: &ActiveQueue| queue.index == index;
        let result = if is(&self.inflate) {
            self.inflate(account)
        } else if is(&self.deflate) {
            self.deflate(account)
        } else if self.statistics.as_ref().is_some_and(|q| is(&q.active)) {
            self.take_statistics(account)
        } else if self.reporting.as_ref().is_some_and(is) {
            self.take_report(account, poison)
        } else {
            Ok(())
        };
        if let Err(error) = result {
            if account.log.admits() {
                tracing::warn!(%error, queue = index, "a guest broke a queue of its balloon");
            }
            self.interrupt.needs_reset();
        }
    }

    fn inflate(&mut self, account: &mut Account) -> Result<(), virtio_queue::Error> {
        let memory = self.memory.as_ref();
        let pages = &mut self.pages;
        let mut budget = Budget::new(account.ram_bytes);
        answer_each(&mut self.inflate, memory, &*self.interrupt, |chain| {
            pages.read(memory, chain);
            for range in pages.ranges() {
                let discard = |start, length| account.reclaim.discard(start, length);
                let bytes = release(account, memory, range, &mut budget, discard);
                account.inflated_bytes += bytes;
                // A driver may give a page twice.
                let given = account.given_pages + bytes / PAGE;
                account.given_pages = given.min(account.ram_pages());
            }
            0
        })
    }

    /// The guest may access the pages at once, so they are only counted.
    fn deflate(&mut self, account: &mut Account) -> Result<(), virtio_queue::Error> {
        let memory = self.memory.as_ref();
        let pages = &mut self.pages;
        answer_each(&mut self.deflate, memory, &*self.interrupt, |chain| {
            pages.read(memory, chain);
            let ranges = pages.ranges().flat_map(|range| pages_in_ram(memory, range));
            let taken: u64 = ranges.map(|part| (part.end - part.start) / PAGE).sum();
            account.given_pages = account.given_pages.saturating_sub(taken);
            0
        })
    }

    fn take_report(
        &mut self,
        account: &mut Account,
        poison: u32,
    ) -> Result<(), virtio_queue::Error> {
        let Some(queue) = &mut self.reporting else {
            return Ok(());
        };
        // Released pages read as zero, but a driver that fills free pages with another value checks
        // it when it uses them again (§5.5.6.5.2).
        let keep = self.poisons && poison != 0;
        let memory = self.memory.as_ref();
        let mut budget = Budget::new(account.ram_bytes);
        answer_each(queue, memory, &*self.interrupt, |chain| {
            if keep {
                return 0;
            }
            for range in request::reported(memory, chain) {
                if budget.is_exhausted() {
                    break;
                }
                let way = |start, length| account.reclaim.release(start, length);
                let bytes = release(account, memory, range, &mut budget, way);
                account.reported_bytes += bytes;
            }
            0
        })
    }

    fn take_statistics(&mut self, account: &mut Account) -> Result<(), virtio_queue::Error> {
        let Some(StatisticsQueue {
            active,
            held,
            bytes,
        }) = &mut self.statistics
        else {
            return Ok(());
        };
        let memory = self.memory.as_ref();
        let mut returned = false;
        for _ in 0..active.queue.size() {
            let Some(chain) = next_chain(&mut active.queue, memory)? else {
                break;
            };
            request::read_statistics(memory, chain, bytes);
            account.statistics.put(bytes);
            // One buffer is sufficient for requests.
            if let Some(older) = held.replace(chain.head()) {
                active.queue.add_used(memory, older, 0)?;
                returned = true;
            }
        }
        if returned && driver_wants_interrupt(&mut active.queue, memory) {
            self.interrupt.used_buffers();
        }
        Ok(())
    }

    /// Requests new statistics from the driver; false if it gives none.
    pub(super) fn request_statistics(&mut self) -> bool {
        let Some(queue) = &mut self.statistics else {
            return false;
        };
        let Some(head) = queue.held.take() else {
            // A request is pending already, or the driver never gave a buffer.
            return queue.active.queue.next_used() > 0;
        };
        let memory = self.memory.as_ref();
        match queue.active.queue.add_used(memory, head, 0) {
            Ok(()) => {
                if driver_wants_interrupt(&mut queue.active.queue, memory) {
                    self.interrupt.used_buffers();
                }
                true
            }
            // The driver gave a head that does not exist.
            Err(error) => {
                tracing::debug!(%error, "balloon: a statistics buffer cannot be returned");
                false
            }
        }
    }
}

/// Releases the part of a range that is guest RAM in this way, within the budget. Returns the
/// number of released bytes.
fn release(
    account: &Account,
    memory: &GuestMemory,
    range: Range<u64>,
    budget: &mut Budget,
    way: impl Fn(GuestAddress, u64) -> io::Result<()>,
) -> u64 {
    let mut released = 0;
    for part in pages_in_ram(memory, range) {
        let length = part.end - part.start;
        if !budget.take(length) {
            break;
        }
        match way(GuestAddress(part.start), length) {
            Ok(()) => released += length,
            Err(error) => {
                if account.log.admits() {
                    tracing::warn!(%error, start = part.start, length, "memory that a guest gave back could not be released");
                }
            }
        }
    }
    released
}
