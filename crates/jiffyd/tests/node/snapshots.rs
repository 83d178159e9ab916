//! Pause, snapshots, VMs restored from them, and failures meanwhile.

use crate::daemon::{Daemon, bad_vm, eventually, id_of, named, pagers, shell, started, vm};
use crate::daemon::{kill, release_guest};
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{
    CreateVm, ErrorKind, ForkVm, Forked, MakeSnapshot, MemoryForm, MemoryReport, Origin, RunVm,
    Snapshot, SnapshotMade, Vm, VmState, VolumeUse,
};
use jiffy_wire::timeline::{Timeline, names};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub fn snapshot(daemon: &Daemon, vm: &str, name: &str, stop: bool) -> crate::client::Answer {
    let wanted = MakeSnapshot {
        name: name.into(),
        stop,
    };
    let body = serde_json::to_vec(&wanted).unwrap();
    daemon.post(&format!("/v1/vms/{vm}/snapshots"), &body)
}

pub fn fork(daemon: &Daemon, vm: &str, count: u32, name: Option<&str>) -> crate::client::Answer {
    let wanted = ForkVm {
        count: Some(count),
        name: name.map(str::to_owned),
        ..ForkVm::default()
    };
    let body = serde_json::to_vec(&wanted).unwrap();
    daemon.post(&format!("/v1/vms/{vm}/fork"), &body)
}

pub fn from(snapshot: &str) -> CreateVm {
    CreateVm {
        from: Some(snapshot.into()),
        ..CreateVm::default()
    }
}

/// A command that counts, and prints the numbers, until it is killed.
pub fn counter() -> CreateVm {
    vm(shell(
        "echo begun $RESTORED; n=0; while true; do n=$((n+1)); echo $n; sleep 0.02; done",
    ))
}

/// Waits until the daemon knows that the command of [`counter`] runs: only then does a capture
/// contain it. A VM is ready a moment earlier.
fn wait_until_it_counts(daemon: &Daemon, vm: &str) {
    eventually("its command runs", || {
        daemon.logs(vm, "").0.contains("begun")
    });
}

/// Checks that these spans exist, in the order of their starts.
pub fn assert_span_order(timeline: &Timeline, wanted: &[&str]) {
    let mut last = 0;
    for name in wanted {
        let span = timeline.find(name).unwrap_or_else(|| panic!("no {name}"));
        assert!(span.start_ns >= last, "{name} is out of order");
        last = span.start_ns;
    }
}

pub fn entries(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Number of context switches of a process so far.
pub fn context_switches(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let counts = status.lines().filter(|line| line.contains("ctxt_switches"));
    counts
        .map(|line| {
            line.split_whitespace()
                .nth(1)
                .unwrap()
                .parse::<u64>()
                .unwrap()
        })
        .sum()
}

/// Waits until a process is stopped; returns its context switches by then.
pub fn wait_until_stopped(pid: u32) -> u64 {
    let is = |pid: u32, state: &str| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(") ").next().unwrap().starts_with(state)
    };
    // Between vfork and exec of its child a shell can't be stopped.
    let waits_for_ending = || {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        let mut children = children.split_whitespace();
        is(pid, "D") && children.any(|child| is(child.parse().unwrap(), "T"))
    };
    // It is shown as stopped before its last switch is counted.
    let mut last = None;
    eventually("it is stopped", || {
        let is_stopped = is(pid, "T") || waits_for_ending();
        let before = std::mem::replace(&mut last, is_stopped.then(|| context_switches(pid)));
        last.is_some() && last == before
    });
    context_switches(pid)
}

/// Captures a VM as the snapshot `one`, removes it, and runs the VM `two` from the snapshot.
pub fn two_from_one(daemon: &Daemon, captured: CreateVm) {
    daemon.run_detached(named("box", captured)).json::<Vm>();
    let made = daemon.post("/v1/vms/box/snapshots", br#"{"name":"one"}"#);
    assert_eq!(made.status, 200);
    daemon.delete("/v1/vms/box?force=true");
    let from = CreateVm {
        from: Some("one".into()),
        ..CreateVm::default()
    };
    daemon.run_detached(named("two", from)).json::<Vm>();
}

#[test]
fn a_paused_vm_makes_no_progress_until_resumed() {
    let mut daemon = Daemon::start();
    let script = "echo $$; n=0; while true; do n=$((n+1)); echo $n; sleep 0.02; done";
    daemon.run_detached(named("box", vm(shell(script))));
    let mut pid = 0;
    eventually("its command counts", || {
        let log = daemon.logs("box", "").0;
        let lines: Vec<u32> = log.lines().filter_map(|line| line.parse().ok()).collect();
        pid = lines.first().copied().unwrap_or(pid);
        lines.len() > 3
    });
    let paused: Vm = daemon.post("/v1/vms/box/pause", b"").json();
    assert_eq!(paused.state, VmState::Paused);
    // Pausing twice is like pausing once.
    assert_eq!(daemon.post("/v1/vms/box/pause", b"").status, 200);
    let still = wait_until_stopped(pid);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(wait_until_stopped(pid), still);
    let error = daemon
        .exec("box", &shell("true"))
        .unwrap_err()
        .error(ErrorKind::WrongState);
    assert!(error.hint.unwrap().contains("jiffy resume box"));
    snapshot(&daemon, "box", "one", false).error(ErrorKind::WrongState);
    for order in ["start", "wake"] {
        let refused = daemon.post(&format!("/v1/vms/box/{order}"), b"");
        let error = refused.error(ErrorKind::WrongState);
        assert!(error.hint.unwrap().contains("jiffy resume box"), "{order}");
    }
    // It stays paused across daemons.
    daemon.killed();
    daemon.up();
    assert_eq!(daemon.vm("box").state, VmState::Paused);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(wait_until_stopped(pid), still);
    let resumed: Vm = daemon.post("/v1/vms/box/resume", b"").json();
    assert_eq!(resumed.state, VmState::Running);
    assert_eq!(daemon.post("/v1/vms/box/resume", b"").status, 200);
    eventually("it continues", || context_switches(pid) > still + 5);
    daemon.post("/v1/vms/box/pause", b"").json::<Vm>();
    let stopped: Vm = daemon.post("/v1/vms/box/stop", b"").json();
    assert_eq!(stopped.state, VmState::Exited);
    daemon
        .post("/v1/vms/box/pause", b"")
        .error(ErrorKind::WrongState);
    daemon
        .post("/v1/vms/box/resume", b"")
        .error(ErrorKind::WrongState);
}

#[test]
fn a_vm_that_is_paused_right_after_adoption_stays_paused() {
    let mut daemon = Daemon::start();
    daemon.run_detached(named("box", counter()));
    let vmm = Pid::from_raw(daemon.vm("box").pid.unwrap() as i32).unwrap();
    // As by a capture. The next daemon will resume it.
    ask_vmm(&daemon, "box", "\"pause\"\n");
    daemon.killed();
    kill_process(vmm, Signal::STOP).unwrap();
    daemon.up();
    std::thread::scope(|scope| {
        let paused = scope.spawn(|| daemon.post("/v1/vms/box/pause", b"").json::<Vm>());
        // The daemon has asked the VMM whether it is paused, and has no answer.
        std::thread::sleep(Duration::from_millis(500));
        kill_process(vmm, Signal::CONT).unwrap();
        assert_eq!(paused.join().unwrap().state, VmState::Paused);
    });
    std::thread::sleep(Duration::from_millis(500));
    let status = ask_vmm(&daemon, "box", "\"status\"\n");
    assert!(status.contains("\"paused\":true"), "{status}");
}

#[test]
fn a_snapshot_can_be_made_listed_inspected_and_removed() {
    let daemon = Daemon::start();
    daemon.run_detached(named("box", counter()));
    wait_until_it_counts(&daemon, "box");
    let made: SnapshotMade = snapshot(&daemon, "box", "one", false).json();
    assert_span_order(
        &made.timeline,
        &[
            names::REQUEST_RECEIVED,
            names::QUIESCE,
            names::CAPTURE,
            names::IMAGE_WRITTEN,
            names::SNAPSHOT_NAMED,
        ],
    );
    assert_eq!(made.pause_ns, 1_000_000);
    assert!(made.timeline.find(names::PAUSE).is_some());
    let one = &made.snapshot;
    assert_eq!((one.name.as_str(), one.vm.as_str()), ("one", "box"));
    assert_eq!(one.memory, MemoryForm::Image);
    assert_eq!(one.command.as_ref().unwrap()[0], "/bin/sh");
    assert_eq!(
        one.kernel_digest,
        blake3::hash(b"a kernel").to_hex().to_string()
    );
    assert_eq!(one.cpu_features, ["hypervisor", "sse2", "md_clear"]);
    let folder = daemon.data.join("snapshots/one");
    assert_eq!(
        entries(&folder),
        ["ram.image", "root.erofs", "snapshot.json", "state"]
    );
    let before = daemon.logs("box", "").0;
    eventually("the VM continues", || {
        daemon.logs("box", "").0.len() > before.len()
    });
    let list: Vec<Snapshot> = daemon.get("/v1/snapshots").json();
    assert_eq!(list, std::slice::from_ref(&made.snapshot));
    let inspected: Snapshot = daemon.get("/v1/snapshots/one").json();
    assert_eq!(inspected, made.snapshot);
    let report: MemoryReport = daemon.get("/v1/snapshots/one/memory?map=true").json();
    assert_eq!(report.size, 128 << 20);
    assert_eq!(report.chunk_bytes, 8 << 10);
    let zero = report
        .kinds
        .iter()
        .find(|kind| kind.kind == "zero")
        .unwrap();
    assert_eq!(zero.bytes, (128 << 20) - 2 * (8 << 10));
    let covered: u64 = report.ranges.iter().map(|range| range.length).sum();
    assert_eq!(covered, report.size);
    let picture = daemon.get("/v1/snapshots/one/picture");
    assert_eq!((picture.status, &picture.body[1..4]), (200, &b"PNG"[..]));
    // Refused: a taken name, invalid names, and VMs that don't run.
    let error = snapshot(&daemon, "box", "one", false).error(ErrorKind::Conflict);
    assert!(error.message.contains("one"));
    snapshot(&daemon, "box", "../up", false).error(ErrorKind::Invalid);
    daemon.create(&named("idle", CreateVm::default()));
    snapshot(&daemon, "idle", "two", false).error(ErrorKind::WrongState);
    assert_eq!(entries(&daemon.data.join("snapshots")), ["one"]);
    assert_eq!(daemon.delete("/v1/snapshots/one").status, 204);
    daemon
        .delete("/v1/snapshots/one")
        .error(ErrorKind::NotFound);
    daemon.get("/v1/snapshots/one").error(ErrorKind::NotFound);
    assert!(entries(&daemon.data.join("snapshots")).is_empty());
}

#[test]
fn a_snapshot_can_end_its_vm() {
    let daemon = Daemon::start();
    let mut frames = daemon.run(named("box", counter()));
    started(&mut frames);
    let made: SnapshotMade = snapshot(&daemon, "box", "last", true).json();
    assert!(made.snapshot.command.is_some());
    let ended = daemon.vm("box");
    assert_eq!((ended.state, ended.error), (VmState::Exited, None));
    assert_eq!(frames.finish().status(), ExitStatus::Signal(9));
}

#[test]
fn a_failed_capture_leaves_only_the_running_vm() {
    let daemon = Daemon::start();
    daemon.run_detached(named("box", bad_vm("capture-fails", counter().command)));
    for stop in [false, true] {
        let error = snapshot(&daemon, "box", "one", stop).error(ErrorKind::VmFailed);
        assert!(error.message.contains("on fire"), "{}", error.message);
    }
    fork(&daemon, "box", 3, None).error(ErrorKind::VmFailed);
    daemon
        .post("/v1/vms/box/hibernate", b"")
        .error(ErrorKind::VmFailed);
    assert!(entries(&daemon.data.join("snapshots")).is_empty());
    let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    assert_eq!(all.len(), 1, "no child is left");
    assert_eq!(all[0].state, VmState::Running);
    let before = daemon.logs("box", "").0;
    eventually("it continues", || {
        daemon.logs("box", "").0.len() > before.len()
    });
}

#[test]
fn a_snapshot_can_be_restored_any_number_of_times() {
    let daemon = Daemon::start();
    daemon.run_detached(named("box", counter()));
    wait_until_it_counts(&daemon, "box");
    snapshot(&daemon, "box", "one", true).json::<SnapshotMade>();
    assert_eq!(daemon.delete("/v1/vms/box").status, 204);
    assert_eq!(daemon.delete("/v1/images/base").status, 204);
    let mut generations = HashSet::new();
    for round in 0..2 {
        // A slow pager is waited for, longer than the guest's own time limit.
        if round == 1 {
            fs::write(daemon.folder.path().join("run/late"), "").unwrap();
        }
        // A new command replaces the captured one.
        let own = CreateVm {
            command: Some(shell("echo $RESTORED $GENERATION $HOSTNAME")),
            hostname: Some("mine".into()),
            ..from("one")
        };
        let frames = daemon.run(own);
        let id = id_of(&frames);
        let finished = frames.finish();
        assert_eq!(finished.status(), ExitStatus::Code(0));
        let text = finished.text();
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!((words[0], words[2]), ("1", "mine"));
        assert!(generations.insert(words[1].to_owned()));
        let vm = daemon.when(&id, VmState::Exited);
        assert_eq!(vm.origin, Some(Origin::From("one".into())));
        let timeline: Timeline = daemon.get(&format!("/v1/vms/{id}/timeline")).json();
        assert_span_order(
            &timeline,
            &[
                names::REQUEST_RECEIVED,
                names::IMAGE_READY,
                names::VMM_SPAWNED,
                names::STATE_LOADED,
                names::MEMORY_ATTACHED,
                names::VCPUS_RESUMED,
                names::GATE_ENTERED,
                names::GATE_ACKNOWLEDGED,
                names::COMMAND_STARTED,
                names::COMMAND_DONE,
            ],
        );
        assert!(timeline.find(names::FAULTS).is_some());
        assert!(timeline.find(names::KERNEL_ENTRY).is_none());
    }
    // Without a command, the client attaches to the running one.
    let mut frames = daemon.run(named("again", from("one")));
    frames.until("begun 1");
    let error = daemon
        .delete("/v1/snapshots/one")
        .error(ErrorKind::Conflict);
    assert!(error.message.contains("in use"), "{}", error.message);
    // It can be started again, and is restored from the snapshot again.
    daemon.post("/v1/vms/again/kill", b"").json::<Vm>();
    let started: Vm = daemon.post("/v1/vms/again/start", b"").json();
    assert_eq!(started.state, VmState::Running);
    eventually("its command runs again", || {
        daemon.logs("again", "").0.matches("begun 1").count() == 2
    });
    // It can be captured: its snapshot has a parent.
    let made: SnapshotMade = snapshot(&daemon, "again", "two", false).json();
    assert_eq!(made.snapshot.parent.as_deref(), Some("one"));
    for vm in daemon.get("/v1/vms?all=true").json::<Vec<Vm>>() {
        daemon.delete(&format!("/v1/vms/{}?force=true", vm.id));
    }
    for name in ["one", "two"] {
        let path = format!("/v1/snapshots/{name}");
        assert_eq!(daemon.delete(&path).status, 204);
    }
    daemon.assert_nothing_left();
    eventually("no pager socket is left", || {
        entries(&daemon.folder.path().join("run/pager")).is_empty()
    });
}

/// Number of chunks of RAM by kind.
pub fn chunks(daemon: &Daemon, name: &str, kind: &str) -> u64 {
    let report: MemoryReport = daemon.get(&format!("/v1/snapshots/{name}/memory")).json();
    let kinds = report.kinds.iter().filter(|found| found.kind == kind);
    kinds.map(|kind| kind.chunks).sum()
}

#[test]
fn a_child_snapshot_stores_changes_and_outlives_its_parents() {
    let daemon = Daemon::start();
    daemon.run_detached(named("vm0", counter()));
    snapshot(&daemon, "vm0", "s0", true).json::<SnapshotMade>();
    assert_eq!(chunks(&daemon, "s0", "parent"), 0);
    // Each writes one chunk and leaves the other unchanged.
    for n in 1..=3 {
        let (vm, name) = (format!("vm{n}"), format!("s{n}"));
        let parent = format!("s{}", n - 1);
        daemon.run_detached(named(&vm, from(&parent))).json::<Vm>();
        let made: SnapshotMade = snapshot(&daemon, &vm, &name, true).json();
        assert_eq!(made.snapshot.parent.as_ref(), Some(&parent));
        assert!(made.snapshot.shared_bytes > 0);
        assert_eq!(chunks(&daemon, &name, "parent"), 1);
        assert_eq!(chunks(&daemon, &name, "zero"), (128 << 20) / (8 << 10) - 2);
        let bases = entries(&daemon.data.join("snapshots").join(&name));
        let bases = bases.iter().filter(|file| file.starts_with("ram."));
        assert_eq!(
            bases.count(),
            n + 1,
            "the memory files are not its own and its ancestors'"
        );
        let parent: Snapshot = daemon.get(&format!("/v1/snapshots/{parent}")).json();
        assert_eq!(parent.children[0], name);
    }
    let shown: Snapshot = daemon.get("/v1/snapshots/s0").json();
    assert_eq!(shown.children, ["s1", "s2", "s3"]);
    for vm in daemon.get("/v1/vms?all=true").json::<Vec<Vm>>() {
        daemon.delete(&format!("/v1/vms/{}?force=true", vm.id));
    }
    // Parents are removed first; the last one is still complete.
    for name in ["s1", "s0", "s2"] {
        assert_eq!(daemon.delete(&format!("/v1/snapshots/{name}")).status, 204);
    }
    let path = daemon.data.join("snapshots/s3/ram.image");
    let image = jiffy_store::ImageReader::open(&path).unwrap();
    image.verify().unwrap();
    let mut chunk = vec![0; 8 << 10];
    image.read_chunk(0, &mut chunk).unwrap();
    assert_eq!(chunk[..4096], [0x55; 4096]);
    drop(image);
    let own = CreateVm {
        command: Some(shell("echo $RESTORED")),
        ..from("s3")
    };
    assert_eq!(daemon.run(own).finish().text(), "4\n");
    for vm in daemon.get("/v1/vms?all=true").json::<Vec<Vm>>() {
        daemon.delete(&format!("/v1/vms/{}?force=true", vm.id));
    }
    assert_eq!(daemon.delete("/v1/snapshots/s3").status, 204);
    daemon.assert_nothing_left();
}

#[test]
fn a_second_snapshot_stores_only_changes_since_the_first() {
    let daemon = Daemon::start();
    daemon.run_detached(named("box", counter()));
    // One of its two chunks changes after the first snapshot, none after that.
    for (name, in_parent) in [("one", 0), ("two", 1), ("three", 2)] {
        let made: SnapshotMade = snapshot(&daemon, "box", name, false).json();
        assert_eq!(made.snapshot.parent, None, "it booted");
        assert_eq!(chunks(&daemon, name, "parent"), in_parent);
    }
    let children = |name: &str| {
        let shown: Snapshot = daemon.get(&format!("/v1/snapshots/{name}")).json();
        shown.children
    };
    assert_eq!(children("one"), ["three", "two"].map(String::from));
    // Data of another start of the VM is not reused.
    daemon.delete("/v1/vms/box?force=true");
    daemon.run_detached(named("other", counter()));
    snapshot(&daemon, "other", "four", true).json::<SnapshotMade>();
    assert_eq!(chunks(&daemon, "four", "parent"), 0);
    for name in ["two", "one"] {
        assert_eq!(daemon.delete(&format!("/v1/snapshots/{name}")).status, 204);
    }
    let path = daemon.data.join("snapshots/three/ram.image");
    jiffy_store::ImageReader::open(&path)
        .unwrap()
        .verify()
        .unwrap();
}

#[test]
fn memory_shared_with_the_root_is_not_stored_and_survives() {
    let daemon = Daemon::with_memory_in_its_root();
    let folder = |name: &str| daemon.data.join("snapshots").join(name);
    let is_whole = |name: &str| {
        let image = jiffy_store::ImageReader::open(&folder(name).join("ram.image")).unwrap();
        image.verify().unwrap();
        let mut chunk = vec![0; 8 << 10];
        image.read_chunk(0, &mut chunk).unwrap();
        assert_eq!((&chunk[..4096], chunk[4096]), (&[0x55; 4096][..], 0));
    };
    daemon.run_detached(named("vm0", counter()));
    snapshot(&daemon, "vm0", "s0", false).json::<SnapshotMade>();
    assert_eq!(chunks(&daemon, "s0", "root"), 1);
    assert_eq!(chunks(&daemon, "s0", "zstd"), 1);
    let report: MemoryReport = daemon.get("/v1/snapshots/s0/memory?map=true").json();
    let first = &report.ranges[0];
    assert_eq!(
        (&*first.kind, first.offset, first.length, first.stored_bytes),
        ("root", 0, 8 << 10, 0)
    );
    is_whole("s0");
    // Child snapshots find it there, even when the parent is removed.
    daemon.run_detached(named("vm1", from("s0"))).json::<Vm>();
    snapshot(&daemon, "vm1", "s1", true).json::<SnapshotMade>();
    assert_eq!(chunks(&daemon, "s1", "root"), 0);
    assert_eq!(chunks(&daemon, "s1", "parent"), 1);
    for vm in daemon.get("/v1/vms?all=true").json::<Vec<Vm>>() {
        daemon.delete(&format!("/v1/vms/{}?force=true", vm.id));
    }
    assert_eq!(daemon.delete("/v1/snapshots/s0").status, 204);
    assert_eq!(daemon.delete("/v1/images/base").status, 204);
    is_whole("s1");
    // A different root is not taken for the original one.
    let root = folder("s1").join("root.erofs");
    let good = fs::read(&root).unwrap();
    fs::remove_file(&root).unwrap();
    fs::write(&root, &good[4096..]).unwrap();
    let refused = daemon.get("/v1/snapshots/s1/memory");
    assert_eq!(refused.status, 500);
    let text = String::from_utf8_lossy(&refused.body).into_owned();
    assert!(text.contains("root.erofs cannot be used"), "{text}");
}

#[test]
fn a_snapshot_with_a_damaged_parent_is_stored_in_full() {
    let daemon = Daemon::start();
    daemon.run_detached(named("box", counter()));
    snapshot(&daemon, "box", "one", true).json::<SnapshotMade>();
    daemon.run_detached(named("two", from("one"))).json::<Vm>();
    let path = daemon.data.join("snapshots/one/ram.image");
    let length = fs::metadata(&path).unwrap().len();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(length - 1).unwrap();
    let made: SnapshotMade = snapshot(&daemon, "two", "two", false).json();
    assert_eq!(made.snapshot.shared_bytes, 0);
    assert_eq!(chunks(&daemon, "two", "parent"), 0);
    let folder = daemon.data.join("snapshots/two");
    assert_eq!(
        entries(&folder),
        ["ram.image", "root.erofs", "snapshot.json", "state"]
    );
}

#[test]
fn options_fixed_by_a_snapshot_are_refused() {
    let daemon = Daemon::start();
    daemon.run_detached(named("idle", CreateVm::default()));
    snapshot(&daemon, "idle", "one", false).json::<SnapshotMade>();
    let refused = |change: fn(&mut CreateVm)| {
        let mut vm = CreateVm {
            command: Some(shell("true")),
            ..from("one")
        };
        change(&mut vm);
        let error = daemon.try_run(vm).unwrap_err().error(ErrorKind::Invalid);
        assert!(error.message.contains("one") || error.message.contains("boot"));
    };
    refused(|vm| vm.cpus = Some(2));
    refused(|vm| vm.memory_mib = Some(256));
    refused(|vm| vm.image = Some("base".into()));
    refused(|vm| vm.console = true);
    refused(|vm| vm.cold = true);
    refused(|vm| {
        vm.disks = vec![VolumeUse {
            name: "data".into(),
            size_mib: Some(1),
            read_only: false,
            ..VolumeUse::default()
        }]
    });
    let error = daemon.try_run(from("one")).unwrap_err();
    let error = error.error(ErrorKind::Invalid);
    assert!(error.message.contains("command"), "{}", error.message);
    daemon
        .try_run(from("absent"))
        .unwrap_err()
        .error(ErrorKind::NotFound);
    let detached = daemon.run_detached(named("two", from("one")));
    assert_eq!(detached.json::<Vm>().state, VmState::Running);
    let text = daemon.exec("two", &shell("echo in it")).unwrap().finish();
    assert_eq!(text.text(), "in it\n");
    assert_eq!(daemon.get("/v1/vms?all=true").json::<Vec<Vm>>().len(), 2);
}

fn manifest_of(daemon: &Daemon) -> PathBuf {
    daemon.data.join("snapshots/one/snapshot.json")
}

/// Writes another manifest of the snapshot `one`, sealed as it was.
fn change_manifest(daemon: &Daemon, change: impl Fn(&str) -> String) {
    let path = manifest_of(daemon);
    let text = fs::read_to_string(&path).unwrap();
    let content = text.split("\"content\":").nth(1).unwrap();
    let content = &content[..content.len() - 1];
    let changed = change(content);
    assert_ne!(changed, content);
    let sum = crc_fast::crc32_iscsi(changed.as_bytes());
    let sealed = format!(
        "{{\"format\":\"jiffy-snapshot\",\"version\":1,\"crc32c\":\"{sum:08x}\",\"content\":{changed}}}"
    );
    fs::write(&path, sealed).unwrap();
}

#[test]
fn a_snapshot_with_a_now_hidden_cpu_feature_is_restored() {
    let daemon = Daemon::start();
    daemon.run_detached(named("idle", CreateVm::default()));
    snapshot(&daemon, "idle", "one", false).json::<SnapshotMade>();
    change_manifest(&daemon, |content| {
        content.replace("00000000 00000400", "00000000 20000400")
    });
    let detached = daemon.run_detached(named("two", from("one")));
    assert_eq!(detached.json::<Vm>().state, VmState::Running);
}

#[test]
fn a_snapshot_of_another_cpu_is_refused_with_lacking_features() {
    let daemon = Daemon::start();
    daemon.run_detached(named("idle", CreateVm::default()));
    snapshot(&daemon, "idle", "one", false).json::<SnapshotMade>();
    change_manifest(&daemon, |content| {
        // The text of /proc/cpuinfo is not compared.
        content
            .replace("\"cpu_features\":[", "\"cpu_features\":[\"teleport\",")
            .replace("00000000 00000400", "00802000 00000400")
    });
    let error = daemon
        .try_run(CreateVm {
            command: Some(shell("true")),
            ..from("one")
        })
        .unwrap_err()
        .error(ErrorKind::WrongState);
    assert!(
        error.message.contains("it lacks tme, kl."),
        "{}",
        error.message
    );
    // A snapshot of another release is refused with a sentence, too.
    let path = manifest_of(&daemon);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"version\":1", "\"version\":9")).unwrap();
    let error = daemon.get("/v1/snapshots/one").error(ErrorKind::Internal);
    assert!(error.message.contains("version 9"), "{}", error.message);
    assert_eq!(daemon.delete("/v1/snapshots/one").status, 204);
}

/// Sends a request to the VMM of the VM `box`.
pub fn ask_vmm(daemon: &Daemon, vm: &str, request: &str) -> String {
    let id = daemon.vm(vm).id;
    let path = daemon.folder.path().join("run/vms").join(id);
    ask_control(&path.join("control.sock"), request)
}

/// Sends a request to a VMM's control socket.
pub fn ask_control(socket: &Path, request: &str) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    answer
}

#[test]
fn a_daemon_killed_during_a_capture_leaves_no_partial_files() {
    let mut daemon = Daemon::start();
    daemon.run_detached(named("box", bad_vm("held-capture", counter().command)));
    let socket = daemon.socket();
    let folder = daemon.vm_folder(&daemon.vm("box").id);
    for path in ["snapshots", "hibernate", "fork"] {
        let before = daemon.vm("box").pid;
        let body: &[u8] = match path {
            "snapshots" => b"{\"name\":\"one\",\"stop\":true}",
            _ => b"{}",
        };
        let target = format!("/v1/vms/box/{path}");
        let socket = socket.clone();
        let asking = std::thread::spawn(move || {
            let stream = crate::client::connect(&socket).unwrap();
            let _ = crate::client::request(stream, &format!("POST {target} HTTP/1.1"), body);
        });
        let [begun, go, done] = ["capturing", "go", "captured"].map(|name| folder.join(name));
        eventually("it is being captured", || begun.exists());
        // As at the start of a hibernation.
        ask_vmm(&daemon, "box", "{\"set_balloon\":{\"target_mib\":50}}\n");
        daemon.killed();
        asking.join().unwrap();
        release_guest(&folder);
        // The VMM has captured its VM and left it paused.
        eventually("it is captured", || done.exists());
        for file in [begun, go, done] {
            fs::remove_file(file).unwrap();
        }
        daemon.up();
        assert!(entries(&daemon.data.join("snapshots")).is_empty());
        let vm = daemon.vm("box");
        assert_eq!((vm.state, vm.pid), (VmState::Running, before), "{path}");
        let seen = daemon.logs("box", "").0;
        eventually("it continues", || {
            daemon.logs("box", "").0.len() > seen.len()
        });
        eventually("it has all of its memory", || {
            ask_vmm(&daemon, "box", "\"balloon\"\n").contains("\"target_mib\":0,")
        });
        let others: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
        assert!(
            others
                .iter()
                .all(|vm| vm.name == "box" || vm.state != VmState::Running),
            "{path}: {others:?}"
        );
        // Its record may be in the middle of a write.
        eventually("nothing half-made is in its folder", || {
            entries(&daemon.vm_folder(&vm.id))
                .iter()
                .all(|name| !name.starts_with('.') && name != "hibernated")
        });
    }
}

#[test]
fn a_vmm_killed_during_a_capture_leaves_no_partial_files() {
    let daemon = Daemon::start();
    for path in ["snapshots", "hibernate", "fork"] {
        daemon.run_detached(named("box", bad_vm("held-capture", counter().command)));
        let vm = daemon.vm("box");
        let folder = daemon.vm_folder(&vm.id);
        let body: &[u8] = match path {
            "snapshots" => b"{\"name\":\"one\",\"stop\":false}",
            _ => b"{}",
        };
        let answer = std::thread::scope(|scope| {
            let asking = scope.spawn(|| daemon.post(&format!("/v1/vms/box/{path}"), body));
            let begun = folder.join("capturing");
            eventually("it is being captured", || begun.exists());
            kill(vm.pid.unwrap());
            asking.join().unwrap()
        });
        let error = answer.error(ErrorKind::VmFailed);
        assert!(error.message.contains("box"), "{path}: {}", error.message);
        daemon.when(&vm.id, VmState::Exited);
        assert!(entries(&daemon.data.join("snapshots")).is_empty());
        let half_made = |name: &String| name.starts_with('.') || name == "hibernated";
        // Its record may be in the middle of a write.
        eventually("nothing half-made is in its folder", || {
            !entries(&folder).iter().any(half_made)
        });
        let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
        assert_eq!(all.len(), 1, "{path}: {all:?}");
        assert_eq!(daemon.delete("/v1/vms/box").status, 204);
    }
    daemon.assert_nothing_left();
}

#[test]
fn volumes_are_cloned_if_the_file_system_can_reflink() {
    let daemon = Daemon::start();
    let with_volume = CreateVm {
        disks: vec![VolumeUse {
            name: "data".into(),
            size_mib: Some(1),
            read_only: false,
            ..VolumeUse::default()
        }],
        ..named("box", counter())
    };
    daemon.run_detached(with_volume).json::<Vm>();
    let original = daemon.data.join("volumes/data.img");
    fs::write(&original, vec![1; 1 << 20]).unwrap();
    let made = snapshot(&daemon, "box", "one", false);
    let forked = fork(&daemon, "box", 2, Some("child"));
    if made.status != 200 {
        // This file system can't clone files: that is reported, and the VM runs on.
        for answer in [made, forked] {
            let error = answer.error(ErrorKind::WrongState);
            assert!(error.message.contains("data"), "{}", error.message);
            assert!(error.hint.unwrap().contains("XFS"));
        }
        assert!(entries(&daemon.data.join("snapshots")).is_empty());
        assert_eq!(daemon.get("/v1/vms?all=true").json::<Vec<Vm>>().len(), 1);
    } else {
        forked.json::<Forked>();
        fs::write(&original, vec![2; 1 << 20]).unwrap();
        let from_it: Vm = daemon.run_detached(named("two", from("one"))).json();
        for id in [from_it.id, daemon.vm("child-1").id, daemon.vm("child-2").id] {
            let clone = daemon.vm_folder(&id).join("volumes/data.img");
            assert_eq!(fs::read(&clone).unwrap(), vec![1; 1 << 20]);
        }
    }
    let before = daemon.logs("box", "").0;
    eventually("it continues", || {
        daemon.logs("box", "").0.len() > before.len()
    });
}

#[test]
fn a_new_pager_takes_over_from_a_dead_one() {
    let mut daemon = Daemon::start();
    daemon.run_detached(named("box", counter()));
    snapshot(&daemon, "box", "one", true).json::<SnapshotMade>();
    let run: Vm = daemon.run_detached(named("two", from("one"))).json();
    let socket = daemon
        .folder
        .path()
        .join(format!("run/pager/{}.sock", run.id));
    let first = pagers(daemon.folder.path());
    assert_eq!(first.len(), 1);
    kill(first[0]);
    eventually("another pager serves the VM", || {
        let now = pagers(daemon.folder.path());
        now.len() == 1 && now != first && std::os::unix::net::UnixStream::connect(&socket).is_ok()
    });
    // A pager outlives its daemon, and the next one uses it.
    let second = pagers(daemon.folder.path());
    daemon.killed();
    daemon.up();
    assert_eq!(pagers(daemon.folder.path()), second);
    let three: Vm = daemon.run_detached(named("three", from("one"))).json();
    assert_eq!(three.state, VmState::Running);
    assert_eq!(pagers(daemon.folder.path()), second);
    // A pager that died with the daemon is replaced.
    daemon.killed();
    kill(second[0]);
    daemon.up();
    eventually("the VM is served again", || {
        std::os::unix::net::UnixStream::connect(&socket).is_ok()
    });
    for name in ["two", "three"] {
        daemon.delete(&format!("/v1/vms/{name}?force=true"));
    }
    eventually("the pager serves no VM", || {
        entries(&daemon.folder.path().join("run/pager")).is_empty()
    });
    daemon.shut_down();
    eventually("an idle pager ends with its daemon", || {
        pagers(daemon.folder.path()).is_empty()
    });
}

#[test]
fn an_unresponsive_pager_is_killed() {
    let mut daemon = Daemon::prepared(&[]);
    let lib = daemon.folder.path().join("lib");
    fs::create_dir(lib.join("real")).unwrap();
    fs::rename(lib.join("jiffy-pager"), lib.join("real/jiffy-pager")).unwrap();
    // The first pager does not answer.
    let script = format!(
        "#!/bin/sh\nif mkdir {0}/once; then while :; do sleep 1; done; fi\n\
         exec {0}/real/jiffy-pager \"$@\"\n",
        lib.display()
    );
    jiffy_sys::testing::write_program(&lib.join("jiffy-pager"), &script);
    daemon.up();
    daemon.run_detached(named("box", counter()));
    snapshot(&daemon, "box", "one", true).json::<SnapshotMade>();
    let error = daemon
        .run_detached(named("two", from("one")))
        .error(ErrorKind::Internal);
    assert!(
        error.message.contains("does not listen"),
        "{}",
        error.message
    );
    assert!(pagers(daemon.folder.path()).is_empty());
    daemon.run_detached(named("two", from("one"))).json::<Vm>();
    assert_eq!(pagers(daemon.folder.path()).len(), 1);
}

#[test]
fn the_pager_forgets_a_vm_that_fails_to_start() {
    // A spare would run without the VMM's file.
    let daemon = Daemon::with(&["--spare", "0"]);
    daemon.run_detached(named("box", counter()));
    snapshot(&daemon, "box", "one", true).json::<SnapshotMade>();
    fs::remove_file(daemon.folder.path().join("lib/jiffy-vmm")).unwrap();
    let error = daemon
        .run_detached(named("two", from("one")))
        .error(ErrorKind::Internal);
    assert!(error.message.contains("jiffy-vmm"), "{}", error.message);
    assert_eq!(pagers(daemon.folder.path()).len(), 1);
    assert_eq!(
        entries(&daemon.folder.path().join("run/pager")),
        Vec::<String>::new()
    );
}

#[test]
fn optimising_needs_a_recording() {
    let daemon = Daemon::start();
    daemon.run_detached(named("idle", CreateVm::default()));
    snapshot(&daemon, "idle", "one", true).json::<SnapshotMade>();
    let optimise = || daemon.post("/v1/snapshots/one/optimise", b"");
    let error = optimise().error(ErrorKind::WrongState);
    assert!(error.hint.unwrap().contains("--from one"));
    let body = serde_json::to_vec(&RunVm {
        vm: named("two", from("one")),
        detach: true,
        ..RunVm::default()
    });
    daemon.post("/v1/run", &body.unwrap()).json::<Vm>();
    optimise().error(ErrorKind::Conflict);
    daemon.delete("/v1/vms/two?force=true");
    // The file that the stand-in for the pager writes is no recording.
    let error = optimise().error(ErrorKind::Internal);
    assert!(
        error.message.contains("not a recording"),
        "{}",
        error.message
    );
    daemon
        .post("/v1/snapshots/absent/optimise", b"")
        .error(ErrorKind::NotFound);
}
