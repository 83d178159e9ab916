//! What the threads of this process do, and when, and counters that they sample: recorded in
//! memory from the moment that was asked for. Until then each place costs a load and a branch.
//!
//! Each thread writes to a log of its own, which has room for [`SPANS`] spans and [`SAMPLES`]
//! samples from the start and keeps the first ones, because the start of a VM is of interest.

use crate::clock::monotonic_ns;
use crate::mutex::lock;
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// Most spans of a thread.
pub const SPANS: usize = 8192;
/// Most samples of a thread.
pub const SAMPLES: usize = 8192;

static IS_ON: AtomicBool = AtomicBool::new(false);
static LOGS: Mutex<Vec<Arc<Mutex<Log>>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: RefCell<Option<Own>> = const { RefCell::new(None) };
}

/// What a thread did.
#[derive(Debug, Default)]
pub struct Log {
    /// The thread's name.
    pub thread: String,
    /// What it did, in the order of its end.
    pub spans: Vec<Span>,
    /// Counters that have grown, in the order of time.
    pub samples: Vec<Sample>,
    /// Spans and samples that found no room.
    pub dropped: u64,
}

/// A span of time (CLOCK_MONOTONIC).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// What was done.
    pub name: &'static str,
    /// Start, nanoseconds.
    pub start_ns: u64,
    /// End, nanoseconds.
    pub end_ns: u64,
}

/// By how much a counter has grown since its last sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// The counter.
    pub name: Arc<str>,
    /// The time of the sample, nanoseconds of CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// The growth.
    pub count: u64,
}

struct Own {
    log: Arc<Mutex<Log>>,
    /// When the thread last began to work.
    busy_ns: Option<u64>,
}

/// Records from now on.
pub fn record() {
    IS_ON.store(true, Ordering::Relaxed);
}

/// Whether it is recorded.
pub fn is_recorded() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

/// The time, if it is recorded: the start of a span.
pub fn begin() -> Option<u64> {
    is_recorded().then(monotonic_ns)
}

/// Records a span that ends now.
pub fn end(begun: Option<u64>, name: &'static str) {
    if let Some(start_ns) = begun {
        with_own(|own| own.push(name, start_ns, monotonic_ns()));
    }
}

/// Waits for work. The time between two waits is a span of this name.
pub fn wait<T>(name: &'static str, wait: impl FnOnce() -> T) -> T {
    if !is_recorded() {
        return wait();
    }
    with_own(|own| {
        if let Some(start_ns) = own.busy_ns.take() {
            own.push(name, start_ns, monotonic_ns());
        }
    });
    let result = wait();
    with_own(|own| own.busy_ns = Some(monotonic_ns()));
    result
}

/// Records the growth of counters.
pub fn sample(at_ns: u64, grown: impl Iterator<Item = (Arc<str>, u64)>) {
    with_own(|own| {
        let mut log = lock(&own.log);
        for (name, count) in grown {
            match log.samples.len() < SAMPLES {
                true => log.samples.push(Sample { name, at_ns, count }),
                false => log.dropped += 1,
            }
        }
    });
}

/// Stops recording, and takes what was recorded.
pub fn take() -> Vec<Log> {
    IS_ON.store(false, Ordering::Relaxed);
    let logs = lock(&LOGS);
    let take = |log: &Arc<Mutex<Log>>| {
        let mut log = lock(log);
        let thread = log.thread.clone();
        std::mem::replace(
            &mut *log,
            Log {
                thread,
                ..Log::default()
            },
        )
    };
    logs.iter().map(take).collect()
}

impl Own {
    fn new() -> Own {
        let thread = thread::current();
        let log = Arc::new(Mutex::new(Log {
            thread: thread.name().unwrap_or("main").to_owned(),
            spans: Vec::with_capacity(SPANS),
            samples: Vec::with_capacity(SAMPLES),
            dropped: 0,
        }));
        lock(&LOGS).push(Arc::clone(&log));
        Own { log, busy_ns: None }
    }

    fn push(&self, name: &'static str, start_ns: u64, end_ns: u64) {
        let mut log = lock(&self.log);
        match log.spans.len() < SPANS {
            true => log.spans.push(Span {
                name,
                start_ns,
                end_ns,
            }),
            false => log.dropped += 1,
        }
    }
}

fn with_own(act: impl FnOnce(&mut Own)) {
    // A thread that ends has no log any more.
    let _ = OWN.try_with(|own| act(own.borrow_mut().get_or_insert_with(Own::new)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_record_once_that_was_asked_for() {
        end(begin(), "too early");
        wait("too early", || ());
        assert!(take().is_empty());
        record();
        let worker = thread::Builder::new().name("worker".into());
        let work = || {
            wait("work", || ());
            let begun = begin();
            end(begun, "part");
            wait("work", || ());
            sample(7, [(Arc::from("exits"), 3)].into_iter());
            for _ in 0..SPANS {
                end(begin(), "more");
            }
        };
        worker.spawn(work).unwrap().join().unwrap();
        let logs = take();
        let log = logs.iter().find(|log| log.thread == "worker").unwrap();
        let (part, whole) = (log.spans[0], log.spans[1]);
        assert_eq!((part.name, whole.name), ("part", "work"));
        assert!(whole.start_ns <= part.start_ns && part.end_ns <= whole.end_ns);
        assert_eq!(log.samples.len(), 1);
        assert_eq!(log.samples[0].count, 3);
        // Two spans were there, so two of those that followed found no room.
        assert_eq!((log.spans.len(), log.dropped), (SPANS, 2));
        end(begin(), "too late");
        let again = take();
        assert!(again.iter().all(|log| log.spans.is_empty()));
    }
}
