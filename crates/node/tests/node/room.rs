//! Hosts with no memory or disk left.

use crate::daemon::{Daemon, command, eventually, id_of, named, shell, tar_of, vm};
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{CreateVm, ErrorKind, VmState};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A file system of a few MiB. Mounting takes root; without it there is no
/// disk to fill.
pub struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// None without the right to mount.
    pub fn new(size: &str) -> Option<SmallDisk> {
        let folder = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(folder.path())
            .status()
            .unwrap();
        if !mounted.success() {
            eprintln!("skipped: mounting a small disk takes root");
            return None;
        }
        Some(SmallDisk(folder))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Uses the disk up, to the last byte.
    pub fn fill(&self) {
        let mut file = fs::File::create(self.path().join("ballast")).unwrap();
        let full = std::io::copy(&mut std::io::repeat(1), &mut file);
        assert!(full.is_err());
    }

    /// Gives back what was used up.
    pub fn free(&self) {
        let ballast = self.path().join("ballast");
        // A child that another test forked while it was written has it open yet.
        fs::File::create(&ballast).unwrap();
        fs::remove_file(ballast).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

/// A daemon with its data there.
pub fn daemon_on(disk: &SmallDisk) -> Daemon {
    let mut daemon = Daemon::prepared(&[]);
    daemon.data = disk.path().join("data");
    daemon.up();
    daemon
}

#[test]
fn a_vm_larger_than_the_host_is_refused_with_numbers() {
    let daemon = Daemon::start();
    let error = daemon
        .try_run(CreateVm {
            memory_mib: Some(16 << 20),
            ..vm(command(&["true"]))
        })
        .unwrap_err()
        .error(ErrorKind::NoRoom);
    assert!(error.message.contains("16777216 MiB"), "{}", error.message);
    assert!(error.hint.is_some());
    daemon.nothing_left();
}

#[test]
fn a_full_disk_is_one_sentence_and_leaves_nothing() {
    let Some(disk) = SmallDisk::new("4m") else {
        return;
    };
    let daemon = daemon_on(&disk);
    // The built-in image is made while there is room.
    assert_eq!(daemon.get("/v1/images").status, 200);
    let big = tar_of(&[("big", &[7; 6_000_000])]);
    daemon.post("/v1/images/big", &big).error(ErrorKind::NoRoom);
    assert_eq!(fs::read_dir(daemon.data.join("images")).unwrap().count(), 1);
    disk.fill();
    let error = daemon.create(&CreateVm::default()).error(ErrorKind::NoRoom);
    assert!(error.message.contains("full"), "{}", error.message);
    daemon
        .try_run(vm(command(&["true"])))
        .unwrap_err()
        .error(ErrorKind::NoRoom);
    daemon.nothing_left();
    disk.free();
    let finished = daemon.run(vm(command(&["true"]))).finish();
    assert_eq!(finished.status(), ExitStatus::Code(0));
}

#[test]
fn output_waits_for_a_full_disk_and_is_whole_afterwards() {
    const BYTES: usize = 600_000;
    let Some(disk) = SmallDisk::new("4m") else {
        return;
    };
    let daemon = daemon_on(&disk);
    let go = daemon.folder.path().join("go");
    let frames = daemon.run(vm(shell(&format!(
        "while ! test -e {}; do sleep 0.02; done; head -c {BYTES} /dev/zero",
        go.display()
    ))));
    let id = id_of(&frames);
    daemon.when(&id, VmState::Running);
    disk.fill();
    fs::write(&go, "").unwrap();
    let log = daemon.folder.path().join("jiffyd.log");
    eventually("the daemon says that output waits", || {
        fs::read_to_string(&log).unwrap().contains("output waits")
    });
    disk.free();
    let finished = frames.finish();
    assert_eq!(finished.stdout.len(), BYTES);
    assert!(String::from_utf8_lossy(&finished.stderr).contains("is full"));
    assert_eq!(finished.status(), ExitStatus::Code(0));
}

#[test]
fn a_snapshot_that_finds_no_room_leaves_a_running_vm_and_nothing_else() {
    let Some(disk) = SmallDisk::new("4m") else {
        return;
    };
    let daemon = daemon_on(&disk);
    // It writes nothing, and ends with the disk.
    let data = disk.path().join("data");
    let wait = format!("while test -d {}; do sleep 0.02; done", data.display());
    daemon.run_detached(named("box", vm(shell(&wait))));
    let before = daemon.vm("box");
    disk.fill();
    let orders: [(&str, &[u8]); 3] = [
        ("snapshots", b"{\"name\":\"one\",\"stop\":true}"),
        ("snapshots", b"{\"name\":\"one\"}"),
        ("hibernate", b""),
    ];
    for (order, body) in orders {
        let error = daemon
            .post(&format!("/v1/vms/box/{order}"), body)
            .error(ErrorKind::NoRoom);
        assert!(error.message.contains("full"), "{}", error.message);
        let now = daemon.vm("box");
        assert_eq!((now.state, now.pid), (VmState::Running, before.pid));
    }
    let left = |folder: &Path| fs::read_dir(folder).unwrap().count();
    assert_eq!(left(&daemon.data.join("snapshots")), 0);
    assert!(!daemon.vm_folder(&before.id).join("hibernated").exists());
    disk.free();
    let made = daemon.post("/v1/vms/box/snapshots", b"{\"name\":\"one\"}");
    assert_eq!(made.status, 200);
    assert_eq!(daemon.post("/v1/vms/box/hibernate", b"").status, 200);
    assert_eq!(daemon.post("/v1/vms/box/wake", b"").status, 200);
}

#[test]
fn a_node_without_descriptors_refuses_vms_and_serves_all_else() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let daemon = Daemon::with(&["--spare", "0", "--standby", "0"]);
    let open = fs::read_dir(format!("/proc/{}/fd", daemon.pid()))
        .unwrap()
        .count() as u64;
    let limit = Some(open + 128 + 40);
    let limit = Rlimit {
        current: limit,
        maximum: limit,
    };
    let pid = Pid::from_raw(daemon.pid() as i32);
    prlimit(pid, Resource::Nofile, limit).unwrap();
    let mut started = Vec::new();
    let error = loop {
        let name = format!("vm{}", started.len());
        assert_eq!(
            daemon.create(&named(&name, CreateVm::default())).status,
            200
        );
        let answer = daemon.post(&format!("/v1/vms/{name}/start"), b"");
        if answer.status != 200 {
            break answer.error(ErrorKind::NoRoom);
        }
        started.push(name);
        assert!(started.len() < 100, "nothing ever refuses");
    };
    assert!(error.message.contains("files"), "{}", error.message);
    assert!(!started.is_empty());
    // What runs answers, and room can be made.
    for name in &started {
        assert_eq!(daemon.get(&format!("/v1/vms/{name}/stat")).status, 200);
    }
    let gone = started.pop().unwrap();
    daemon.post(&format!("/v1/vms/{gone}/kill"), b"");
    daemon.when(&gone, VmState::Exited);
    assert_eq!(
        daemon.post(&format!("/v1/vms/{gone}/start"), b"").status,
        200
    );
}
