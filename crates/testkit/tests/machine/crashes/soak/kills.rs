//! Which process is killed and when.

use super::causes::Victim;
use super::plan::Plan;
use super::trial::Trial;
use crate::support::LIVES;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Most commands that begin between two kills.
const MOST_COMMANDS_BETWEEN_KILLS: u64 = 8;
/// Longest additional delay before a kill.
const DELAY_MS: u64 = 800;
/// Longest wait for these commands to begin.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// Looks for a process that lives for a short time, and the pause between two, in the shell's form.
const LOOKS: u32 = 60;
const LOOK: &str = "0.05";
/// A pager that dies more than five times within 10 s is not restarted.
const PAGER_KILL_INTERVAL: Duration = Duration::from_millis(2500);
/// Limits on the descriptors and memory of `jiffyd`.
const MOST_DESCRIPTORS: u64 = 512;
const MOST_KIB: u64 = 96 << 10;

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
        let (kind, which) = (plan.below(18), plan.below(1 << 16));
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
            10 => Victim::Spare,
            11 => Victim::Standby,
            12 | 13 => Victim::Origins,
            14 => Victim::Files,
            15 => Victim::Import,
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
    if victim == Victim::Import {
        wait_for_import(trial);
    }
    // Held until the kill is done, so that no failure is judged meanwhile.
    let mut causes = trial.causes.lock().unwrap();
    if let Some(last) = causes.last_pager_kill().filter(|_| victim.is_pager()) {
        sleep(PAGER_KILL_INTERVAL.saturating_sub(last.elapsed()));
    }
    let any = "true";
    let spared = causes.spared.join("|");
    let killed = match victim {
        Victim::Daemon => one_of(trial, "jiffyd", "KILL", which, any),
        Victim::DaemonInOrder => one_of(trial, "jiffyd", "TERM", which, any),
        Victim::Pager => one_of(trial, "jiffy-pager", "KILL", which, any),
        Victim::DaemonAndPager => {
            let daemon = one_of(trial, "jiffyd", "KILL", which, any);
            one_of(trial, "jiffy-pager", "KILL", which, any).or(daemon)
        }
        Victim::Origins => one_of(trial, "jiffy-origins", "KILL", which, any),
        Victim::Monitor => {
            let other = format!("! grep -qE '/vms/({spared}|-+)/' /proc/$pid/cmdline 2>/dev/null");
            one_of(trial, "jiffy-vmm", "KILL", which, &other)
        }
        Victim::Spare => {
            let spare = "grep -q -e /vms/-- /proc/$pid/cmdline 2>/dev/null";
            one_of(trial, "jiffy-vmm", "KILL", which, spare)
        }
        Victim::Standby => {
            // It has an id and no record.
            let standby = "line=; read -r line < /proc/$pid/cmdline; id=${line#*/vms/}; \
                           id=${id%%/*}; [ -d /var/lib/jiffy/vms/$id ] && \
                           [ ! -e /var/lib/jiffy/vms/$id/vm.json ]";
            one_of(trial, "jiffy-vmm", "KILL", which, standby)
        }
        Victim::Files => one_of(trial, "jiffy-files", "KILL", which, any),
        Victim::Import => one_of(trial, "jiffy-import", "KILL", which, any),
        Victim::Client => one_of(trial, "jiffy", "KILL", which, any),
    };
    let Some((pid, line)) = killed else { return };
    trial.note(&format!("killed {}: {pid} {line}", victim.name()));
    causes.killed(victim, pid, &line);
}

/// Waits for `jiffy-import`, which lives for a short time only.
fn wait_for_import(trial: &Trial) {
    trial.jiffy.sh(&format!(
        "looks={LOOKS}; until pidof jiffy-import >/dev/null || [ $looks -eq 0 ]; do \
           looks=$((looks-1)); sleep {LOOK}; done"
    ));
}

/// Signals one process of a program, of those that a shell command accepts by their `$pid`, and waits
/// until it has ended; returns its id and command line. The process is stopped first, because a spare
/// VMM may just become a VM's. A child of the program, which has its name until it executes another
/// one, is no victim: the first process of a namespace ignores SIGTERM, and as a VMM it would run on.
/// Only `jiffy-origins` consists of two processes.
fn one_of(
    trial: &Trial,
    program: &str,
    signal: &str,
    which: u64,
    accepts: &str,
) -> Option<(u64, String)> {
    let script = format!(
        "set --; for pid in $(pidof {program}); do \
           {accepts} || continue; \
           parent=$(sed -n 's/^PPid:.//p' /proc/$pid/status 2>/dev/null); \
           [ {program} != jiffy-origins ] && \
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
