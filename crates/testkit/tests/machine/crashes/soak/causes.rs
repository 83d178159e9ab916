//! What may explain the failure of a request: kills so far, and times when the disk was full.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// Time limit for a VMM to find the next pager, `JIFFY_PAGER_PATIENCE_MS`; until then missing pages
/// of its memory can't be served.
const PAGER_RESTART_LIMIT: Duration = Duration::from_secs(60);
/// After a failed wake, connections to the VM are reset at once for so long.
const WAKE_PAUSE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Victim {
    Daemon,
    /// By SIGTERM.
    DaemonInOrder,
    Pager,
    DaemonAndPager,
    Origins,
    Monitor,
    /// A VMM that was started ahead and has no VM yet.
    Spare,
    /// The VMM of a VM that was restored ahead of its run.
    Standby,
    Files,
    Import,
    Client,
}

impl Victim {
    pub fn name(self) -> &'static str {
        match self {
            Victim::Daemon => "jiffyd",
            Victim::DaemonInOrder => "jiffyd by SIGTERM",
            Victim::Pager => "jiffy-pager",
            Victim::DaemonAndPager => "jiffyd and jiffy-pager",
            Victim::Origins => "jiffy-origins",
            Victim::Monitor => "jiffy-vmm",
            Victim::Spare => "jiffy-vmm as a spare",
            Victim::Standby => "jiffy-vmm as a standby",
            Victim::Files => "jiffy-files",
            Victim::Import => "jiffy-import",
            Victim::Client => "jiffy",
        }
    }

    pub fn is_daemon(self) -> bool {
        matches!(
            self,
            Victim::Daemon | Victim::DaemonInOrder | Victim::DaemonAndPager
        )
    }

    /// Whether the pager ends with it.
    pub fn is_pager(self) -> bool {
        matches!(
            self,
            Victim::Pager | Victim::DaemonAndPager | Victim::Origins
        )
    }

    pub fn is_monitor(self) -> bool {
        matches!(self, Victim::Monitor | Victim::Spare | Victim::Standby)
    }
}

/// The kills so far, and when the disk was full.
#[derive(Default)]
pub struct Causes {
    counts: BTreeMap<Victim, usize>,
    last: BTreeMap<Victim, Instant>,
    /// VMM processes that were killed, by VM id.
    monitors: HashMap<String, u64>,
    /// Ids of VMs whose VMMs are not killed.
    pub spared: Vec<String>,
    is_full: bool,
    last_full: Option<Instant>,
    filled: usize,
}

impl Causes {
    /// Counts the kill of this process, with its command line.
    pub fn killed(&mut self, victim: Victim, pid: u64, line: &str) {
        *self.counts.entry(victim).or_default() += 1;
        self.last.insert(victim, Instant::now());
        let id = line
            .split("/vms/")
            .nth(1)
            .and_then(|rest| rest.split('/').next());
        if let Some(id) = id.filter(|_| victim.is_monitor()) {
            self.monitors.insert(id.to_owned(), pid);
        }
    }

    /// The disk is full from now on, or until now.
    pub fn disk_is_full(&mut self, is_full: bool) {
        self.filled += usize::from(is_full && !self.is_full);
        self.is_full = is_full;
        self.last_full = Some(Instant::now());
    }

    /// When the last of these was killed.
    fn last_kill(&self, of: impl Fn(Victim) -> bool) -> Option<Instant> {
        let kills = self.last.iter().filter(|(victim, _)| of(**victim));
        kills.map(|(_, at)| *at).max()
    }

    /// Whether one of these was killed since then.
    pub fn killed_since(&self, began: Instant, of: impl Fn(Victim) -> bool) -> bool {
        self.last_kill(of).is_some_and(|last| last >= began)
    }

    pub fn last_pager_kill(&self) -> Option<Instant> {
        self.last_kill(Victim::is_pager)
    }

    /// Whether the disk was full at some time since then.
    pub fn was_full_since(&self, began: Instant) -> bool {
        self.is_full || self.last_full.is_some_and(|last| last >= began)
    }

    /// Whether something explains the failure of a command that began at `began`: any kill since
    /// then, an earlier kill of this VM's VMM, a recent kill of the pager if the message is about the
    /// pager, a full disk if it is about space, or a busy host.
    pub fn explain(&self, began: Instant, vm: Option<&str>, said: &str) -> bool {
        let pager = self
            .last_pager_kill()
            .filter(|_| said.contains("from the pager"));
        self.killed_since(began, |_| true)
            || vm.is_some_and(|vm| self.monitors.contains_key(vm))
            || pager.is_some_and(|last| last + PAGER_RESTART_LIMIT >= began)
            || self.was_full_since(began) && is_about_space(said)
            || is_of_a_busy_host(said)
    }

    /// Whether something explains that a connection to this VM was closed or refused without an
    /// answer: the daemon or the VMM was killed. A published port has no other way to say that its
    /// VM can't be woken, as on a full disk.
    pub fn explain_a_cut(&self, began: Instant, vm: &str, is_published: bool) -> bool {
        let cuts = |victim: Victim| victim.is_daemon() || victim == Victim::Monitor;
        self.killed_since(began, cuts)
            || self.monitors.contains_key(vm)
            || is_published && self.was_full_since(began - WAKE_PAUSE)
            || is_published && self.killed_since(began - WAKE_PAUSE, |_| true)
    }

    /// The killed process that was this VM's VMM.
    pub fn killed_vmm_of(&self, vm: &str) -> Option<u64> {
        self.monitors.get(vm).copied()
    }

    /// Forgets the kill of this VM's VMM: the VM has a new one or needs none.
    pub fn forget(&mut self, vm: &str) {
        self.monitors.remove(vm);
    }

    pub fn summary(&self) -> String {
        let counts = self.counts.iter();
        let each: Vec<_> = counts
            .map(|(victim, count)| format!("{count} {}", victim.name()))
            .collect();
        format!("killed: {}; disk full: {}", each.join(", "), self.filled)
    }
}

/// Whether a message says that a guest took longer than a time limit: to freeze its programs, which is
/// then undone, to accept a connection, or to wake. The host may be slow, busy or suspended. The VM must answer
/// later.
pub fn is_of_a_busy_host(said: &str) -> bool {
    let limits = [
        "did not freeze within",
        "agent accepts no connections",
        "did not wake in time",
    ];
    limits.iter().any(|limit| said.contains(limit))
}

/// Whether a message says that the server of a shared folder has ended: before or after the guest mounted it
/// (ECONNREFUSED, ENOTCONN).
pub fn is_about_a_lost_folder(said: &str) -> bool {
    ["onnection refused", "not connected"]
        .iter()
        .any(|word| said.contains(word))
}

/// Whether a message names missing space as its reason.
pub fn is_about_space(said: &str) -> bool {
    ["space", "is full", "MiB left"]
        .iter()
        .any(|word| said.contains(word))
}
