//! Rate limits of devices: a token bucket for operations, and one for bytes. Each is filled at its
//! rate, and holds one second's worth or the configured burst.
//!
//! A request larger than the bucket is admitted when the bucket is full, and leaves it in debt, so
//! that the rate holds over time for requests of any size. A waiting request is not lost: when the
//! device stops it is put back into the queue, and waits again when the device continues.

use jiffy_sys::mutex::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::num::NonZeroU64;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

const SECOND_NS: i128 = 1_000_000_000;

/// The limits of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RateLimit {
    /// Bytes read and written per second.
    pub bytes_per_second: Option<NonZeroU64>,
    /// Requests per second: reads, writes, flushes, discards, zeroing; frames.
    pub operations_per_second: Option<NonZeroU64>,
    /// Bytes at once after a pause; `None` for one second's worth.
    pub bytes_burst: Option<NonZeroU64>,
    /// Requests at once after a pause; `None` for one second's worth.
    pub operations_burst: Option<NonZeroU64>,
}

/// The cost of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Requests; a request has 0 or 1.
    pub operations: u64,
    /// Bytes that are transferred.
    pub bytes: u64,
}

/// A clock, and a way to wait for a time.
pub(crate) trait Clock: std::fmt::Debug + Send + Sync {
    /// Nanoseconds since an arbitrary moment.
    fn now_ns(&self) -> u64;
    /// Waits for this many nanoseconds, or until `doorbell` is readable.
    fn wait(&self, nanoseconds: u64, doorbell: BorrowedFd<'_>) -> io::Result<()>;
}

/// CLOCK_MONOTONIC; waits on the doorbell.
#[derive(Debug)]
struct Monotonic;

impl Clock for Monotonic {
    fn now_ns(&self) -> u64 {
        jiffy_sys::clock::monotonic_ns()
    }

    fn wait(&self, nanoseconds: u64, doorbell: BorrowedFd<'_>) -> io::Result<()> {
        let timeout = Timespec {
            tv_sec: (nanoseconds / SECOND_NS as u64) as i64,
            tv_nsec: (nanoseconds % SECOND_NS as u64) as i64,
        };
        let mut fds = [PollFd::new(&doorbell, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            // The worker must stop, or further requests came, which are checked for anyway.
            Ok(1..) => {
                rustix::io::read(doorbell, &mut [0; 8])?;
                Ok(())
            }
            Ok(0) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// A bucket. Levels are in billionths of a token: exact at any rate.
#[derive(Debug)]
struct Bucket {
    rate: u64,
    /// Capacity, tokens.
    room: u64,
    level: i128,
}

impl Bucket {
    fn new(rate: NonZeroU64, burst: Option<NonZeroU64>) -> Bucket {
        let room = burst.unwrap_or(rate).get();
        Bucket {
            rate: rate.get(),
            room,
            level: i128::from(room) * SECOND_NS,
        }
    }

    fn fill(&mut self, nanoseconds: u64) {
        let rate = i128::from(self.rate);
        let full = i128::from(self.room) * SECOND_NS;
        self.level = (self.level + rate * i128::from(nanoseconds)).min(full);
    }

    /// Nanoseconds until this many tokens may be taken; 0 if they may be taken now.
    fn wait_ns(&self, tokens: u64) -> u64 {
        let rate = i128::from(self.rate);
        let needed = i128::from(tokens.min(self.room)) * SECOND_NS;
        let missing = (needed - self.level).max(0);
        u64::try_from((missing + rate - 1) / rate).unwrap_or(u64::MAX)
    }

    fn take(&mut self, tokens: u64) {
        self.level -= i128::from(tokens) * SECOND_NS;
    }
}

#[derive(Debug, Default)]
struct Buckets {
    operations: Option<Bucket>,
    bytes: Option<Bucket>,
    filled_ns: u64,
}

impl Buckets {
    /// Takes the cost of a request; the error is how many nanoseconds to wait first.
    fn take(&mut self, cost: Cost, now_ns: u64) -> Result<(), u64> {
        match self.wait_ns(cost, now_ns) {
            0 => {
                self.charge(cost);
                Ok(())
            }
            wait => Err(wait),
        }
    }

    /// Nanoseconds until a request of this cost may be executed.
    fn wait_ns(&mut self, cost: Cost, now_ns: u64) -> u64 {
        let elapsed = now_ns.saturating_sub(self.filled_ns);
        self.filled_ns = now_ns;
        let mut wait = 0;
        for (bucket, tokens) in self.pairs(cost) {
            bucket.fill(elapsed);
            wait = wait.max(bucket.wait_ns(tokens));
        }
        wait
    }

    fn charge(&mut self, cost: Cost) {
        for (bucket, tokens) in self.pairs(cost) {
            bucket.take(tokens);
        }
    }

    fn pairs(&mut self, cost: Cost) -> impl Iterator<Item = (&mut Bucket, u64)> {
        let operations = self
            .operations
            .as_mut()
            .map(|bucket| (bucket, cost.operations));
        let bytes = self.bytes.as_mut().map(|bucket| (bucket, cost.bytes));
        operations.into_iter().chain(bytes)
    }
}

/// The limit of one device.
#[derive(Debug)]
pub(crate) struct Limiter {
    /// False for a device without a limit, which then costs nothing.
    is_limited: AtomicBool,
    buckets: Mutex<Buckets>,
    clock: Box<dyn Clock>,
}

impl Limiter {
    /// A limiter with full buckets.
    pub(crate) fn new(limit: RateLimit) -> Limiter {
        Limiter::with_clock(limit, Box::new(Monotonic))
    }

    fn with_clock(limit: RateLimit, clock: Box<dyn Clock>) -> Limiter {
        let limiter = Limiter {
            is_limited: AtomicBool::new(false),
            buckets: Mutex::default(),
            clock,
        };
        limiter.set(limit);
        limiter
    }

    /// Replaces the limit. The buckets are full. A worker that waits for the previous limit must
    /// be woken, and asks again.
    pub(crate) fn set(&self, limit: RateLimit) {
        *self.buckets() = Buckets {
            operations: limit
                .operations_per_second
                .map(|rate| Bucket::new(rate, limit.operations_burst)),
            bytes: limit
                .bytes_per_second
                .map(|rate| Bucket::new(rate, limit.bytes_burst)),
            filled_ns: self.clock.now_ns(),
        };
        let is_limited = limit != RateLimit::default();
        self.is_limited.store(is_limited, Ordering::SeqCst);
    }

    /// `None` without a limit.
    fn limited(&self) -> Option<MutexGuard<'_, Buckets>> {
        let is_limited = self.is_limited.load(Ordering::Relaxed);
        is_limited.then(|| self.buckets())
    }

    fn buckets(&self) -> MutexGuard<'_, Buckets> {
        lock(&self.buckets)
    }

    /// Waits until a request of this cost may be executed. Fails with
    /// [`io::ErrorKind::Interrupted`] if `stop` is set and the doorbell is signalled.
    pub(crate) fn admit(
        &self,
        cost: Cost,
        doorbell: BorrowedFd<'_>,
        stop: &AtomicBool,
    ) -> io::Result<()> {
        while let Err(wait_ns) = self.try_admit(cost) {
            self.clock.wait(wait_ns, doorbell)?;
            if stop.load(Ordering::SeqCst) {
                return Err(io::ErrorKind::Interrupted.into());
            }
        }
        Ok(())
    }

    /// Admits a request of this cost now; the error is how many nanoseconds later to ask again.
    pub(crate) fn try_admit(&self, cost: Cost) -> Result<(), u64> {
        match self.limited() {
            None => Ok(()),
            Some(mut buckets) => buckets.take(cost, self.clock.now_ns()),
        }
    }

    /// Admits a request whose cost is known only afterwards ([`charge`](Limiter::charge)), if there
    /// is no debt.
    pub(crate) fn try_admit_unknown(&self) -> Result<(), u64> {
        let Some(mut buckets) = self.limited() else {
            return Ok(());
        };
        let least = Cost {
            operations: 1,
            bytes: 1,
        };
        match buckets.wait_ns(least, self.clock.now_ns()) {
            0 => Ok(()),
            wait => Err(wait),
        }
    }

    /// Charges the cost of an executed request.
    pub(crate) fn charge(&self, cost: Cost) {
        if let Some(mut buckets) = self.limited() {
            buckets.charge(cost);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::queue::doorbell::descriptor;
    use proptest::prelude::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use vmm_sys_util::eventfd::EventFd;

    /// A clock whose time passes only while it is waited on.
    #[derive(Debug, Clone, Default)]
    struct Virtual {
        now_ns: Arc<AtomicU64>,
        waits: Arc<AtomicU64>,
    }

    impl Clock for Virtual {
        fn now_ns(&self) -> u64 {
            self.now_ns.load(Ordering::SeqCst)
        }

        fn wait(&self, nanoseconds: u64, _: BorrowedFd<'_>) -> io::Result<()> {
            self.now_ns.fetch_add(nanoseconds, Ordering::SeqCst);
            self.waits.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
    }

    fn limit(bytes: u64, operations: u64) -> RateLimit {
        RateLimit {
            bytes_per_second: NonZeroU64::new(bytes),
            operations_per_second: NonZeroU64::new(operations),
            ..RateLimit::default()
        }
    }

    fn limiter(limit: RateLimit) -> (Limiter, Virtual) {
        let clock = Virtual::default();
        (Limiter::with_clock(limit, Box::new(clock.clone())), clock)
    }

    /// Admits requests one after the other; returns the time it took.
    fn run(limit: RateLimit, costs: impl IntoIterator<Item = Cost>) -> (u64, u64) {
        let (limiter, clock) = limiter(limit);
        let doorbell = EventFd::new(0).unwrap();
        let stop = AtomicBool::new(false);
        for cost in costs {
            limiter.admit(cost, descriptor(&doorbell), &stop).unwrap();
        }
        let waits = clock.waits.load(Ordering::SeqCst);
        (clock.now_ns(), waits)
    }

    fn cost(bytes: u64) -> Cost {
        let operations = 1;
        Cost { operations, bytes }
    }

    const SECOND: u64 = SECOND_NS as u64;

    #[test]
    fn the_default_burst_is_one_second_of_the_rate() {
        assert_eq!(run(limit(0, 100), vec![cost(0); 100]), (0, 0));
        assert_eq!(run(limit(0, 100), vec![cost(0); 101]), (SECOND / 100, 1));
        let (time, waits) = run(limit(0, 100), vec![cost(0); 600]);
        assert_eq!((time, waits), (5 * SECOND, 500));
        let (time, _) = run(limit(1 << 20, 0), vec![cost(4096); 1024]);
        assert_eq!(time, 3 * SECOND);
    }

    #[test]
    fn a_burst_is_admitted_at_once() {
        let burst = |tokens| RateLimit {
            operations_burst: NonZeroU64::new(tokens),
            ..limit(0, 100)
        };
        assert_eq!(run(burst(10), vec![cost(0); 10]), (0, 0));
        assert_eq!(run(burst(10), vec![cost(0); 110]).0, SECOND);
        assert_eq!(run(burst(1000), vec![cost(0); 1000]), (0, 0));
    }

    #[test]
    fn later_requests_wait_for_costs_charged_afterwards() {
        let (limiter, clock) = limiter(limit(1000, 0));
        limiter.try_admit_unknown().unwrap();
        limiter.charge(cost(3000));
        // Two seconds' worth of debt, and one byte.
        let wait = limiter.try_admit_unknown().unwrap_err();
        assert_eq!(wait, 2 * SECOND + SECOND / 1000);
        assert_eq!(limiter.try_admit(cost(1)), Err(wait));
        clock.now_ns.fetch_add(wait, Ordering::SeqCst);
        limiter.try_admit_unknown().unwrap();
        assert_eq!(limiter.try_admit(cost(1)), Ok(()));
        assert!(limiter.try_admit(cost(1)).is_err());
    }

    #[test]
    fn a_new_limit_replaces_the_previous_one_and_its_debt() {
        let (limiter, clock) = limiter(limit(0, 0));
        limiter.try_admit(cost(1 << 40)).unwrap();
        limiter.set(limit(1000, 0));
        limiter.try_admit(cost(5000)).unwrap();
        assert_eq!(limiter.try_admit(cost(1000)), Err(5 * SECOND));
        limiter.set(limit(10_000, 0));
        limiter.try_admit(cost(10_000)).unwrap();
        assert_eq!(limiter.try_admit(cost(10_000)), Err(SECOND));
        clock.now_ns.fetch_add(SECOND, Ordering::SeqCst);
        limiter.try_admit(cost(10_000)).unwrap();
        limiter.set(RateLimit::default());
        limiter.try_admit(cost(1 << 40)).unwrap();
    }

    #[test]
    fn without_a_limit_nothing_waits() {
        assert_eq!(run(limit(0, 0), vec![cost(1 << 40); 1000]), (0, 0));
    }

    #[test]
    fn the_tighter_of_both_limits_applies() {
        let (time, _) = run(limit(1 << 20, 10), vec![cost(1 << 16); 110]);
        assert_eq!(time, 10 * SECOND);
        let (time, _) = run(limit(1 << 16, 1000), vec![cost(1 << 16); 11]);
        assert_eq!(time, 10 * SECOND);
    }

    #[test]
    fn the_next_request_waits_after_one_larger_than_the_bucket() {
        // 10 MiB at 1 MiB a second: at once, but the next one waits.
        let (time, waits) = run(limit(1 << 20, 0), [cost(10 << 20)]);
        assert_eq!((time, waits), (0, 0));
        let (time, _) = run(limit(1 << 20, 0), [cost(10 << 20), cost(1 << 20)]);
        assert_eq!(time, 10 * SECOND);
    }

    #[test]
    fn idle_time_earns_at_most_one_second_of_tokens() {
        let (limiter, clock) = limiter(limit(0, 10));
        let doorbell = EventFd::new(0).unwrap();
        let stop = AtomicBool::new(false);
        let go = || {
            limiter
                .admit(cost(0), descriptor(&doorbell), &stop)
                .unwrap()
        };
        (0..10).for_each(|_| go());
        clock.now_ns.fetch_add(100 * SECOND, Ordering::SeqCst);
        let before = clock.now_ns();
        (0..10).for_each(|_| go());
        assert_eq!(clock.now_ns(), before);
        go();
        assert_eq!(clock.now_ns(), before + SECOND / 10);
    }

    #[test]
    fn a_stop_ends_a_wait() {
        // Real time, and an hour to wait: the doorbell ends the wait.
        let limiter = Limiter::new(limit(1, 0));
        let doorbell = EventFd::new(0).unwrap();
        let stop = AtomicBool::new(false);
        let admit = || limiter.admit(cost(3600), descriptor(&doorbell), &stop);
        admit().unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(admit);
            stop.store(true, Ordering::SeqCst);
            doorbell.write(1).unwrap();
            let error = waiting.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        });
    }

    #[test]
    fn a_driver_notification_neither_ends_a_wait_nor_makes_it_spin() {
        let (limiter, clock) = limiter(limit(0, 1));
        let stop = AtomicBool::new(false);
        let doorbell = EventFd::new(0).unwrap();
        limiter
            .admit(cost(0), descriptor(&doorbell), &stop)
            .unwrap();
        limiter
            .admit(cost(0), descriptor(&doorbell), &stop)
            .unwrap();
        assert_eq!(clock.waits.load(Ordering::SeqCst), 1);
        // The real clock reads the doorbell, so the next wait blocks again.
        doorbell.write(1).unwrap();
        Monotonic.wait(SECOND * 60, descriptor(&doorbell)).unwrap();
        let mut fds = [PollFd::from_borrowed_fd(
            descriptor(&doorbell),
            PollFlags::IN,
        )];
        assert_eq!(poll(&mut fds, Some(&Timespec::default())).unwrap(), 0);
    }

    proptest! {
        /// For any requests: over the whole time no more than the rate and one bucket are admitted,
        /// less the last request, and not much less.
        #[test]
        fn the_rate_is_kept(
            bytes in 1u64..1 << 32,
            operations in 1u64..1 << 20,
            sizes in prop::collection::vec(0u64..1 << 24, 1..200),
        ) {
            let last = *sizes.last().unwrap();
            let total: u64 = sizes.iter().sum();
            let count = sizes.len() as u64;
            let (time, _) = run(limit(bytes, operations), sizes.into_iter().map(cost));
            let allowed = |rate: u64| {
                i128::from(rate) * (SECOND_NS + i128::from(time)) / SECOND_NS
            };
            prop_assert!(i128::from(total - last) <= allowed(bytes));
            prop_assert!(i128::from(count - 1) <= allowed(operations));
            let needed = |amount: u64, rate: u64| {
                i128::from(amount) * SECOND_NS / i128::from(rate)
            };
            let most = needed(total, bytes) + needed(count, operations) + 400;
            prop_assert!(i128::from(time) <= most, "{time} > {most}");
        }
    }
}
