//! Concurrent work while processes are killed at random moments. Acknowledged results exist, each
//! failure is reported and explained by a kill, and nothing is left behind.
//!
//! A seed, which is printed, determines the sequence: `SOAK_SEED=N` repeats it, and
//! `SOAK_SECONDS=N` sets the duration. The timing of the steps depends on the machine.

mod baseline;
mod kills;
mod plan;
mod steps;
mod trial;
mod vms;
mod worker;

use crate::registry::Registry;
use crate::support::jiffy;
use baseline::Baseline;
use plan::Plan;
use std::io::Write as _;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use trial::Trial;
use vms::Keepers;
use worker::Worker;

/// Default duration of the kills, seconds.
const SECONDS: u64 = 120;
/// Length of a round, after which everything is checked and removed.
const ROUND: Duration = Duration::from_secs(60);
/// Number of concurrent clients.
const WORKERS: u64 = 3;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// Writes to stderr directly, because libtest would hold the output back until the end.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "soak: {text}");
}

#[test]
fn killing_processes_under_load_loses_and_leaks_nothing() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let random = || now.map_or(1, |now| u64::from(now.subsec_nanos()));
    let seed = number("SOAK_SEED").unwrap_or_else(random);
    let time = Duration::from_secs(number("SOAK_SECONDS").unwrap_or(SECONDS));
    say(&format!("SOAK_SEED={seed} SOAK_SECONDS={}", time.as_secs()));
    let jiffy = jiffy();
    let trial = Trial::new(&jiffy);
    let result = soak(&trial, seed, time);
    say(&trial.summary());
    if let Err(why) = result {
        trial.stopping.store(true, Ordering::Relaxed);
        panic!("SOAK_SEED={seed}: {why}\n{}", trial.report());
    }
}

/// Runs rounds of work and kills. The daemon is not killed in every second round, so that its leaks
/// add up.
fn soak(trial: &Trial, seed: u64, time: Duration) -> Result<(), String> {
    let jiffy = trial.jiffy;
    let registry = Registry::start(jiffy);
    trial.warm_up()?;
    let first = Baseline::of(jiffy, &[]);
    let keepers = Keepers::start(trial)?;
    let mut workers: Vec<Worker> = (0..WORKERS)
        .map(|number| Worker::new(trial, number, Plan::of(seed, number + 1)))
        .collect();
    let mut kills = Plan::of(seed, 0);
    let rounds = time.as_secs().div_ceil(ROUND.as_secs()).max(1);
    let share = time / u32::try_from(rounds).unwrap_or(u32::MAX);
    for round in 0..rounds {
        trial.warm_up()?;
        let before = Baseline::of(jiffy, &keepers.ids());
        let spares_daemon = round % 2 == 1;
        run_round(trial, &mut workers, &mut kills, spares_daemon, share)?;
        remove_late_ones(trial)?;
        // Blobs of an interrupted pull are kept; a complete pull and its removal remove them.
        trial.retry_until_done(&["pull", &steps::image()])?;
        trial.eventually("the image is removed", || steps::remove_image(trial))?;
        keepers.check(trial)?;
        trial.has_not_panicked()?;
        trial.warm_up()?;
        before.wait_until_restored(jiffy, &keepers.ids(), spares_daemon)?;
        say(&format!(
            "round {} of {rounds}: {}",
            round + 1,
            trial.summary()
        ));
    }
    keepers.remove(trial)?;
    trial.warm_up()?;
    first.wait_until_restored(jiffy, &[], false)?;
    drop(registry);
    match trial.succeeded() {
        true => Ok(()),
        false => Err("most commands failed".into()),
    }
}

/// Removes late results: a request of a killed client may finish after the client's worker has
/// looked for its result. No new requests are sent meanwhile.
fn remove_late_ones(trial: &Trial) -> Result<(), String> {
    let list = "/bin/jiffy ps -a | awk '$2 ~ /^w[0-9]+-(vm|from|child)/ { print \"vm\", $2 }'; \
                /bin/jiffy snapshot ls | awk '$1 ~ /^w[0-9]+-shot/ { print \"snapshot\", $1 }'";
    trial.eventually("no more late VMs or snapshots", || {
        let late = trial.jiffy.sh(list);
        for line in late.lines() {
            trial.note(&format!("created late: {line}"));
            match line.split_once(' ') {
                Some(("vm", name)) => trial.retry_until_done(&["rm", "-f", name])?,
                Some((_, name)) => trial.retry_until_done(&["snapshot", "rm", name])?,
                None => return Err(line.to_owned()),
            };
        }
        Ok(late.is_empty())
    })
}

/// All workers work and one thread kills for that time; then each worker checks its acknowledged
/// results and removes them.
fn run_round(
    trial: &Trial,
    workers: &mut [Worker],
    plan: &mut Plan,
    spares_daemon: bool,
    time: Duration,
) -> Result<(), String> {
    let until = Instant::now() + time;
    trial.stopping.store(false, Ordering::Relaxed);
    thread::scope(|scope| {
        let killer = scope
            .spawn(|| trial.run_or_stop(|| kills::kill_until(trial, plan, spares_daemon, until)));
        for worker in workers {
            scope.spawn(|| trial.run_or_stop(|| worker.work()));
        }
        // Without kills each worker completes its step, and the rest must succeed.
        let ended = killer.join();
        trial.stopping.store(true, Ordering::Relaxed);
        ended.expect("nobody panics");
    });
    trial.result()
}
