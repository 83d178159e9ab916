//! Measures disk space and memory of a node's VMs, with the CLI.

use crate::plan::{BYTES, Sample};
use anyhow::{Context, Result, ensure};
use jiffy_wire::api::{Forked, Snapshot};
use std::collections::BTreeMap;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

pub const JIFFY: &str = "/bin/jiffy";
/// How long a guest is idle before it is measured.
const IDLE: Duration = Duration::from_secs(1);

/// Size on disk of a snapshot of an idle VM.
///
/// # Errors
///
/// If `jiffy` fails, or does not list the snapshot.
pub fn snapshot_bytes(run: u32) -> Result<Sample> {
    let (vm, snapshot) = (format!("idle-{run}"), format!("idle-snapshot-{run}"));
    let found = boot_idle(&vm).and_then(|()| {
        jiffy(&["snapshot", "create", &vm, &snapshot])?;
        let list = jiffy(&["snapshot", "ls", "--format", "json"])?;
        let list: Vec<Snapshot> = serde_json::from_slice(&list)?;
        let made = list.into_iter().find(|found| found.name == snapshot);
        let made = made.context("the snapshot that was made is not listed")?;
        Ok(counted(BTreeMap::from([
            (BYTES.into(), made.memory_bytes + made.other_bytes),
            ("memory_bytes".into(), made.memory_bytes),
            ("other_bytes".into(), made.other_bytes),
        ])))
    });
    // If this fails, there is nothing to remove.
    let _ = output(&["rm", "--force", &vm]);
    let _ = output(&["snapshot", "rm", &snapshot]);
    found
}

/// Private memory of an idle clone's VMM, guest RAM included.
///
/// # Errors
///
/// If `jiffy` fails, or the clone has no process.
pub fn clone_memory(run: u32) -> Result<Sample> {
    let (parent, child) = (format!("parent-{run}"), format!("clone-{run}"));
    let found = boot_idle(&parent).and_then(|()| {
        let forked = jiffy(&["fork", &parent, "--name", &child, "--format", "json"])?;
        let forked: Forked = serde_json::from_slice(&forked)?;
        let pid = forked.vms.first().and_then(|vm| vm.pid);
        let pid = pid.context("the clone has no process")?;
        std::thread::sleep(IDLE);
        Ok(counted(memory_of(pid)?))
    });
    let _ = output(&["rm", "--force", &child]);
    let _ = output(&["rm", "--force", &parent]);
    found
}

pub fn counted(counters: BTreeMap<String, u64>) -> Sample {
    Sample {
        counters,
        ..Sample::default()
    }
}

/// Boots a VM without a command and lets it idle.
///
/// # Errors
///
/// If `jiffy run` fails.
pub fn boot_idle(name: &str) -> Result<()> {
    jiffy(&[
        "run", "--cold", "--detach", "--memory", "128", "--name", name,
    ])?;
    std::thread::sleep(IDLE);
    Ok(())
}

/// A process's memory by kind (proc(5), smaps_rollup), bytes. Memory that no other process has
/// mapped is [`BYTES`].
///
/// # Errors
///
/// If the process does not exist.
pub fn memory_of(pid: u32) -> Result<BTreeMap<String, u64>> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let rollup = std::fs::read_to_string(&path).context(path)?;
    let sum = |names: &[&str]| names.iter().map(|name| field(&rollup, name)).sum();
    Ok(BTreeMap::from([
        (BYTES.into(), sum(&["Private_Clean:", "Private_Dirty:"])),
        ("anonymous".into(), sum(&["Anonymous:"])),
        ("private_clean".into(), sum(&["Private_Clean:"])),
        ("shared".into(), sum(&["Shared_Clean:", "Shared_Dirty:"])),
        ("resident".into(), sum(&["Rss:"])),
    ]))
}

/// Bytes of a line in KiB; 0 without one.
fn field(rollup: &str, name: &str) -> u64 {
    number_in(rollup, name).unwrap_or(0) * 1024
}

/// The number after this name at the start of a line (proc(5): `status`, `meminfo`, …).
pub fn number_in(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Runs `jiffy` with these arguments, whether it succeeds or not.
///
/// # Errors
///
/// If it can't be started.
pub fn output(words: &[&str]) -> Result<Output> {
    let mut command = Command::new(JIFFY);
    command.args(words).stdin(Stdio::null());
    command.output().context(JIFFY)
}

/// Runs `jiffy` with these arguments and returns its stdout.
///
/// # Errors
///
/// If it can't be started, or fails.
pub fn jiffy(words: &[&str]) -> Result<Vec<u8>> {
    let output = output(words)?;
    ensure!(
        output.status.success(),
        "jiffy {}: {}: {}",
        words.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_memory_is_read_from_smaps_rollup() {
        let rollup = "00400000-7fff rollup\nRss: 900 kB\nShared_Clean: 500 kB\n\
                      Private_Clean: 100 kB\nPrivate_Dirty: 300 kB\n";
        let private = field(rollup, "Private_Clean:") + field(rollup, "Private_Dirty:");
        assert_eq!(private, 400 * 1024);
        assert_eq!(field(rollup, "Anonymous:"), 0);
    }

    #[test]
    fn memory_of_this_process_is_read() {
        let memory = memory_of(std::process::id()).unwrap();
        assert!(memory[BYTES] > 0 && memory["resident"] >= memory[BYTES]);
    }
}
