//! VMs that hibernate and wake.

use crate::client::{connect, request};
use crate::daemon::{
    Daemon, bad_vm, command, eventually, is_alive, kill, named, release_guest, shell, status_of,
    vm_record, vmms,
};
use crate::snapshots::{assert_span_order, counter};
use jiffy_wire::agent::{Command, ExitStatus};
use jiffy_wire::api::{CreateVm, ErrorKind, Hibernated, Vm, VmState, VolumeUse};
use jiffy_wire::timeline::names;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Makes a hibernated VM whose guest does not pass the gate of a wake until it is released; returns
/// its folder.
fn held_asleep(daemon: &Daemon, command: Command) -> PathBuf {
    let vm = named("box", bad_vm("held", Some(command)));
    let id = daemon.create(&vm).json::<Vm>().id;
    let folder = daemon.vm_folder(&id);
    release_guest(&folder);
    daemon.post("/v1/vms/box/start", b"").json::<Vm>();
    daemon
        .post("/v1/vms/box/hibernate", b"")
        .json::<Hibernated>();
    fs::remove_file(folder.join("go")).unwrap();
    folder
}

#[test]
fn a_stop_during_a_wake_lets_programs_end_in_order() {
    let daemon = Daemon::start();
    let folder = held_asleep(&daemon, command(&["sleep", "1000"]));
    thread::scope(|scope| {
        let wake = scope.spawn(|| daemon.post("/v1/vms/box/wake", b""));
        daemon.when("box", VmState::Starting);
        let stop = scope.spawn(|| daemon.post("/v1/vms/box/stop", b"").json::<Vm>());
        thread::sleep(Duration::from_millis(300));
        assert_eq!(daemon.vm("box").state, VmState::Starting);
        release_guest(&folder);
        let ended = stop.join().unwrap();
        assert_eq!(ended.state, VmState::Exited);
        assert_eq!(ended.exit, Some(ExitStatus::Signal(15)), "by SIGTERM");
        wake.join().unwrap();
    });
}

#[test]
fn a_stop_during_a_wake_that_fails_keeps_the_vm_hibernated() {
    let daemon = Daemon::start();
    held_asleep(&daemon, shell("sleep 1000"));
    thread::scope(|scope| {
        let wake = scope.spawn(|| daemon.post("/v1/vms/box/wake", b""));
        daemon.when("box", VmState::Starting);
        eventually("it has a monitor", || daemon.vm("box").pid.is_some());
        let stop = scope.spawn(|| daemon.post("/v1/vms/box/stop", b""));
        thread::sleep(Duration::from_millis(300));
        kill(daemon.vm("box").pid.expect("a monitor"));
        stop.join().unwrap().error(ErrorKind::WrongState);
        assert_ne!(wake.join().unwrap().status, 200);
    });
    assert_eq!(daemon.vm("box").state, VmState::Hibernated);
}

#[test]
fn a_vm_hibernates_and_wakes_unchanged() {
    let mut daemon = Daemon::start();
    let mut frames = daemon.run(named("box", counter()));
    frames.until("\n3\n");
    let before = daemon.vm("box");
    let slept: Hibernated = daemon.post("/v1/vms/box/hibernate", b"").json();
    assert_span_order(
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
    // It is listed with running VMs, so that users don't overlook it.
    let shown: Vec<Vm> = daemon.get("/v1/vms").json();
    assert_eq!(shown.len(), 1);
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
    // Its origin is not used again.
    let state = daemon.vm_folder(&before.id).join("hibernated/state");
    eventually("its state is gone", || !state.exists());
    // The client of `run` is still attached, and gets later output.
    frames.until("begun 1\n1\n2\n");
    // Also across a restart of the daemon.
    daemon
        .post("/v1/vms/box/hibernate", b"")
        .json::<Hibernated>();
    daemon.killed();
    daemon.up();
    assert_eq!(daemon.vm("box").state, VmState::Hibernated);
    assert!(vmms(&daemon.data).is_empty());
    assert!(daemon.logs("box", "").0.starts_with("begun\n1\n2\n3\n"));
    // `start` wakes it as well.
    let woken: Vm = daemon.post("/v1/vms/box/start", b"").json();
    assert_eq!(woken.state, VmState::Running);
    eventually("it continues", || {
        daemon.logs("box", "").0.contains("begun 2")
    });
    daemon.post("/v1/vms/box/wake", b"").json::<Vm>();
    // A hibernated VM can be ended for good.
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
    daemon.assert_nothing_left();
}

#[test]
fn hibernation_does_not_remove_a_vm_with_remove_set() {
    let mut daemon = Daemon::start();
    let vm = CreateVm {
        remove: true,
        ..named("box", counter())
    };
    daemon.run_detached(vm).json::<Vm>();
    daemon
        .post("/v1/vms/box/hibernate", b"")
        .json::<Hibernated>();
    daemon.killed();
    daemon.up();
    assert_eq!(daemon.vm("box").state, VmState::Hibernated);
    let woken: Vm = daemon.post("/v1/vms/box/wake", b"").json();
    assert_eq!(woken.state, VmState::Running);
    daemon.post("/v1/vms/box/kill", b"");
    daemon.gone("box");
    daemon.assert_nothing_left();
}

#[test]
fn a_hibernated_vm_keeps_its_volumes() {
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
fn a_failed_wake_leaves_a_hibernated_vm() {
    let daemon = Daemon::start();
    daemon.run_detached(named("box", counter()));
    daemon
        .post("/v1/vms/box/hibernate", b"")
        .json::<Hibernated>();
    let id = daemon.vm("box").id;
    let state = daemon.vm_folder(&id).join("hibernated/state");
    let good = fs::read(&state).unwrap();
    // Only the VMM detects the damage.
    fs::write(&state, jiffy_wire::state::seal("0.1.0", b"nonsense")).unwrap();
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
fn after_a_start_a_vm_that_cant_be_woken_is_told_until_it_can() {
    let mut daemon = Daemon::with(&["--spare", "0", "--standby", "0"]);
    for name in ["box", "other"] {
        daemon.run_detached(named(name, counter())).json::<Vm>();
        daemon
            .post(&format!("/v1/vms/{name}/hibernate"), b"")
            .json::<Hibernated>();
    }
    let state = daemon
        .vm_folder(&daemon.vm("box").id)
        .join("hibernated/state");
    daemon.shut_down();
    let good = fs::read(&state).unwrap();
    fs::remove_file(&state).unwrap();
    let gone = format!(
        "The memory of the VM box can't be read: {} is missing.",
        state.display()
    );
    // The first request shows it: a list, and one VM.
    daemon.up();
    let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    let error = |name: &str| all.iter().find(|vm| vm.name == name).unwrap().error.clone();
    assert_eq!((error("box"), error("other")), (Some(gone.clone()), None));
    daemon.shut_down();
    daemon.up();
    assert_eq!(daemon.vm("box").error, Some(gone));
    assert_eq!(daemon.vm("other").error, None);
    let error = daemon
        .post("/v1/vms/box/wake", b"")
        .error(ErrorKind::Internal);
    assert!(error.message.contains("is missing"), "{}", error.message);
    // Nobody asks: the log says it.
    daemon.shut_down();
    let log = daemon.folder.path().join("jiffyd.log");
    let before = fs::read_to_string(&log).unwrap().len();
    daemon.up();
    eventually("it is logged", || {
        let told = "a VM can't be woken vm=box ";
        fs::read_to_string(&log).unwrap()[before..].contains(told)
    });
    fs::write(&state, good).unwrap();
    let woken: Vm = daemon.post("/v1/vms/box/wake", b"").json();
    assert_eq!((woken.state, woken.error), (VmState::Running, None));
    let slept: Hibernated = daemon.post("/v1/vms/box/hibernate", b"").json();
    assert_eq!(slept.vm.error, None);
    assert_eq!(daemon.vm("box").error, None);
}

#[test]
fn a_vm_that_is_not_awake_in_time_stays_hibernated() {
    let daemon = Daemon::with(&["--start-timeout", "1"]);
    let folder = held_asleep(&daemon, counter_command());
    let error = daemon
        .post("/v1/vms/box/wake", b"")
        .error(ErrorKind::VmFailed);
    assert_eq!(
        error.message,
        "The VM box could not be woken: its guest was not ready after 1 s."
    );
    assert_eq!(daemon.vm("box").state, VmState::Hibernated);
    release_guest(&folder);
    let woken: Vm = daemon.post("/v1/vms/box/wake", b"").json();
    assert_eq!((woken.state, woken.error), (VmState::Running, None));
}

#[test]
fn a_vm_that_ran_without_a_daemon_is_not_hibernated_again() {
    let mut daemon = Daemon::start();
    let folder = held_asleep(&daemon, counter_command());
    // The daemon dies while the VM wakes. Then its programs run, so that its disks are newer than its
    // memory on disk.
    let socket = daemon.socket();
    let asked = thread::spawn(move || {
        let stream = connect(&socket)?;
        request(stream, "POST /v1/vms/box/wake HTTP/1.1", b"")
    });
    eventually("its VMM starts", || !vmms(&daemon.data).is_empty());
    daemon.killed();
    // Nobody answers.
    assert!(asked.join().unwrap().is_err());
    release_guest(&folder);
    let record = folder.join("hibernated/passed");
    eventually("its guest passes the gate", || {
        fs::metadata(&record).is_ok_and(|file| file.len() > 0)
    });
    for vmm in vmms(&daemon.data) {
        kill(vmm);
    }
    daemon.up();
    assert_eq!(daemon.vm("box").state, VmState::Exited);
    daemon
        .post("/v1/vms/box/wake", b"")
        .error(ErrorKind::WrongState);
}

/// How often this VM was started or woken.
pub fn starts(daemon: &Daemon, name: &str) -> usize {
    let log = fs::read_to_string(daemon.folder.path().join("jiffyd.log")).unwrap();
    let of_it = format!("VM starting vm={name} ");
    log.lines().filter(|line| line.contains(&of_it)).count()
}

#[test]
fn concurrent_requests_wake_a_vm_once() {
    let daemon = Daemon::start();
    // The program ends when nobody reads its output: its VMM may be killed.
    let command = shell("while echo on; do sleep 0.02; done");
    let frames = daemon.run(named("box", bad_vm("held", Some(command))));
    let id = daemon.vm("box").id;
    release_guest(&daemon.vm_folder(&id));
    daemon.when("box", VmState::Running);
    drop(frames);
    for round in 2..5 {
        daemon
            .post("/v1/vms/box/hibernate", b"")
            .json::<Hibernated>();
        // Its guest is slow, so that all of them come during the wake.
        fs::remove_file(daemon.vm_folder(&id).join("go")).unwrap();
        thread::scope(|scope| {
            let mut all = Vec::new();
            for path in ["wake", "start", "wake"] {
                let path = format!("/v1/vms/box/{path}");
                let daemon = &daemon;
                all.push(scope.spawn(move || {
                    let woken: Vm = daemon.post(&path, b"").json();
                    assert_eq!(woken.state, VmState::Running);
                }));
            }
            for _ in 0..3 {
                all.push(scope.spawn(|| {
                    let done = daemon.exec("box", &shell("echo here")).unwrap().finish();
                    assert_eq!(done.text(), "here\n");
                }));
            }
            all.push(scope.spawn(|| drop(daemon.stream("/v1/vms/box/attach", b"").unwrap())));
            let state = || daemon.vm("box").state;
            eventually("it wakes", || state() == VmState::Starting);
            release_guest(&daemon.vm_folder(&id));
            for one in all {
                one.join().unwrap();
            }
        });
        assert_eq!(starts(&daemon, "box"), round);
        assert_eq!(daemon.vm("box").error, None);
    }
    // Requests wait for the end of a hibernation, and then wake the VM.
    thread::scope(|scope| {
        let sleeps = scope.spawn(|| daemon.post("/v1/vms/box/hibernate", b"").status);
        let log = daemon.folder.path().join("jiffyd.log");
        let before = starts(&daemon, "box");
        while !sleeps.is_finished() {
            let exec = daemon.exec("box", &shell("echo here"));
            // Requests from before the hibernation fail as for a VM that ends, and wake nothing.
            if starts(&daemon, "box") > before {
                assert_eq!(exec.unwrap().finish().text(), "here\n", "{}", log.display());
            }
        }
        assert_eq!(sleeps.join().unwrap(), 200);
    });
}

#[test]
fn every_request_hears_that_a_vm_cannot_be_woken() {
    let daemon = Daemon::start();
    daemon.run_detached(named("box", counter()));
    daemon
        .post("/v1/vms/box/hibernate", b"")
        .json::<Hibernated>();
    let id = daemon.vm("box").id;
    let state = daemon.vm_folder(&id).join("hibernated/state");
    let good = fs::read(&state).unwrap();
    // A reason that is not in its record is in the list, too.
    fs::remove_file(&state).unwrap();
    let refused = daemon.exec("box", &shell("true")).unwrap_err();
    refused.error(ErrorKind::Internal);
    let list = connect(&daemon.socket())
        .and_then(|stream| request(stream, "GET /v1/vms HTTP/1.1\r\nAccept: text/plain", b""))
        .unwrap();
    let list = String::from_utf8(list.body).unwrap();
    assert!(list.contains("(error)"), "{list}");
    // Only the VMM detects the damage.
    fs::write(&state, jiffy_wire::state::seal("0.1.0", b"nonsense")).unwrap();
    let refused = [
        daemon.exec("box", &shell("true")).unwrap_err(),
        daemon.stream("/v1/vms/box/attach", b"").unwrap_err(),
        daemon
            .stream("/v1/vms/box/copy-out?path=/etc/hostname", b"")
            .unwrap_err(),
    ];
    for answer in refused {
        let error = answer.error(ErrorKind::VmFailed);
        assert!(error.message.contains("could not be woken"), "{error:?}");
        assert_eq!(daemon.vm("box").state, VmState::Hibernated);
    }
    fs::write(&state, good).unwrap();
    let done = daemon.exec("box", &shell("echo here")).unwrap().finish();
    assert_eq!(done.text(), "here\n");
    assert_eq!(daemon.vm("box").error, None);
}

#[test]
fn a_vm_whose_command_exits_during_a_pause_ends() {
    let daemon = Daemon::start();
    daemon.run_detached(named(
        "box",
        bad_vm("end-at-pause", Some(shell("sleep 1000"))),
    ));
    let error = daemon
        .post("/v1/vms/box/pause", b"")
        .error(ErrorKind::WrongState);
    assert!(error.message.contains("ended meanwhile"), "{error:?}");
    daemon.when("box", VmState::Exited);
}

#[test]
fn a_fork_parent_that_fails_to_resume_stays_paused() {
    let daemon = Daemon::start();
    let with_volume = CreateVm {
        disks: vec![VolumeUse {
            name: "data".into(),
            size_mib: Some(1),
            ..VolumeUse::default()
        }],
        ..named("box", bad_vm("resume-fails", Some(counter_command())))
    };
    daemon.run_detached(with_volume).json::<Vm>();
    let error = daemon
        .post("/v1/vms/box/fork", b"{}")
        .error(ErrorKind::VmFailed);
    assert!(error.message.contains("could not be resumed"), "{error:?}");
    assert_eq!(daemon.vm("box").state, VmState::Paused);
    let resumed: Vm = daemon.post("/v1/vms/box/resume", b"").json();
    assert_eq!(resumed.state, VmState::Running);
    let seen = daemon.logs("box", "").0.len();
    eventually("it continues", || daemon.logs("box", "").0.len() > seen);
    assert_eq!(daemon.get("/v1/vms").json::<Vec<Vm>>().len(), 1);
}

fn counter_command() -> Command {
    counter().command.unwrap()
}

/// Copies the folder of a hibernated VM for a VM with another id, name and context id. Immutable
/// files are shared.
fn copied(from: &Path, to: &Path, number: u32) {
    fs::create_dir_all(to.join("hibernated")).unwrap();
    for file in fs::read_dir(from.join("hibernated")).unwrap() {
        let file = file.unwrap();
        fs::hard_link(file.path(), to.join("hibernated").join(file.file_name())).unwrap();
    }
    fs::hard_link(from.join("command.log"), to.join("command.log")).unwrap();
    let record = fs::read_to_string(from.join("vm.json")).unwrap();
    let mut record: Value = serde_json::from_str(&record).unwrap();
    let content = &mut record["content"];
    content["id"] = to.file_name().unwrap().to_str().unwrap().into();
    content["name"] = format!("sleeper-{number}").into();
    content["cid"] = (20_000 + number).into();
    fs::write(to.join("vm.json"), vm_record(&content.to_string())).unwrap();
}

/// Clock ticks (10 ms) of CPU time that a process has used.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let fields: Vec<&str> = fields.split_whitespace().collect();
    // proc_pid_stat(5): utime and stime.
    [11, 12]
        .map(|at: usize| fields[at].parse::<u64>().unwrap())
        .iter()
        .sum()
}

#[test]
fn ten_thousand_hibernated_vms_cost_little() {
    const SLEEPERS: u32 = 10_000;
    /// The VMs of the first start.
    const FEWER: u32 = 2_500;
    /// 128 MiB for ten thousand.
    const EACH: u64 = 13_400;
    /// Most CPU time of a start, in ticks. A release build is faster.
    const START: u64 = 1_000;
    let mut daemon = Daemon::with(&["--spare", "0", "--standby", "0"]);
    let mut frames = daemon.run(named("sleeper-0", counter()));
    frames.until("\n3\n");
    drop(frames);
    daemon
        .post("/v1/vms/sleeper-0/hibernate", b"")
        .json::<Hibernated>();
    let first = daemon.vm("sleeper-0").id;
    daemon.shut_down();
    daemon.up();
    let resident = |daemon: &Daemon| status_of(daemon.pid(), "VmRSS") * 1024;
    let alone = resident(&daemon);
    // The CPU time of a start with so many VMs: other tests run meanwhile.
    let mut start_with = |made: u32, wanted: u32| {
        daemon.shut_down();
        for number in made..wanted {
            let id = format!("{:012x}", 0xabc0_0000_0000_u64 + u64::from(number));
            copied(&daemon.vm_folder(&first), &daemon.vm_folder(&id), number);
        }
        let begun = Instant::now();
        daemon.up();
        let (answers, ticks) = (begun.elapsed(), cpu_ticks(daemon.pid()));
        println!("{wanted} VMs: {ticks} ticks of CPU time, answers after {answers:?}");
        ticks
    };
    let few = start_with(1, FEWER);
    let mut many = start_with(FEWER, SLEEPERS);
    let growth = |many: u64| many * u64::from(FEWER) / (few.max(10) * u64::from(SLEEPERS));
    // The host's processors may have become slower since the first start.
    for _ in 0..3 {
        if many > START || growth(many) >= 2 {
            many = many.min(start_with(SLEEPERS, SLEEPERS));
        }
    }
    assert!(many <= START, "{many} ticks");
    assert!(
        growth(many) < 2,
        "{few} ticks with {FEWER} VMs, {many} with {SLEEPERS}"
    );
    let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    assert_eq!(all.len(), SLEEPERS as usize);
    assert!(all.iter().all(|vm| vm.state == VmState::Hibernated));
    let each = resident(&daemon).saturating_sub(alone) / u64::from(SLEEPERS);
    println!("{each} bytes a sleeping VM, {alone} bytes without them");
    assert!(each <= EACH, "{each} bytes a sleeping VM");
    let threads = status_of(daemon.pid(), "Threads");
    assert!(threads < 40, "{threads} threads");
    let woken: Vm = daemon.post("/v1/vms/sleeper-9999/wake", b"").json();
    assert_eq!(woken.state, VmState::Running);
}

/// The nice values of a process's threads.
fn nice_values(pid: u32) -> impl Iterator<Item = i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks.filter_map(|task| {
        // A thread may end meanwhile.
        let stat = fs::read_to_string(task.ok()?.path().join("stat")).ok()?;
        // proc_pid_stat(5): nice is the 17th field after the name.
        let (_, fields) = stat.rsplit_once(')')?;
        fields.split_whitespace().nth(16)?.parse().ok()
    })
}

#[test]
fn captures_are_written_with_a_lower_priority() {
    let daemon = Daemon::with(&["--spare", "0", "--standby", "0"]);
    daemon.run_detached(named("box", counter())).json::<Vm>();
    let pid = daemon.pid();
    let normal = nice_values(pid).min().unwrap();
    let lower = (normal + jiffy_sys::priority::AWAITED).min(19);
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let seen = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            while !seen.contains(&lower) && !ended.load(Ordering::Relaxed) {
                seen.extend(nice_values(pid));
            }
            seen
        });
        // A thread that writes may end before it is seen.
        for _ in 0..100 {
            if seen.is_finished() {
                break;
            }
            daemon
                .post("/v1/vms/box/hibernate", b"")
                .json::<Hibernated>();
            daemon.post("/v1/vms/box/wake", b"").json::<Vm>();
        }
        ended.store(true, Ordering::Relaxed);
        let seen = seen.join().unwrap();
        assert!(seen.contains(&lower), "{seen:?}");
    });
    // The daemon's other threads keep theirs.
    eventually("only normal threads are left", || {
        nice_values(pid).all(|nice| nice == normal)
    });
}
