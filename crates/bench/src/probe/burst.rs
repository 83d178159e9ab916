//! Measures bursts of runs on a node with other work.

use super::at_once::to_first_byte_of_each;
use super::many::pid_of;
use super::node::{JIFFY, jiffy, output};
use super::{Running, command, cpu_ns, now_ns, wait_for, wait_until_idle};
use crate::plan::{Burst, Load, OTHERS, Sample, Start, WORK};
use anyhow::{Context, Result, anyhow, ensure};
use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

/// VMs whose programs never wait.
const PROGRAMS: u32 = 4;
/// Time for which other work runs before the burst.
const BEFORE: Duration = Duration::from_millis(50);
/// Copies of 1.35 MiB of text in the memory of the VM that is captured.
const COPIES: u32 = 30;
const SNAPSHOT: &str = "burst-snapshot";

/// Requests the runs of a burst at once; returns one sample of each. The first burst has one run
/// and no other work: it starts the daemon and leaves a golden snapshot.
pub fn run(burst: Burst, run: u32, once: &[String]) -> Result<Vec<Sample>> {
    let Burst { size, start, load } = match run {
        0 => Burst {
            size: 1,
            start: Start::Golden,
            load: Load::Idle,
        },
        _ => burst,
    };
    if run > 0 {
        wait_for(once)?;
    }
    let vms = numbered("burst", size);
    let others = match load {
        Load::Idle => Vec::new(),
        Load::Programs => numbered("working", PROGRAMS),
        Load::Compression => numbered("captured", 1),
    };
    let measured = prepare(load, &others, run).and_then(|()| {
        // Spares and standbys are prepared again.
        wait_until_idle()?;
        let argvs: Vec<Vec<String>> = vms.iter().map(|vm| argv(vm, start)).collect();
        measure(&argvs, load, &others)
    });
    // If this fails, there is nothing to remove.
    for vm in others.iter().chain(&vms) {
        let _ = output(&["rm", "--force", vm]);
    }
    let _ = output(&["snapshot", "rm", SNAPSHOT]);
    measured
}

fn numbered(name: &str, count: u32) -> Vec<String> {
    (1..=count)
        .map(|number| format!("{name}-{number}"))
        .collect()
}

/// A command whose VM stays until it is removed, so that no VM ends during the burst.
fn argv(vm: &str, start: Start) -> Vec<String> {
    let script = "echo J; exec sleep 1000";
    let mut argv = vec![JIFFY, "run", "--name", vm];
    if start == Start::Cold {
        argv.push("--cold");
    }
    argv.extend(["--", "sh", "-c", script]);
    argv.into_iter().map(String::from).collect()
}

/// Starts the VMs of the other work.
fn prepare(load: Load, others: &[String], run: u32) -> Result<()> {
    for vm in others {
        jiffy(&["run", "--detach", "--name", vm])?;
    }
    if load == Load::Compression {
        // Text that differs in each run, so that nothing of an earlier snapshot is used.
        let script = format!(
            "head -c 1m /dev/urandom | base64 > /tmp/text && echo {run} > /tmp/all && \
             for copy in $(seq {COPIES}); do cat /tmp/text; done >> /tmp/all"
        );
        for vm in others {
            jiffy(&["exec", vm, "--", "sh", "-c", &script])?;
        }
    }
    Ok(())
}

/// Begins the other work, requests the runs and ends the other work.
fn measure(argvs: &[Vec<String>], load: Load, others: &[String]) -> Result<Vec<Sample>> {
    let begun = now_ns();
    let mut working = others
        .iter()
        .map(|vm| {
            let words = match load {
                Load::Compression => vec![JIFFY, "snapshot", "create", vm, SNAPSHOT],
                _ => vec![JIFFY, "exec", vm, "--", "sh", "-c", "while :; do :; done"],
            };
            let words: Vec<String> = words.into_iter().map(String::from).collect();
            let mut command = command(&words)?;
            // The probe's answer is on stdout.
            command.stdout(Stdio::null());
            Ok(Running(command.spawn().context(JIFFY)?))
        })
        .collect::<Result<Vec<Running>>>()?;
    let pids = others.iter().map(|vm| pid_of(vm));
    let pids = pids.collect::<Result<Vec<u32>>>()?;
    if load != Load::Idle {
        std::thread::sleep(BEFORE);
    }
    let (before, start) = (cpu_of(&pids)?, now_ns());
    let (answers, _) = to_first_byte_of_each(argvs);
    let (after, end) = (cpu_of(&pids)?, now_ns());
    let mut counters = BTreeMap::new();
    if load == Load::Programs {
        for other in &mut working {
            let status = other.0.try_wait()?;
            ensure!(
                status.is_none(),
                "a program that never waits ended: {status:?}"
            );
        }
        counters.insert(OTHERS.into(), (after - before) * 1000 / (end - start));
    }
    if load == Load::Compression {
        for other in &mut working {
            let status = other.0.wait()?;
            ensure!(status.success(), "the capture failed: {status}");
        }
        counters.insert(WORK.into(), now_ns() - begun);
    }
    let sample = |answer: &Result<(u64, Running)>| {
        let (nanoseconds, _) = answer.as_ref().map_err(|error| anyhow!("{error:#}"))?;
        Ok(Sample {
            nanoseconds: *nanoseconds,
            counters: counters.clone(),
            ..Sample::default()
        })
    };
    answers.iter().map(sample).collect()
}

fn cpu_of(pids: &[u32]) -> Result<u64> {
    pids.iter().map(|pid| cpu_ns(*pid)).sum()
}
