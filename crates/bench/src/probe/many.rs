//! The cost of idle VMs: of one, and of a thousand.

use super::node::{boot_idle, counted, jiffy, output};
use super::until_idle;
use crate::plan::{BYTES, INSTRUCTIONS, Sample, WAKE_UPS};
use anyhow::{Context, Result, bail, ensure};
use jiffy_wire::api::{Forked, Vm};
use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

/// How long a node is watched. On the instruction clock idle time is skipped.
const WATCHED: Duration = Duration::from_secs(100);
/// Time for background work after a boot: golden snapshots, standbys.
const SETTLED: Duration = Duration::from_secs(30);

/// Instructions and wake-ups of an idle VM per second: the whole machine's instructions
/// with it less those without it, and the voluntary context switches of its VMM and the
/// daemon.
pub fn idle_vm(run: u32) -> Result<Sample> {
    let vm = format!("does-nothing-{run}");
    let found = boot_idle(&vm).and_then(|()| {
        std::thread::sleep(SETTLED);
        until_idle()?;
        let with = watch(&[pid_of(&vm)?, daemon()?])?;
        jiffy(&["rm", "--force", &vm])?;
        std::thread::sleep(SETTLED);
        until_idle()?;
        let without = watch(&[daemon()?])?;
        Ok(counted(BTreeMap::from([
            (
                INSTRUCTIONS.into(),
                with.busy_ns.saturating_sub(without.busy_ns) / WATCHED.as_secs(),
            ),
            // Per a thousand seconds: a counter is a whole number.
            (
                WAKE_UPS.into(),
                with.wake_ups.saturating_sub(without.wake_ups) * 1000 / WATCHED.as_secs(),
            ),
        ])))
    });
    // Usually it is gone.
    let _ = output(&["rm", "--force", &vm]);
    found
}

/// Forks an idle VM into `count`, each of which answers an exec; measures the machine's
/// memory for each of them; then removes all.
pub fn clones(run: u32, count: u32) -> Result<Sample> {
    let parent = format!("parent-of-many-{run}");
    let found = boot_idle(&parent).and_then(|()| {
        // Its clones need not read and start again what it has read and started.
        jiffy(&["exec", &parent, "--", "true"])?;
        std::thread::sleep(SETTLED);
        let before = available_bytes()?;
        let number = count.to_string();
        let forked = jiffy(&[
            "fork",
            &parent,
            "-n",
            &number,
            "--name",
            "one-of-many",
            "--format",
            "json",
        ])?;
        let forked: Forked = serde_json::from_slice(&forked)?;
        ensure!(
            forked.vms.len() == count as usize,
            "not as many as asked for"
        );
        for vm in &forked.vms {
            jiffy(&["exec", &vm.name, "--", "true"])?;
        }
        std::thread::sleep(SETTLED);
        let used = before.saturating_sub(available_bytes()?);
        Ok(counted(BTreeMap::from([(
            BYTES.into(),
            used / u64::from(count),
        )])))
    });
    let names = (1..=count).map(|number| format!("one-of-many-{number}"));
    for name in names {
        let _ = output(&["rm", "--force", &name]);
    }
    let _ = output(&["rm", "--force", &parent]);
    found
}

/// Activity of the machine during a measurement.
struct Watched {
    /// Time in which its CPU was not idle.
    busy_ns: u64,
    /// Voluntary context switches of the processes' threads.
    wake_ups: u64,
}

fn watch(processes: &[u32]) -> Result<Watched> {
    let (idle, sleeps) = (idle_ns()?, sleeps_of(processes)?);
    let begin = super::now_ns();
    std::thread::sleep(WATCHED);
    let (after, end) = (idle_ns()?, super::now_ns());
    Ok(Watched {
        busy_ns: (end - begin).saturating_sub(after - idle),
        wake_ups: sleeps_of(processes)?.saturating_sub(sleeps),
    })
}

/// How long the CPUs have been idle: to the nanosecond in /proc/timer_list, which
/// says it as `.idle_sleeptime` for each.
fn idle_ns() -> Result<u64> {
    let text = fs::read_to_string("/proc/timer_list").context("/proc/timer_list")?;
    let idle: Vec<u64> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix(".idle_sleeptime"))
        .filter_map(|rest| {
            rest.trim_start_matches([' ', ':'])
                .split(' ')
                .next()?
                .parse()
                .ok()
        })
        .collect();
    ensure!(
        !idle.is_empty(),
        "/proc/timer_list does not say how long CPUs were idle"
    );
    Ok(idle.iter().sum())
}

/// Voluntary context switches (proc(5), status) of all threads.
fn sleeps_of(processes: &[u32]) -> Result<u64> {
    let mut sum = 0;
    for pid in processes {
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let status = fs::read_to_string(task?.path().join("status"))?;
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            sum += line.context("a thread's switches")?.trim().parse::<u64>()?;
        }
    }
    Ok(sum)
}

fn pid_of(vm: &str) -> Result<u32> {
    let found: Vec<Vm> = serde_json::from_slice(&jiffy(&["inspect", vm])?)?;
    let pid = found.first().and_then(|vm| vm.pid);
    pid.context("the VM has no process")
}

fn daemon() -> Result<u32> {
    for process in fs::read_dir("/proc")? {
        let process = process?;
        let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        if name.trim_end() == "jiffyd" {
            return Ok(process.file_name().to_string_lossy().parse()?);
        }
    }
    bail!("jiffyd does not run");
}

fn available_bytes() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next());
    Ok(kib.context("MemAvailable")?.parse::<u64>()? * 1024)
}
