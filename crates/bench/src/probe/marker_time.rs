//! Finds the time at which a guest's marker arrived: when it woke the waiting thread, in the
//! kernel's sched_waking trace.
//!
//! The woken thread does not run at once. On one CPU a busy guest keeps the CPU until its time
//! slice ends, milliseconds later, and that is not part of the restore.

use crate::plan::MARKER;
use anyhow::{Context, Result, ensure};
use rustix::mount::{MountFlags, mount};
use rustix::thread::{Pid, gettid};
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Duration;

const TRACING: &str = "/sys/kernel/tracing";
/// A trace instance with wake-ups of one thread only.
const WAKE_UPS: &str = "/sys/kernel/tracing/instances/jiffy";

/// The standard output of a VMM, and a thread that waits for the marker on it.
pub struct Output {
    kept: OwnedFd,
    waiting: JoinHandle<Result<u64>>,
}

impl Output {
    /// Starts the waiting thread and waits until it sleeps: a thread that still runs when the marker
    /// arrives is not woken by it. Also returns the VMM's end of the pipe.
    ///
    /// # Errors
    ///
    /// If tracing of wake-ups can't be set up, or the pipe can't be made.
    pub fn new() -> Result<(Output, OwnedFd)> {
        let (output, output_end) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let kept = output.try_clone()?;
        let (ready, is_ready) = sync_channel(1);
        let waiting = std::thread::spawn(move || {
            let prepared = trace_this_thread();
            let failed = prepared.is_err();
            ready.send(prepared.map(|()| gettid()))?;
            ensure!(!failed, "the trace of wake-ups could not be set up");
            read_until_marker(output.into())?;
            last_wake_up()
        });
        let thread = is_ready.recv()??;
        while !sleeps(thread)? {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok((Output { kept, waiting }, output_end))
    }

    /// Waits for the marker. Returns its time (monotonic clock, nanoseconds) and the pipe. Nothing
    /// reads the guest's output any more, but the pipe must stay open, because a VMM reacts to a
    /// closed one.
    ///
    /// # Errors
    ///
    /// If the pipe was closed before the marker, or the trace does not have the wake-up.
    pub fn wait(self) -> Result<(u64, OwnedFd)> {
        let at_ns = self.waiting.join().expect("the thread does not panic")?;
        Ok((at_ns, self.kept))
    }
}

fn read_until_marker(mut output: File) -> Result<()> {
    let mut bytes = [0; 4096];
    loop {
        let got = output.read(&mut bytes)?;
        ensure!(got > 0, "it ended before the marker");
        // A log line may contain the letter too, but not alone or doubled.
        let got = &bytes[..got];
        if got == [MARKER] || got.windows(2).any(|pair| pair == [MARKER; 2]) {
            return Ok(());
        }
    }
}

/// Whether a thread of this process waits for something (proc(5), stat).
fn sleeps(thread: Pid) -> Result<bool> {
    let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    let stat = fs::read_to_string(&path).context(path)?;
    // The name, in parentheses, may contain anything.
    let (_, after_name) = stat.rsplit_once(')').unwrap_or_default();
    Ok(after_name.starts_with(" S"))
}

fn trace_this_thread() -> Result<()> {
    if !Path::new(TRACING).join("instances").exists() {
        mount("tracefs", TRACING, "tracefs", MountFlags::empty(), c"").context(TRACING)?;
    }
    fs::create_dir_all(WAKE_UPS).context(WAKE_UPS)?;
    let thread = gettid().as_raw_nonzero();
    write("trace_clock", "mono")?;
    write(
        "events/sched/sched_waking/filter",
        &format!("pid=={thread}"),
    )?;
    write("events/sched/sched_waking/enable", "1")?;
    // Opening this for writing clears the trace.
    write("trace", "")
}

fn write(file: &str, text: &str) -> Result<()> {
    let path = Path::new(WAKE_UPS).join(file);
    fs::write(&path, text).with_context(|| path.display().to_string())
}

fn last_wake_up() -> Result<u64> {
    let path = Path::new(WAKE_UPS).join("trace");
    let trace = fs::read_to_string(&path)?;
    last_wake_up_time(&trace).with_context(|| format!("no wake-up in the trace: {trace}"))
}

/// Time of a trace's last wake-up (`… 12.345678: sched_waking: …`, seconds) in nanoseconds.
fn last_wake_up_time(trace: &str) -> Option<u64> {
    let line = trace
        .lines()
        .rfind(|line| line.contains(": sched_waking: "))?;
    let (before, _) = line.split_once(": sched_waking: ")?;
    let (seconds, micros) = before.rsplit(' ').next()?.split_once('.')?;
    let micros: u64 = format!("{micros:0<6}").get(..6)?.parse().ok()?;
    Some((seconds.parse::<u64>().ok()? * 1_000_000 + micros) * 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_the_last_wake_up_is_read_from_the_trace() {
        let trace = "# tracer: nop\n#\n\
            \x20         <idle>-0       [000] d.h4.     7.000001: sched_waking: comm=probe pid=7 prio=120 target_cpu=000\n\
            \x20         vcpu 0-123     [000] d..4.    12.345678: sched_waking: comm=probe pid=7 prio=120 target_cpu=000\n";
        assert_eq!(last_wake_up_time(trace), Some(12_345_678_000));
        assert_eq!(last_wake_up_time("# tracer: nop\n"), None);
    }
}
