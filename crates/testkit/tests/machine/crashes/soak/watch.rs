//! Checks that last as long as the work does: no VM is awake twice, and none is lost.

use super::trial::Trial;
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

/// Time after which the watcher tells what it has seen, seconds.
const WATCH: u32 = 3;
/// Pause between two lists of the VMs.
const PAUSE: Duration = Duration::from_secs(2);

/// Looks many times a second for two VMMs of one VM, until the work has ended.
pub fn nobody_is_awake_twice(trial: &Trial, has_ended: &AtomicBool) -> Result<(), String> {
    while !has_ended.load(Ordering::Relaxed) {
        let seen = trial.jiffy.sh(&format!("/tests/witness watch {WATCH}"));
        if seen.contains("twice:") {
            let processes = "for pid in $(pidof jiffy-vmm); do \
                             line=; read -r line < /proc/$pid/cmdline; echo \"$pid $line\"; done";
            let processes = trial.jiffy.sh(processes);
            return Err(format!("a VM has two VMMs: {seen}\n{processes}"));
        }
        trial.watched(&seen)?;
    }
    Ok(())
}

/// Checks from time to time that each acknowledged VM is listed, until the work has ended, and once
/// more then.
pub fn nobody_is_lost(trial: &Trial, has_ended: &AtomicBool) -> Result<(), String> {
    loop {
        let is_last = has_ended.load(Ordering::Relaxed);
        all_are_listed(trial)?;
        if is_last {
            return Ok(());
        }
        sleep(PAUSE);
    }
}

fn all_are_listed(trial: &Trial) -> Result<(), String> {
    let before = trial.acknowledged.lock().unwrap().clone();
    let list = trial.retry_until_done(&["ps", "-a", "--format", "json"])?;
    let list: Vec<Value> =
        serde_json::from_str(&list).map_err(|error| format!("{error}: {list}"))?;
    let listed: BTreeSet<&str> = list.iter().filter_map(|vm| vm["id"].as_str()).collect();
    let now = trial.acknowledged.lock().unwrap();
    let mut lost = before
        .iter()
        .filter(|(id, _)| now.contains_key(*id) && !listed.contains(id.as_str()));
    match lost.next() {
        None => Ok(()),
        Some((id, name)) => Err(format!("{name} ({id}) was made, and is not listed")),
    }
}
