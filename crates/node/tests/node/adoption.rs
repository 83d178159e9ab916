//! Daemons that end while VMs go on.

use crate::client::{connect, request};
use crate::daemon::{
    Daemon, bad_vm, command, eventually, id_of, is_alive, kill, let_go, named, shell, started, vm,
    vmms,
};
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{CreateVm, ErrorKind, Vm, VmState, VolumeUse};
use std::fs;
use std::io::Write;
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
fn what_happens_while_no_daemon_looks_is_not_lost() {
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
fn a_vm_that_was_starting_gets_ready_under_the_next_daemon() {
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
    let_go(&daemon.vm_folder(&id));
    daemon.when("slow", VmState::Running);
    eventually("its output is there", || {
        daemon.logs("slow", "").0 == "hello\n"
    });
}

#[test]
fn a_guest_that_writes_back_is_not_cut_short_by_the_next_daemon() {
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
        // There is no agent any more: one that ran would be ended at once.
        std::thread::sleep(Duration::from_millis(500));
        for id in &vms {
            assert_eq!(daemon.vm(id).state, VmState::Stopping);
            let_go(&daemon.vm_folder(id));
        }
        for stop in stops {
            let stopped: Vm = stop.join().unwrap().json();
            assert_eq!((stopped.state, stopped.error), (VmState::Exited, None));
            assert!(daemon.vm_folder(&stopped.id).join("written").exists());
        }
    });
}

#[test]
fn an_orderly_end_leaves_vms_running_too() {
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
fn vmms_of_unknown_vms_are_ended_and_their_files_removed() {
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
    daemon.nothing_left();
}

#[test]
fn a_record_that_can_not_be_read_is_shown_and_can_be_removed() {
    let mut daemon = Daemon::start();
    let broken: Vm = daemon.create(&named("broken", CreateVm::default())).json();
    let newer: Vm = daemon.create(&named("newer", CreateVm::default())).json();
    let whole: Vm = daemon.create(&named("whole", CreateVm::default())).json();
    daemon.killed();
    let record = |vm: &Vm| daemon.vm_folder(&vm.id).join("vm.json");
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
    daemon
        .post(&format!("/v1/vms/{}/start", broken.id), b"")
        .error(ErrorKind::NotFound);
    for vm in [&broken, &newer, &whole] {
        assert_eq!(daemon.delete(&format!("/v1/vms/{}", vm.id)).status, 204);
    }
    daemon.nothing_left();
}

#[test]
fn a_vm_whose_record_can_not_be_read_does_not_run_on_unseen() {
    let mut daemon = Daemon::start();
    for name in ["broken", "newer"] {
        let with_volume = CreateVm {
            disks: vec![VolumeUse {
                name: name.into(),
                size_mib: Some(1),
                ..VolumeUse::default()
            }],
            ..named(name, CreateVm::default())
        };
        daemon.run_detached(with_volume).json::<Vm>();
    }
    let [broken, newer] = ["broken", "newer"].map(|name| daemon.vm(name));
    daemon.killed();
    for (vm, before, after) in [
        (&broken, "\"broken\"", "\"bloken\""),
        (&newer, "\"version\":1", "\"version\":2"),
    ] {
        let record = daemon.vm_folder(&vm.id).join("vm.json");
        let text = fs::read_to_string(&record).unwrap();
        assert!(text.contains(before));
        fs::write(&record, text.replace(before, after)).unwrap();
    }
    daemon.up();
    assert!(vmms(&daemon.data).is_empty());
    for vm in [&broken, &newer] {
        let shown = daemon.vm(&vm.id);
        assert_eq!((shown.state, shown.pid), (VmState::Exited, None));
        assert!(!daemon.run_folder(&vm.id).exists());
        assert_eq!(daemon.delete(&format!("/v1/vms/{}", vm.id)).status, 204);
    }
    daemon.nothing_left();
}

#[test]
fn a_second_daemon_says_so_and_a_stale_socket_is_replaced() {
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
    let mut elsewhere = daemon.command();
    elsewhere
        .arg("--data")
        .arg(daemon.folder.path().join("other"));
    // The last --data counts in no way: clap refuses two.
    assert!(!elsewhere.output().unwrap().status.success());
    daemon.killed();
    assert!(daemon.socket().exists());
    assert!(connect(&daemon.socket()).is_err());
    daemon.up();
    assert_eq!(daemon.get("/v1/info").status, 200);
}

#[test]
fn another_daemon_on_the_same_socket_says_so() {
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
    daemon.nothing_left();
}
