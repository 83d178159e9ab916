//! VMMs of this data folder that an earlier daemon started: found by their command lines, and
//! ended.

use crate::control;
use crate::host::Host;
use crate::process::{VmmProcess, leads_session};
use crate::spares::NO_ID;
use jiffy_content::names;
use jiffy_wire::vmm::ControlRequest;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tracing::warn;

/// How long the VMM of an unknown VM has to stop before it is killed.
const STOP_TIME: Duration = Duration::from_secs(2);
/// How long a killed process has to end. On a busy host it waits for a CPU to end on.
const END_TIME: Duration = Duration::from_secs(10);
/// How long a spare has to become a VM's VMM or to end. If it is killed too soon, a VM that was just
/// started is lost.
const SPARE_TIME: Duration = Duration::from_secs(10);
/// Polling interval while a spare VMM either becomes a VM's or ends, or a process gets a command
/// line.
const LOOK: Duration = Duration::from_millis(2);
/// How long processes are waited for that execute a program and have no command line yet. On a busy
/// host one may wait for a CPU meanwhile.
const EXECUTING: Duration = Duration::from_millis(500);

/// Ends the VMM of a hibernated VM, whose memory is on disk.
pub(super) async fn end_sleeper(pid: u32, id: &str, host: &Host) {
    let Ok(process) = VmmProcess::adopted(pid) else {
        return;
    };
    if vmm_id(pid, host).as_deref() == Some(id) {
        process.kill();
        let _ = timeout(END_TIME, process.ended()).await;
    }
}

/// Ends a process whose command line names another VM than it was started for.
pub(super) async fn end_impostor(host: &Host, id: &str, pid: u32) {
    let Ok(process) = VmmProcess::adopted(pid) else {
        return;
    };
    if folder_of(pid, &host.paths.vms(), executing_deadline()).as_deref() == Some(id)
        && !belongs_to(pid, id, host)
    {
        warn!(
            id,
            pid, "ending a VMM that claims to be this VM's but runs as another user"
        );
        process.kill();
        let _ = timeout(END_TIME, process.ended()).await;
    }
}

/// Ends a VMM; false if the process does not belong to this VM any more.
pub(super) async fn end_vmm(host: &Host, id: &str, pid: u32) -> bool {
    let Ok(process) = VmmProcess::adopted(pid) else {
        return false;
    };
    if vmm_id(pid, host).as_deref() != Some(id) {
        return false;
    }
    let socket = host.paths.control_socket(id);
    let stopped = async {
        control::request(&socket, ControlRequest::Stop).await.ok()?;
        Some(process.ended().await)
    };
    if !matches!(timeout(STOP_TIME, stopped).await, Ok(Some(_))) {
        process.kill();
        let _ = timeout(END_TIME, process.ended()).await;
    }
    true
}

/// Waits until no spares of the earlier daemon are left. A spare ends with its daemon, unless the
/// daemon had just made it a VM's VMM.
pub(super) async fn wait_for_spares(vms: &Path) {
    let deadline = Instant::now() + SPARE_TIME;
    let undecided = || -> Vec<u32> {
        let spares = vmms_of(vms, |id| id == NO_ID);
        spares.map(|(_, pid)| pid).collect()
    };
    let mut left = undecided();
    while !left.is_empty() && Instant::now() < deadline {
        tokio::time::sleep(LOOK).await;
        left = undecided();
    }
    for pid in left {
        let Ok(process) = VmmProcess::adopted(pid) else {
            continue;
        };
        if undecided().contains(&pid) {
            warn!(pid, "ending a spare VMM that did not end by itself");
            process.kill();
            let _ = timeout(END_TIME, process.ended()).await;
        }
    }
}

/// All VMMs whose configuration is in this node's folder, from VM id to process id; and processes
/// whose command line falsely claims that.
pub(super) fn vmms(host: &Host) -> (HashMap<String, u32>, Vec<(String, u32)>) {
    let vms = host.paths.vms();
    let all = vmms_of(&vms, names::is_id);
    let (own, others) = all.partition::<Vec<_>, _>(|(id, pid)| belongs_to(*pid, id, host));
    (own.into_iter().collect(), others)
}

/// Was this process started for this VM, judging by its user id?
fn belongs_to(pid: u32, id: &str, host: &Host) -> bool {
    host.launcher.is_user_of(pid, &host.paths.vm_run(id))
}

/// VM ids and process ids of the VMMs whose VM id satisfies `which`.
fn vmms_of(vms: &Path, which: impl Fn(&str) -> bool) -> impl Iterator<Item = (String, u32)> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    let until = executing_deadline();
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter_map(move |pid| Some((folder_of(pid, vms, until)?, pid)))
        .filter(move |(id, _)| which(id))
}

/// The id of the VM whose VMM this process is.
pub(super) fn vmm_id(pid: u32, host: &Host) -> Option<String> {
    folder_of(pid, &host.paths.vms(), executing_deadline())
        .filter(|id| names::is_id(id) && belongs_to(pid, id, host))
}

fn executing_deadline() -> Instant {
    Instant::now() + EXECUTING
}

/// The VM id in the command line of this process, not validated.
///
/// A VMM leads a session. A process that it has forked shares its command line until it executes a
/// program, and is not the VMM.
fn folder_of(pid: u32, vms: &Path, until: Instant) -> Option<String> {
    vmm_of(&command_line(pid, until)?, vms).filter(|_| leads_session(pid))
}

/// The command line of a process. One that is just executing a program has none for a moment, in
/// which it has released the lock of the data folder already: it is waited for.
fn command_line(pid: u32, until: Instant) -> Option<Vec<u8>> {
    loop {
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        // Threads of the kernel and zombies have no command line either, and execute no file.
        let executes = || leads_session(pid) && fs::read_link(format!("/proc/{pid}/exe")).is_ok();
        if !line.is_empty() || !executes() || Instant::now() >= until {
            return Some(line);
        }
        std::thread::sleep(LOOK);
    }
}

/// The VM's id (or [`NO_ID`]) in the command line `jiffy-vmm run --config VMS/ID/vmm.json …`.
fn vmm_of(command_line: &[u8], vms: &Path) -> Option<String> {
    let mut words = command_line.split(|byte| *byte == 0).skip(1);
    if words.next()? != b"run" || words.next()? != b"--config" {
        return None;
    }
    let config = Path::new(OsStr::from_bytes(words.next()?));
    let folder = config.strip_prefix(vms).ok()?.parent()?;
    let id = folder.to_str()?;
    let known = names::is_id(id) || id == NO_ID;
    (known && config.file_name()? == "vmm.json").then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_sys::spawn::{Detached, Environment, spawn_detached};
    use std::fs::File;
    use std::os::fd::AsFd;

    #[tokio::test]
    async fn a_child_of_a_vmm_is_not_taken_for_the_vmm() {
        let folder = tempfile::tempdir().unwrap();
        // The subshell has the command line of the shell.
        let script = "(echo forked; while kill -0 $$; do sleep 0.01; done) & wait";
        fs::write(folder.path().join("run"), script).unwrap();
        let vms = folder.path().join("vms");
        let config = vms.join("0123456789ab/vmm.json");
        let output = File::create(folder.path().join("output")).unwrap();
        let pid = spawn_detached(&Detached {
            program: Path::new("/bin/sh"),
            arguments: &["run", "--config", config.to_str().unwrap()].map(OsStr::new),
            directory: folder.path(),
            output: output.as_fd(),
            descriptors: &[],
            environment: Environment::Inherited,
        });
        let vmm = VmmProcess::child(pid.unwrap()).unwrap();
        while fs::read(folder.path().join("output")).unwrap().is_empty() {
            tokio::time::sleep(LOOK).await;
        }
        let found: Vec<_> = vmms_of(&vms, names::is_id).collect();
        vmm.kill();
        vmm.ended().await;
        assert_eq!(found, [("0123456789ab".to_owned(), vmm.pid)]);
    }

    #[test]
    fn only_vmms_of_this_data_folder_are_adopted() {
        let of = |line: &str| vmm_of(line.replace(' ', "\0").as_bytes(), Path::new("/d/vms"));
        assert_eq!(
            of("/lib/jiffy-vmm run --config /d/vms/0123456789ab/vmm.json --events-fd 3").as_deref(),
            Some("0123456789ab")
        );
        assert_eq!(
            of("jiffy-vmm run --config /d/vms/------------/vmm.json --spare-fd 3").as_deref(),
            Some(NO_ID)
        );
        assert_eq!(
            NO_ID.len(),
            names::new_id().len(),
            "one takes the other's place"
        );
        assert!(!names::is_id(NO_ID));
        for other in [
            "jiffy-vmm run --config /e/vms/0123456789ab/vmm.json",
            "jiffy-vmm run --config /d/vms/short/vmm.json",
            "jiffy-vmm run --config /d/vms/0123456789ab/other.json",
            "jiffy-vmm probe --config /d/vms/0123456789ab/vmm.json",
            "cat /d/vms/0123456789ab/vmm.json",
            "",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
