//! Which process is killed and when, and whether a kill explains a failure.

use super::plan::Plan;
use super::trial::Trial;
use crate::support::LIVES;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Most commands that begin between two kills.
const MOST_COMMANDS_BETWEEN_KILLS: u64 = 8;
/// Longest additional delay before a kill.
const DELAY_MS: u64 = 800;
/// Longest wait for these commands to begin.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// A pager that dies more than five times within 10 s is not restarted.
const PAGER_KILL_INTERVAL: Duration = Duration::from_millis(2500);
/// Time limit for a VMM to find the next pager, `JIFFY_PAGER_PATIENCE_MS`; until then missing pages
/// of its memory can't be served.
const PAGER_RESTART_LIMIT: Duration = Duration::from_secs(60);
/// Limits on the descriptors and memory of `jiffyd`.
const MOST_DESCRIPTORS: u64 = 512;
const MOST_KIB: u64 = 96 << 10;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    Daemon,
    /// By SIGTERM.
    DaemonInOrder,
    Pager,
    DaemonAndPager,
    Monitor,
    Client,
}

impl Victim {
    fn name(self) -> &'static str {
        match self {
            Victim::Daemon => "jiffyd",
            Victim::DaemonInOrder => "jiffyd by SIGTERM",
            Victim::Pager => "jiffy-pager",
            Victim::DaemonAndPager => "jiffyd and jiffy-pager",
            Victim::Monitor => "jiffy-vmm",
            Victim::Client => "jiffy",
        }
    }

    fn is_daemon(self) -> bool {
        matches!(
            self,
            Victim::Daemon | Victim::DaemonInOrder | Victim::DaemonAndPager
        )
    }
}

/// The kills so far.
#[derive(Default)]
pub struct Kills {
    counts: BTreeMap<Victim, usize>,
    last: Option<Instant>,
    last_client: Option<Instant>,
    last_pager: Option<Instant>,
    /// VMM processes that were killed, by VM id.
    monitors: HashMap<String, u64>,
    /// Ids of VMs whose VMMs are not killed.
    pub spared: Vec<String>,
}

impl Kills {
    /// Whether a client was killed since then.
    pub fn client_killed_since(&self, began: Instant) -> bool {
        self.last_client.is_some_and(|last| last >= began)
    }

    /// Whether a kill explains the failure of a command that began at `began`: any kill since then,
    /// an earlier kill of this VM's VMM, or a recent kill of the pager if the message is about the
    /// pager.
    pub fn explains(&self, began: Instant, vm: Option<&str>, said: &str) -> bool {
        let pager = self.last_pager.filter(|_| said.contains("from the pager"));
        self.last.is_some_and(|last| last >= began)
            || vm.is_some_and(|vm| self.monitors.contains_key(vm))
            || pager.is_some_and(|last| last + PAGER_RESTART_LIMIT >= began)
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
        each.join(", ")
    }
}

/// Kills one process after the other until a time.
pub fn kill_until(
    trial: &Trial,
    plan: &mut Plan,
    spares_daemon: bool,
    until: Instant,
) -> Result<(), String> {
    while trial.continues() && Instant::now() < until {
        let commands = plan.below(MOST_COMMANDS_BETWEEN_KILLS) as usize;
        let delay = Duration::from_millis(plan.below(DELAY_MS));
        let (kind, which) = (plan.below(12), plan.below(1 << 16));
        let wanted = trial.begun.load(Ordering::Relaxed) + commands;
        let waits = (Instant::now() + LONGEST_WAIT).min(until);
        while trial.begun.load(Ordering::Relaxed) < wanted && Instant::now() < waits {
            sleep(Duration::from_millis(10));
        }
        sleep(delay);
        let victim = match kind {
            0..=2 => Victim::Daemon,
            3 => Victim::DaemonInOrder,
            4 => Victim::DaemonAndPager,
            5 | 6 => Victim::Pager,
            7..=9 => Victim::Monitor,
            _ => Victim::Client,
        };
        if !(spares_daemon && victim.is_daemon()) {
            kill(trial, victim, which);
        }
        daemon_is_bounded(trial)?;
    }
    Ok(())
}

fn kill(trial: &Trial, victim: Victim, which: u64) {
    // Held until the kill is done, so that no failure is judged meanwhile.
    let mut kills = trial.kills.lock().unwrap();
    let takes_pager = matches!(victim, Victim::Pager | Victim::DaemonAndPager);
    if let Some(last) = kills.last_pager.filter(|_| takes_pager) {
        sleep(PAGER_KILL_INTERVAL.saturating_sub(last.elapsed()));
    }
    let killed = match victim {
        Victim::Daemon => one_of(trial, "jiffyd", "KILL", which, &[]),
        Victim::DaemonInOrder => one_of(trial, "jiffyd", "TERM", which, &[]),
        Victim::Pager => one_of(trial, "jiffy-pager", "KILL", which, &[]),
        Victim::DaemonAndPager => {
            let daemon = one_of(trial, "jiffyd", "KILL", which, &[]);
            one_of(trial, "jiffy-pager", "KILL", which, &[]).or(daemon)
        }
        Victim::Monitor => one_of(trial, "jiffy-vmm", "KILL", which, &kills.spared),
        Victim::Client => one_of(trial, "jiffy", "KILL", which, &[]),
    };
    let now = Instant::now();
    let Some((pid, line)) = killed else { return };
    trial.note(&format!("killed {}: {pid} {line}", victim.name()));
    *kills.counts.entry(victim).or_default() += 1;
    kills.last = Some(now);
    if victim == Victim::Client {
        kills.last_client = Some(now);
    }
    if takes_pager {
        kills.last_pager = Some(now);
    }
    if victim == Victim::Monitor {
        let id = line
            .split("/vms/")
            .nth(1)
            .and_then(|rest| rest.split('/').next());
        if let Some(id) = id {
            kills.monitors.insert(id.to_owned(), pid);
        }
    }
}

/// Signals one process of a program and waits until it has ended; returns its id and command line.
/// The process is stopped first, because a spare VMM may just become a VM's. A child of the program,
/// which has its name until it executes another one, is no victim: the first process of a namespace
/// ignores SIGTERM, and as a VMM it would run on.
fn one_of(
    trial: &Trial,
    program: &str,
    signal: &str,
    which: u64,
    spared: &[String],
) -> Option<(u64, String)> {
    let spared = spared.join("|");
    let script = format!(
        "set --; for pid in $(pidof {program}); do \
           grep -qE '/vms/({spared})/' /proc/$pid/cmdline 2>/dev/null && continue; \
           parent=$(sed -n 's/^PPid:.//p' /proc/$pid/status 2>/dev/null); \
           [ \"$(cat /proc/$parent/comm 2>/dev/null)\" = {program} ] || set -- $@ $pid; done; \
         [ $# -gt 0 ] || exit 0; shift $(({which} % $#)); pid=$1; \
         kill -STOP $pid 2>/dev/null || exit 0; line=; read -r line < /proc/$pid/cmdline; \
         echo \"$pid $line\"; kill -{signal} $pid; kill -CONT $pid; \
         while {LIVES} /proc/$pid/status && \
           [ \"$(cat /proc/$pid/comm)\" = {program} ]; do sleep 0.01; done 2>/dev/null; true"
    );
    let text = trial.jiffy.sh(&script);
    let (pid, line) = text.split_once(' ')?;
    Some((pid.parse().ok()?, line.to_owned()))
}

/// Checks that memory and descriptors of the daemon are within the limits.
fn daemon_is_bounded(trial: &Trial) -> Result<(), String> {
    let numbers = trial.jiffy.sh(
        "for pid in $(pidof jiffyd); do awk '/^VmRSS/ { print $2 }' /proc/$pid/status && \
         ls /proc/$pid/fd | wc -l; done 2>/dev/null; true",
    );
    let numbers: Vec<u64> = numbers
        .lines()
        .filter_map(|line| line.trim().parse().ok())
        .collect();
    for pair in numbers.chunks_exact(2) {
        let &[kib, descriptors] = pair else { continue };
        if kib > MOST_KIB || descriptors > MOST_DESCRIPTORS {
            return Err(format!(
                "jiffyd has {kib} KiB and {descriptors} descriptors"
            ));
        }
    }
    Ok(())
}
