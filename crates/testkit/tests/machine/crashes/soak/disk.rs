//! Fills the data disk for some seconds at a time.

use super::plan::Plan;
use super::trial::Trial;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The file that takes the space.
const FILE: &str = "/var/lib/jiffy/full";
/// Shortest and longest time with and without space, milliseconds.
const ROOMY_MS: (u64, u64) = (5_000, 15_000);
const FULL_MS: (u64, u64) = (2_000, 6_000);
/// KiB that are left: none, or enough for some of the writes.
const LEFT_KIB: [u64; 4] = [0, 64, 2 << 10, 16 << 10];

/// Fills the disk and frees it again, until a time.
pub fn fill_until(trial: &Trial, plan: &mut Plan, until: Instant) -> Result<(), String> {
    let mut within = |(shortest, longest): (u64, u64)| {
        Duration::from_millis(shortest + plan.below(longest - shortest))
    };
    let mut turns = LEFT_KIB.iter().cycle();
    while trial.continues() && Instant::now() < until {
        let (roomy, full) = (within(ROOMY_MS), within(FULL_MS));
        wait(trial, roomy, until);
        if !trial.continues() || Instant::now() + full >= until {
            continue;
        }
        let left = turns.next().expect("a cycle");
        // What fails while the space is taken or given back is explained, too.
        trial.causes.lock().unwrap().disk_is_full(true);
        let filled = trial
            .jiffy
            .sh(&format!("/tests/witness fill {FILE} {left}"));
        trial.note(&format!("filled the disk but for {left} KiB: {filled}"));
        wait(trial, full, until);
        // XFS frees the blocks of a removed file later, those of a truncated one at once.
        trial.jiffy.sh(&format!(": > {FILE}; rm {FILE}"));
        trial.note("freed the disk");
        trial.causes.lock().unwrap().disk_is_full(false);
    }
    Ok(())
}

/// Waits for that time, but not after `until` or the end of all work.
fn wait(trial: &Trial, time: Duration, until: Instant) {
    let until = until.min(Instant::now() + time);
    while trial.continues() && Instant::now() < until {
        sleep(Duration::from_millis(50));
    }
}
