//! Firecracker's own restore through its API (docs/snapshotting in its repository): a full snapshot
//! whose memory is mapped from the file.

use super::marker_time::Output;
use super::restore::{SETTLE_TIME, SNAPSHOT, huge_tmpfs};
use super::{Running, cpu_ns, kvm_counters, now_ns};
use crate::plan::Sample;
use anyhow::{Context, Result, bail, ensure};
use jiffy_sys::clock::monotonic_ns;
use rustix::fs::inotify;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

const FOLDER: &str = "/bench/firecracker-run";
const SOCKET: &str = "/bench/firecracker-run/api.sock";
/// Timeout of a request.
const TIMEOUT_NS: u64 = 120_000_000_000;

/// Time between connection attempts while its socket is bound but not listening yet.
const RETRY_INTERVAL: Duration = Duration::from_micros(50);

/// A guest to boot; paths in the machine.
pub struct Guest<'a> {
    pub program: &'a str,
    pub kernel: &'a str,
    pub initramfs: &'a str,
    pub command_line: &'a str,
    pub ram_mib: u64,
}

fn state() -> String {
    format!("{SNAPSHOT}/firecracker.state")
}

fn memory() -> String {
    format!("{SNAPSHOT}/firecracker.memory")
}

/// Boots the guest and makes a snapshot of it.
///
/// # Errors
///
/// If Firecracker can't be started or refuses a request, or the guest writes no marker.
pub fn prepare(guest: &Guest) -> Result<()> {
    huge_tmpfs(SNAPSHOT)?;
    for file in [state(), memory()] {
        let _ = fs::remove_file(file);
    }
    let (output, output_end) = Output::new()?;
    let _child = start(guest.program, output_end.into())?;
    put(
        "/machine-config",
        &json!({"vcpu_count": 1, "mem_size_mib": guest.ram_mib}),
    )?;
    put(
        "/boot-source",
        &json!({
            "kernel_image_path": guest.kernel,
            "initrd_path": guest.initramfs,
            "boot_args": guest.command_line,
        }),
    )?;
    put("/actions", &json!({"action_type": "InstanceStart"}))?;
    let _marker = output.wait()?;
    std::thread::sleep(SETTLE_TIME);
    request("PATCH", "/vm", &json!({"state": "Paused"}))?;
    put(
        "/snapshot/create",
        &json!({
            "snapshot_type": "Full",
            "snapshot_path": state(),
            "mem_file_path": memory(),
        }),
    )
}

/// Measures one restore, from spawn to the next marker.
///
/// # Errors
///
/// If Firecracker can't be started or refuses the snapshot, or the guest writes no marker.
pub fn restore(program: &str) -> Result<Sample> {
    let (output, output_end) = Output::new()?;
    let (start_ns, start_busy_ns) = (now_ns(), busy_ns()?);
    let child = start(program, output_end.into())?;
    let (ready_ns, ready_busy_ns) = (now_ns(), busy_ns()?);
    // Firecracker waits for the kernel here, which takes no time on the instruction clock.
    let waited_ns = (ready_ns - start_ns).saturating_sub(ready_busy_ns - start_busy_ns);
    put(
        "/snapshot/load",
        &json!({
            "snapshot_path": state(),
            "mem_backend": {"backend_type": "File", "backend_path": memory()},
            "resume_vm": true,
        }),
    )?;
    let loaded_ns = now_ns();
    let (end_ns, _output) = output.wait()?;
    let mut counters = kvm_counters(child.0.id());
    counters.insert("cpu_ns".into(), cpu_ns(child.0.id())?);
    Ok(Sample {
        nanoseconds: end_ns - start_ns - waited_ns,
        counters,
        spans: BTreeMap::from([
            ("API ready".to_owned(), ready_ns - start_ns - waited_ns),
            ("waited before that".to_owned(), waited_ns),
            ("snapshot loaded".to_owned(), loaded_ns - ready_ns),
        ]),
    })
}

/// Time in which the machine's only processor ran tasks, nanoseconds: the seventh number in
/// /proc/schedstat (Linux, Documentation/scheduler/sched-stats).
fn busy_ns() -> Result<u64> {
    let text = fs::read_to_string("/proc/schedstat")?;
    let line = text.lines().find(|line| line.starts_with("cpu0 "));
    let number = line.and_then(|line| line.split_whitespace().nth(7));
    Ok(number.context("/proc/schedstat")?.parse()?)
}

/// Starts Firecracker and waits until it listens. Polling would be counted as Firecracker's time,
/// so it waits for the socket with inotify.
fn start(program: &str, output: Stdio) -> Result<Running> {
    fs::create_dir_all(FOLDER)?;
    let _ = fs::remove_file(SOCKET);
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC)?;
    inotify::add_watch(&watch, FOLDER, inotify::WatchFlags::CREATE)?;
    let mut child = Running(
        Command::new(program)
            .args(["--api-sock", SOCKET])
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| program.to_owned())?,
    );
    let mut buffer = [MaybeUninit::uninit(); 512];
    inotify::Reader::new(&watch, &mut buffer).next()?;
    // The socket is bound, but may not listen yet.
    let until = monotonic_ns() + TIMEOUT_NS;
    while let Err(error) = UnixStream::connect(SOCKET) {
        let refused = error.kind() == ErrorKind::ConnectionRefused;
        ensure!(refused && monotonic_ns() < until, "{SOCKET}: {error}");
        if let Some(status) = child.0.try_wait()? {
            bail!("{program} ended: {status}");
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
    Ok(child)
}

fn put(path: &str, body: &Value) -> Result<()> {
    request("PUT", path, body)
}

/// Sends one request; an error unless it succeeds.
fn request(method: &str, path: &str, body: &Value) -> Result<()> {
    let body = body.to_string();
    let mut stream = UnixStream::connect(SOCKET).context(SOCKET)?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    while !answer.windows(4).any(|window| window == b"\r\n\r\n") {
        match stream.read(&mut piece)? {
            0 => break,
            count => answer.extend_from_slice(&piece[..count]),
        }
    }
    let text = String::from_utf8_lossy(&answer);
    ensure!(
        text.starts_with("HTTP/1.1 2"),
        "{method} {path}: {}",
        text.trim()
    );
    Ok(())
}
