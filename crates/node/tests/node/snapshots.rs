//! Pause, snapshots, VMs from them, fork, hibernate and wake.

use crate::daemon::{Daemon, bad_vm, eventually, id_of, named, pagers, shell, started, vm, vmms};
use crate::daemon::{is_alive, kill, let_go};
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{
    CreateVm, ErrorKind, ForkVm, Forked, Hibernated, MakeSnapshot, MemoryForm, MemoryReport,
    Origin, RunVm, Snapshot, SnapshotMade, Vm, VmState, VolumeUse,
};
use jiffy_wire::timeline::{Timeline, names};
use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

fn snapshot(daemon: &Daemon, vm: &str, name: &str, stop: bool) -> crate::client::Answer {
    let wanted = MakeSnapshot {
        name: name.into(),
        stop,
    };
    let body = serde_json::to_vec(&wanted).unwrap();
    daemon.post(&format!("/v1/vms/{vm}/snapshots"), &body)
}

fn fork(daemon: &Daemon, vm: &str, count: u32, name: Option<&str>) -> crate::client::Answer {
    let wanted = ForkVm {
        count: Some(count),
        name: name.map(str::to_owned),
    };
    let body = serde_json::to_vec(&wanted).unwrap();
    daemon.post(&format!("/v1/vms/{vm}/fork"), &body)
}

fn from(snapshot: &str) -> CreateVm {
    CreateVm {
        from: Some(snapshot.into()),
        ..CreateVm::default()
    }
}

/// A command that counts, and says so, until it is ended.
fn counter() -> CreateVm {
    vm(shell(
        "echo begun $RESTORED; n=0; while true; do n=$((n+1)); echo $n; sleep 0.02; done",
    ))
}

/// In the order of their beginning, these spans are there.
fn in_order(timeline: &Timeline, wanted: &[&str]) {
    let mut last = 0;
    for name in wanted {
        let span = timeline.find(name).unwrap_or_else(|| panic!("no {name}"));
        assert!(span.start_ns >= last, "{name} is out of order");
        last = span.start_ns;
    }
}

fn entries(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// How often the kernel has switched away from a process so far.
fn times_run(pid: u32) -> u64 {
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

/// Waits until a process is stopped; how often it has run by then.
fn stands_still(pid: u32) -> u64 {
    eventually("it is stopped", || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit(')').next().unwrap().starts_with(" T")
    });
    times_run(pid)
}

#[test]
fn a_paused_vm_stands_still_until_it_is_resumed() {
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
    // Twice is once.
    assert_eq!(daemon.post("/v1/vms/box/pause", b"").status, 200);
    let still = stands_still(pid);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(stands_still(pid), still);
    let error = daemon
        .exec("box", &shell("true"))
        .unwrap_err()
        .error(ErrorKind::WrongState);
    assert!(error.hint.unwrap().contains("jiffy resume box"));
    snapshot(&daemon, "box", "one", false).error(ErrorKind::WrongState);
    // It stays paused over daemons.
    daemon.killed();
    daemon.up();
    assert_eq!(daemon.vm("box").state, VmState::Paused);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(stands_still(pid), still);
    let resumed: Vm = daemon.post("/v1/vms/box/resume", b"").json();
    assert_eq!(resumed.state, VmState::Running);
    assert_eq!(daemon.post("/v1/vms/box/resume", b"").status, 200);
    eventually("it goes on", || times_run(pid) > still + 5);
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
fn a_snapshot_is_made_listed_looked_into_and_removed() {
    let daemon = Daemon::start();
    daemon.run_detached(named("box", counter()));
    let made: SnapshotMade = snapshot(&daemon, "box", "one", false).json();
    in_order(
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
    assert!(!one.cpu_features.is_empty());
    let folder = daemon.data.join("snapshots/one");
    assert_eq!(
        entries(&folder),
        ["ram.image", "root.erofs", "snapshot.json", "state"]
    );
    let before = daemon.logs("box", "").0;
    eventually("the VM goes on", || {
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
    // The same name twice, names that can't be, VMs that don't run.
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
fn a_capture_that_fails_leaves_a_running_vm_and_nothing_else() {
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
    eventually("it goes on", || {
        daemon.logs("box", "").0.len() > before.len()
    });
}

#[test]
fn a_vm_goes_on_from_a_snapshot_any_number_of_times() {
    let daemon = Daemon::start();
    daemon.run_detached(named("box", counter()));
    snapshot(&daemon, "box", "one", true).json::<SnapshotMade>();
    assert_eq!(daemon.delete("/v1/vms/box").status, 204);
    assert_eq!(daemon.delete("/v1/images/base").status, 204);
    let mut generations = HashSet::new();
    for _ in 0..2 {
        // A command of its own takes the place of the captured one.
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
        in_order(
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
    // Without a command: what runs is attached to.
    let mut frames = daemon.run(named("again", from("one")));
    frames.until("begun 1");
    let error = daemon
        .delete("/v1/snapshots/one")
        .error(ErrorKind::Conflict);
    assert!(error.message.contains("in use"), "{}", error.message);
    // It can be started again, and goes on from there again.
    daemon.post("/v1/vms/again/kill", b"").json::<Vm>();
    let started: Vm = daemon.post("/v1/vms/again/start", b"").json();
    assert_eq!(started.state, VmState::Running);
    eventually("its command runs again", || {
        daemon.logs("again", "").0.matches("begun 1").count() == 2
    });
    // And captured: its snapshot has a parent.
    let made: SnapshotMade = snapshot(&daemon, "again", "two", false).json();
    assert_eq!(made.snapshot.parent.as_deref(), Some("one"));
    for vm in daemon.get("/v1/vms?all=true").json::<Vec<Vm>>() {
        daemon.delete(&format!("/v1/vms/{}?force=true", vm.id));
    }
    for name in ["one", "two"] {
        let path = format!("/v1/snapshots/{name}");
        assert_eq!(daemon.delete(&path).status, 204);
    }
    daemon.nothing_left();
    eventually("no pager socket is left", || {
        entries(&daemon.folder.path().join("run/pager")).is_empty()
    });
}

#[test]
fn what_a_snapshot_decides_can_not_be_chosen() {
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

#[test]
fn a_snapshot_of_other_processors_is_refused_with_the_list() {
    let daemon = Daemon::start();
    daemon.run_detached(named("idle", CreateVm::default()));
    snapshot(&daemon, "idle", "one", false).json::<SnapshotMade>();
    let path = daemon.data.join("snapshots/one/snapshot.json");
    let text = fs::read_to_string(&path).unwrap();
    let content = text.split("\"content\":").nth(1).unwrap();
    let content = &content[..content.len() - 1];
    let changed = content.replace(
        "\"cpu_features\":[",
        "\"cpu_features\":[\"teleport\",\"warp\",",
    );
    let sum = crc32c::crc32c(changed.as_bytes());
    fs::write(
        &path,
        format!(
            "{{\"format\":\"jiffy-snapshot\",\"version\":1,\"crc32c\":\"{sum:08x}\",\"content\":{changed}}}"
        ),
    )
    .unwrap();
    let error = daemon
        .try_run(CreateVm {
            command: Some(shell("true")),
            ..from("one")
        })
        .unwrap_err()
        .error(ErrorKind::WrongState);
    assert!(
        error.message.contains("teleport, warp"),
        "{}",
        error.message
    );
    // Of another release of Jiffy: refused with a sentence too.
    fs::write(&path, text.replace("\"version\":1", "\"version\":9")).unwrap();
    let error = daemon.get("/v1/snapshots/one").error(ErrorKind::Internal);
    assert!(error.message.contains("version 9"), "{}", error.message);
    assert_eq!(daemon.delete("/v1/snapshots/one").status, 204);
}

#[test]
fn children_of_a_fork_run_at_once_and_differ() {
    let daemon = Daemon::start();
    daemon.run_detached(named("box", counter()));
    let forked: Forked = fork(&daemon, "box", 3, Some("child")).json();
    in_order(
        &forked.timeline,
        &[
            names::REQUEST_RECEIVED,
            names::QUIESCE,
            names::CAPTURE,
            names::CHILDREN_SPAWNED,
        ],
    );
    let names: Vec<&str> = forked.vms.iter().map(|vm| vm.name.as_str()).collect();
    assert_eq!(names, ["child-1", "child-2", "child-3"]);
    let parent = daemon.vm("box");
    let mut cids = HashSet::from([parent.cid]);
    let mut pids = HashSet::from([parent.pid.unwrap()]);
    for child in &forked.vms {
        assert_eq!(child.state, VmState::Running);
        assert_eq!(child.origin, Some(Origin::ForkedFrom("box".into())));
        assert!(cids.insert(child.cid));
        assert!(pids.insert(child.pid.unwrap()));
        eventually("its command goes on", || {
            daemon.logs(&child.id, "").0.contains("begun 1\n1\n")
        });
    }
    let before = daemon.logs("box", "").0;
    eventually("the parent goes on", || {
        daemon.logs("box", "").0.len() > before.len()
    });
    // A second fork, and a child's; the parent goes first.
    let again: Forked = fork(&daemon, "box", 1, None).json();
    assert_eq!(daemon.delete("/v1/vms/box?force=true").status, 204);
    let deeper: Forked = fork(&daemon, "child-1", 2, None).json();
    let named: HashSet<String> = again
        .vms
        .iter()
        .chain(&deeper.vms)
        .map(|vm| vm.name.clone())
        .collect();
    assert_eq!(named.len(), 3);
    for child in &deeper.vms {
        eventually("it is two captures deep", || {
            daemon.logs(&child.id, "").0.contains("begun 2")
        });
    }
    // A name that is taken: none is made.
    fork(&daemon, "child-1", 2, Some("child")).error(ErrorKind::Conflict);
    fork(&daemon, "child-1", 0, None).error(ErrorKind::Invalid);
    let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    assert_eq!(all.len(), 6);
    for vm in all {
        daemon.delete(&format!("/v1/vms/{}?force=true", vm.id));
    }
    daemon.nothing_left();
}

#[test]
fn what_a_command_wrote_before_a_fork_is_the_parents() {
    let daemon = Daemon::start();
    daemon.run_detached(named(
        "box",
        vm(shell(
            "echo start $RESTORED; head -c 30000 /dev/zero; sleep 100",
        )),
    ));
    eventually("it has written", || daemon.logs("box", "").0.len() > 30_000);
    let forked: Forked = fork(&daemon, "box", 1, Some("child")).json();
    assert_eq!(forked.vms.len(), 1);
    eventually("the child's begins with its own", || {
        daemon.logs("child", "").0.starts_with("start 1\n")
    });
    assert!(daemon.logs("box", "").0.starts_with("start\n"));
}

#[test]
fn a_vm_sleeps_and_wakes_as_the_same() {
    let mut daemon = Daemon::start();
    let mut frames = daemon.run(named("box", counter()));
    frames.until("\n3\n");
    let before = daemon.vm("box");
    let slept: Hibernated = daemon.post("/v1/vms/box/hibernate", b"").json();
    in_order(
        &slept.timeline,
        &[
            names::QUIESCE,
            names::BALLOON,
            names::CAPTURE,
            names::IMAGE_WRITTEN,
            names::SNAPSHOT_NAMED,
        ],
    );
    assert!(slept.bytes > 0);
    assert_eq!(slept.vm.state, VmState::Hibernated);
    assert_eq!(slept.vm.pid, None);
    assert!(!is_alive(before.pid.unwrap()));
    assert!(!daemon.run_folder(&before.id).exists());
    // It is shown with those that run, and it can't be used or lost.
    let shown: Vec<Vm> = daemon.get("/v1/vms").json();
    assert_eq!(shown.len(), 1);
    let error = daemon.exec("box", &shell("true")).unwrap_err();
    let error = error.error(ErrorKind::WrongState);
    assert!(error.hint.unwrap().contains("jiffy wake box"));
    daemon
        .post("/v1/vms/box/stop", b"")
        .error(ErrorKind::WrongState);
    daemon.delete("/v1/vms/box").error(ErrorKind::WrongState);
    daemon.delete("/v1/images/base").error(ErrorKind::Conflict);
    let woken: Vm = daemon.post("/v1/vms/box/wake", b"").json();
    assert_eq!(woken.state, VmState::Running);
    assert_eq!((woken.id, woken.cid), (before.id.clone(), before.cid));
    assert_ne!(woken.pid, before.pid);
    assert_eq!(woken.origin, None, "it is the same VM");
    // The client of `run` stayed: what comes now comes to it.
    frames.until("begun 1\n1\n2\n");
    // Over a daemon's end too.
    daemon
        .post("/v1/vms/box/hibernate", b"")
        .json::<Hibernated>();
    daemon.killed();
    daemon.up();
    assert_eq!(daemon.vm("box").state, VmState::Hibernated);
    assert!(vmms(&daemon.data).is_empty());
    assert!(daemon.logs("box", "").0.starts_with("begun\n1\n2\n3\n"));
    // `start` wakes as well.
    let woken: Vm = daemon.post("/v1/vms/box/start", b"").json();
    assert_eq!(woken.state, VmState::Running);
    eventually("it goes on", || {
        daemon.logs("box", "").0.contains("begun 2")
    });
    daemon.post("/v1/vms/box/wake", b"").json::<Vm>();
    // A sleeping VM can be ended for good.
    daemon
        .post("/v1/vms/box/hibernate", b"")
        .json::<Hibernated>();
    let killed: Vm = daemon.post("/v1/vms/box/kill", b"").json();
    assert_eq!(killed.state, VmState::Exited);
    assert!(!daemon.vm_folder(&before.id).join("hibernated").exists());
    daemon
        .post("/v1/vms/box/wake", b"")
        .error(ErrorKind::WrongState);
    assert_eq!(daemon.delete("/v1/vms/box").status, 204);
    daemon.nothing_left();
}

#[test]
fn a_sleeping_vm_keeps_its_volumes_to_itself() {
    let mut daemon = Daemon::start();
    let with_volume = |name: &str| CreateVm {
        disks: vec![VolumeUse {
            name: "data".into(),
            size_mib: Some(1),
            read_only: false,
            ..VolumeUse::default()
        }],
        ..named(name, CreateVm::default())
    };
    daemon.run_detached(with_volume("one")).json::<Vm>();
    daemon
        .post("/v1/vms/one/hibernate", b"")
        .json::<Hibernated>();
    daemon
        .run_detached(with_volume("two"))
        .error(ErrorKind::Conflict);
    daemon.killed();
    daemon.up();
    daemon
        .run_detached(with_volume("two"))
        .error(ErrorKind::Conflict);
    let woken: Vm = daemon.post("/v1/vms/one/wake", b"").json();
    assert_eq!(woken.state, VmState::Running);
    assert_eq!(daemon.delete("/v1/vms/one?force=true").status, 204);
    daemon.run_detached(with_volume("two")).json::<Vm>();
}

#[test]
fn a_wake_that_fails_leaves_a_sleeping_vm() {
    let daemon = Daemon::start();
    daemon.run_detached(named("box", counter()));
    daemon
        .post("/v1/vms/box/hibernate", b"")
        .json::<Hibernated>();
    let id = daemon.vm("box").id;
    let state = daemon.vm_folder(&id).join("hibernated/state");
    let good = fs::read(&state).unwrap();
    fs::write(&state, b"nonsense").unwrap();
    let error = daemon
        .post("/v1/vms/box/wake", b"")
        .error(ErrorKind::VmFailed);
    assert!(
        error.message.contains("could not be woken"),
        "{}",
        error.message
    );
    assert_eq!(daemon.vm("box").state, VmState::Hibernated);
    fs::write(&state, good).unwrap();
    let woken: Vm = daemon.post("/v1/vms/box/wake", b"").json();
    assert_eq!((woken.state, woken.error), (VmState::Running, None));
}

#[test]
fn a_daemon_killed_in_the_middle_leaves_a_running_vm_and_nothing_half_made() {
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
        daemon.killed();
        asking.join().unwrap();
        let_go(&folder);
        // The VMM has captured, and paused its VM for nobody.
        eventually("it is captured", || done.exists());
        for file in [begun, go, done] {
            fs::remove_file(file).unwrap();
        }
        daemon.up();
        assert!(entries(&daemon.data.join("snapshots")).is_empty());
        let vm = daemon.vm("box");
        assert_eq!((vm.state, vm.pid), (VmState::Running, before), "{path}");
        let seen = daemon.logs("box", "").0;
        eventually("it goes on", || daemon.logs("box", "").0.len() > seen.len());
        let others: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
        assert!(
            others
                .iter()
                .all(|vm| vm.name == "box" || vm.state != VmState::Running),
            "{path}: {others:?}"
        );
        assert!(
            entries(&daemon.vm_folder(&vm.id))
                .iter()
                .all(|name| !name.starts_with('.') && name != "hibernated")
        );
    }
}

#[test]
fn vms_with_volumes_are_cloned_where_files_can_be() {
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
        // This file system makes no clones: it is said, and the VM goes on.
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
    eventually("it goes on", || {
        daemon.logs("box", "").0.len() > before.len()
    });
}

#[test]
fn another_pager_takes_over_from_one_that_died() {
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
    eventually("another one serves the VM", || {
        let now = pagers(daemon.folder.path());
        now.len() == 1 && now != first && std::os::unix::net::UnixStream::connect(&socket).is_ok()
    });
    // A pager outlives its daemon, and is used by the next one.
    let second = pagers(daemon.folder.path());
    daemon.killed();
    daemon.up();
    assert_eq!(pagers(daemon.folder.path()), second);
    let three: Vm = daemon.run_detached(named("three", from("one"))).json();
    assert_eq!(three.state, VmState::Running);
    assert_eq!(pagers(daemon.folder.path()), second);
    // One that died with the daemon is replaced.
    daemon.killed();
    kill(second[0]);
    daemon.up();
    eventually("the VM is served again", || {
        std::os::unix::net::UnixStream::connect(&socket).is_ok()
    });
    for name in ["two", "three"] {
        daemon.delete(&format!("/v1/vms/{name}?force=true"));
    }
    eventually("nobody is served", || {
        entries(&daemon.folder.path().join("run/pager")).is_empty()
    });
    daemon.shut_down();
    eventually("an idle pager ends with its daemon", || {
        pagers(daemon.folder.path()).is_empty()
    });
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
    });
    daemon.post("/v1/run", &body.unwrap()).json::<Vm>();
    optimise().error(ErrorKind::Conflict);
    daemon.delete("/v1/vms/two?force=true");
    // What the stand-in for the pager leaves is no recording.
    let error = optimise().error(ErrorKind::Internal);
    assert!(error.message.contains("recorded"), "{}", error.message);
    daemon
        .post("/v1/snapshots/absent/optimise", b"")
        .error(ErrorKind::NotFound);
}
