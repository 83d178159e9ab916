//! Runs many commands at once, each to its first byte of output.

use super::{Running, command, fill_in, kvm_counters, node, now_ns};
use crate::plan::{BYTES, Sample};
use anyhow::{Context, Result, anyhow, bail};
use jiffy_wire::api::Vm;
use std::io::Read;
use std::process::Stdio;
use std::sync::Barrier;

/// Starts `count` commands at once, numbered from `first`; `{run}` in their arguments is replaced
/// by the number. Returns one sample each. When all have answered, measures the memory of their
/// VMs; then runs `after` for each.
///
/// # Errors
///
/// If a command can't be started or does not answer, or one of `after` can't be started.
pub fn run(count: u32, first: u32, argv: &[String], after: &[String]) -> Result<Vec<Sample>> {
    let numbers = first..first + count;
    let argvs: Vec<Vec<String>> = numbers.clone().map(|it| fill_in(argv, it)).collect();
    let (answers, busy) = to_first_byte_of_each(&argvs);
    let samples = numbers
        .clone()
        .zip(&answers)
        .map(|(number, answer)| {
            let (nanoseconds, _) = answer.as_ref().map_err(|error| anyhow!("{error:#}"))?;
            let mut sample = Sample {
                nanoseconds: *nanoseconds,
                ..Sample::default()
            };
            sample
                .counters
                .insert("cpu_ns".into(), busy / u64::from(count));
            add_resources(&name(argv, number)?, &mut sample)?;
            Ok(sample)
        })
        .collect();
    for number in numbers {
        command(&fill_in(after, number))?.output()?;
    }
    samples
}

/// Spawns commands at once; returns each with the time to its first byte of output, and the time in
/// which the processors were busy, nanoseconds.
pub(super) fn to_first_byte_of_each(argvs: &[Vec<String>]) -> (Vec<Result<(u64, Running)>>, u64) {
    let barrier = Barrier::new(argvs.len() + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = argvs
            .iter()
            .map(|argv| {
                scope.spawn(|| {
                    barrier.wait();
                    to_first_byte(argv)
                })
            })
            .collect();
        let before = busy_ns();
        barrier.wait();
        let answers = threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
            .collect();
        (answers, busy_ns().saturating_sub(before))
    })
}

/// The VM's name: the word after `--name`.
fn name(argv: &[String], number: u32) -> Result<String> {
    let argv = fill_in(argv, number);
    let at = argv.iter().position(|word| word == "--name");
    let name = at.and_then(|at| argv.get(at + 1));
    name.cloned().context("the command names no VM")
}

/// Spawns a command; returns it and the time to its first byte of output.
pub(super) fn to_first_byte(argv: &[String]) -> Result<(u64, Running)> {
    let mut command = command(argv)?;
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = now_ns();
    let mut child = Running(command.spawn().with_context(|| argv.join(" "))?);
    let stdout = child.0.stdout.as_mut().context("stdout is piped")?;
    if stdout.read(&mut [0])? == 0 {
        let mut message = String::new();
        if let Some(stderr) = &mut child.0.stderr {
            stderr.take(4096).read_to_string(&mut message)?;
        }
        bail!("{}: no answer: {}", argv.join(" "), message.trim());
    }
    Ok((now_ns() - start, child))
}

/// Adds the resources that a running VM has used so far to a sample.
fn add_resources(name: &str, sample: &mut Sample) -> Result<()> {
    let inspect = ["/bin/jiffy", "inspect", name].map(String::from);
    let output = command(&inspect)?.output()?;
    let vms: Vec<Vm> = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let pid = vms.first().and_then(|vm| vm.pid);
    let pid = pid.with_context(|| format!("{name} has ended"))?;
    sample.counters.extend(kvm_counters(pid));
    sample.counters.extend(node::memory_of(pid)?);
    let unique = sample.counters.remove(BYTES).unwrap_or(0);
    sample.counters.insert("unique".into(), unique);
    let io = std::fs::read_to_string(format!("/proc/{pid}/io"))?;
    let read = io.lines().find_map(|line| line.strip_prefix("rchar: "));
    let read = read.and_then(|text| text.parse().ok()).unwrap_or(0);
    sample.counters.insert("bytes_read".into(), read);
    Ok(())
}

/// Time in which the machine's processors were not idle, nanoseconds (proc(5), stat).
fn busy_ns() -> u64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    sum_busy(&stat) * 10_000_000
}

/// Ticks of 10 ms outside idle and iowait. The time of guests is included in that of their VMMs.
fn sum_busy(stat: &str) -> u64 {
    let line = stat.lines().next().unwrap_or_default();
    let ticks = line.split_whitespace().skip(1).take(8);
    ticks
        .enumerate()
        .filter(|(index, _)| !matches!(index, 3 | 4))
        .filter_map(|(_, ticks)| ticks.parse::<u64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_not_busy() {
        let stat = "cpu  10 1 20 1000 500 3 4 0 7 0\ncpu0 1 1 1 1 1 1 1 1\n";
        assert_eq!(sum_busy(stat), 38);
    }

    #[test]
    fn a_command_without_output_fails_with_its_stderr() {
        let argv = ["/bin/sh", "-c", "echo no room >&2"].map(String::from);
        let error = to_first_byte(&argv).unwrap_err().to_string();
        assert!(error.contains("no room"), "{error}");
        let argv = ["/bin/sh", "-c", "echo J; exec sleep 100"].map(String::from);
        assert!(to_first_byte(&argv).unwrap().0 > 0);
    }
}
