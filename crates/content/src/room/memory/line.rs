//! The order of requests that wait.
//!
//! * A request of a higher class is served before those of lower ones. Its class is its priority
//!   at first; it rises by one for each [`AGEING`] that it has waited, so that requests of high
//!   priority delay a low one by twice that time at most, and by one round of their owners.
//! * Within a class, owners take turns: one that was served goes behind the others, and so does
//!   one that is new. So the first request of a class stays its first until it is served or
//!   leaves, whoever comes.
//! * Requests of an owner are served in the order in which they came.

use super::amount::Amount;
use super::asking::Asking;
use jiffy_wire::api::{Priority, Queued};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// How long a request waits in a class until it rises to the next one.
pub(super) const AGEING: Duration = Duration::from_secs(30);
const CLASSES: usize = 3;

/// A request that waits.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) asking: Asking,
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

/// Requests of one owner in one class, in order of arrival; never empty.
#[derive(Debug)]
struct OfOwner {
    owner: Arc<str>,
    tickets: VecDeque<Numbered>,
}

/// The owners of a class, in the order of their turns.
type Class = VecDeque<OfOwner>;

/// Requests that wait.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// The highest first.
    classes: [Class; CLASSES],
    /// Number of the next ticket.
    next: u64,
    length: usize,
    /// When the next request rises, at the earliest.
    rises: Option<Instant>,
}

impl Ticket {
    /// The class of its priority.
    fn first_class(&self) -> usize {
        class_of(self.asking.priority)
    }

    /// When it leaves this class for the next one.
    fn rises_from(&self, class: usize) -> Option<Instant> {
        let before = (self.first_class() + 1).checked_sub(class)?;
        (class > 0).then(|| self.since + AGEING * before as u32)
    }

    fn shown(&self, place: usize) -> Queued {
        Queued {
            place: place as u32,
            id: self.asking.id.clone(),
            name: self.asking.name.clone(),
            purpose: self.asking.purpose,
            owner: self.asking.owner.to_string(),
            priority: self.asking.priority,
            vms: self.count,
            memory_mib: self.want.soon.max(self.want.whole),
            cpus: self.want.cpus,
            since: self.since_s,
            until: self.since_s.saturating_add(self.wait.as_secs()),
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

    /// Number of requests of this owner.
    pub(super) fn len_of(&self, owner: &str) -> usize {
        let owners = self.classes.iter().flatten();
        let theirs = owners.filter(|other| &*other.owner == owner);
        theirs.map(|one| one.tickets.len()).sum()
    }

    /// Would a new request of this priority be the first?
    pub(super) fn would_be_first(&self, priority: Priority) -> bool {
        self.classes[..=class_of(priority)]
            .iter()
            .all(VecDeque::is_empty)
    }

    /// Adds a request; returns its number.
    pub(super) fn enter(&mut self, ticket: Ticket) -> u64 {
        let number = self.next;
        self.next += 1;
        self.length += 1;
        let class = ticket.first_class();
        self.rises = earlier(self.rises, ticket.rises_from(class));
        insert(&mut self.classes[class], Numbered { number, ticket });
        number
    }

    /// The request whose turn it is.
    pub(super) fn first(&self) -> Option<(u64, &Ticket)> {
        let owners = self.classes.iter().find_map(VecDeque::front)?;
        let first = owners.tickets.front()?;
        Some((first.number, &first.ticket))
    }

    /// Takes the first request out, because it is served: its owner goes behind the others.
    pub(super) fn serve_first(&mut self) {
        let Some(class) = self.classes.iter_mut().find(|class| !class.is_empty()) else {
            return;
        };
        let Some(mut served) = class.pop_front() else {
            return;
        };
        served.tickets.pop_front();
        self.length -= 1;
        if !served.tickets.is_empty() {
            class.push_back(served);
        }
    }

    /// Takes a request out that gave up; false if it is not there.
    pub(super) fn leave(&mut self, number: u64) -> bool {
        for class in &mut self.classes {
            for at in 0..class.len() {
                let tickets = &mut class[at].tickets;
                let Ok(found) = tickets.binary_search_by_key(&number, |one| one.number) else {
                    continue;
                };
                tickets.remove(found);
                if tickets.is_empty() {
                    class.remove(at);
                }
                self.length -= 1;
                return true;
            }
        }
        false
    }

    /// Moves those up that have waited long enough; true if there were any.
    pub(super) fn age(&mut self, now: Instant) -> bool {
        if self.rises.is_none_or(|rises| rises > now) {
            return false;
        }
        let mut moved = false;
        // The lowest class first: who has waited for both rises twice.
        for class in (1..CLASSES).rev() {
            for ticket in take_risen(&mut self.classes[class], class, now) {
                insert(&mut self.classes[class - 1], ticket);
                moved = true;
            }
        }
        let all = self.classes.iter().enumerate().flat_map(|(class, owners)| {
            let tickets = owners.iter().flat_map(|one| &one.tickets);
            tickets.map(move |one| one.ticket.rises_from(class))
        });
        self.rises = all.fold(None, earlier);
        moved
    }

    /// All requests that pass, with their places in the order in which they will be served if
    /// nobody comes, leaves or rises.
    pub(super) fn shown(&self, passes: impl Fn(&Asking) -> bool) -> Vec<Queued> {
        let mut shown = Vec::new();
        let mut place = 0;
        for class in &self.classes {
            let mut owners: Vec<_> = class.iter().map(|one| one.tickets.iter()).collect();
            while !owners.is_empty() {
                owners.retain_mut(|tickets| {
                    let Some(Numbered { ticket, .. }) = tickets.next() else {
                        return false;
                    };
                    place += 1;
                    if passes(&ticket.asking) {
                        shown.push(ticket.shown(place));
                    }
                    true
                });
            }
        }
        shown
    }

    /// When the next of all requests gives up, at the latest.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let owners = self.classes.iter().flatten();
        let tickets = owners.flat_map(|one| &one.tickets);
        tickets.map(|one| one.ticket.since + one.ticket.wait).min()
    }
}

fn class_of(priority: Priority) -> usize {
    match priority {
        Priority::High => 0,
        Priority::Normal => 1,
        Priority::Low => 2,
    }
}

fn earlier(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(other).min()
}

/// Adds a request behind those of its owner that came before it; a new owner goes behind the
/// others.
fn insert(class: &mut Class, ticket: Numbered) {
    let owner = &ticket.ticket.asking.owner;
    match class.iter_mut().find(|one| one.owner == *owner) {
        Some(one) => {
            let earlier = |other: &Numbered| other.number < ticket.number;
            let at = one.tickets.partition_point(earlier);
            one.tickets.insert(at, ticket);
        }
        None => class.push_back(OfOwner {
            owner: Arc::clone(owner),
            tickets: VecDeque::from([ticket]),
        }),
    }
}

/// Takes those out of a class that leave it for the next one, in order of arrival.
fn take_risen(class: &mut Class, number: usize, now: Instant) -> Vec<Numbered> {
    let rises = |one: &Numbered| {
        let at = one.ticket.rises_from(number);
        at.is_some_and(|at| at <= now)
    };
    let mut risen = Vec::new();
    for one in class.iter_mut() {
        let (up, stays): (VecDeque<_>, _) = one.tickets.drain(..).partition(&rises);
        risen.extend(up);
        one.tickets = stays;
    }
    class.retain(|one| !one.tickets.is_empty());
    risen.sort_by_key(|one| one.number);
    risen
}
