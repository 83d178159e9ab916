//! The ledger of memory and vCPUs. Every start of a VM reserves them here first; a request that
//! does not fit waits in a queue.
//!
//! Three things are counted, each against a bound of its own:
//!
//! * [`Amount::soon`]: what VMs that are starting, or whose RAM a pager fills completely, will
//!   take, against the host's MemAvailable. It is given back when the VM is ready: MemAvailable
//!   no longer includes what the VM took. It is not kept for the VM's life, because that would
//!   refuse too much: a thousand idle children of a fork have 125 GiB in all and take 1.5 GiB.
//! * [`Amount::whole`]: the most that VMs may ever take, against `--memory-limit`: without the
//!   option the host's memory less the reserve. It is given back when the VMM is gone. With
//!   `--memory-overcommit` more than that limit is promised, and MemAvailable is what VMs may still
//!   use of a limit that was chosen, if that is less.
//! * [`Amount::cpus`]: vCPUs of VMs with a VMM, against `--cpu-share`, if there is one.
//!
//! `line` defines the order of the queue. Only the first request checks whether it fits, whenever
//! something is given back, so it is not overtaken by one that needs less. A new request checks at
//! once if it is the first. A capture waits beside the queue (`beside`). Background work
//! ([`Room::reserve_background`]) never waits and never delays a request. A spare VMM reserves
//! nothing: its 20 MiB belong to the VM that takes it. `reserved` is what a VM has.

mod amount;
mod background;
mod beside;
mod line;
mod request;
mod reserved;
mod settings;
mod shortage;
#[cfg(test)]
mod tests;

pub use amount::Amount;
pub use background::{Background, memory_needed};
pub use request::{DEFAULT_OWNER, Request};
pub use reserved::Reserved;
pub use settings::Settings;
pub use shortage::{Lacking, Memory, vcpus};

use crate::clock::{monotonic_ns, unix_seconds};
use crate::error::{Error, Result};
use jiffy_sys::mutex::lock;
use jiffy_wire::api::Queued;
use line::{Line, Ticket};
use shortage::{Bounds, Shortage, meminfo};
use std::io;
use std::num::NonZeroU64;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout_at};
use tracing::debug;

/// How often the first request checks without a notification: other programs free memory, too.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// The longest that a request may wait.
pub const MAX_WAIT: Duration = Duration::from_secs(86_400);
/// Delay between a change of the queue and its report to clients: many requests may be served
/// meanwhile, and each client searches the queue for its own.
const CHANGE_PAUSE: Duration = Duration::from_millis(200);
/// Longest retry time that a client is told when the queue is full, seconds.
const RETRY_S: u64 = 60;

/// The ledger.
pub struct Room {
    host: Box<Host>,
    /// Tells how much memory VMs use.
    in_use: OnceLock<Box<InUse>>,
    bounds: Bounds,
    /// MiB that VMs leave to the host.
    kept_free: Option<u64>,
    /// Time limit of requests that give none.
    wait: Duration,
    /// Most requests in the queue.
    max_waiting: usize,
    /// A request reads the host's memory and updates the totals under one lock, so that two
    /// requests can't get the same memory.
    state: Mutex<State>,
    /// Notifies when the queue has changed.
    queue_changed: Notify,
    /// Notifies captures, which wait beside the queue, when something is given back.
    freed: Notify,
    /// Counts how often background reservations were taken away.
    claims: watch::Sender<u64>,
}

/// Reads the host's memory.
type Host = dyn Fn() -> io::Result<Memory> + Send + Sync;

/// Tells how much of the host's memory VMs use, MiB.
type InUse = dyn Fn() -> u64 + Send + Sync;

#[derive(Debug, Default)]
struct State {
    totals: Totals,
    line: Line,
    /// Background work gets nothing.
    is_low: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Totals {
    /// Reserved by requests, and held by running VMs.
    held: Amount,
    /// Reserved by background work.
    background: Amount,
}

/// A request in the queue, which it leaves when this is dropped.
struct Waiting<'a> {
    room: &'a Arc<Room>,
    number: u64,
    called: Arc<Notify>,
    /// It was the first at its last check, and did not fit.
    is_first: bool,
    /// That was logged.
    was_logged: bool,
}

/// The outcome of a new request.
enum Entered<'a> {
    Served(Reserved),
    Waits(Waiting<'a>),
}

/// The outcome of a check by a waiting request.
enum Check {
    Reserved(Reserved),
    /// It does not fit.
    Lacks(Shortage),
    /// It is not its turn.
    NotFirst,
}

impl Room {
    /// The ledger of this host.
    pub fn new(settings: &Settings) -> Arc<Room> {
        let total = meminfo().ok().map(|memory| memory.total);
        let processors = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        let bounds = settings.bounds(total, processors);
        let usable = bounds.usable.map_or(u64::MAX, NonZeroU64::get);
        Arc::new(Room {
            kept_free: settings.reserve_of(total.unwrap_or(0).min(usable)),
            ..Room::on(Box::new(meminfo), bounds, settings.wait, settings.queue)
        })
    }

    fn on(host: Box<Host>, bounds: Bounds, wait: Duration, max_waiting: usize) -> Room {
        Room {
            host,
            in_use: OnceLock::new(),
            bounds,
            kept_free: None,
            wait,
            max_waiting,
            state: Mutex::default(),
            queue_changed: Notify::new(),
            freed: Notify::new(),
            claims: watch::Sender::new(0),
        }
    }

    /// Reserves `each` for each of `count` VMs that start together. Waits if there is no room,
    /// unless there never can be. Dropping the future leaves the queue.
    ///
    /// # Errors
    ///
    /// If it can never fit, does not fit within the time limit, or the queue is full.
    pub async fn reserve(
        self: &Arc<Self>,
        request: Request,
        each: Amount,
        count: u32,
    ) -> Result<Reserved> {
        let wait = self.wait_limit(request.wait);
        let want = each.times(count);
        let mut waiting = match self.enter(request, want, count, wait)? {
            Entered::Served(reserved) => return Ok(reserved),
            Entered::Waits(waiting) => waiting,
        };
        let began_ns = monotonic_ns();
        let deadline = Instant::now() + wait;
        match timeout_at(deadline, waiting.wait_for_turn()).await {
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

    /// The time limit of a request that gives this one.
    pub fn wait_limit(&self, said: Option<Duration>) -> Duration {
        said.unwrap_or(self.wait).min(MAX_WAIT)
    }

    /// Reserves at once, or joins the queue.
    fn enter(
        self: &Arc<Self>,
        request: Request,
        want: Amount,
        count: u32,
        wait: Duration,
    ) -> Result<Entered<'_>> {
        let mut state = self.state();
        let is_first = state.line.would_be_first(request.priority);
        let shortage = self.shortage(&state, want, count);
        if is_first && shortage.fits() {
            let reserved = self.take(&mut state, &shortage);
            if !state.line.is_empty() {
                // It may now be the turn of a lower priority.
                state.line.note_served(request.priority);
                wake_first(&state.line);
                self.queue_changed.notify_waiters();
            }
            return Ok(Entered::Served(reserved));
        }
        if shortage.is_permanent() || wait.is_zero() {
            return Err(shortage.error(None));
        }
        self.check_places(&state.line, &request.owner)?;
        let called = Arc::default();
        let number = state.line.enter(Ticket {
            request,
            want,
            count,
            since: Instant::now(),
            since_s: unix_seconds(),
            wait,
            called: Arc::clone(&called),
        });
        drop(state);
        self.queue_changed.notify_waiters();
        if is_first {
            debug!(?shortage, "a VM waits for memory");
        }
        Ok(Entered::Waits(Waiting {
            room: self,
            number,
            called,
            is_first,
            was_logged: is_first,
        }))
    }

    /// Refuses a request that finds no place in the queue.
    fn check_places(&self, line: &Line, owner: &str) -> Result<()> {
        // One owner may have three quarters of the places; the rest is for others.
        let share = self.max_waiting - self.max_waiting / 4;
        let (all, of_owner) = (line.len(), line.len_of(owner));
        let (count, whose, of) = if all >= self.max_waiting {
            (all, String::new(), None)
        } else if of_owner >= share {
            (of_owner, format!(" of the owner {owner}"), Some(owner))
        } else {
            return Ok(());
        };
        let now = Instant::now();
        let free = line.next_deadline(of).unwrap_or(now);
        let after_s = free.saturating_duration_since(now).as_secs() + 1;
        let after_s = after_s.min(RETRY_S) as u32;
        let mut error = Error::no_room(format!(
            "{count} requests{whose} wait for memory or vCPUs; the queue accepts no more."
        ))
        .hint(format!(
            "Try again in {after_s} s, stop other VMs, or start jiffyd with a higher --queue-limit."
        ));
        error.0.retry_after_s = Some(after_s);
        Err(error)
    }

    /// Whether any request is in the queue.
    pub fn has_waiting(&self) -> bool {
        !self.state().line.is_empty()
    }

    /// The host's memory; if more is promised than VMs may use, what they may use of it.
    ///
    /// # Errors
    ///
    /// If `/proc/meminfo` can't be read.
    pub fn host_memory(&self) -> io::Result<Memory> {
        let memory = (self.host)()?;
        Ok(match (self.bounds.usable, self.in_use.get()) {
            (Some(limit), Some(in_use)) => memory.within(limit.get(), in_use()),
            _ => memory,
        })
    }

    /// How many MiB VMs leave to the host; `None` if there is no such reserve.
    pub fn kept_free(&self) -> Option<u64> {
        self.kept_free
    }

    /// Sets what tells how many MiB VMs use. It is called only if more is promised than they may use.
    pub fn measure_use(&self, in_use: impl Fn() -> u64 + Send + Sync + 'static) {
        let _ = self.in_use.set(Box::new(in_use));
    }

    /// What the first request in the queue lacks; `None` if none waits, or it fits now.
    pub fn lacking(&self) -> Option<Lacking> {
        let state = self.state();
        let (_, first) = state.line.first()?;
        self.shortage(&state, first.want, first.count).lacking()
    }

    /// Waits until the queue has a request.
    pub async fn wait_until_queued(&self) {
        let is_there = |line: &Line| (!line.is_empty()).then_some(());
        self.wait_until(is_there, Duration::ZERO).await;
    }

    /// Waits until the queue is empty.
    pub async fn wait_until_idle(&self) {
        let is_over = |line: &Line| line.is_empty().then_some(());
        self.wait_until(is_over, Duration::ZERO).await;
    }

    /// Waits until `found` returns something; pauses after each change of the queue.
    async fn wait_until<T>(&self, found: impl Fn(&Line) -> Option<T>, pause: Duration) -> T {
        loop {
            let mut changed = pin!(self.queue_changed.notified());
            // Enabled before the check, so that no later change is missed.
            changed.as_mut().enable();
            let found = found(&self.state().line);
            match found {
                Some(found) => return found,
                None => changed.await,
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
        self.wait_until(is_there, CHANGE_PAUSE).await;
    }

    /// The request for this VM, if one waits.
    pub fn queued_for(&self, id: &str) -> Option<Queued> {
        let shown = self.state().line.shown(|request| request.id == id);
        shown.into_iter().next()
    }

    /// Waits until the request that its client has given this id has another place than `last`;
    /// `None` if it does not wait.
    pub async fn next_place(&self, request: &str, last: Option<u32>) -> Option<Queued> {
        let is_it = |waiting: &Request| waiting.request_id.as_deref() == Some(request);
        let has_moved = |line: &Line| match line.shown(is_it).into_iter().next() {
            Some(queued) if Some(queued.place) == last => None,
            changed => Some(changed),
        };
        self.wait_until(has_moved, CHANGE_PAUSE).await
    }

    /// Sets whether the host is low on memory, whatever the totals are. While it is low, background
    /// work gets no memory and gives up what it has.
    pub fn set_low_memory(&self, is_low: bool) {
        let before = std::mem::replace(&mut self.state().is_low, is_low);
        if is_low && !before {
            self.claims.send_modify(|claims| *claims += 1);
        }
    }

    /// Counts a VM that an earlier daemon started, whether there is room or not.
    pub fn adopt(self: &Arc<Self>, amount: Amount) -> Reserved {
        let mut state = self.state();
        state.totals.held = state.totals.held.plus(amount);
        drop(state);
        self.reserved(amount, 1, false)
    }

    /// Adds to what a running VM has reserved, if it fits. Does not wait, and ignores the queue.
    fn add(&self, more: Amount) -> Result<()> {
        let mut state = self.state();
        let shortage = self.shortage(&state, more, 1);
        if !shortage.fits() {
            return Err(shortage.error(None));
        }
        self.hold(&mut state.totals, &shortage);
        Ok(())
    }

    /// Reserves for a request that fits.
    fn take(self: &Arc<Self>, state: &mut State, fits: &Shortage) -> Reserved {
        self.hold(&mut state.totals, fits);
        self.reserved(fits.want, fits.count, false)
    }

    /// Adds a request that fits to the totals, and preempts background work that is in its way.
    fn hold(&self, totals: &mut Totals, fits: &Shortage) {
        totals.held = totals.held.plus(fits.want);
        if !fits.fits_with(totals.background) {
            self.claims.send_modify(|claims| *claims += 1);
        }
    }

    /// Compares a request with what is reserved and what the host has.
    fn shortage(&self, state: &State, want: Amount, count: u32) -> Shortage {
        Shortage {
            want,
            count,
            // Before the host's memory: what a VM takes as it becomes ready is counted twice.
            held: state.totals.held,
            bounds: self.bounds,
            memory: match want.soon {
                0 => None,
                // A request is not refused because the host's memory can't be read.
                _ => self.host_memory().ok(),
            },
        }
    }

    fn give_back(&self, amount: Amount, is_background: bool) {
        let mut state = self.state();
        let of = match is_background {
            true => &mut state.totals.background,
            false => &mut state.totals.held,
        };
        *of = of.less(amount);
        wake_first(&state.line);
        self.freed.notify_waiters();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// Makes the first request check again.
fn wake_first(line: &Line) {
    if let Some((_, first)) = line.first() {
        first.called.notify_one();
    }
}

impl Waiting<'_> {
    /// Waits until the request is served, or can never be.
    async fn wait_for_turn(&mut self) -> std::result::Result<Reserved, Shortage> {
        loop {
            // A notification since the last check is kept.
            match self.is_first {
                true => tokio::select! {
                    () = self.called.notified() => {}
                    () = sleep(CHECK_INTERVAL) => {}
                },
                false => self.called.notified().await,
            }
            match self.check() {
                Check::Reserved(reserved) => return Ok(reserved),
                Check::Lacks(shortage) if shortage.is_beyond_bounds() => return Err(shortage),
                Check::Lacks(shortage) => {
                    if !self.was_logged {
                        debug!(?shortage, "a VM waits for memory");
                    }
                    (self.is_first, self.was_logged) = (true, true);
                }
                Check::NotFirst => self.is_first = false,
            }
        }
    }

    fn check(&self) -> Check {
        let mut state = self.room.state();
        let (want, count) = match state.line.first() {
            Some((number, first)) if number == self.number => (first.want, first.count),
            _ => return Check::NotFirst,
        };
        let shortage = self.room.shortage(&state, want, count);
        if !shortage.fits() {
            return Check::Lacks(shortage);
        }
        state.line.serve_first();
        let reserved = self.room.take(&mut state, &shortage);
        wake_first(&state.line);
        self.room.queue_changed.notify_waiters();
        Check::Reserved(reserved)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.room.state();
        if state.line.leave(self.number) {
            wake_first(&state.line);
            self.room.queue_changed.notify_waiters();
        }
    }
}

impl std::fmt::Debug for Room {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = formatter.debug_struct("Room");
        shown.field("bounds", &self.bounds);
        shown
            .field("totals", &self.state().totals)
            .finish_non_exhaustive()
    }
}
