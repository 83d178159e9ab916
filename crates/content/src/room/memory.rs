//! The ledger of memory. Whatever starts a VM reserves memory here first, and what can't
//! have it now waits in line.
//!
//! Two things are counted, each against a bound of its own:
//!
//! * [`Amount::soon`]: what VMs that are starting, or that a pager fills to the end, will
//!   take, against what the host has available. It is given back when the VM is ready: what
//!   it took is no longer available then, and the host counts it. It can't be kept for the
//!   VM's life: a thousand idle children of a fork have 125 GiB between them, and take
//!   1.5 GiB.
//! * [`Amount::whole`]: the most that VMs may ever take, against `--memory-limit`, if there
//!   is one. It is given back when the VMM is gone.
//!
//! Requests are served in the order in which they came: the first in line looks again
//! whenever something is given back, the others wait for their turn and look at nothing.
//! What a node does for later ([`Room::behind`]) never waits and is never waited for. A spare
//! VMM is not asked for: its few MiB are those of the VM that takes it.

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

/// How often the first in line looks by itself: programs that are no VMs give memory back,
/// too, and nobody tells.
const LOOK: Duration = Duration::from_millis(250);
/// What a child of a fork takes until it is ready, MiB: an idle one has 1.43 MiB that only it
/// has (`clone/unique-memory` of the benchmarks).
const CHILD_MIB: u64 = 2;

/// Memory of VMs, MiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// What is taken soon: until the VM is ready.
    pub soon: u64,
    /// The most that it may ever take.
    pub whole: u64,
}

impl Amount {
    /// Of a VM that boots, is restored or woken. What its guest will touch is not known
    /// before it has run, also of a golden or a lazy one: its command may fill all of its
    /// memory as soon as it starts. The VMM's own few MiB are much less than what a guest
    /// leaves untouched, and are not counted.
    pub fn of(spec: &Spec) -> Amount {
        let whole = u64::from(spec.memory_mib);
        let soon = match spec.pages {
            // These are set aside when the VMM maps them, and were never available.
            PageSize::Huge2M | PageSize::Huge1G => 0,
            PageSize::Small => whole,
        };
        Amount { soon, whole }
    }

    /// Of a child of a fork, which has its parent's memory until one of them writes.
    pub fn of_child(spec: &Spec) -> Amount {
        Amount {
            soon: CHILD_MIB,
            whole: spec.memory_mib.into(),
        }
    }

    /// Of a VM whose memory a pager fills to the end, for a capture: so many bytes of it are
    /// not zero, if that is known. What is there already counts once more, which is never
    /// too little.
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
    /// Who holds it is first in line. It is handed on in the order of arrival, and only who
    /// holds it adds to the books: two can't have the same memory.
    turn: tokio::sync::Mutex<()>,
    books: Mutex<Books>,
    /// Something was given back.
    freed: Notify,
    /// How often what is reserved for later was taken away.
    claims: watch::Sender<u64>,
}

/// What the host says of its memory; an error if it can't tell.
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
    /// Of what somebody waits for, and of VMs that run.
    held: Amount,
    /// Of what is made for later.
    behind: Amount,
}

/// Memory that was reserved; it is given back when this is dropped.
#[derive(Debug)]
pub struct Reserved {
    room: Arc<Room>,
    amount: Amount,
    count: u32,
    is_behind: bool,
    /// From when to when it was waited for, if it was: monotonic nanoseconds.
    pub waited_ns: Option<(u64, u64)>,
}

/// Memory for what is made for later.
#[derive(Debug)]
pub struct Background {
    _reserved: Reserved,
    claims: watch::Receiver<u64>,
    /// Claims before it was reserved.
    before: u64,
}

impl Room {
    /// Of this host.
    pub fn new(limit: Option<Limit>, patience: Duration) -> Arc<Room> {
        // A host that can't tell has no share to give.
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

    /// Reserves so much for each of so many VMs that are to start together. Waits if there
    /// is no room, unless there can't be. Whoever drops this leaves the line.
    pub async fn reserve(self: &Arc<Self>, each: Amount, count: u32) -> Result<Reserved> {
        if self.patience.is_zero() {
            // Nobody holds it for longer than a look.
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
                // Made before the look: what is given back after it is not missed.
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

    /// Waits until whoever asked before has what it asked for, or gave up.
    pub async fn nobody_waits(&self) {
        drop(self.turn.lock().await);
    }

    /// Reserves for what is made for later, if there is room now and nobody waits. It is no
    /// hindrance to what somebody waits for, which takes it away ([`Background::claimed`]).
    pub fn behind(self: &Arc<Self>, amount: Amount) -> Option<Background> {
        let _turn = self.turn.try_lock().ok()?;
        // Seen before the look, as above.
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

    /// Of whoever has the turn.
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

    /// What is wanted beside what there is.
    fn shortage(&self, each: Amount, count: u32) -> Shortage {
        // The books first: of a VM that gets ready in between, both count what it took.
        let held = self.books().held;
        Shortage {
            want: each.times(count),
            count,
            held,
            limit: self.limit,
            memory: match each.soon {
                0 => None,
                // A host that can't tell is no reason to refuse.
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
        // For the first in line; it hands the turn on when it has what it wants.
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

    /// A part for each of the VMs it is for.
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
    /// Waits until somebody else has this memory: what it is for is to be given up.
    pub async fn claimed(&mut self) {
        // The sender is the ledger's, which this holds.
        let _ = self.claims.wait_for(|claims| *claims > self.before).await;
    }

    /// Has it been claimed?
    pub fn was_claimed(&self) -> bool {
        *self.claims.borrow() > self.before
    }
}

/// Why something is not made for later: there is no room behind what runs, or it was claimed.
pub fn needed_by_runs() -> Error {
    Error::no_room("What runs needs the memory.")
}

/// What is wanted, beside what there is.
#[derive(Debug, Clone, Copy)]
struct Shortage {
    want: Amount,
    /// VMs that want it.
    count: u32,
    held: Amount,
    limit: Option<u64>,
    memory: Option<Memory>,
}

/// What there is too little of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lack {
    /// The host's memory.
    Memory,
    /// What VMs may have.
    Limit,
}

impl Shortage {
    /// None if there is room.
    fn lacks(&self) -> Option<Lack> {
        self.lacks_beside(Amount::default())
    }

    /// As [`Shortage::lacks`] if so much more were held.
    fn lacks_beside(&self, more: Amount) -> Option<Lack> {
        let all = self.held.plus(more).plus(self.want);
        // VMs that were adopted may have more than the limit.
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
