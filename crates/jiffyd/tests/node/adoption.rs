//! Daemons that end while VMs run on.

use crate::client::{connect, request};
use crate::daemon::{
    Daemon, bad_vm, command, eventually, id_of, is_alive, kill, named, release_guest, shell,
    started, vm, vm_record, vmms,
};
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{CreateVm, ErrorKind, Vm, VmState, VolumeUse};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn vms_survive_a_killed_daemon_and_are_adopted() {
    let mut daemon = Daemon::start();
    let go = daemon.folder.path().join("go");
    let script = format!(
        "echo before; while ! test -e {}; do sleep 0.02; done; echo after; exit 6",
        go.display()
    );
    daemon.run_detached(named("long", vm(shell(&script))));
    daemon.run_detached(named("idle", CreateVm::default()));
    eventually("the first output is stored", || {
        daemon.logs("long", "").0 == "before\n"
    });
    let pids: Vec<_> = ["long", "idle"].map(|name| daemon.vm(name).pid).into();
    daemon.killed();
    daemon.up();
    for (name, pid) in ["long", "idle"].into_iter().zip(pids) {
        let vm = daemon.vm(name);
        assert_eq!((vm.state, vm.pid), (VmState::Running, pid), "{name}");
    }
    let finished = daemon
        .exec("idle", &shell("echo still here"))
        .unwrap()
        .finish();
    assert_eq!(finished.text(), "still here\n");
    let attached = daemon.stream("/v1/vms/long/attach", b"").unwrap();
    fs::write(&go, "").unwrap();
    let finished = attached.finish();
    assert_eq!(finished.text(), "before\nafter\n");
    assert_eq!(finished.status(), ExitStatus::Code(6));
    daemon.when("long", VmState::Exited);
    let stopped: Vm = daemon.post("/v1/vms/idle/stop", b"").json();
    assert_eq!((stopped.state, stopped.error), (VmState::Exited, None));
}

#[test]
fn output_and_exits_without_a_daemon_are_not_lost() {
    let mut daemon = Daemon::start();
    let go = daemon.folder.path().join("go");
    let wait = format!("while ! test -e {}; do sleep 0.02; done", go.display());
    daemon.run_detached(named(
        "ends",
        vm(shell(&format!("{wait}; head -c 100000 /dev/zero; exit 9"))),
    ));
    daemon.run_detached(named(
        "passing",
        CreateVm {
            remove: true,
            ..vm(shell(&format!("{wait}; exit 1")))
        },
    ));
    let passing = daemon.vm("passing").id;
    daemon.run_detached(named("shot", CreateVm::default()));
    let shot = daemon.vm("shot").pid.unwrap();
    daemon.killed();
    fs::write(&go, "").unwrap();
    kill(shot);
    std::thread::sleep(Duration::from_millis(300));
    daemon.up();
    let ended = daemon.when("ends", VmState::Exited);
    assert_eq!((ended.exit, ended.error), (Some(ExitStatus::Code(9)), None));
    assert_eq!(daemon.logs("ends", "").0.len(), 100_000);
    daemon.gone("passing");
    assert!(!daemon.vm_folder(&passing).exists());
    let shot = daemon.when("shot", VmState::Exited);
    assert!(shot.error.unwrap().contains("VMM"));
}

#[test]
fn a_starting_vm_becomes_ready_under_the_next_daemon() {
    let mut daemon = Daemon::start();
    let mut frames = daemon.run(named(
        "slow",
        bad_vm("held", Some(shell("echo hello; sleep 100"))),
    ));
    let id = id_of(&frames);
    eventually("its record is written", || {
        daemon.vm_folder(&id).join("vm.json").exists()
    });
    daemon.killed();
    assert_eq!(
        frames.next::<jiffy_wire::agent::ExecOutput>(),
        None,
        "the stream ends between frames"
    );
    daemon.up();
    assert_eq!(daemon.vm("slow").state, VmState::Starting);
    release_guest(&daemon.vm_folder(&id));
    daemon.when("slow", VmState::Running);
    eventually("its output is there", || {
        daemon.logs("slow", "").0 == "hello\n"
    });
}

#[test]
fn the_next_daemon_lets_a_stopping_guest_write_back() {
    let mut daemon = Daemon::start();
    let asked = command(&["sleep", "100"]);
    let asked: Vm = daemon
        .run_detached(named("asked", bad_vm("slow-off", Some(asked))))
        .json();
    let itself = command(&["true"]);
    let frames = daemon.run(named("itself", bad_vm("slow-off", Some(itself))));
    let vms = [asked.id, id_of(&frames)];
    let stopping = connect(&daemon.socket()).unwrap();
    let request = format!(
        "POST /v1/vms/{}/stop?grace_ms=0 HTTP/1.1\r\nHost: node",
        vms[0]
    );
    (&stopping)
        .write_all(format!("{request}\r\nContent-Length: 0\r\n\r\n").as_bytes())
        .unwrap();
    eventually("both power off, and that is written", || {
        vms.iter().all(|id| {
            let record = fs::read_to_string(daemon.vm_folder(id).join("vm.json"));
            record.is_ok_and(|record| record.contains(r#""powering_off":true"#))
        })
    });
    daemon.killed();
    daemon.up();
    std::thread::scope(|scope| {
        let stop = |id: &str| daemon.post(&format!("/v1/vms/{id}/stop?grace_ms=0"), b"");
        let stops = [&vms[0], &vms[1]].map(|id| scope.spawn(move || stop(id)));
        // The guests have no agent any more; otherwise such VMs would be killed at once.
        std::thread::sleep(Duration::from_millis(500));
        for id in &vms {
            assert_eq!(daemon.vm(id).state, VmState::Stopping);
            release_guest(&daemon.vm_folder(id));
        }
        for stop in stops {
            let stopped: Vm = stop.join().unwrap().json();
            assert_eq!((stopped.state, stopped.error), (VmState::Exited, None));
            assert!(daemon.vm_folder(&stopped.id).join("written").exists());
        }
    });
}

#[test]
fn a_clean_daemon_shutdown_leaves_vms_running() {
    let mut daemon = Daemon::start();
    daemon.run_detached(named("idle", CreateVm::default()));
    let pid = daemon.vm("idle").pid.unwrap();
    daemon.shut_down();
    assert!(!daemon.socket().exists());
    assert!(is_alive(pid));
    daemon.up();
    assert_eq!(daemon.vm("idle").pid, Some(pid));
    let timeline: jiffy_wire::timeline::Timeline = daemon.get("/v1/vms/idle/timeline").json();
    assert!(
        timeline.find("PID 1").is_some(),
        "what was measured before is kept"
    );
}

#[test]
fn vmms_of_unknown_vms_are_killed_and_their_files_removed() {
    let mut daemon = Daemon::start();
    daemon.run_detached(named("orphan", CreateVm::default()));
    let vm = daemon.vm("orphan");
    daemon.killed();
    fs::remove_file(daemon.vm_folder(&vm.id).join("vm.json")).unwrap();
    let stray = daemon.folder.path().join("run/vms/0123456789ab");
    fs::create_dir(&stray).unwrap();
    fs::create_dir(daemon.data.join("vms/.gone-0123456789ab")).unwrap();
    daemon.up();
    assert!(!is_alive(vm.pid.unwrap()));
    assert!(vmms(&daemon.data).is_empty());
    daemon.get("/v1/vms/orphan").error(ErrorKind::NotFound);
    daemon.assert_nothing_left();
}

#[test]
fn an_unreadable_record_is_listed_and_can_be_removed() {
    let mut daemon = Daemon::start();
    let broken: Vm = daemon.create(&named("broken", CreateVm::default())).json();
    let newer: Vm = daemon.create(&named("newer", CreateVm::default())).json();
    let whole: Vm = daemon.create(&named("whole", CreateVm::default())).json();
    daemon.killed();
    let data = daemon.data.clone();
    let record = |vm: &Vm| data.join("vms").join(&vm.id).join("vm.json");
    let text = fs::read_to_string(record(&broken)).unwrap();
    fs::write(record(&broken), text.replace("\"broken\"", "\"bloken\"")).unwrap();
    let text = fs::read_to_string(record(&newer)).unwrap();
    fs::write(
        record(&newer),
        text.replace("\"version\":1", "\"version\":2"),
    )
    .unwrap();
    daemon.up();
    assert_eq!(daemon.vm("whole").id, whole.id);
    let shown = daemon.vm(&broken.id);
    assert!(shown.error.unwrap().contains("checksum"));
    assert!(daemon.vm(&newer.id).error.unwrap().contains("version 2"));
    assert_eq!(
        daemon.vm("newer").id,
        newer.id,
        "the name in a newer record is not used"
    );
    for vm in [&broken, &newer] {
        daemon
            .post(&format!("/v1/vms/{}/start", vm.id), b"")
            .error(ErrorKind::WrongState);
    }
    let refused = daemon.delete(&format!("/v1/vms/{}", newer.id));
    let refused = refused.error(ErrorKind::WrongState);
    assert!(refused.message.contains("newer release"), "{refused:?}");
    assert!(record(&newer).exists());
    for vm in [&broken, &whole] {
        assert_eq!(daemon.delete(&format!("/v1/vms/{}", vm.id)).status, 204);
    }
    let forced = daemon.delete(&format!("/v1/vms/{}?force=true", newer.id));
    assert_eq!(forced.status, 204);
    daemon.assert_nothing_left();
}

/// A VM with a volume of its own name, which its record lists.
fn with_volume(name: &str) -> CreateVm {
    let volume = VolumeUse {
        name: name.into(),
        size_mib: Some(1),
        ..VolumeUse::default()
    };
    CreateVm {
        disks: vec![volume],
        ..named(name, CreateVm::default())
    }
}

#[test]
fn a_vm_with_an_unreadable_record_runs_on_and_is_listed() {
    let mut daemon = Daemon::start();
    for name in ["broken", "newer"] {
        daemon.run_detached(with_volume(name)).json::<Vm>();
    }
    let [broken, newer] = ["broken", "newer"].map(|name| daemon.vm(name));
    daemon.killed();
    let data = daemon.data.clone();
    let record = |vm: &Vm| data.join("vms").join(&vm.id).join("vm.json");
    let whole = fs::read_to_string(record(&newer)).unwrap();
    for (vm, before, after) in [
        (&broken, "\"broken\"", "\"bloken\""),
        (&newer, "\"version\":1", "\"version\":2"),
    ] {
        let text = fs::read_to_string(record(vm)).unwrap();
        assert!(text.contains(before));
        fs::write(record(vm), text.replace(before, after)).unwrap();
    }
    let records = [&broken, &newer].map(|vm| fs::read(record(vm)).unwrap());
    daemon.up();
    for (vm, why) in [(&broken, "checksum"), (&newer, "newer release")] {
        let path = format!("/v1/vms/{}", vm.id);
        let shown = daemon.vm(&vm.id);
        assert_eq!((shown.state, shown.pid), (VmState::Running, vm.pid));
        assert!(shown.error.unwrap().contains(why));
        assert!(is_alive(vm.pid.unwrap()));
        assert!(daemon.run_folder(&vm.id).exists());
        for order in ["start", "stop", "pause", "hibernate", "fork"] {
            let refused = daemon.post(&format!("{path}/{order}"), b"{}");
            let refused = refused.error(ErrorKind::WrongState);
            assert!(refused.message.contains(why), "{order}: {refused:?}");
        }
        let refused = daemon.exec(&vm.id, &shell("true")).err().unwrap();
        refused.error(ErrorKind::WrongState);
        daemon.delete(&path).error(ErrorKind::WrongState);
        // No other VM writes to its volume.
        let other = CreateVm {
            name: Some(format!("not-{}", vm.id)),
            ..with_volume(if vm.id == newer.id { "newer" } else { "broken" })
        };
        let refused = daemon.run_detached(other).error(ErrorKind::Conflict);
        assert!(refused.message.contains("volume"), "{refused:?}");
    }
    assert_eq!(daemon.vm("newer").id, newer.id);
    daemon.shut_down();
    assert_eq!(
        records,
        [&broken, &newer].map(|vm| fs::read(record(vm)).unwrap())
    );

    // The release that wrote the record finds it unchanged.
    fs::write(record(&newer), whole).unwrap();
    daemon.up();
    let shown = daemon.vm("newer");
    assert_eq!(
        (shown.state, shown.pid, shown.error),
        (VmState::Running, newer.pid, None)
    );
    let finished = daemon
        .exec("newer", &shell("echo still here"))
        .unwrap()
        .finish();
    assert_eq!(finished.text(), "still here\n");

    // A user can end the other.
    let killed: Vm = daemon
        .post(&format!("/v1/vms/{}/kill", broken.id), b"")
        .json();
    assert_eq!((killed.state, killed.pid), (VmState::Exited, None));
    assert!(!is_alive(broken.pid.unwrap()));
    for id in [&broken.id, &newer.id] {
        let removed = daemon.delete(&format!("/v1/vms/{id}?force=true"));
        assert_eq!(removed.status, 204);
    }
    let names: Vec<String> = daemon
        .get("/v1/vms?all=true")
        .json::<Vec<Vm>>()
        .into_iter()
        .map(|vm| vm.name)
        .collect();
    assert!(
        names.iter().all(|name| name.starts_with("not-")),
        "{names:?}"
    );
    for name in names {
        daemon.delete(&format!("/v1/vms/{name}"));
    }
    daemon.assert_nothing_left();
}

#[test]
fn a_vm_of_a_newer_release_that_ends_or_sleeps_is_kept() {
    let mut daemon = Daemon::start();
    for name in ["shot", "asleep"] {
        daemon.run_detached(with_volume(name)).json::<Vm>();
    }
    daemon
        .post("/v1/vms/asleep/hibernate", b"")
        .json::<jiffy_wire::api::Hibernated>();
    let [shot, asleep] = ["shot", "asleep"].map(|name| daemon.vm(name));
    daemon.killed();
    for vm in [&shot, &asleep] {
        let record = daemon.vm_folder(&vm.id).join("vm.json");
        let text = fs::read_to_string(&record).unwrap();
        fs::write(&record, text.replace("\"version\":1", "\"version\":2")).unwrap();
    }
    daemon.up();
    assert_eq!(daemon.vm("asleep").state, VmState::Hibernated);
    daemon
        .post("/v1/vms/asleep/wake", b"")
        .error(ErrorKind::WrongState);
    daemon
        .post("/v1/vms/asleep/kill", b"")
        .error(ErrorKind::WrongState);
    daemon.delete("/v1/vms/asleep").error(ErrorKind::WrongState);
    let other = CreateVm {
        name: Some("other".into()),
        ..with_volume("asleep")
    };
    daemon.run_detached(other).error(ErrorKind::Conflict);
    kill(shot.pid.unwrap());
    daemon.when("shot", VmState::Exited);
    daemon.delete("/v1/vms/shot").error(ErrorKind::WrongState);
    daemon.shut_down();
    daemon.up();
    assert_eq!(daemon.vm("shot").state, VmState::Exited);
    assert_eq!(daemon.vm("asleep").state, VmState::Hibernated);
    assert!(
        daemon
            .vm_folder(&asleep.id)
            .join("hibernated/state")
            .exists()
    );
    let again = CreateVm {
        name: Some("again".into()),
        ..with_volume("shot")
    };
    daemon.run_detached(again).json::<Vm>();
    for name in ["shot", "asleep"] {
        let removed = daemon.delete(&format!("/v1/vms/{name}?force=true"));
        assert_eq!(removed.status, 204, "{name}");
    }
    for name in ["other", "again"] {
        daemon.delete(&format!("/v1/vms/{name}?force=true"));
    }
    daemon.assert_nothing_left();
}

#[test]
fn a_second_daemon_is_refused_and_a_stale_socket_replaced() {
    let mut daemon = Daemon::start();
    let second = daemon.command().output().unwrap();
    assert!(!second.status.success());
    let said = String::from_utf8_lossy(&second.stderr);
    let said = said.trim();
    assert!(
        said.starts_with("jiffyd: Another jiffyd (process "),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1);
    daemon.killed();
    assert!(daemon.socket().exists());
    assert!(connect(&daemon.socket()).is_err());
    daemon.up();
    assert_eq!(daemon.get("/v1/info").status, 200);
}

#[test]
fn the_next_daemon_waits_for_one_that_is_ending() {
    let mut daemon = Daemon::start();
    let mut next = daemon.command().stderr(Stdio::null()).spawn().unwrap();
    // Time enough for it to find the folder locked; if it was not locked, it has it now.
    std::thread::sleep(Duration::from_millis(200));
    daemon.killed();
    daemon.answers();
    next.kill().unwrap();
    next.wait().unwrap();
    daemon.up();
}

#[test]
fn a_daemon_on_a_used_socket_is_refused() {
    let daemon = Daemon::start();
    let other = tempfile::tempdir().unwrap();
    let second = std::process::Command::new(env!("CARGO_BIN_EXE_jiffyd"))
        .arg("--data")
        .arg(other.path())
        .arg("--run")
        .arg(daemon.folder.path().join("run"))
        .output()
        .unwrap();
    assert!(!second.status.success());
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(said.contains("already answers on"), "{said}");
    let answer = request(
        connect(&daemon.socket()).unwrap(),
        "GET /v1/info HTTP/1.1",
        b"",
    );
    assert_eq!(answer.unwrap().status, 200);
}

#[test]
fn random_kills_of_the_daemon_leak_nothing() {
    let mut daemon = Daemon::start();
    for round in 0..6u64 {
        let mut frames = daemon.run(CreateVm {
            remove: true,
            ..vm(command(&["true"]))
        });
        std::thread::sleep(Duration::from_millis(round * 7));
        daemon.killed();
        while frames.next::<jiffy_wire::agent::ExecOutput>().is_some() {}
        daemon.up();
    }
    let mut frames = daemon.run(CreateVm {
        remove: true,
        ..vm(command(&["true"]))
    });
    started(&mut frames);
    assert_eq!(frames.finish().status(), ExitStatus::Code(0));
    daemon.assert_nothing_left();
}

#[test]
fn a_vm_with_a_missing_record_runs_on_and_is_listed() {
    let mut daemon = Daemon::start();
    for name in ["lost", "young"] {
        daemon.run_detached(with_volume(name)).json::<Vm>();
    }
    let [lost, young] = ["lost", "young"].map(|name| daemon.vm(name));
    daemon.killed();
    for vm in [&lost, &young] {
        fs::remove_file(daemon.vm_folder(&vm.id).join("vm.json")).unwrap();
    }
    // It began an hour ago; the other may have been reported to nobody yet.
    let config = daemon.vm_folder(&lost.id).join("vmm.json");
    let config = fs::File::options().write(true).open(config).unwrap();
    let before = std::time::SystemTime::now() - Duration::from_secs(3600);
    config.set_modified(before).unwrap();
    daemon.up();
    let shown = daemon.vm(&lost.id);
    assert_eq!((shown.state, shown.pid), (VmState::Running, lost.pid));
    let why = shown.error.unwrap();
    assert!(
        why.contains("is left as it is") && why.contains("No such file"),
        "{why}"
    );
    assert!(is_alive(lost.pid.unwrap()));
    // No other VM writes to its volume.
    let other = CreateVm {
        name: Some("other".into()),
        ..with_volume("lost")
    };
    let refused = daemon.run_detached(other).error(ErrorKind::Conflict);
    assert!(refused.message.contains("volume"), "{refused:?}");
    assert!(!daemon.vm_folder(&young.id).exists());
    eventually("the other was ended", || !is_alive(young.pid.unwrap()));
    let path = format!("/v1/vms/{}", lost.id);
    daemon.delete(&path).error(ErrorKind::WrongState);
    assert_eq!(daemon.delete(&format!("{path}?force=true")).status, 204);
    daemon.assert_nothing_left();
}

/// Starts the daemon, and runs `act` when it is at its first such call with this path.
fn up_with_a_stop(daemon: &mut Daemon, call: &str, path: &Path, act: impl FnOnce()) {
    let untraced = daemon.command();
    let mut traced = Command::new("strace");
    let seen = daemon.folder.path().join("strace");
    let _ = fs::remove_file(&seen);
    // The tracer is the daemon's grandchild: the spawned process is the daemon.
    traced.args(["-D", "-f", "-qq", "-o"]).arg(&seen);
    traced.arg("-e").arg(format!("trace={call}"));
    traced
        .arg("-e")
        .arg(format!("inject={call}:signal=STOP:when=1"));
    traced.arg("-P").arg(path).arg(untraced.get_program());
    traced.args(untraced.get_args());
    for (name, value) in untraced.get_envs() {
        traced.env(name, value.unwrap_or_default());
    }
    traced.stdin(std::process::Stdio::null());
    daemon.begin(traced);
    eventually("the daemon is at that call", || {
        let seen = fs::read_to_string(&seen).unwrap_or_default();
        seen.contains("--- stopped by SIGSTOP ---")
    });
    act();
    // Each thread would stop at its first such call.
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let tracer = status.split("TracerPid:\t").nth(1).unwrap();
    kill(tracer.lines().next().unwrap().parse().unwrap());
    let pid = rustix::process::Pid::from_raw(daemon.pid() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    daemon.answers();
}

#[test]
fn a_vm_folder_removed_during_adoption_does_not_end_the_daemon() {
    let mut daemon = Daemon::start();
    daemon
        .run_detached(named("beside", CreateVm::default()))
        .json::<Vm>();
    let [vms, runs] = ["data/vms", "run/vms"].map(|name| daemon.folder.path().join(name));
    // Before it is looked for; when it is known; when its record is; and when
    // its guest can be heard.
    let points = [
        ("openat", "run/vms".to_owned()),
        ("openat", "data/vms/ID/vm.json".to_owned()),
        ("statx", "run/vms/ID/vsock.sock_1024".to_owned()),
        ("openat", "data/vms/ID/command.log".to_owned()),
    ];
    for (call, path) in &points {
        for folder in [&vms, &runs] {
            if path.ends_with("command.log") && folder == &runs {
                // It is adopted by then.
                continue;
            }
            let vm: Vm = daemon
                .run_detached(named("box", vm(command(&["sleep", "1000"]))))
                .json();
            daemon.killed();
            let at = daemon.folder.path().join(path.replace("ID", &vm.id));
            let gone = folder.join(&vm.id);
            up_with_a_stop(&mut daemon, call, &at, || {
                fs::remove_dir_all(&gone).unwrap();
            });
            let what = format!("{} removed at {path}", gone.display());
            assert_eq!(daemon.vm("beside").state, VmState::Running, "{what}");
            let answer = daemon.get("/v1/vms/box");
            // Nobody knows a VM without a record.
            if answer.status != 404 {
                eventually(&what, || daemon.vm("box").error.is_some());
                let seen = daemon.vm("box");
                assert_eq!((seen.state, seen.pid), (VmState::Running, vm.pid), "{what}");
                let error = seen.error.expect(&what);
                assert!(error.contains(&vm.id), "{what}: {error}");
                let log = fs::read_to_string(daemon.folder.path().join("jiffyd.log")).unwrap();
                assert!(log.contains(&error), "{what}: {error}");
                let removed = daemon.delete("/v1/vms/box?force=true");
                assert_eq!(removed.status, 204, "{what}");
            }
            eventually(&what, || !is_alive(vm.pid.unwrap()));
            assert!(!vms.join(&vm.id).exists(), "{what}");
            eventually(&what, || !runs.join(&vm.id).exists());
        }
    }
    assert_eq!(daemon.delete("/v1/vms/beside?force=true").status, 204);
    daemon.assert_nothing_left();
}

#[test]
fn a_vm_that_cannot_be_adopted_runs_on_and_is_adopted_later() {
    let mut daemon = Daemon::start();
    let go = daemon.folder.path().join("go");
    let script = format!(
        "echo before; while ! test -e {}; do sleep 0.02; done; echo after",
        go.display()
    );
    let vm: Vm = daemon.run_detached(named("box", vm(shell(&script)))).json();
    eventually("the first output is stored", || {
        daemon.logs("box", "").0 == "before\n"
    });
    let kept = daemon.folder.path().join("kept.log");
    let log: PathBuf = daemon.vm_folder(&vm.id).join("command.log");
    let socket = daemon.run_folder(&vm.id).join("vsock.sock_1024");
    daemon.killed();
    fs::rename(&log, &kept).unwrap();
    fs::create_dir(&log).unwrap();
    fs::remove_file(&socket).unwrap();
    fs::create_dir(&socket).unwrap();
    fs::write(socket.join("inside"), "").unwrap();
    daemon.up();
    let seen = daemon.vm("box");
    assert_eq!((seen.state, seen.pid), (VmState::Running, vm.pid));
    let error = seen.error.unwrap();
    assert!(error.contains("log of the VM box"), "{error}");
    let listed: Vec<Vm> = daemon.get("/v1/vms").json();
    assert!(listed[0].error.is_some());
    // No output is lost meanwhile.
    fs::write(&go, "").unwrap();
    fs::remove_dir(&log).unwrap();
    fs::rename(&kept, &log).unwrap();
    let ended = daemon.when("box", VmState::Exited);
    assert_eq!((ended.exit, ended.error), (Some(ExitStatus::Code(0)), None));
    assert_eq!(daemon.logs("box", "").0, "before\nafter\n");
}

#[test]
fn output_after_a_lost_log_is_kept() {
    let mut daemon = Daemon::start();
    let go = daemon.folder.path().join("go");
    let script = format!(
        "echo before; while ! test -e {}; do sleep 0.02; done; echo after; exit 3",
        go.display()
    );
    let vm: Vm = daemon.run_detached(named("box", vm(shell(&script)))).json();
    eventually("the first output is stored", || {
        daemon.logs("box", "").0 == "before\n"
    });
    // The guest drops output only after it was told that it is stored.
    daemon.post("/v1/vms/box/snapshots", b"{\"name\":\"one\"}");
    daemon.killed();
    fs::remove_file(daemon.vm_folder(&vm.id).join("command.log")).unwrap();
    daemon.up();
    fs::write(&go, "").unwrap();
    let ended = daemon.when("box", VmState::Exited);
    assert_eq!((ended.exit, ended.error), (Some(ExitStatus::Code(3)), None));
    let (stdout, stderr) = daemon.logs("box", "");
    assert_eq!(stdout, "after\n");
    assert!(stderr.contains("7 bytes of output are lost"), "{stderr}");
}

#[test]
fn two_vms_with_one_name_are_both_listed() {
    let mut daemon = Daemon::start();
    let first: Vm = daemon.create(&named("box", CreateVm::default())).json();
    daemon.killed();
    let second = "0123456789ab";
    let text = fs::read_to_string(daemon.vm_folder(&first.id).join("vm.json")).unwrap();
    let (_, content) = text.split_once("\"content\":").unwrap();
    let content = content
        .strip_suffix('}')
        .unwrap()
        .replace(&first.id, second);
    fs::create_dir(daemon.vm_folder(second)).unwrap();
    let copy = daemon.vm_folder(second).join("vm.json");
    fs::write(copy, vm_record(&content)).unwrap();
    daemon.up();
    let both: Vec<Vm> = [&first.id, second].map(|id| daemon.vm(id)).into();
    assert_eq!(both[0].id, first.id);
    assert_eq!(both[1].id, second);
    let renamed: Vec<&Vm> = both.iter().filter(|vm| vm.name == vm.id).collect();
    assert_eq!(renamed.len(), 1);
    let error = renamed[0].error.as_ref().unwrap();
    assert!(error.contains("The name box is also the name of the VM"));
    for vm in &both {
        assert_eq!(daemon.delete(&format!("/v1/vms/{}", vm.id)).status, 204);
    }
    daemon.assert_nothing_left();
}

#[test]
fn a_name_like_an_id_is_refused_and_an_old_one_hides_no_vm() {
    let mut daemon = Daemon::start();
    let vm: Vm = daemon.create(&named("box", CreateVm::default())).json();
    let error = daemon
        .create(&named(&vm.id, CreateVm::default()))
        .error(ErrorKind::Invalid);
    assert!(error.message.contains("looks like the id"), "{error:?}");
    // Like a record of an earlier release.
    let old: Vm = daemon
        .create(&named("xxxxxxxxxxxx", CreateVm::default()))
        .json();
    daemon.killed();
    let record = daemon.vm_folder(&old.id).join("vm.json");
    let text = fs::read_to_string(&record).unwrap();
    let (_, content) = text.split_once("\"content\":").unwrap();
    let content = content.strip_suffix('}').unwrap();
    let content = content.replace("xxxxxxxxxxxx", &vm.id);
    fs::write(&record, vm_record(&content)).unwrap();
    daemon.up();
    assert_eq!(daemon.vm(&old.id).name, vm.id);
    assert_eq!(daemon.vm(&vm.id).name, "box");
    assert_eq!(daemon.delete(&format!("/v1/vms/{}", vm.id)).status, 204);
    assert_eq!(daemon.vm(&old.id).name, vm.id);
}
