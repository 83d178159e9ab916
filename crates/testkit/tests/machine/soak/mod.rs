//! Concurrent work, and kills at random moments meanwhile: what was acknowledged is
//! there, what failed says why and had a reason, and nothing is left.
//!
//! What is done follows from a seed, which is printed: `SOAK_SEED=N` does it again in the
//! same order, and `SOAK_SECONDS=N` says for how long. When each step happens is up to the
//! machine.

mod kills;
mod plan;
mod rest;
mod steps;
mod trial;
mod vms;
mod worker;

use crate::registry::Registry;
use crate::support::jiffy;
use plan::Plan;
use rest::Rest;
use std::io::Write as _;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use trial::Trial;
use vms::Keepers;
use worker::Worker;

/// How long there are kills, unless it is said.
const SECONDS: u64 = 120;
/// How long before all is looked at, and what was made is removed.
const ROUND: Duration = Duration::from_secs(60);
/// Clients that work at once.
const WORKERS: u64 = 3;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// Not kept back as a test's output is: it is to be known while the test runs, too.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "soak: {text}");
}

#[test]
fn whatever_is_killed_under_load_nothing_is_lost_or_left() {
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
        trial.over.store(true, Ordering::Relaxed);
        panic!("SOAK_SEED={seed}: {why}\n{}", trial.report());
    }
}

/// Rounds of work and kills. In every other the daemon is not killed, so that what it
/// does not give back adds up.
fn soak(trial: &Trial, seed: u64, time: Duration) -> Result<(), String> {
    let jiffy = trial.jiffy;
    let registry = Registry::start(jiffy);
    trial.warm_up()?;
    let first = Rest::of(jiffy, &[]);
    let keepers = Keepers::start(trial)?;
    let mut workers: Vec<Worker> = (0..WORKERS)
        .map(|number| Worker::new(trial, number, Plan::of(seed, number + 1)))
        .collect();
    let mut kills = Plan::of(seed, 0);
    let rounds = time.as_secs().div_ceil(ROUND.as_secs()).max(1);
    let share = time / u32::try_from(rounds).unwrap_or(u32::MAX);
    for round in 0..rounds {
        trial.warm_up()?;
        let before = Rest::of(jiffy, &keepers.ids());
        let spares_daemon = round % 2 == 1;
        run_round(trial, &mut workers, &mut kills, spares_daemon, share)?;
        remove_late_ones(trial)?;
        // Blobs of a pull that was cut short are kept: they go with one that is not.
        trial.must(&["pull", &steps::image()])?;
        trial.eventually("the image is removed", || steps::remove_image(trial))?;
        keepers.are_well(trial)?;
        trial.has_not_panicked()?;
        trial.warm_up()?;
        before.is_again(jiffy, &keepers.ids(), spares_daemon)?;
        say(&format!(
            "round {} of {rounds}: {}",
            round + 1,
            trial.summary()
        ));
    }
    keepers.remove(trial)?;
    trial.warm_up()?;
    first.is_again(jiffy, &[], false)?;
    drop(registry);
    match trial.succeeded() {
        true => Ok(()),
        false => Err("most of what was asked for failed".into()),
    }
}

/// What clients that were killed had asked for may have been made after it was looked for.
/// Nobody has asked for anything since: only what is made now can come.
fn remove_late_ones(trial: &Trial) -> Result<(), String> {
    let list = "/bin/jiffy ps -a | awk '$2 ~ /^w[0-9]+-(vm|from|child)/ { print \"vm\", $2 }'; \
                /bin/jiffy snapshot ls | awk '$1 ~ /^w[0-9]+-shot/ { print \"snapshot\", $1 }'";
    trial.eventually("nothing is made any more", || {
        let late = trial.jiffy.sh(list);
        for line in late.lines() {
            trial.note(&format!("made late: {line}"));
            match line.split_once(' ') {
                Some(("vm", name)) => trial.must(&["rm", "-f", name])?,
                Some((_, name)) => trial.must(&["snapshot", "rm", name])?,
                None => return Err(line.to_owned()),
            };
        }
        Ok(late.is_empty())
    })
}

/// Everybody works and one kills for that long; then each looks for what was acknowledged,
/// and removes it.
fn run_round(
    trial: &Trial,
    workers: &mut [Worker],
    plan: &mut Plan,
    spares_daemon: bool,
    time: Duration,
) -> Result<(), String> {
    let until = Instant::now() + time;
    trial.over.store(false, Ordering::Relaxed);
    thread::scope(|scope| {
        let killer =
            scope.spawn(|| trial.does(|| kills::kill_until(trial, plan, spares_daemon, until)));
        for worker in workers {
            scope.spawn(|| trial.does(|| worker.work()));
        }
        // Without kills each does what it is at, and what remains has to succeed.
        let ended = killer.join();
        trial.over.store(true, Ordering::Relaxed);
        ended.expect("nobody panics");
    });
    trial.result()
}
