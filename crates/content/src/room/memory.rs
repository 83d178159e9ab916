//! The ledger of memory and vCPUs. Every start of a VM reserves them here first; a request that
//! does not fit waits in a queue.
//!
//! Three things are counted, each against a bound of its own:
//!
//! * [`Amount::soon`]: what VMs that are starting, or whose RAM a pager fills completely, will
//!   take, against the host's MemAvailable. It is given back when the VM is ready: MemAvailable
//!   no longer includes what the VM took. It is not kept for the VM's life, because that would
//!   refuse too much: a thousand idle children of a fork have 125 GiB in all and take 1.5 GiB.
//! * [`Amount::whole`]: the most that VMs may ever take, against `--memory-limit`, if there
//!   is one. It is given back when the VMM is gone.
//! * [`Amount::cpus`]: vCPUs of VMs with a VMM, against `--cpu-share`, if there is one.
//!
//! The order of the queue is that of `line`. Only its first request checks whether it fits,
//! whenever something is given back, and a new one if it is before all that wait: so none is
//! overtaken by one that needs less. A capture waits beside the queue (`beside`). Background work
//! ([`Room::behind`]) never waits and never delays a request. A spare VMM reserves nothing: its few
//! MiB belong to the VM that takes it.

mod amount;
mod asking;
mod beside;
mod line;
mod shortage;
#[cfg(test)]
mod tests;

pub use amount::Amount;
pub use asking::{Asking, DEFAULT_OWNER};
pub use shortage::{Lacking, Memory};

use super::Limit;
use crate::clock::{monotonic_ns, unix_seconds};
use crate::error::{Error, Result};
use jiffy_wire::api::Queued;
use line::{Line, Ticket};
use shortage::{Bounds, Shortage, meminfo};
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout_at};
use tracing::debug;

/// How often the first in the queue checks without a notification: other programs give memory
/// back, too.
const LOOK: Duration = Duration::from_millis(250);
/// The longest that a request may wait.
pub const MAX_WAIT: Duration = Duration::from_secs(86_400);
/// How long after a change of the queue clients are told their places: many requests may be
/// served in this time, and each of many clients looks for its own.
const PAUSE: Duration = Duration::from_millis(200);
/// The longest time after which a request that found the queue full should be sent again, seconds.
const RETRY_S: u64 = 60;

/// Options of the ledger.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Limit of all VMs' memory.
    pub memory: Option<Limit>,
    /// vCPUs that VMs may have for each processor of the host, in thousandths; `None` for any
    /// number.
    pub cpu_share: Option<u32>,
    /// How long a request waits that does not say so.
    pub wait: Duration,
    /// Most requests that wait.
    pub queue: usize,
}

/// The ledger.
pub struct Room {
    host: Box<Host>,
    bounds: Bounds,
    /// How long a request waits that does not say so.
    wait: Duration,
    /// Most requests that wait.
    most: usize,
    /// A request reads and changes the books, and the host's memory, under one lock, so that two
    /// can't get the same memory.
    state: Mutex<State>,
    /// Notifies when the queue has changed.
    moved: Notify,
    /// Notifies those that wait beside the queue when something is given back.
    freed: Notify,
    /// Counts how often background reservations were taken away.
    claims: watch::Sender<u64>,
}

/// Reads the host's memory; an error if that is not possible.
type Host = dyn Fn() -> io::Result<Memory> + Send + Sync;

#[derive(Debug, Default)]
struct State {
    books: Books,
    line: Line,
    /// Background work gets nothing.
    is_scarce: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Books {
    /// Reserved by requests, and held by running VMs.
    held: Amount,
    /// Reserved by background work.
    behind: Amount,
}

/// Memory and vCPUs that were reserved; they are given back when this is dropped.
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

/// A request in the queue, which it leaves when this is dropped.
struct Waiting<'a> {
    room: &'a Arc<Room>,
    number: u64,
    called: Arc<Notify>,
    /// It was the first and did not fit when it last looked.
    is_first: bool,
    /// That was logged.
    told: bool,
}

/// What becomes of a new request.
enum Entered<'a> {
    Served(Reserved),
    Waits(Waiting<'a>),
}

/// What a request that waits finds when it looks.
enum Look {
    Reserved(Reserved),
    /// It does not fit.
    Lacks(Shortage),
    /// It is not its turn.
    NotFirst,
}

impl Room {
    /// The ledger of this host.
    pub fn new(settings: Settings) -> Arc<Room> {
        // If the host's total is unknown, a limit in percent does not restrict anything.
        let total = meminfo().map_or(u64::MAX, |memory| memory.total << 20);
        let cpus = |share| {
            let host = std::thread::available_parallelism().map_or(1, usize::from) as u64;
            (host * u64::from(share) / 1000).max(1)
        };
        let bounds = Bounds {
            memory: settings.memory.map(|limit| limit.of(total) >> 20),
            cpus: settings.cpu_share.map(cpus),
        };
        Room::of_host(Box::new(meminfo), bounds, settings.wait, settings.queue)
    }

    fn of_host(host: Box<Host>, bounds: Bounds, wait: Duration, most: usize) -> Arc<Room> {
        Arc::new(Room {
            host,
            bounds,
            wait,
            most,
            state: Mutex::default(),
            moved: Notify::new(),
            freed: Notify::new(),
            claims: watch::Sender::new(0),
        })
    }

    /// Reserves `each` for each of `count` VMs that start together. Waits if there is no room,
    /// unless there never can be. Dropping the future leaves the queue.
    pub async fn reserve(
        self: &Arc<Self>,
        asking: Asking,
        each: Amount,
        count: u32,
    ) -> Result<Reserved> {
        let wait = self.wait_of(asking.wait);
        let want = each.times(count);
        let mut waiting = match self.enter(asking, want, count, wait)? {
            Entered::Served(reserved) => return Ok(reserved),
            Entered::Waits(waiting) => waiting,
        };
        let began_ns = monotonic_ns();
        let deadline = Instant::now() + wait;
        match timeout_at(deadline, waiting.turn()).await {
            Ok(Ok(mut reserved)) => {
                reserved.waited_ns = Some((began_ns, monotonic_ns()));
                Ok(reserved)
            }
            Ok(Err(shortage)) => Err(shortage.error(None)),
            Err(_) => {
                let shortage = self.shortage(&self.state(), want, count);
                Err(shortage.error(Some(wait)))
            }
        }
    }

    /// How long a request waits that says this.
    pub fn wait_of(&self, said: Option<Duration>) -> Duration {
        said.unwrap_or(self.wait).min(MAX_WAIT)
    }

    /// Reserves at once, or joins the queue.
    fn enter(
        self: &Arc<Self>,
        asking: Asking,
        want: Amount,
        count: u32,
        wait: Duration,
    ) -> Result<Entered<'_>> {
        let mut state = self.state();
        let is_first = state.line.would_be_first(asking.priority);
        let shortage = self.shortage(&state, want, count);
        if is_first && shortage.fits() {
            let reserved = self.take(&mut state, &shortage);
            if !state.line.is_empty() {
                // It may now be the turn of a lower priority.
                state.line.note_served(asking.priority);
                call_first(&state.line);
                self.moved.notify_waiters();
            }
            return Ok(Entered::Served(reserved));
        }
        if shortage.is_for_good() || wait.is_zero() {
            return Err(shortage.error(None));
        }
        self.check_places(&state.line, &asking.owner)?;
        let called = Arc::default();
        let number = state.line.enter(Ticket {
            asking,
            want,
            count,
            since: Instant::now(),
            since_s: unix_seconds(),
            wait,
            called: Arc::clone(&called),
        });
        drop(state);
        self.moved.notify_waiters();
        if is_first {
            debug!(?shortage, "a VM waits for memory");
        }
        Ok(Entered::Waits(Waiting {
            room: self,
            number,
            called,
            is_first,
            told: is_first,
        }))
    }

    /// Refuses a request that finds no place in the queue.
    fn check_places(&self, line: &Line, owner: &str) -> Result<()> {
        // One owner may have three quarters of the places; the rest is for others.
        let share = self.most - self.most / 4;
        let (all, theirs) = (line.len(), line.len_of(owner));
        let (count, whose, of) = if all >= self.most {
            (all, String::new(), None)
        } else if theirs >= share {
            (theirs, format!(" of the owner {owner}"), Some(owner))
        } else {
            return Ok(());
        };
        let now = Instant::now();
        let free = line.next_deadline(of).unwrap_or(now);
        let after_s = free.saturating_duration_since(now).as_secs() + 1;
        let after_s = after_s.min(RETRY_S) as u32;
        let mut error = Error::no_room(format!(
            "{count} requests{whose} wait for memory or vCPUs, and the queue takes no further one."
        ))
        .hint(format!(
            "Try again in {after_s} s, stop other VMs, or start jiffyd with a higher --queue-limit."
        ));
        error.0.retry_after_s = Some(after_s);
        Err(error)
    }

    /// Does a request wait?
    pub fn is_waited_for(&self) -> bool {
        !self.state().line.is_empty()
    }

    /// The host's memory.
    pub fn host_memory(&self) -> io::Result<Memory> {
        (self.host)()
    }

    /// What the first request in the queue lacks; `None` if none waits, or it fits now.
    pub fn lacking(&self) -> Option<Lacking> {
        let state = self.state();
        let (_, first) = state.line.first()?;
        self.shortage(&state, first.want, first.count).lacking()
    }

    /// Waits until a request waits.
    pub async fn somebody_waits(&self) {
        let is_there = |line: &Line| (!line.is_empty()).then_some(());
        self.when(is_there, Duration::ZERO).await;
    }

    /// Waits until no request waits.
    pub async fn nobody_waits(&self) {
        let is_over = |line: &Line| line.is_empty().then_some(());
        self.when(is_over, Duration::ZERO).await;
    }

    /// Waits until `found` finds something in the queue; looks again this long after a change.
    async fn when<T>(&self, found: impl Fn(&Line) -> Option<T>, pause: Duration) -> T {
        loop {
            let mut moved = pin!(self.moved.notified());
            // Enabled before the look, so that no change after it is missed.
            moved.as_mut().enable();
            let found = found(&self.state().line);
            match found {
                Some(found) => return found,
                None => moved.await,
            }
            if !pause.is_zero() {
                sleep(pause).await;
            }
        }
    }

    /// The requests that wait, in the order in which they will be served.
    pub fn queue(&self) -> Vec<Queued> {
        self.state().line.shown(|_| true)
    }

    /// Waits until a request for this VM waits.
    pub async fn when_queued_for(&self, id: &str) {
        let is_there = |line: &Line| line.has(id).then_some(());
        self.when(is_there, PAUSE).await;
    }

    /// The request for this VM, if one waits.
    pub fn queued_for(&self, id: &str) -> Option<Queued> {
        let shown = self.state().line.shown(|asking| asking.id == id);
        shown.into_iter().next()
    }

    /// Waits until the request that its client has given this id has another place than `last`;
    /// `None` if it does not wait.
    pub async fn next_place(&self, request: &str, last: Option<u32>) -> Option<Queued> {
        let is_it = |asking: &Asking| asking.request.as_deref() == Some(request);
        let has_moved = |line: &Line| match line.shown(is_it).into_iter().next() {
            Some(queued) if Some(queued.place) == last => None,
            moved => Some(moved),
        };
        self.when(has_moved, PAUSE).await
    }

    /// Reserves for background work, if there is room now and no request waits. Requests may take
    /// this memory away ([`Background::claimed`]).
    pub fn behind(self: &Arc<Self>, amount: Amount) -> Option<Background> {
        let mut state = self.state();
        if state.is_scarce || !state.line.is_empty() {
            return None;
        }
        // Subscribed before the check, so that no claim is missed.
        let claims = self.claims.subscribe();
        let before = *claims.borrow();
        let others = state.books.behind;
        if !self.shortage(&state, amount, 1).fits_beside(others) {
            return None;
        }
        state.books.behind = others.plus(amount);
        drop(state);
        Some(Background {
            _reserved: self.reserved(amount, 1, true),
            before,
            claims,
        })
    }

    /// The host has little memory left, or has enough again, whatever the books say. As long as it
    /// has little, background work gets none, and gives up what it has.
    pub fn set_scarce(&self, is_scarce: bool) {
        let before = std::mem::replace(&mut self.state().is_scarce, is_scarce);
        if is_scarce && !before {
            self.claims.send_modify(|claims| *claims += 1);
        }
    }

    /// Counts a VM that an earlier daemon started, whether there is room or not.
    pub fn adopt(self: &Arc<Self>, amount: Amount) -> Reserved {
        let mut state = self.state();
        state.books.held = state.books.held.plus(amount);
        drop(state);
        self.reserved(amount, 1, false)
    }

    /// Adds to what a running VM has reserved, if it fits. This does not wait, and is not behind
    /// those that do.
    fn add(&self, more: Amount) -> Result<()> {
        let mut state = self.state();
        let shortage = self.shortage(&state, more, 1);
        if !shortage.fits() {
            return Err(shortage.error(None));
        }
        self.hold(&mut state.books, &shortage);
        Ok(())
    }

    /// Reserves for a request that fits.
    fn take(self: &Arc<Self>, state: &mut State, fits: &Shortage) -> Reserved {
        self.hold(&mut state.books, fits);
        self.reserved(fits.want, fits.count, false)
    }

    /// Books what fits; background work that is in its way has to give up.
    fn hold(&self, books: &mut Books, fits: &Shortage) {
        books.held = books.held.plus(fits.want);
        if !fits.fits_beside(books.behind) {
            self.claims.send_modify(|claims| *claims += 1);
        }
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

    /// Compares a request with what is reserved and what the host has.
    fn shortage(&self, state: &State, want: Amount, count: u32) -> Shortage {
        Shortage {
            want,
            count,
            // Before the host's memory: what a VM takes as it becomes ready is counted twice.
            held: state.books.held,
            bounds: self.bounds,
            memory: match want.soon {
                0 => None,
                // A request is not refused because the host's memory can't be read.
                _ => (self.host)().ok(),
            },
        }
    }

    fn give_back(&self, amount: Amount, is_behind: bool) {
        let mut state = self.state();
        let of = match is_behind {
            true => &mut state.books.behind,
            false => &mut state.books.held,
        };
        *of = of.less(amount);
        call_first(&state.line);
        self.freed.notify_waiters();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Has the first request look again.
fn call_first(line: &Line) {
    if let Some((_, first)) = line.first() {
        first.called.notify_one();
    }
}

impl Waiting<'_> {
    /// Waits until the request is served, or can never be.
    async fn turn(&mut self) -> std::result::Result<Reserved, Shortage> {
        loop {
            // A call that came since the last look is kept.
            match self.is_first {
                true => tokio::select! {
                    () = self.called.notified() => {}
                    () = sleep(LOOK) => {}
                },
                false => self.called.notified().await,
            }
            match self.look() {
                Look::Reserved(reserved) => return Ok(reserved),
                Look::Lacks(shortage) if shortage.is_beyond_bounds() => return Err(shortage),
                Look::Lacks(shortage) => {
                    if !self.told {
                        debug!(?shortage, "a VM waits for memory");
                    }
                    (self.is_first, self.told) = (true, true);
                }
                Look::NotFirst => self.is_first = false,
            }
        }
    }

    fn look(&self) -> Look {
        let mut state = self.room.state();
        let (want, count) = match state.line.first() {
            Some((number, first)) if number == self.number => (first.want, first.count),
            _ => return Look::NotFirst,
        };
        let shortage = self.room.shortage(&state, want, count);
        if !shortage.fits() {
            return Look::Lacks(shortage);
        }
        state.line.serve_first();
        let reserved = self.room.take(&mut state, &shortage);
        call_first(&state.line);
        self.room.moved.notify_waiters();
        Look::Reserved(reserved)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.room.state();
        if state.line.leave(self.number) {
            call_first(&state.line);
            self.room.moved.notify_waiters();
        }
    }
}

impl std::fmt::Debug for Room {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = formatter.debug_struct("Room");
        shown.field("bounds", &self.bounds);
        shown
            .field("books", &self.state().books)
            .finish_non_exhaustive()
    }
}

impl Reserved {
    /// The VM is ready: what it took is no longer available to others.
    pub fn note_ready(&mut self) {
        let soon = self.amount.until_ready();
        self.amount = self.amount.less(soon);
        if soon.soon > 0 {
            self.room.give_back(soon, self.is_behind);
        }
    }

    /// Changes the number of vCPUs. An error if more than there are would be reserved.
    pub fn set_cpus(&mut self, cpus: u64) -> Result<()> {
        let of = |cpus| Amount {
            cpus,
            ..Amount::default()
        };
        let before = std::mem::replace(&mut self.amount.cpus, cpus);
        if cpus < before {
            self.room.give_back(of(before - cpus), self.is_behind);
        } else if let Err(error) = self.room.add(of(cpus - before)) {
            self.amount.cpus = before;
            return Err(error);
        }
        Ok(())
    }

    /// Splits it into one reservation for each VM.
    pub fn split(mut self) -> Vec<Reserved> {
        let count = self.count.max(1);
        let each = self.amount.divided(count);
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
