//! Concurrent work while processes are killed and the disk is filled at random moments. Acknowledged
//! results exist, each failure is reported and explained, and nothing is left behind. VMs fall asleep
//! and are woken by requests: each is answered or fails with a reason, and no VM is lost or awake twice.
//!
//! A seed, which is printed, determines the sequence: `SOAK_SEED=N` repeats it, and
//! `SOAK_SECONDS=N` sets the duration. The timing of the steps depends on the machine.

mod baseline;
mod causes;
mod disk;
mod images;
mod kills;
mod plan;
mod requests;
mod steps;
mod trial;
mod visitor;
mod vms;
mod watch;
mod worker;

use crate::http::WITH_PROXY;
use crate::registry::Registry;
use crate::support::jiffy_with;
use baseline::Baseline;
use plan::Plan;
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use trial::Trial;
use visitor::Visitor;
use vms::Keepers;
use worker::Worker;

/// Default duration of the kills, seconds.
const SECONDS: u64 = 120;
/// Length of a round, after which everything is checked and removed, and the most rounds.
const ROUND: Duration = Duration::from_secs(60);
const MOST_ROUNDS: u64 = 4;
/// Number of concurrent clients with VMs that they use, and with VMs that sleep meanwhile.
const WORKERS: u64 = 2;
const VISITORS: u16 = 2;

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
    let jiffy = jiffy_with(WITH_PROXY);
    jiffy.push_witness();
    let trial = Trial::new(&jiffy);
    let result = soak(&trial, seed, time);
    say(&trial.summary());
    if let Err(why) = result {
        trial.stopping.store(true, Ordering::Relaxed);
        panic!("SOAK_SEED={seed}: {why}\n{}", trial.report());
    }
}

/// The clients, and what disturbs them.
struct Players<'a> {
    workers: Vec<Worker<'a>>,
    visitors: Vec<Visitor<'a>>,
    kills: Plan,
    fills: Plan,
}

impl<'a> Players<'a> {
    fn new(trial: &'a Trial<'a>, seed: u64) -> Players<'a> {
        let visitor = |number| {
            let plan = Plan::of(seed, 100 + u64::from(number));
            Visitor::new(trial, number, plan)
        };
        Players {
            workers: (0..WORKERS)
                .map(|number| Worker::new(trial, number, Plan::of(seed, number + 1)))
                .collect(),
            visitors: (0..VISITORS).map(visitor).collect(),
            kills: Plan::of(seed, 0),
            fills: Plan::of(seed, 99),
        }
    }
}

/// Runs rounds of work and kills. The daemon is not killed in every second round, so that its leaks
/// add up.
fn soak(trial: &Trial, seed: u64, time: Duration) -> Result<(), String> {
    let jiffy = trial.jiffy;
    let registry = Registry::start(jiffy);
    let sums = images::prepare(trial)?;
    assert!(trial.sums.set(sums).is_ok(), "once");
    trial.warm_up()?;
    let first = Baseline::of(jiffy, &[]);
    let keepers = Keepers::start(trial)?;
    let mut players = Players::new(trial, seed);
    let rounds = time.as_secs().div_ceil(ROUND.as_secs());
    let rounds = rounds.clamp(1, MOST_ROUNDS);
    let share = time / u32::try_from(rounds).unwrap_or(u32::MAX);
    for round in 0..rounds {
        trial.warm_up()?;
        let before = Baseline::of(jiffy, &keepers.ids());
        let spares_daemon = round % 2 == 1;
        run_round(trial, &mut players, spares_daemon, share)?;
        remove_late_ones(trial)?;
        // Blobs of an interrupted pull are kept; a complete pull and its removal remove them.
        images::remove_all(trial)?;
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
    trial.was_meaningful()
}

/// Removes late results: a request of a killed client may finish after its client has looked for its
/// result. No new requests are sent meanwhile.
fn remove_late_ones(trial: &Trial) -> Result<(), String> {
    let list = "/bin/jiffy ps -a | awk '$2 ~ /^[vw][0-9]+-(vm|from|child)/ { print \"vm\", $2 }'; \
                /bin/jiffy snapshot ls | awk '$1 ~ /^w[0-9]+-shot/ { print \"snapshot\", $1 }'; \
                /bin/jiffy image ls | awk '$1 ~ /^w[0-9]+-image/ { print \"image\", $1 }'";
    trial.eventually("no more late VMs, snapshots or images", || {
        let late = trial.jiffy.sh(list);
        for line in late.lines() {
            trial.note(&format!("created late: {line}"));
            match line.split_once(' ') {
                Some(("vm", name)) => trial.retry_until_done(&["rm", "-f", name])?,
                Some((kind, name)) => trial.retry_until_done(&[kind, "rm", name])?,
                None => return Err(line.to_owned()),
            };
        }
        Ok(late.is_empty())
    })
}

/// All clients work for that time, while processes are killed and the disk is filled; then each
/// checks its acknowledged results and removes them. Watchers look on until the end.
fn run_round(
    trial: &Trial,
    players: &mut Players,
    spares_daemon: bool,
    time: Duration,
) -> Result<(), String> {
    let until = Instant::now() + time;
    trial.stopping.store(false, Ordering::Relaxed);
    let has_ended = AtomicBool::new(false);
    let Players {
        workers,
        visitors,
        kills,
        fills,
    } = players;
    thread::scope(|scope| {
        scope.spawn(|| trial.run_or_stop(|| watch::nobody_is_awake_twice(trial, &has_ended)));
        scope.spawn(|| trial.run_or_stop(|| watch::nobody_is_lost(trial, &has_ended)));
        let disturbs = [
            scope.spawn(|| {
                trial.run_or_stop(|| kills::kill_until(trial, kills, spares_daemon, until))
            }),
            scope.spawn(|| trial.run_or_stop(|| disk::fill_until(trial, fills, until))),
        ];
        let workers = workers
            .iter_mut()
            .map(|worker| scope.spawn(|| trial.run_or_stop(|| worker.work())));
        let visitors = visitors
            .iter_mut()
            .map(|visitor| scope.spawn(|| trial.run_or_stop(|| visitor.visit())));
        let works: Vec<_> = workers.chain(visitors).collect();
        let mut ended: Vec<_> = disturbs.into_iter().map(|one| one.join()).collect();
        // Without kills each client completes its step, and the rest must succeed.
        trial.stopping.store(true, Ordering::Relaxed);
        ended.extend(works.into_iter().map(|one| one.join()));
        has_ended.store(true, Ordering::Relaxed);
        ended
            .into_iter()
            .for_each(|ended| ended.expect("nobody panics"));
    });
    trial.result()
}
