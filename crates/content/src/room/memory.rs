//! The ledger of memory. Every start of a VM reserves memory here first; a request that does not
//! fit waits in a queue.
//!
//! Two things are counted, each against a bound of its own:
//!
//! * [`Amount::soon`]: what VMs that are starting, or whose RAM a pager fills completely, will
//!   take, against the host's MemAvailable. It is given back when the VM is ready: MemAvailable
//!   no longer includes what the VM took. It is not kept for the VM's life, because that would
//!   refuse too much: a thousand idle children of a fork have 125 GiB in all and take 1.5 GiB.
//! * [`Amount::whole`]: the most that VMs may ever take, against `--memory-limit`, if there
//!   is one. It is given back when the VMM is gone.
//!
//! Requests are served in order of arrival: the first in the queue checks again whenever memory
//! is given back; the others wait for their turn. Background work ([`Room::behind`]) never waits
//! and never delays a request. A spare VMM reserves nothing: its few MiB belong to the VM that
//! takes it.

#[cfg(test)]
mod tests;

use super::Limit;
use crate::clock::monotonic_ns;
use crate::error::{Error, Result};
use crate::model::vm::Spec;
use jiffy_wire::vmm::PageSize;
use std::fs;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout_at};
use tracing::debug;

/// How often the first in the queue checks without a notification: other programs give memory
/// back, too.
const LOOK: Duration = Duration::from_millis(250);
/// What a child of a fork takes until it is ready, MiB: an idle one has 1.43 MiB of its own
/// (`clone/unique-memory` of the benchmarks).
const CHILD_MIB: u64 = 2;

/// Memory of VMs, MiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// MiB that are taken until the VM is ready.
    pub soon: u64,
    /// The most that it may ever take.
    pub whole: u64,
}

impl Amount {
    /// The amount of a VM that boots, is restored or is woken. How much its guest will touch is
    /// not known in advance, not even for a golden or lazy one: its command may fill all of its
    /// memory at once. The VMM's own few MiB are much less than what a guest leaves untouched,
    /// and are not counted.
    pub fn of(spec: &Spec) -> Amount {
        let whole = u64::from(spec.memory_mib);
        let soon = match spec.pages {
            // hugetlb pages are reserved when the VMM maps them and are not part of MemAvailable.
            PageSize::Huge2M | PageSize::Huge1G => 0,
            PageSize::Small => whole,
        };
        Amount { soon, whole }
    }

    /// The amount of a child of a fork, which shares its parent's memory until one of them
    /// writes.
    pub fn of_child(spec: &Spec) -> Amount {
        Amount {
            soon: CHILD_MIB,
            whole: spec.memory_mib.into(),
        }
    }

    /// The amount of a VM whose RAM a pager fills completely for a capture; `bytes` of it are not
    /// zero, if that is known. Pages that are present already are counted again, so the amount is
    /// never too small.
    pub fn to_complete(spec: &Spec, bytes: Option<u64>) -> Amount {
        let most = Amount::of(spec).soon;
        let mib = bytes.map_or(most, |bytes| bytes.div_ceil(1 << 20));
        Amount {
            soon: mib.min(most),
            whole: 0,
        }
    }

    fn times(self, count: u32) -> Amount {
        let count = u64::from(count);
        Amount {
            soon: self.soon.saturating_mul(count),
            whole: self.whole.saturating_mul(count),
        }
    }

    fn plus(self, other: Amount) -> Amount {
        Amount {
            soon: self.soon.saturating_add(other.soon),
            whole: self.whole.saturating_add(other.whole),
        }
    }

    fn less(self, other: Amount) -> Amount {
        Amount {
            soon: self.soon.saturating_sub(other.soon),
            whole: self.whole.saturating_sub(other.whole),
        }
    }
}

/// The ledger.
pub struct Room {
    host: Box<Host>,
    /// MiB that VMs may have in all.
    limit: Option<u64>,
    /// How long a request waits.
    patience: Duration,
    /// The first in the queue holds it. It is passed on in order of arrival, and only its holder
    /// adds to the books, so that two requests can't get the same memory.
    turn: tokio::sync::Mutex<()>,
    books: Mutex<Books>,
    /// Notifies when something was given back.
    freed: Notify,
    /// Counts how often background reservations were taken away.
    claims: watch::Sender<u64>,
}

/// Reads the host's memory; an error if that is not possible.
type Host = dyn Fn() -> io::Result<Memory> + Send + Sync;

#[derive(Debug, Clone, Copy)]
struct Memory {
    /// MemTotal, MiB.
    total: u64,
    /// MemAvailable, MiB.
    available: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Books {
    /// Reserved by requests, and held by running VMs.
    held: Amount,
    /// Reserved by background work.
    behind: Amount,
}

/// Memory that was reserved; it is given back when this is dropped.
#[derive(Debug)]
pub struct Reserved {
    room: Arc<Room>,
    amount: Amount,
    count: u32,
    is_behind: bool,
    /// When the wait for it began and ended, if there was one: monotonic nanoseconds.
    pub waited_ns: Option<(u64, u64)>,
}

/// Memory reserved by background work.
#[derive(Debug)]
pub struct Background {
    _reserved: Reserved,
    claims: watch::Receiver<u64>,
    /// The value of `claims` before the reservation.
    before: u64,
}

impl Room {
    /// The ledger of this host.
    pub fn new(limit: Option<Limit>, patience: Duration) -> Arc<Room> {
        // If the host's total is unknown, a limit in percent does not restrict anything.
        let total = meminfo().map_or(u64::MAX, |memory| memory.total << 20);
        let limit = limit.map(|limit| limit.of(total) >> 20);
        Room::of_host(Box::new(meminfo), limit, patience)
    }

    fn of_host(host: Box<Host>, limit: Option<u64>, patience: Duration) -> Arc<Room> {
        Arc::new(Room {
            host,
            limit,
            patience,
            turn: tokio::sync::Mutex::default(),
            books: Mutex::default(),
            freed: Notify::new(),
            claims: watch::Sender::new(0),
        })
    }

    /// Reserves `each` for each of `count` VMs that start together. Waits if there is no room,
    /// unless there never can be. Dropping the future leaves the queue.
    pub async fn reserve(self: &Arc<Self>, each: Amount, count: u32) -> Result<Reserved> {
        if self.patience.is_zero() {
            // Without patience, the turn is never held for longer than one check.
            let _turn = self.turn.lock().await;
            return self.take(each, count).map_err(|lack| lack.error(None));
        }
        let began_ns = monotonic_ns();
        let deadline = Instant::now() + self.patience;
        let (mut waits, mut looked) = (false, false);
        let in_turn = async {
            let _turn = match self.turn.try_lock() {
                Ok(turn) => turn,
                Err(_) => {
                    waits = true;
                    self.turn.lock().await
                }
            };
            loop {
                // Created before the check, so that memory given back after it is not missed.
                let freed = self.freed.notified();
                let shortage = match self.take(each, count) {
                    Ok(reserved) => return Ok(reserved),
                    Err(shortage) if shortage.is_for_good() => return Err(shortage.error(None)),
                    Err(shortage) => shortage,
                };
                if !looked {
                    debug!(?shortage, "a VM waits for memory");
                }
                (looked, waits) = (true, true);
                tokio::select! {
                    () = freed => {}
                    () = sleep(LOOK) => {}
                }
            }
        };
        match timeout_at(deadline, in_turn).await {
            Ok(Ok(mut reserved)) if waits => {
                reserved.waited_ns = Some((began_ns, monotonic_ns()));
                Ok(reserved)
            }
            Ok(done) => done,
            Err(_) => Err(self.shortage(each, count).error(Some(self.patience))),
        }
    }

    /// Waits until all earlier requests are served or have given up.
    pub async fn nobody_waits(&self) {
        drop(self.turn.lock().await);
    }

    /// Reserves for background work, if there is room now and no request waits. Requests may take
    /// this memory away ([`Background::claimed`]).
    pub fn behind(self: &Arc<Self>, amount: Amount) -> Option<Background> {
        let _turn = self.turn.try_lock().ok()?;
        // Subscribed before the check, so that no claim is missed.
        let claims = self.claims.subscribe();
        let before = *claims.borrow();
        let shortage = self.shortage(amount, 1);
        let mut books = self.books();
        let after = books.behind.plus(amount);
        if shortage.lacks_beside(after.less(amount)).is_some() {
            return None;
        }
        books.behind = after;
        drop(books);
        Some(Background {
            _reserved: self.reserved(amount, 1, true),
            before,
            claims,
        })
    }

    /// Counts a VM that an earlier daemon started, whether there is room or not.
    pub fn adopt(self: &Arc<Self>, whole: u64) -> Reserved {
        let amount = Amount { soon: 0, whole };
        let mut books = self.books();
        books.held = books.held.plus(amount);
        drop(books);
        self.reserved(amount, 1, false)
    }

    /// Reserves without waiting; only the holder of the turn calls this.
    fn take(self: &Arc<Self>, each: Amount, count: u32) -> std::result::Result<Reserved, Shortage> {
        let shortage = self.shortage(each, count);
        if shortage.lacks().is_some() {
            return Err(shortage);
        }
        let want = each.times(count);
        let mut books = self.books();
        books.held = books.held.plus(want);
        let behind = books.behind;
        drop(books);
        if shortage.lacks_beside(behind).is_some() {
            self.claims.send_modify(|claims| *claims += 1);
        }
        Ok(self.reserved(want, count, false))
    }

    fn reserved(self: &Arc<Self>, amount: Amount, count: u32, is_behind: bool) -> Reserved {
        Reserved {
            room: Arc::clone(self),
            amount,
            count,
            is_behind,
            waited_ns: None,
        }
    }

    /// Compares the request with what is reserved and what the host has.
    fn shortage(&self, each: Amount, count: u32) -> Shortage {
        // The books first: memory of a VM that becomes ready in between is counted twice.
        let held = self.books().held;
        Shortage {
            want: each.times(count),
            count,
            held,
            limit: self.limit,
            memory: match each.soon {
                0 => None,
                // A request is not refused because the host's memory can't be read.
                _ => (self.host)().ok(),
            },
        }
    }

    fn give_back(&self, amount: Amount, is_behind: bool) {
        let mut books = self.books();
        let of = match is_behind {
            true => &mut books.behind,
            false => &mut books.held,
        };
        *of = of.less(amount);
        drop(books);
        // Wakes the first in the queue, which passes its turn on when it is served.
        self.freed.notify_one();
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Room {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = formatter.debug_struct("Room");
        shown.field("limit", &self.limit);
        shown.field("books", &*self.books()).finish_non_exhaustive()
    }
}

impl Reserved {
    /// The VM is ready: what it took is no longer available to others.
    pub fn note_ready(&mut self) {
        let soon = Amount {
            whole: 0,
            ..self.amount
        };
        self.amount = self.amount.less(soon);
        if soon.soon > 0 {
            self.room.give_back(soon, self.is_behind);
        }
    }

    /// Splits it into one reservation for each VM.
    pub fn split(mut self) -> Vec<Reserved> {
        let count = self.count.max(1);
        let each = Amount {
            soon: self.amount.soon / u64::from(count),
            whole: self.amount.whole / u64::from(count),
        };
        self.amount = self.amount.less(each.times(count));
        let part = |_| {
            let mut part = self.room.reserved(each, 1, self.is_behind);
            part.waited_ns = self.waited_ns;
            part
        };
        (0..count).map(part).collect()
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.amount != Amount::default() {
            self.room.give_back(self.amount, self.is_behind);
        }
    }
}

impl Background {
    /// Waits until a request has claimed this memory: the background work must be given up.
    pub async fn claimed(&mut self) {
        // The sender is the ledger's, which this holds.
        let _ = self.claims.wait_for(|claims| *claims > self.before).await;
    }

    /// Has a request claimed this memory?
    pub fn was_claimed(&self) -> bool {
        *self.claims.borrow() > self.before
    }
}

/// The error of background work that has no room, or whose memory was claimed.
pub fn needed_by_runs() -> Error {
    Error::no_room("What runs needs the memory.")
}

/// A request, compared with what is reserved and what the host has.
#[derive(Debug, Clone, Copy)]
struct Shortage {
    want: Amount,
    /// VMs that want it.
    count: u32,
    held: Amount,
    limit: Option<u64>,
    memory: Option<Memory>,
}

/// Which bound a request exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lack {
    /// The host's memory.
    Memory,
    /// The limit of all VMs' memory.
    Limit,
}

impl Shortage {
    /// None if there is room.
    fn lacks(&self) -> Option<Lack> {
        self.lacks_beside(Amount::default())
    }

    /// As [`Shortage::lacks`] if `more` were held in addition.
    fn lacks_beside(&self, more: Amount) -> Option<Lack> {
        let all = self.held.plus(more).plus(self.want);
        // Adopted VMs may already hold more than the limit.
        if self.want.whole > 0 && self.limit.is_some_and(|limit| all.whole > limit) {
            return Some(Lack::Limit);
        }
        let over = |memory: Memory| all.soon > memory.available;
        (self.want.soon > 0 && self.memory.is_some_and(over)).then_some(Lack::Memory)
    }

    /// Would there be no room even if all VMs ended?
    fn is_for_good(&self) -> bool {
        let beyond = |memory: Memory| {
            let most = memory.available.saturating_add(self.held.whole);
            self.want.soon > most.min(memory.total)
        };
        self.limit.is_some_and(|limit| self.want.whole > limit) || self.memory.is_some_and(beyond)
    }

    fn error(&self, waited: Option<Duration>) -> Error {
        let lack = self.lacks();
        let mib = match lack {
            Some(Lack::Limit) => self.want.whole,
            _ => self.want.soon,
        };
        let who = match self.count {
            1 => format!("The VM wants {mib} MiB of memory"),
            count => format!("{count} VMs want {mib} MiB of memory"),
        };
        let waited = match waited {
            Some(waited) => format!(" and waited {} s for it", waited.as_secs()),
            None => String::new(),
        };
        let has = match (lack, self.memory, self.limit) {
            (Some(Lack::Limit), _, Some(limit)) => format!(
                "VMs have {} MiB of the {limit} MiB that they may have in all",
                self.held.whole
            ),
            (Some(Lack::Memory), Some(memory), _) => {
                let starting = match self.held.soon {
                    0 => String::new(),
                    soon => format!(", of which VMs that are starting will take {soon} MiB"),
                };
                format!("the host has {} MiB available{starting}", memory.available)
            }
            _ => "others that asked before still wait".to_owned(),
        };
        let fewer = match self.count {
            1 => "give this one less with --memory",
            _ => "ask for fewer",
        };
        let higher = match lack {
            Some(Lack::Limit) => ", or start jiffyd with a higher --memory-limit",
            _ => "",
        };
        Error::no_room(format!("{who}{waited}; {has}."))
            .hint(format!("Stop other VMs, or {fewer}{higher}."))
    }
}

/// The host's memory.
fn meminfo() -> io::Result<Memory> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|rest| rest.trim().strip_suffix(" kB"))
            .and_then(|kib| kib.trim().parse::<u64>().ok())
            .map(|kib| kib / 1024)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    };
    Ok(Memory {
        total: field("MemTotal:")?,
        available: field("MemAvailable:")?,
    })
}
