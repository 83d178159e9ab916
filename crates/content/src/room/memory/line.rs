//! The order of requests that wait.
//!
//! * Higher priorities are served first. None starves: after [`PASSES`] requests of higher
//!   priorities were served while some of a lower priority waited, one of the lower priority is
//!   served.
//! * Within a priority, owners take turns: an owner that was served or is new goes to the end. So
//!   the first request of a priority stays the first until it is served or leaves.
//! * Requests of an owner and priority are served in the order in which they came.

use super::amount::Amount;
use super::request::Request;
use jiffy_wire::api::{Priority, Queued};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// How many requests of higher priorities are served before one of a lower priority that waits.
pub(super) const PASSES: u32 = 8;
/// The number of priorities.
const PRIORITIES: usize = 3;

/// A request that waits.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) request: Request,
    /// What it needs in all.
    pub(super) want: Amount,
    /// VMs that want it.
    pub(super) count: u32,
    /// When it came.
    pub(super) since: Instant,
    /// When it came, Unix time in seconds.
    pub(super) since_s: u64,
    /// How long it may wait.
    pub(super) wait: Duration,
    /// Notified when it may be its turn.
    pub(super) called: Arc<Notify>,
}

/// A ticket with its number, in order of arrival.
#[derive(Debug)]
struct Numbered {
    number: u64,
    ticket: Ticket,
}

/// Requests of one owner in one priority, in order of arrival; never empty.
#[derive(Debug)]
struct OfOwner {
    owner: Arc<str>,
    tickets: VecDeque<Numbered>,
}

/// The owners of a priority, in the order of their turns.
type Owners = VecDeque<OfOwner>;

/// How often each priority was passed over.
#[derive(Debug, Clone, Copy, Default)]
struct Passes([u32; PRIORITIES]);

/// Requests that wait.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// The highest priority first.
    priorities: [Owners; PRIORITIES],
    passes: Passes,
    /// Number of the next ticket.
    next: u64,
    length: usize,
}

impl Ticket {
    fn shown(&self, place: usize) -> Queued {
        Queued {
            place: place as u32,
            id: self.request.id.clone(),
            name: self.request.name.clone(),
            purpose: self.request.purpose,
            owner: self.request.owner.to_string(),
            priority: self.request.priority,
            vms: self.count,
            memory_mib: self.want.soon.max(self.want.whole),
            cpus: self.want.cpus,
            since: self.since_s,
            until: self.since_s.saturating_add(self.wait.as_secs()),
        }
    }
}

impl Passes {
    /// The index of the priority whose turn it is, of those in which requests wait.
    fn turn(&self, waits: [bool; PRIORITIES]) -> Option<usize> {
        let is_due = |index: &usize| waits[*index] && self.0[*index] >= PASSES;
        let due = (0..PRIORITIES).rev().find(is_due);
        due.or_else(|| waits.iter().position(|waits| *waits))
    }

    /// Notes that a request of the priority of this index was served; requests wait in the priorities
    /// `waits`.
    fn note_served(&mut self, index: usize, waits: [bool; PRIORITIES]) {
        self.0[index] = 0;
        for passed in &mut self.0[index + 1..] {
            *passed += 1;
        }
        self.forget_empty(waits);
    }

    /// A priority in which no request waits is not passed over.
    fn forget_empty(&mut self, waits: [bool; PRIORITIES]) {
        for (passed, waits) in self.0.iter_mut().zip(waits) {
            *passed *= u32::from(waits);
        }
    }
}

impl Line {
    pub(super) fn is_empty(&self) -> bool {
        self.length == 0
    }

    pub(super) fn len(&self) -> usize {
        self.length
    }

    /// Whether a request for this VM waits.
    pub(super) fn has(&self, id: &str) -> bool {
        let owners = self.priorities.iter().flatten();
        let mut tickets = owners.flat_map(|one| &one.tickets);
        tickets.any(|one| one.ticket.request.id == id)
    }

    /// Number of requests of this owner.
    pub(super) fn len_of(&self, owner: &str) -> usize {
        let owners = self.priorities.iter().flatten();
        let theirs = owners.filter(|other| &*other.owner == owner);
        theirs.map(|one| one.tickets.len()).sum()
    }

    /// Whether a new request of this priority would be the first.
    pub(super) fn would_be_first(&self, priority: Priority) -> bool {
        let index = index_of(priority);
        let mut waits = self.waits();
        let is_alone = !waits[index];
        waits[index] = true;
        is_alone && self.passes.turn(waits) == Some(index)
    }

    /// Notes that a request of this priority was served without waiting.
    pub(super) fn note_served(&mut self, priority: Priority) {
        self.passes.note_served(index_of(priority), self.waits());
    }

    /// Adds a request; returns its number.
    pub(super) fn enter(&mut self, ticket: Ticket) -> u64 {
        let number = self.next;
        self.next += 1;
        self.length += 1;
        let owners = &mut self.priorities[index_of(ticket.request.priority)];
        let owner = Arc::clone(&ticket.request.owner);
        let ticket = Numbered { number, ticket };
        match owners.iter_mut().find(|one| one.owner == owner) {
            Some(one) => one.tickets.push_back(ticket),
            None => owners.push_back(OfOwner {
                owner,
                tickets: VecDeque::from([ticket]),
            }),
        }
        number
    }

    /// The request whose turn it is.
    pub(super) fn first(&self) -> Option<(u64, &Ticket)> {
        let index = self.passes.turn(self.waits())?;
        let first = self.priorities[index].front()?.tickets.front()?;
        Some((first.number, &first.ticket))
    }

    /// Removes the first request, which is served; its owner goes to the end.
    pub(super) fn serve_first(&mut self) {
        let Some(index) = self.passes.turn(self.waits()) else {
            return;
        };
        let owners = &mut self.priorities[index];
        let Some(mut served) = owners.pop_front() else {
            return;
        };
        served.tickets.pop_front();
        self.length -= 1;
        if !served.tickets.is_empty() {
            owners.push_back(served);
        }
        self.passes.note_served(index, self.waits());
    }

    /// Removes a request that gave up; false if it is not there.
    pub(super) fn leave(&mut self, number: u64) -> bool {
        for owners in &mut self.priorities {
            for at in 0..owners.len() {
                let tickets = &mut owners[at].tickets;
                let Ok(found) = tickets.binary_search_by_key(&number, |one| one.number) else {
                    continue;
                };
                tickets.remove(found);
                if tickets.is_empty() {
                    owners.remove(at);
                }
                self.length -= 1;
                self.passes.forget_empty(self.waits());
                return true;
            }
        }
        false
    }

    /// All requests that `passes` accepts, with their places in the order of service if no request
    /// arrives or leaves.
    pub(super) fn shown(&self, passes: impl Fn(&Request) -> bool) -> Vec<Queued> {
        let mut waiting = self.priorities.each_ref().map(in_turns);
        let mut turns = self.passes;
        let mut shown = Vec::new();
        for place in 1..=self.length {
            let waits = waiting.each_ref().map(|tickets| !tickets.is_empty());
            let Some(index) = turns.turn(waits) else {
                break;
            };
            let ticket = waiting[index].pop_front();
            let waits = waiting.each_ref().map(|tickets| !tickets.is_empty());
            turns.note_served(index, waits);
            if let Some(ticket) = ticket.filter(|ticket| passes(&ticket.request)) {
                shown.push(ticket.shown(place));
            }
        }
        shown
    }

    /// In which priorities requests wait.
    fn waits(&self) -> [bool; PRIORITIES] {
        self.priorities.each_ref().map(|owners| !owners.is_empty())
    }

    /// The earliest deadline of all requests, or of those of one owner.
    pub(super) fn next_deadline(&self, of: Option<&str>) -> Option<Instant> {
        let owners = self.priorities.iter().flatten();
        let owners = owners.filter(|one| of.is_none_or(|of| *one.owner == *of));
        let tickets = owners.flat_map(|one| &one.tickets);
        tickets.map(|one| one.ticket.since + one.ticket.wait).min()
    }
}

/// The place of a priority in [`Line::priorities`].
fn index_of(priority: Priority) -> usize {
    match priority {
        Priority::High => 0,
        Priority::Normal => 1,
        Priority::Low => 2,
    }
}

/// The requests of a priority in the order of their owners' turns.
fn in_turns(owners: &Owners) -> VecDeque<&Ticket> {
    let mut owners: Vec<_> = owners.iter().map(|one| one.tickets.iter()).collect();
    let mut order = VecDeque::new();
    while !owners.is_empty() {
        owners.retain_mut(|tickets| match tickets.next() {
            Some(next) => {
                order.push_back(&next.ticket);
                true
            }
            None => false,
        });
    }
    order
}
