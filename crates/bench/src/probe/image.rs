//! Measures images from the registry in the machine.

use super::node::{JIFFY, jiffy};
use super::{Running, at_once, now_ns};
use crate::image::{CONFIG, HOST, PROGRAM};
use crate::plan::{BYTES, Sample, WHOLE};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Time limit for the registry's start, nanoseconds.
const START_TIME: u64 = 60_000_000_000;

/// Pulls an image. Returns the registry, which must keep running for later fetches.
///
/// # Errors
///
/// If the registry does not listen, or `jiffy` can't pull the image.
pub fn pull(reference: &str) -> Result<Running> {
    let registry = registry()?;
    jiffy(&["image", "pull", reference])?;
    Ok(registry)
}

/// Runs a shell command of an image that the node does not have, and counts the bytes on loopback
/// until it answers, including requests and headers.
///
/// # Errors
///
/// If the registry does not listen, the VM does not answer, or the image can't be removed.
pub fn first_answer(run: u32, reference: &str, whole: u64) -> Result<Sample> {
    let _registry = registry()?;
    let vm = format!("first-{run}");
    let script = "echo \"$(id -u) $(uname -s)\"; exec sleep 1000";
    let argv = [JIFFY, "run", "--cold", "--name", &vm, reference];
    let argv = [&argv[..], &["--", "/bin/sh", "-c", script]].concat();
    let argv: Vec<String> = argv.into_iter().map(str::to_owned).collect();
    let before = loopback_bytes()?;
    let answer = at_once::to_first_byte(&argv);
    let moved = loopback_bytes()? - before;
    let nanoseconds = answer.as_ref().map_or(0, |(nanoseconds, _)| *nanoseconds);
    let failure = answer.map(drop);
    // If this fails, there is nothing to remove.
    let _ = jiffy(&["rm", "--force", &vm]);
    failure?;
    jiffy(&["image", "rm", reference])?;
    Ok(Sample {
        nanoseconds,
        counters: [(BYTES.into(), moved), (WHOLE.into(), whole)].into(),
        ..Sample::default()
    })
}

/// Starts the registry, which runs until the result is dropped.
///
/// # Errors
///
/// If its program is missing, ends, or does not listen within a minute.
pub fn registry() -> Result<Running> {
    let mut command = Command::new(PROGRAM);
    command.args(["serve", CONFIG]).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = Running(command.spawn().context(PROGRAM)?);
    let until = now_ns() + START_TIME;
    while TcpStream::connect(HOST).is_err() {
        if let Some(status) = child.0.try_wait()? {
            bail!("{PROGRAM} ended: {status}");
        }
        ensure!(now_ns() < until, "{PROGRAM} does not listen at {HOST}");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(child)
}

/// Bytes on loopback since the machine's start.
fn loopback_bytes() -> Result<u64> {
    let path = "/sys/class/net/lo/statistics/rx_bytes";
    let text = fs::read_to_string(path).context(path)?;
    text.trim().parse().context(path)
}
