//! Compares samples, counts uses, and records since when a VM is idle.

use super::sample::Sample;
use jiffy_content::clock::monotonic_ns;
use jiffy_sys::mutex::lock;
use jiffy_vmhost::activity::Activity;
use jiffy_wire::api::VmIdle;
use jiffy_wire::text::size;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// CPU time per second that an idle VM may use. The idle guest of `base` runs about 30,000
/// instructions a second; a program that polls or collects garbage takes a few percent of a
/// processor.
const CPU: f64 = 0.05;
/// Bytes per second that an idle VM may read and write: a file system's journal and logs.
const DISK: f64 = 16_384.0;
/// Bytes per second that an idle VM may have on its link: keep-alives of connections, and NTP.
const NETWORK: f64 = 1024.0;
/// Shortest interval between two samples that are compared: the kernel counts CPU time in 10 ms.
const WINDOW_NS: u64 = 500_000_000;
/// Pause after the first failed attempt; each further one doubles it.
const FIRST_PAUSE: Duration = Duration::from_secs(30);
/// Longest pause between attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// Why a VM with published ports stays awake although it may be idle.
const UNCOUNTED: &str =
    "The connections to its published ports can't be counted; jiffyd's log has the reason.";

/// The activity of a VM, while it runs.
#[derive(Debug)]
pub struct Watch {
    /// When it was last seen active (host CLOCK_MONOTONIC).
    active_ns: u64,
    last: Option<Sample>,
    /// Resources that it used too much of between the last two samples, in words.
    busy: Vec<String>,
    /// Open connections that the kernel leads to it, when they were last counted.
    connections: usize,
    /// They could not be counted the last time, so whether it is idle is unknown.
    uncounted: bool,
    /// It is being hibernated or stopped.
    pub tried: bool,
    failures: u32,
    not_before_ns: u64,
    error: Option<String>,
}

impl Watch {
    /// A VM that has begun to run.
    pub fn new(now_ns: u64) -> Watch {
        Watch {
            active_ns: now_ns,
            last: None,
            busy: Vec::new(),
            connections: 0,
            uncounted: false,
            tried: false,
            failures: 0,
            not_before_ns: 0,
            error: None,
        }
    }

    /// Compares a sample with the last one. A VM in use is active even if it consumes nothing.
    pub fn take(&mut self, sample: Sample, is_used: bool, last_use_ns: u64) {
        self.active_ns = self.active_ns.max(last_use_ns);
        if is_used {
            self.active_ns = sample.at_ns;
        }
        let Some(last) = self.last.filter(|last| last.pid == sample.pid) else {
            if self.last.is_some() {
                // Another process: the VM was started or woken since.
                self.active_ns = sample.at_ns;
                self.busy.clear();
            }
            self.last = Some(sample);
            return;
        };
        let window_ns = sample.at_ns.saturating_sub(last.at_ns);
        if window_ns < WINDOW_NS {
            return;
        }
        self.busy = too_much(&last, &sample, window_ns as f64 / 1e9);
        if !self.busy.is_empty() {
            self.active_ns = sample.at_ns;
        }
        self.last = Some(sample);
    }

    /// Records the number of open connections to published ports, from the kernel's conntrack;
    /// `None` if they can't be counted.
    pub fn connected(&mut self, now_ns: u64, connections: Option<usize>) {
        self.uncounted = connections.is_none();
        let Some(connections) = connections else {
            return;
        };
        self.connections = connections;
        if connections > 0 {
            self.active_ns = now_ns;
        }
    }

    /// Have only connections kept it awake? Then they must be counted again.
    pub fn was_connected(&self) -> bool {
        self.connections > 0
    }

    /// Was it idle long enough, and is it not too early for another attempt?
    pub fn is_due(&self, now_ns: u64, after: Duration) -> bool {
        !self.tried && now_ns >= self.not_before_ns && self.idle(now_ns, self.active_ns) >= after
    }

    /// How long it has been idle, if it was last used then.
    pub fn idle(&self, now_ns: u64, last_use_ns: u64) -> Duration {
        let active_ns = self.active_ns.max(last_use_ns);
        Duration::from_nanos(now_ns.saturating_sub(active_ns))
    }

    /// Records a failed hibernation or stop. True if this failure is new.
    pub fn failed(&mut self, now_ns: u64, why: &str) -> bool {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.min(10));
        let pause = pause.min(LONGEST_PAUSE).as_nanos() as u64;
        self.failures += 1;
        self.not_before_ns = now_ns.saturating_add(pause);
        let is_new = self.error.as_deref() != Some(why);
        self.error = Some(why.to_owned());
        is_new
    }

    /// Why it could not be hibernated or stopped when it was idle.
    fn error(&self) -> Option<String> {
        match self.uncounted {
            true => Some(UNCOUNTED.to_owned()),
            false => self.error.clone(),
        }
    }

    /// What keeps it awake besides uses, in words.
    pub fn busy(&self) -> Vec<String> {
        let open = match self.connections {
            0 => None,
            1 => Some("1 connection to a published port".to_owned()),
            open => Some(format!("{open} connections to published ports")),
        };
        self.busy.iter().cloned().chain(open).collect()
    }
}

/// The VMs that are watched, by id.
#[derive(Debug, Default)]
pub struct Watches(Mutex<HashMap<String, Watch>>);

impl Watches {
    /// All of them.
    pub fn lock(&self) -> MutexGuard<'_, HashMap<String, Watch>> {
        lock(&self.0)
    }

    /// Marks a VM as being hibernated or stopped; false if it is already, or does not run.
    pub fn claim(&self, id: &str) -> bool {
        let mut watches = self.lock();
        let watch = watches.get_mut(id).filter(|watch| !watch.tried);
        watch.map(|watch| watch.tried = true).is_some()
    }

    /// Describes the activity of the running VM with this id and these uses.
    pub fn describe(&self, shown: &mut VmIdle, id: &str, activity: &Activity) {
        let now_ns = monotonic_ns();
        let last_use_ns = activity.last_ns();
        shown.awake = activity.in_words();
        let watches = self.lock();
        let watch = watches.get(id);
        shown.awake.extend(watch.into_iter().flat_map(Watch::busy));
        shown.error = watch.and_then(Watch::error);
        shown.idle_s = watch
            .filter(|_| shown.awake.is_empty())
            .map(|it| it.idle(now_ns, last_use_ns).as_secs());
    }
}

/// Resources that a VM used more of than an idle VM does, in words.
fn too_much(last: &Sample, now: &Sample, seconds: f64) -> Vec<String> {
    let cpu = now.cpu.saturating_sub(last.cpu).as_secs_f64() / seconds;
    let per_second = |now: u64, last: u64| now.saturating_sub(last) as f64 / seconds;
    let disk = per_second(now.disk, last.disk);
    let moved = per_second(now.moved, last.moved);
    let network = per_second(now.network, last.network);
    let mut words = Vec::new();
    if cpu > CPU {
        words.push(format!("CPU {:.1} %", cpu * 100.0));
    }
    let rates = [
        ("disk", disk, DISK),
        ("data", moved, DISK),
        ("network", network, NETWORK),
    ];
    for (name, rate, most) in rates {
        if rate > most {
            words.push(format!("{name} {}/s", size(rate as u64)));
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn sample(second: u64, cpu_ms: u64, disk: u64, network: u64) -> Sample {
        Sample {
            at_ns: second * SECOND,
            pid: 7,
            cpu: Duration::from_millis(cpu_ms),
            disk,
            moved: 0,
            network,
        }
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_vm_is_idle_since_its_last_use_or_work() {
        let mut watch = Watch::new(0);
        watch.take(sample(1, 0, 0, 0), false, 0);
        watch.take(sample(11, 400, 150_000, 9_000), false, 0);
        assert!(watch.busy().is_empty(), "{:?}", watch.busy());
        assert_eq!(watch.idle(11 * SECOND, 0), seconds(11));
        assert!(watch.is_due(11 * SECOND, seconds(11)));
        assert!(!watch.is_due(11 * SECOND, seconds(12)));
        // Each kind of work counts separately.
        for (now, words) in [
            (sample(21, 1_000, 150_000, 9_000), "CPU 6.0 %"),
            (sample(31, 1_000, 350_000, 9_000), "disk 19.5 KiB/s"),
            (sample(41, 1_000, 350_000, 30_000), "network 2.1 KiB/s"),
        ] {
            watch.take(now, false, 0);
            assert_eq!(watch.busy(), [words]);
            assert_eq!(watch.idle(now.at_ns, 0), seconds(0));
        }
        watch.take(sample(51, 1_000, 350_000, 30_000), false, 0);
        assert!(watch.busy().is_empty());
        assert_eq!(watch.idle(51 * SECOND, 0), seconds(10));
        // A use that has ended, and one in progress.
        watch.take(sample(61, 1_000, 350_000, 30_000), false, 55 * SECOND);
        assert_eq!(watch.idle(61 * SECOND, 0), seconds(6));
        assert_eq!(watch.idle(61 * SECOND, 60 * SECOND), seconds(1));
        watch.take(sample(71, 1_000, 350_000, 30_000), true, 0);
        assert_eq!(watch.idle(71 * SECOND, 0), seconds(0));
        watch.connected(81 * SECOND, Some(2));
        assert_eq!(watch.busy(), ["2 connections to published ports"]);
        assert!(!watch.is_due(82 * SECOND, seconds(2)));
    }

    #[test]
    fn samples_that_are_too_close_are_not_compared() {
        let mut watch = Watch::new(0);
        watch.take(sample(1, 0, 0, 0), false, 0);
        let soon = Sample {
            at_ns: SECOND + 1_000_000,
            ..sample(1, 10, 0, 0)
        };
        watch.take(soon, false, 0);
        assert!(watch.busy().is_empty());
        // The window still begins at the first sample.
        watch.take(sample(2, 60, 0, 0), false, 0);
        assert_eq!(watch.busy(), ["CPU 6.0 %"]);
        // Another process, as after a wake: counting starts again.
        let other = Sample {
            pid: 8,
            ..sample(3, 9_000, 0, 0)
        };
        watch.take(other, false, 0);
        assert!(watch.busy().is_empty());
        assert_eq!(watch.idle(3 * SECOND, 0), seconds(0));
    }

    #[test]
    fn connections_that_cannot_be_counted_are_a_reason_until_they_are_counted() {
        let mut watch = Watch::new(0);
        watch.connected(2 * SECOND, None);
        assert!(watch.error().unwrap().contains("can't be counted"));
        assert_eq!(watch.idle(2 * SECOND, 0), seconds(2));
        watch.connected(3 * SECOND, Some(0));
        assert_eq!(watch.error(), None);
    }

    #[test]
    fn failures_are_reported_once_and_retried_with_backoff() {
        let mut watch = Watch::new(0);
        let after = seconds(1);
        assert!(watch.is_due(2 * SECOND, after));
        assert!(watch.failed(2 * SECOND, "No."));
        assert!(!watch.is_due(31 * SECOND, after));
        assert!(watch.is_due(32 * SECOND, after));
        assert!(!watch.failed(32 * SECOND, "No."));
        assert!(!watch.is_due(91 * SECOND, after));
        assert!(watch.is_due(92 * SECOND, after));
        assert!(watch.failed(92 * SECOND, "For another reason."));
        for _ in 0..100 {
            watch.failed(0, "No.");
        }
        assert!(watch.is_due(3600 * SECOND, after));
        assert_eq!(watch.error().as_deref(), Some("No."));
        watch.tried = true;
        assert!(!watch.is_due(u64::MAX, after));
    }
}
