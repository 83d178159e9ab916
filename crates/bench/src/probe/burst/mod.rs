//! Measures bursts of runs on a node with other work.

mod other_work;

use super::at_once::to_first_byte_of_each;
use super::many::{idle_ns, pid_of};
use super::node::{JIFFY, jiffy, output};
use super::{Running, cpu_ns, image, now_ns, wait_for, wait_until_idle};
use crate::image::{HOST, SMALL_LAZY};
use crate::plan::{
    BURST_WORK, Burst, BurstStart, FEWER_RUNS, LEAST_SHARE, OTHERS, OTHERS_IN_WINDOW, Sample,
    Scheduler, WORK,
};
use anyhow::{Context, Result, anyhow, ensure};
use other_work::{OtherWork, system_image};
use std::collections::BTreeMap;
use std::time::Duration;

/// Length of the window, and what each run adds, and each whose image is pulled: longer than a burst
/// takes beside many programs.
const WINDOW: Duration = Duration::from_millis(500);
const WINDOW_OF_RUN: Duration = Duration::from_millis(60);
const WINDOW_OF_PULL: Duration = Duration::from_millis(250);
/// Runs of the usual size for which the machine has room at once.
const ROOM: u32 = 50;
/// Of two owners one requests every fifth run.
const EVERY: usize = 5;
/// RAM of the VMs of two owners: the machine has room for some ten.
const LARGE: &str = "--memory=640M";

/// Requests the runs of a burst at once; returns one sample of each. Run 0 starts the daemon and
/// leaves a golden snapshot.
///
/// # Errors
///
/// If a run of the burst fails, the load can't be made, the machine does not become idle within 60
/// s, or the scheduler is not the wanted one.
pub fn run(burst: Burst, run: u32, once: &[String]) -> Result<Vec<Sample>> {
    let Burst { size, start, .. } = burst;
    if run == 0 {
        let memory = burst.owners.then_some(LARGE);
        jiffy(&[&["run", "--rm"], memory.as_slice(), &["--", "true"]].concat())?;
        return Ok(Vec::new());
    }
    wait_for(once)?;
    let mut others = OtherWork::new(burst.load, run);
    let mut images = Vec::new();
    if start == BurstStart::Pulled {
        images.push(pulled_image());
    }
    if burst.load.needs_registry() {
        images.push(system_image());
    }
    let registry = match images.is_empty() {
        true => None,
        false => Some(image::registry()?),
    };
    if let Some(registry) = &registry {
        set_nice(registry, if start == BurstStart::Pulled { -20 } else { 19 })?;
    }
    for image in &images {
        jiffy(&["image", "pull", image])?;
    }
    let vms = numbered("burst", size);
    let measured = others.prepare().and_then(|()| {
        // Spares and standbys are prepared again.
        wait_until_idle()?;
        let argvs = (1..).zip(&vms).map(|(number, vm)| argv(burst, number, vm));
        let argvs: Vec<Vec<String>> = argvs.collect();
        check_scheduler(burst.scheduler)?;
        let mut samples = measure(&argvs, burst, &mut others)?;
        if burst.owners {
            let share = fewer_runs(&samples);
            samples[0].counters.insert(FEWER_RUNS.into(), share);
        }
        // A policy that fails ends without another sign.
        check_scheduler(burst.scheduler)?;
        Ok(samples)
    });
    // If this fails, there is nothing to remove.
    for vm in &vms {
        let _ = output(&["rm", "--force", vm]);
    }
    others.remove();
    if start == BurstStart::Pulled {
        jiffy(&["image", "rm", &pulled_image()])?;
    }
    measured
}

/// Gives the registry this nice value, because it stands for another host. If the burst waits for it, it
/// must not have a small share of the CPU; if only other work does, it must not take the burst's.
fn set_nice(registry: &Running, nice: i32) -> Result<()> {
    let threads = format!("/proc/{}/task", registry.0.id());
    for thread in std::fs::read_dir(&threads).context(threads)? {
        let id = thread?.file_name().to_string_lossy().parse()?;
        rustix::process::setpriority_process(rustix::process::Pid::from_raw(id), nice)?;
    }
    Ok(())
}

fn check_scheduler(wanted: Scheduler) -> Result<()> {
    let state = std::fs::read_to_string("/sys/kernel/sched_ext/state").unwrap_or_default();
    let expected = match wanted {
        Scheduler::Usual => "",
        Scheduler::Eevdf => "disabled",
        Scheduler::SchedExt => "enabled",
    };
    ensure!(state.trim() == expected, "sched_ext is {state:?}");
    Ok(())
}

fn numbered(name: &str, count: u32) -> Vec<String> {
    (1..=count)
        .map(|number| format!("{name}-{number}"))
        .collect()
}

fn pulled_image() -> String {
    format!("{HOST}/{SMALL_LAZY}")
}

/// A command whose VM stays until it is removed, so that no VM ends during the burst, unless the
/// machine has no room for all.
fn argv(burst: Burst, number: usize, vm: &str) -> Vec<String> {
    let mut argv = vec![JIFFY, "run", "--name", vm];
    if burst.owners {
        argv.extend([
            LARGE,
            "--owner",
            if is_fewer(number) { "fewer" } else { "more" },
        ]);
    }
    if burst.start != BurstStart::Golden {
        argv.push("--cold");
    }
    let pulled = pulled_image();
    if burst.start == BurstStart::Pulled {
        argv.push(&pulled);
    }
    let script = match burst.owners || burst.size > ROOM {
        true => "echo J",
        false => "echo J; exec /bin/busybox sleep 1000",
    };
    argv.extend(["--", "sh", "-c", script]);
    argv.into_iter().map(String::from).collect()
}

/// Whether the run with this number, from 1, is of the owner who requests fewer.
fn is_fewer(number: usize) -> bool {
    number.is_multiple_of(EVERY)
}

/// See [`FEWER_RUNS`].
fn fewer_runs(samples: &[Sample]) -> u64 {
    let last = |fewer: bool| {
        let numbered = (1..).zip(samples);
        let theirs = numbered.filter(|(number, _)| is_fewer(*number) == fewer);
        theirs.map(|(_, sample)| sample.nanoseconds).max()
    };
    last(true).unwrap_or(0) * 1000 / last(false).unwrap_or(1).max(1)
}

/// Begins the other work, requests the runs and ends the other work.
fn measure(argvs: &[Vec<String>], burst: Burst, others: &mut OtherWork) -> Result<Vec<Sample>> {
    // Before some of these VMs are removed.
    let pids = others.vms.iter().map(|vm| pid_of(vm));
    let pids = pids.collect::<Result<Vec<u32>>>()?;
    others.begin()?;
    let mut counters = BTreeMap::new();
    let answers = if others.is_endless() {
        let before = Moment::now(&pids)?;
        let (answers, _) = to_first_byte_of_each(argvs);
        let after = Moment::now(&pids)?;
        let of_run = match burst.start {
            BurstStart::Pulled => WINDOW_OF_PULL,
            _ => WINDOW_OF_RUN,
        };
        let window = WINDOW + of_run * burst.size;
        let rest = window.checked_sub(Duration::from_nanos(now_ns() - before.time));
        std::thread::sleep(rest.context("the burst took longer than its window")?);
        let end = Moment::now(&pids)?;
        others.check_goes_on()?;
        counters.extend(before.counters(&after, &end));
        answers
    } else {
        let (answers, _) = to_first_byte_of_each(argvs);
        counters.insert(WORK.into(), others.wait()?);
        answers
    };
    let mut counters = Some(counters);
    let mut sample = |answer: &Result<(u64, Running)>| {
        let (nanoseconds, _) = answer.as_ref().map_err(|error| anyhow!("{error:#}"))?;
        Ok(Sample {
            nanoseconds: *nanoseconds,
            // Those of the whole burst are in its first sample.
            counters: counters.take().unwrap_or_default(),
            ..Sample::default()
        })
    };
    answers.iter().map(&mut sample).collect()
}

/// What the VMs of the other work, and the machine, have used until then.
struct Moment {
    time: u64,
    idle: u64,
    others: Vec<u64>,
}

impl Moment {
    fn now(pids: &[u32]) -> Result<Moment> {
        let others = pids.iter().map(|pid| cpu_ns(*pid));
        Ok(Moment {
            others: others.collect::<Result<_>>()?,
            idle: idle_ns()?,
            time: now_ns(),
        })
    }

    /// Counters of a burst that began at this moment, was answered at `after`, and whose window
    /// ended at `end`.
    fn counters(&self, after: &Moment, end: &Moment) -> BTreeMap<String, u64> {
        let of = |later: &Moment| -> Vec<u64> {
            let each = later.others.iter().zip(&self.others);
            each.map(|(later, earlier)| later.saturating_sub(*earlier))
                .collect()
        };
        let per_mille = |part: u64, whole: u64| part * 1000 / whole.max(1);
        let (meanwhile, all) = (of(after), of(end));
        let processors = std::thread::available_parallelism().map_or(1, |it| it.get() as u64);
        let (others, window) = (all.iter().sum::<u64>(), (end.time - self.time) * processors);
        let busy = window.saturating_sub(end.idle - self.idle);
        let mut counters = BTreeMap::from([(BURST_WORK.to_owned(), busy.saturating_sub(others))]);
        if let (Some(least), Some(most)) = (all.iter().min(), all.iter().max()) {
            let time = (after.time - self.time) * processors;
            let share = per_mille(meanwhile.iter().sum(), time);
            counters.insert(OTHERS.into(), share);
            counters.insert(OTHERS_IN_WINDOW.into(), per_mille(others, window));
            counters.insert(LEAST_SHARE.into(), per_mille(*least, *most));
        }
        counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_answers_to_two_owners_are_compared() {
        let samples = |times: &[u64]| -> Vec<Sample> {
            let sample = |nanoseconds: &u64| Sample {
                nanoseconds: *nanoseconds,
                ..Sample::default()
            };
            times.iter().map(sample).collect()
        };
        // Every fifth is of the owner who requests fewer.
        assert_eq!(fewer_runs(&samples(&[10, 80, 20, 30, 40])), 500);
        assert_eq!(fewer_runs(&samples(&[10, 20, 20, 30, 40, 10])), 1333);
    }
}
