//! Measures the cost of one idle VM and of a thousand.

use super::node::{boot_idle, counted, jiffy, number_in, output};
use super::wait_until_idle;
use crate::plan::{BYTES, DAEMON_BYTES, INSTRUCTIONS, LIST, Sample, WAKE_UPS};
use anyhow::{Context, Result, ensure};
use jiffy_wire::api::{Forked, Vm};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Length of a measurement. On the instruction clock idle time is skipped.
const MEASURED_TIME: Duration = Duration::from_secs(100);
/// Time for background work after a boot: golden snapshots, standbys.
const SETTLE_TIME: Duration = Duration::from_secs(30);

/// Most monitors that the node keeps started ahead by its default options: one spare, two standbys.
const STARTED_AHEAD: usize = 3;

/// Instructions per second, and wake-ups per thousand seconds, of an idle VM: the whole machine's
/// instructions with it less those without it, and the voluntary context switches of its VMM and
/// the daemon.
///
/// # Errors
///
/// If the VM can't be started or removed, or the machine does not become idle within 60 s.
pub fn idle_vm(run: u32) -> Result<Sample> {
    let vm = format!("does-nothing-{run}");
    let found = boot_idle(&vm).and_then(|()| {
        std::thread::sleep(SETTLE_TIME);
        wait_until_idle()?;
        let with = watch(&[pid_of(&vm)?, daemon()?])?;
        jiffy(&["rm", "--force", &vm])?;
        std::thread::sleep(SETTLE_TIME);
        wait_until_idle()?;
        let without = watch(&[daemon()?])?;
        Ok(counted(BTreeMap::from([
            (
                INSTRUCTIONS.into(),
                with.busy_ns.saturating_sub(without.busy_ns) / MEASURED_TIME.as_secs(),
            ),
            // Per a thousand seconds: a counter is a whole number.
            (
                WAKE_UPS.into(),
                with.wake_ups.saturating_sub(without.wake_ups) * 1000 / MEASURED_TIME.as_secs(),
            ),
        ])))
    });
    // The VM is removed already, unless something failed.
    let _ = output(&["rm", "--force", &vm]);
    found
}

/// Forks an idle VM into `count` clones and runs an exec in each; measures the machine's memory per
/// clone and the daemon's memory, in bytes; then removes all.
///
/// # Errors
///
/// If `jiffy` fails, makes another number of clones, or leaves anything of them.
pub fn clones(run: u32, count: u32) -> Result<Sample> {
    let parent = format!("parent-of-many-{run}");
    let found = boot_idle(&parent).and_then(|()| {
        // The parent reads and starts the program first, so that its clones need not.
        jiffy(&["exec", &parent, "--", "true"])?;
        std::thread::sleep(SETTLE_TIME);
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
            "the number of clones is not the requested one"
        );
        for vm in &forked.vms {
            jiffy(&["exec", &vm.name, "--", "true"])?;
        }
        std::thread::sleep(SETTLE_TIME);
        let used = before.saturating_sub(available_bytes()?);
        let daemon = number_of(Path::new(&format!("/proc/{}/status", daemon()?)), "VmRSS:")?;
        Ok(counted(BTreeMap::from([
            (BYTES.into(), used / u64::from(count)),
            (DAEMON_BYTES.into(), daemon * 1024),
        ])))
    });
    let names = (1..=count).map(|number| format!("one-of-many-{number}"));
    for name in names {
        let _ = output(&["rm", "--force", &name]);
    }
    let _ = output(&["rm", "--force", &parent]);
    let found = found?;
    check_nothing_left()?;
    Ok(found)
}

/// Creates `count` stopped VMs, measures a list of them and removes all.
///
/// # Errors
///
/// If `jiffy` fails or does not list all, or the machine does not become idle within 60 s.
pub fn list(run: u32, count: u32) -> Result<Sample> {
    let name = |number| format!("of-many-{run}-{number}");
    let found = (1..=count)
        .try_for_each(|number| jiffy(&["create", "--name", &name(number)]).map(drop))
        .and_then(|()| {
            // The first one is a warm-up, as other cases have.
            jiffy(&["ps", "--all"])?;
            std::thread::sleep(SETTLE_TIME);
            wait_until_idle()?;
            let list = Watch::begin(&[])?;
            let listed = jiffy(&["ps", "--all"])?;
            let list = list.end()?;
            let lines = listed.split(|byte| *byte == b'\n').count();
            ensure!(lines > count as usize, "not all of them are listed");
            Ok(counted(BTreeMap::from([(LIST.into(), list.busy_ns)])))
        });
    for number in 1..=count {
        let _ = output(&["rm", &name(number)]);
    }
    found
}

/// Checks that no VM is left, and no VMM except those that were started ahead.
fn check_nothing_left() -> Result<()> {
    std::thread::sleep(SETTLE_TIME);
    let all: Vec<Vm> = serde_json::from_slice(&jiffy(&["ps", "--all", "--format", "json"])?)?;
    ensure!(all.is_empty(), "{} VMs are left", all.len());
    let monitors = processes("jiffy-vmm")?.len();
    ensure!(monitors <= STARTED_AHEAD, "{monitors} monitors are left");
    Ok(())
}

/// Activity of the machine during a measurement.
pub(super) struct Activity {
    /// Time in which its CPU was not idle.
    pub(super) busy_ns: u64,
    /// Voluntary context switches of the processes' threads.
    wake_ups: u64,
}

/// A measurement that has begun.
pub(super) struct Watch<'a> {
    processes: &'a [u32],
    idle_ns: u64,
    sleeps: u64,
    begin_ns: u64,
}

impl Watch<'_> {
    pub(super) fn begin(processes: &[u32]) -> Result<Watch<'_>> {
        let (idle_ns, sleeps) = (idle_ns()?, voluntary_switches(processes)?);
        Ok(Watch {
            processes,
            idle_ns,
            sleeps,
            begin_ns: super::now_ns(),
        })
    }

    pub(super) fn end(self) -> Result<Activity> {
        let (idle, end) = (idle_ns()?, super::now_ns());
        Ok(Activity {
            busy_ns: (end - self.begin_ns).saturating_sub(idle - self.idle_ns),
            wake_ups: voluntary_switches(self.processes)?.saturating_sub(self.sleeps),
        })
    }
}

fn watch(processes: &[u32]) -> Result<Activity> {
    let watch = Watch::begin(processes)?;
    std::thread::sleep(MEASURED_TIME);
    watch.end()
}

/// Idle time of the CPUs: the sum of `.idle_sleeptime` in /proc/timer_list, which has nanoseconds.
pub(super) fn idle_ns() -> Result<u64> {
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
        "/proc/timer_list has no idle times of CPUs"
    );
    Ok(idle.iter().sum())
}

/// Voluntary context switches (proc(5), status) of all threads of these processes.
fn voluntary_switches(processes: &[u32]) -> Result<u64> {
    let mut sum = 0;
    for pid in processes {
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            sum += number_of(&task?.path().join("status"), "voluntary_ctxt_switches:")?;
        }
    }
    Ok(sum)
}

/// What the node says about a VM.
pub(super) fn vm_of(vm: &str) -> Result<Vm> {
    let found: Vec<Vm> = serde_json::from_slice(&jiffy(&["inspect", vm])?)?;
    let first = found.into_iter().next();
    first.context("the VM is not listed")
}

pub(super) fn pid_of(vm: &str) -> Result<u32> {
    vm_of(vm)?.pid.context("the VM has no process")
}

pub(super) fn daemon() -> Result<u32> {
    let found = processes("jiffyd")?;
    found.first().copied().context("jiffyd does not run")
}

/// Processes with this name.
fn processes(name: &str) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    for process in fs::read_dir("/proc")? {
        let process = process?;
        let comm = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        if comm.trim_end() == name {
            found.push(process.file_name().to_string_lossy().parse()?);
        }
    }
    Ok(found)
}

fn available_bytes() -> Result<u64> {
    Ok(number_of(Path::new("/proc/meminfo"), "MemAvailable:")? * 1024)
}

/// The number of a line that begins with `name`, as in proc(5)'s status and meminfo.
pub(super) fn number_of(file: &Path, name: &str) -> Result<u64> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    number_in(&text, name).with_context(|| format!("{name} is not in {}", file.display()))
}
