//! Runs a case inside the machine.
//!
//! While it measures, nothing here may wait for a timer or a disk: the marker is read from a pipe,
//! and counters are read afterwards.

mod at_once;
mod burst;
mod data;
mod disk;
mod firecracker;
mod folder;
mod image;
mod lazy;
mod many;
mod marker_time;
mod marks;
mod network;
mod node;
mod proxy;
mod restore;
mod sleepers;

use crate::plan::{Case, Kind, MARKER, Outcome, Sample, VSOCK};
use crate::running::Running;
use anyhow::{Context, Result, bail};
use jiffy_sys::durable;
use jiffy_wire::timeline::Timeline;
use jiffy_wire::vmm::VmmEvent;
use lazy::Pager;
use restore::Stage;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs per capture. Restores of one capture differ little, those of different captures more.
const RUNS_PER_CAPTURE: u32 = 5;

/// Runs a case; a failure is in the outcome.
pub fn run(case: &Case) -> Outcome {
    if let Err(error) = data::mount() {
        return Outcome::failed(case, format!("the node's data folder: {error:#}"));
    }
    let mut samples = Vec::new();
    let mut left = case.runs;
    while left > 0 {
        let mut state = CaseState::default();
        let counted = match case.kind.uses_one_capture() {
            true => left.min(RUNS_PER_CAPTURE),
            false => left,
        };
        left -= counted;
        for run in 0..case.warm_up + counted {
            match run_once(&case.kind, run, &mut state) {
                Ok(_) if run < case.warm_up => {}
                Ok(more) => samples.extend(more),
                Err(error) => return Outcome::failed(case, format!("run {run}: {error:#}")),
            }
        }
    }
    Outcome {
        name: case.name.clone(),
        monitor: case.monitor.clone(),
        samples,
        failure: None,
    }
}

/// State shared by the runs of a case.
#[derive(Default)]
struct CaseState {
    stage: Option<Stage>,
    pager: Option<Pager>,
    network: network::State,
}

fn run_once(kind: &Kind, run: u32, state: &mut CaseState) -> Result<Vec<Sample>> {
    let CaseState {
        stage,
        pager,
        network,
    } = state;
    let sample = match kind {
        Kind::Restore { config, spare } => restore::restore(Stage::of(stage, config)?, *spare),
        Kind::Lazy { config, how, spare } => {
            lazy::restore(Stage::of(stage, config)?, pager, *how, *spare)
        }
        Kind::FirecrackerRestore {
            program,
            kernel,
            initramfs,
            command_line,
            ram_mib,
        } => {
            if run == 0 {
                firecracker::prepare(&firecracker::Guest {
                    program,
                    kernel,
                    initramfs,
                    command_line,
                    ram_mib: *ram_mib,
                })?;
            }
            firecracker::restore(program)
        }
        Kind::Fork { config } => restore::fork(Stage::of(stage, config)?),
        Kind::Pause { config } => restore::pause(config),
        Kind::SnapshotBytes => node::snapshot_bytes(run),
        Kind::CloneMemory => node::clone_memory(run),
        Kind::Idle => many::idle_vm(run),
        Kind::Clones { count } => many::clones(run, *count),
        Kind::List { count } => many::list(run, *count),
        Kind::Disk { argv, warm } => disk::read(argv, *warm),
        Kind::Folder { argv, server, work } => folder::measure(run, argv, server, *work),
        Kind::CreateRoot { bytes } => disk::create_root(*bytes),
        Kind::CloneRoot { bytes } => disk::clone_root(run, *bytes),
        Kind::Network(what) => network::run(what, run, network),
        Kind::Proxy(what) => proxy::run(*what, run),
        Kind::Sleepers { count } => sleepers::measure(*count),
        Kind::ToMarker { argv, ram_mib } => to_marker(&fill_in(argv, run), *ram_mib),
        Kind::AtOnce {
            count,
            argv,
            once,
            after,
        } => {
            if run > 0 {
                wait_for(once)?;
            }
            return at_once::run(*count, run * count, argv, after);
        }
        Kind::Burst { burst, once } => return burst::run(*burst, run, once),
        Kind::FirstAnswer { reference, bytes } => image::first_answer(run, reference, *bytes),
        Kind::ToExit {
            pull,
            once,
            before,
            argv,
            timeline,
            after,
        } => {
            let reference = pull.as_ref().filter(|_| run == 0);
            let registry = reference.map(|reference| image::pull(reference));
            let registry = registry.transpose()?;
            if let Some(once) = once.as_ref().filter(|_| run > 0) {
                wait_for(&fill_in(once, run))?;
                wait_until_idle()?;
            }
            if let Some(argv) = before {
                to_exit(&fill_in(argv, run))?;
                wait_until_idle()?;
            }
            let mut sample = to_exit(&fill_in(argv, run))?;
            if let Some(argv) = timeline {
                sample.spans = timeline_spans(&fill_in(argv, run))?;
            }
            if let Some(argv) = after {
                command(&fill_in(argv, run))?.output()?;
            }
            if let (Some(_needed), Some(once)) = (registry, once) {
                // Waits until the chunks that a start reads have been fetched.
                wait_for(&fill_in(once, run))?;
            }
            Ok(sample)
        }
    };
    Ok(vec![sample?])
}

fn fill_in(argv: &[String], run: u32) -> Vec<String> {
    argv.iter()
        .map(|word| word.replace("{run}", &run.to_string()))
        .collect()
}

fn command(argv: &[String]) -> Result<Command> {
    let (program, arguments) = argv.split_first().context("an empty command")?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    Ok(command)
}

fn now_ns() -> u64 {
    jiffy_sys::clock::monotonic_ns()
}

/// Removes the socket of a killed VM, because the next VM needs the path.
fn remove_socket(path: &str) -> Result<()> {
    durable::remove(Path::new(path)).context(path.to_owned())
}

fn to_marker(argv: &[String], ram_mib: u64) -> Result<Sample> {
    remove_socket(VSOCK)?;
    // Without close-on-exec, so that the child inherits it under the same number.
    let (events, events_end) = rustix::pipe::pipe()?;
    let number = std::os::fd::AsRawFd::as_raw_fd(&events_end).to_string();
    let argv: Vec<String> = argv
        .iter()
        .map(|word| word.replace("{events}", &number))
        .collect();
    let mut command = command(&argv)?;
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = now_ns();
    let mut child = Running(command.spawn().with_context(|| argv.join(" "))?);
    drop(events_end);
    let mut stdout = child.0.stdout.take().context("stdout is piped")?;
    let mut bytes = [0; 4096];
    loop {
        let got = stdout.read(&mut bytes)?;
        if got == 0 {
            let mut message = String::new();
            if let Some(stderr) = &mut child.0.stderr {
                stderr.take(4096).read_to_string(&mut message)?;
            }
            bail!("it ended before the marker: {}", message.trim());
        }
        if bytes[..got].contains(&MARKER) {
            break;
        }
    }
    let end = now_ns();
    let pid = child.0.id();
    let mut counters = kvm_counters(pid);
    counters.insert("cpu_ns".into(), cpu_ns(pid)?);
    counters.insert("rss_outside_ram".into(), rss_outside_ram(pid, ram_mib)?);
    drop(child);
    Ok(Sample {
        nanoseconds: end - start,
        counters,
        spans: event_spans(std::fs::File::from(events), start),
    })
}

/// Reads the spans that a VMM has reported, up to the end of `events`.
fn event_spans(events: impl Read, start: u64) -> BTreeMap<String, u64> {
    let mut spans = BTreeMap::new();
    for line in BufReader::new(events).lines().map_while(Result::ok) {
        if let Ok(VmmEvent::Span {
            name,
            start_ns,
            end_ns,
            ..
        }) = serde_json::from_str(&line)
        {
            let length = match end_ns.saturating_sub(start_ns) {
                0 => start_ns.saturating_sub(start),
                length => length,
            };
            spans.insert(name, length);
        }
    }
    spans
}

/// Runs a command repeatedly until it succeeds, at most 60 s.
fn wait_for(argv: &[String]) -> Result<()> {
    let until = now_ns() + 60_000_000_000;
    while !command(argv)?.stdout(Stdio::null()).status()?.success() {
        if now_ns() > until {
            bail!("{} does not succeed", argv.join(" "));
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    Ok(())
}

/// Waits until the machine is idle, that is until the node has prepared the next run.
fn wait_until_idle() -> Result<()> {
    let until = now_ns() + 60_000_000_000;
    loop {
        let before = cpu_ticks()?;
        std::thread::sleep(std::time::Duration::from_millis(200));
        let after = cpu_ticks()?;
        let (idle, all) = (after.0 - before.0, after.1 - before.1);
        if idle * 20 >= all * 19 {
            return Ok(());
        }
        if now_ns() > until {
            bail!("the machine does not become idle");
        }
    }
}

/// Idle ticks and all ticks of the machine (proc(5), stat).
fn cpu_ticks() -> Result<(u64, u64)> {
    let text = fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().context("/proc/stat")?;
    let ticks: Vec<u64> = line
        .split_whitespace()
        .skip(1)
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let idle = ticks.get(3).context("/proc/stat")?;
    // Guest ticks are left out, because user ticks include them.
    Ok((*idle, ticks.iter().take(8).sum()))
}

fn to_exit(argv: &[String]) -> Result<Sample> {
    let mut command = command(argv)?;
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let start = now_ns();
    let mut child = command.spawn().with_context(|| argv.join(" "))?;
    let status = child.wait()?;
    let end = now_ns();
    if !status.success() {
        let mut message = String::new();
        if let Some(stderr) = child.stderr {
            stderr.take(4096).read_to_string(&mut message)?;
        }
        bail!("{}: {status}: {}", argv.join(" "), message.trim());
    }
    Ok(Sample {
        nanoseconds: end - start,
        ..Sample::default()
    })
}

fn timeline_spans(argv: &[String]) -> Result<BTreeMap<String, u64>> {
    let output = command(argv)?.output()?;
    let timeline: Timeline = serde_json::from_slice(&output.stdout).with_context(|| {
        format!(
            "{}: {}",
            argv.join(" "),
            String::from_utf8_lossy(&output.stderr)
        )
    })?;
    let first = timeline.spans.iter().map(|span| span.start_ns).min();
    Ok(timeline
        .spans
        .iter()
        .map(|span| {
            let length = match span.duration_ns() {
                0 => span.start_ns - first.unwrap_or_default(),
                length => length,
            };
            (span.name.clone(), length)
        })
        .collect())
}

/// KVM's counters of that process's VM, from debugfs, for every VMM. Empty if debugfs is not
/// mounted.
fn kvm_counters(pid: u32) -> BTreeMap<String, u64> {
    let mut counters = BTreeMap::new();
    let Ok(folders) = fs::read_dir("/sys/kernel/debug/kvm") else {
        return counters;
    };
    for folder in folders.flatten() {
        let name = folder.file_name();
        if !name.to_string_lossy().starts_with(&format!("{pid}-")) {
            continue;
        }
        for file in fs::read_dir(folder.path()).into_iter().flatten().flatten() {
            let value = fs::read_to_string(file.path())
                .ok()
                .and_then(|text| text.trim().parse().ok());
            if let Some(value) = value {
                counters.insert(file.file_name().to_string_lossy().into_owned(), value);
            }
        }
    }
    counters
}

/// What counters have counted since they were `before`.
fn since(
    mut counters: BTreeMap<String, u64>,
    before: &BTreeMap<String, u64>,
) -> BTreeMap<String, u64> {
    for (name, value) in &mut counters {
        *value = value.saturating_sub(before.get(name).copied().unwrap_or(0));
    }
    counters
}

/// CPU time of all threads, nanoseconds (proc(5), schedstat).
fn cpu_ns(pid: u32) -> Result<u64> {
    let tasks = format!("/proc/{pid}/task");
    let mut total = 0;
    for task in fs::read_dir(&tasks).context(tasks)? {
        let text = match fs::read_to_string(task?.path().join("schedstat")) {
            // The thread has ended since it was listed.
            Err(error) if has_ended(&error) => continue,
            text => text?,
        };
        let first = text.split_whitespace().next().context("schedstat")?;
        total += first.parse::<u64>()?;
    }
    Ok(total)
}

/// Whether a file of procfs can't be read because its thread has ended.
fn has_ended(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::NOENT | Errno::SRCH)
    )
}

/// Resident memory outside of mappings as large as guest RAM, bytes.
fn rss_outside_ram(pid: u32, ram_mib: u64) -> Result<u64> {
    let smaps = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("smaps"))?;
    Ok(sum_rss(&smaps, ram_mib * 1024 * 9 / 10) * 1024)
}

/// Resident memory in mappings smaller than `ram_kib`, KiB.
fn sum_rss(smaps: &str, ram_kib: u64) -> u64 {
    let value = |line: &str| -> Option<u64> { line.split_whitespace().nth(1)?.parse().ok() };
    let (mut sum, mut size) = (0, 0);
    for line in smaps.lines() {
        if line.starts_with("Size:") {
            size = value(line).unwrap_or(0);
        } else if line.starts_with("Rss:") && size < ram_kib {
            sum += value(line).unwrap_or(0);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_ram_is_not_counted_as_vmm_memory() {
        let smaps = "00400000-00500000 r-xp 0 0:0 0 /bin/x\nSize: 1024 kB\nRss: 700 kB\n\
                     7f00-8f00 rw-s 0 0:0 0 /memfd:ram\nSize: 131072 kB\nRss: 90000 kB\n\
                     9f00-af00 rw-p 0 0:0 0 [stack]\nSize: 132 kB\nRss: 20 kB\n";
        assert_eq!(sum_rss(smaps, 128 * 1024 * 9 / 10), 720);
    }

    #[test]
    fn a_program_that_never_writes_its_marker_is_an_error() {
        let sh = |script: &str| vec!["/bin/sh".to_string(), "-c".into(), script.into()];
        let sample =
            to_marker(&sh("sleep 0.05; echo booting; echo J; exec sleep 100"), 128).unwrap();
        assert!(sample.nanoseconds > 50_000_000);
        assert!(sample.counters["rss_outside_ram"] > 0);
        let error = to_marker(&sh("echo no kvm >&2"), 128)
            .unwrap_err()
            .to_string();
        assert!(error.contains("no kvm"), "{error}");
    }

    #[test]
    fn a_failed_command_gives_no_sample() {
        let argv = vec!["/bin/sh".to_string(), "-c".into(), "exit 3".into()];
        assert!(to_exit(&argv).is_err());
    }
}
