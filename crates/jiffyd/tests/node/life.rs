//! VMs from creation to removal.

use crate::client::connect;
use crate::daemon::{
    Daemon, bad_vm, command, eventually, release_guest, run_of, shell, started, vm,
};
use jiffy_wire::agent::{ExitStatus, Stat};
use jiffy_wire::api::{CreateVm, ErrorKind, RootDisk, Vm, VmState};
use jiffy_wire::timeline::{Timeline, names};
use std::fs;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

fn idle(name: &str) -> CreateVm {
    CreateVm {
        name: Some(name.into()),
        ..CreateVm::default()
    }
}

#[test]
fn a_vm_is_created_started_stopped_started_again_and_removed() {
    let daemon = Daemon::start();
    let created: Vm = daemon
        .create(&CreateVm {
            cpus: Some(2),
            memory_mib: Some(256),
            ..idle("web")
        })
        .json();
    assert_eq!((created.cpus, created.memory_mib), (2, 256));
    assert_eq!(created.state, VmState::Created);
    assert_eq!(created.pid, None);
    let started: Vm = daemon.post("/v1/vms/web/start", b"").json();
    assert_eq!(started.state, VmState::Running);
    let again: Vm = daemon.post("/v1/vms/web/start", b"").json();
    assert_eq!(again.pid, started.pid, "what runs is started");
    let stat: Stat = daemon.get("/v1/vms/web/stat").json();
    assert_eq!(stat.memory_total, 256 << 20);
    daemon.delete("/v1/vms/web").error(ErrorKind::WrongState);
    let stopped: Vm = daemon.post("/v1/vms/web/stop?grace_ms=2000", b"").json();
    assert_eq!(
        (stopped.state, stopped.pid, stopped.error),
        (VmState::Exited, None, None)
    );
    assert_eq!(
        daemon.post("/v1/vms/web/stop", b"").status,
        200,
        "what ended is stopped"
    );
    daemon
        .post("/v1/vms/web/kill", b"")
        .error(ErrorKind::WrongState);
    daemon.get("/v1/vms/web/stat").error(ErrorKind::WrongState);
    let again: Vm = daemon.post("/v1/vms/web/start", b"").json();
    assert_eq!(again.state, VmState::Running);
    assert_ne!(again.pid, started.pid);
    let killed: Vm = daemon.post("/v1/vms/web/kill", b"").json();
    assert_eq!(killed.state, VmState::Exited);
    assert_eq!(daemon.delete("/v1/vms/web").status, 204);
    daemon.get("/v1/vms/web").error(ErrorKind::NotFound);
    daemon.assert_nothing_left();
}

#[test]
fn a_restarted_vm_has_new_output_and_continues_its_log() {
    let daemon = Daemon::start();
    daemon.create(&CreateVm {
        name: Some("twice".into()),
        ..vm(shell("echo here"))
    });
    for _ in 0..2 {
        daemon.post("/v1/vms/twice/start", b"");
        daemon.when("twice", VmState::Exited);
    }
    assert_eq!(daemon.logs("twice", "").0, "here\nhere\n");
    let attached = daemon.stream("/v1/vms/twice/attach", b"").unwrap().finish();
    assert_eq!(attached.text(), "here\n");
    // Also while it is still powering off.
    for _ in 0..3 {
        daemon.post("/v1/vms/twice/start", b"").json::<Vm>();
        let attached = daemon.stream("/v1/vms/twice/attach", b"").unwrap().finish();
        assert_eq!(attached.text(), "here\n");
    }
    daemon.when("twice", VmState::Exited);
    assert_eq!(daemon.logs("twice", "").0, "here\n".repeat(5));
}

#[test]
fn stop_lets_the_command_exit_cleanly_and_kill_does_not() {
    let daemon = Daemon::start();
    let mut frames = daemon.run(CreateVm {
        name: Some("polite".into()),
        ..vm(shell(
            "trap 'echo bye; exit 3' TERM; echo go; while :; do sleep 0.05; done",
        ))
    });
    frames.until("go\n");
    let stopped: Vm = daemon
        .post("/v1/vms/polite/stop?grace_ms=86400000", b"")
        .json();
    assert_eq!(stopped.exit, Some(ExitStatus::Code(3)));
    let finished = frames.finish();
    assert_eq!(finished.text(), "bye\n");
    assert_eq!(finished.status(), ExitStatus::Code(3));

    let mut frames = daemon.run(CreateVm {
        name: Some("sudden".into()),
        ..vm(shell("trap '' TERM; echo go; while :; do sleep 0.05; done"))
    });
    frames.until("go\n");
    let killed: Vm = daemon.post("/v1/vms/sudden/kill", b"").json();
    assert_eq!(killed.exit, Some(ExitStatus::Signal(9)));
    assert_eq!(killed.error, None);
    assert_eq!(frames.finish().status(), ExitStatus::Signal(9));
}

#[test]
fn a_signal_can_be_sent_to_the_first_command() {
    let daemon = Daemon::start();
    let mut frames = daemon.run(CreateVm {
        name: Some("sig".into()),
        ..vm(command(&["sleep", "100"]))
    });
    started(&mut frames);
    daemon
        .post("/v1/vms/sig/kill?signal=0", b"")
        .error(ErrorKind::Invalid);
    assert_eq!(daemon.post("/v1/vms/sig/kill?signal=10", b"").status, 200);
    assert_eq!(frames.finish().status(), ExitStatus::Signal(10));
    daemon.run_detached(idle("idle"));
    daemon
        .post("/v1/vms/idle/kill?signal=10", b"")
        .error(ErrorKind::WrongState);
}

#[test]
fn a_vm_with_an_unresponsive_agent_can_be_stopped() {
    let daemon = Daemon::start();
    daemon.run_detached(CreateVm {
        name: Some("deaf".into()),
        ..bad_vm("deaf", Some(command(&["sleep", "100"])))
    });
    // The grace period of a day does not apply if the agent does not answer.
    let stopped: Vm = daemon
        .post("/v1/vms/deaf/stop?grace_ms=86400000", b"")
        .json();
    assert_eq!(stopped.state, VmState::Exited);
    assert_eq!(stopped.error, None);
}

#[test]
fn a_guest_that_powers_off_is_not_killed_before_write_back() {
    let daemon = Daemon::start();
    let slow = |name: &str, program: &[&str]| CreateVm {
        name: Some(name.into()),
        ..bad_vm("slow-off", Some(command(program)))
    };
    // One guest powers off on request; the other is already doing so when it is asked.
    let asked: Vm = daemon.run_detached(slow("asked", &["sleep", "100"])).json();
    let mut frames = daemon.run(slow("itself", &["true"]));
    started(&mut frames);
    let itself = daemon.when("itself", VmState::Stopping);
    eventually("it powers off", || {
        daemon.vm_folder(&itself.id).join("off").exists()
    });
    std::thread::scope(|scope| {
        let stop = |name: &str| daemon.post(&format!("/v1/vms/{name}/stop?grace_ms=0"), b"");
        let stops = ["asked", "itself", "asked"].map(|name| scope.spawn(move || stop(name)));
        // A guest without a report would be killed after 15 seconds.
        std::thread::sleep(Duration::from_millis(15_500));
        for vm in [&asked, &itself] {
            assert_eq!(daemon.vm(&vm.id).state, VmState::Stopping, "{}", vm.name);
            release_guest(&daemon.vm_folder(&vm.id));
        }
        for stop in stops {
            let stopped: Vm = stop.join().unwrap().json();
            assert_eq!((stopped.state, stopped.error), (VmState::Exited, None));
            assert!(daemon.vm_folder(&stopped.id).join("written").exists());
        }
    });
}

#[test]
fn wait_answers_when_the_vm_has_ended() {
    let daemon = Daemon::start();
    daemon.run_detached(CreateVm {
        name: Some("brief".into()),
        ..vm(shell("sleep 0.3; exit 4"))
    });
    let ended: Vm = daemon.post("/v1/vms/brief/wait", b"").json();
    assert_eq!(
        (ended.state, ended.exit),
        (VmState::Exited, Some(ExitStatus::Code(4)))
    );
}

#[test]
fn one_of_many_concurrent_creates_with_one_name_succeeds() {
    let daemon = Daemon::start();
    let answers: Vec<u16> = std::thread::scope(|scope| {
        let tries: Vec<_> = (0..12)
            .map(|_| scope.spawn(|| daemon.create(&idle("same")).status))
            .collect();
        tries.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert_eq!(answers.iter().filter(|status| **status == 200).count(), 1);
    assert_eq!(answers.iter().filter(|status| **status == 409).count(), 11);
    assert_eq!(daemon.get("/v1/vms?all=true").json::<Vec<Vm>>().len(), 1);
    let folders = fs::read_dir(daemon.data.join("vms")).unwrap().count();
    assert_eq!(folders, 1);
    let refused = daemon.create(&idle("same")).error(ErrorKind::Conflict);
    assert!(refused.message.contains("same"));
}

#[test]
fn vms_are_found_by_name_id_and_beginning_of_an_id() {
    let daemon = Daemon::start();
    let vms: Vec<Vm> = (0..3)
        .map(|index| daemon.create(&idle(&format!("vm-{index}"))).json())
        .collect();
    let cids: std::collections::HashSet<u32> = vms.iter().map(|vm| vm.cid).collect();
    assert_eq!(cids.len(), 3);
    assert!(cids.iter().all(|cid| *cid >= 3));
    for vm in &vms {
        for key in [&vm.id, &vm.name, &vm.id[..8].to_owned()] {
            assert_eq!(daemon.vm(key).id, vm.id);
        }
    }
    daemon.get("/v1/vms/nobody").error(ErrorKind::NotFound);
    let listed: Vec<Vm> = daemon.get("/v1/vms").json();
    assert!(listed.is_empty(), "none runs");
    let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    let names: Vec<_> = all.iter().map(|vm| vm.name.as_str()).collect();
    assert_eq!(names, ["vm-0", "vm-1", "vm-2"], "the oldest first");
}

#[test]
fn a_vm_can_be_removed_in_every_state() {
    let daemon = Daemon::start();
    // Created.
    daemon.create(&idle("a"));
    assert_eq!(daemon.delete("/v1/vms/a").status, 204);
    // Starting.
    daemon.create(&CreateVm {
        name: Some("b".into()),
        ..bad_vm("mute", None)
    });
    std::thread::scope(|scope| {
        let starting = scope.spawn(|| daemon.post("/v1/vms/b/start", b""));
        daemon.when("b", VmState::Starting);
        daemon.delete("/v1/vms/b").error(ErrorKind::WrongState);
        assert_eq!(daemon.delete("/v1/vms/b?force=true").status, 204);
        starting.join().unwrap();
    });
    // Running, with a client attached.
    let mut frames = daemon.run(CreateVm {
        name: Some("c".into()),
        ..vm(command(&["sleep", "100"]))
    });
    started(&mut frames);
    assert_eq!(daemon.delete("/v1/vms/c?force=true").status, 204);
    let _ = frames.finish();
    // Stopping.
    let mut frames = daemon.run(CreateVm {
        name: Some("d".into()),
        ..vm(shell("trap '' TERM; echo go; sleep 100"))
    });
    frames.until("go\n");
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| daemon.post("/v1/vms/d/stop?grace_ms=86400000", b""));
        daemon.when("d", VmState::Stopping);
        assert_eq!(daemon.delete("/v1/vms/d?force=true").status, 204);
        stopping.join().unwrap();
    });
    // Exited.
    daemon.run_detached(CreateVm {
        name: Some("e".into()),
        ..vm(command(&["true"]))
    });
    daemon.when("e", VmState::Exited);
    assert_eq!(daemon.delete("/v1/vms/e").status, 204);
    daemon.delete("/v1/vms/e").error(ErrorKind::NotFound);
    daemon.assert_nothing_left();
}

/// The base image's file with a lease on it (fcntl(2)): opening it for a copy blocks until the
/// lease holder has ended, or for the 45 s after which the kernel breaks the lease.
fn stalled_image(daemon: &Daemon) -> Child {
    let script = "import fcntl, os, signal, sys\n\
        signal.signal(signal.SIGIO, signal.SIG_IGN)\n\
        file = os.open(sys.argv[1], os.O_RDWR)\n\
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n\
        print(flush=True)\n\
        sys.stdin.read()\n";
    let mut holder = Command::new("python3")
        .args(["-c", script])
        .arg(daemon.data.join("images/base/image.erofs"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let told = holder.stdout.as_mut().unwrap().read(&mut [0]).unwrap();
    assert_eq!(told, 1, "the lease on the image can't be taken");
    holder
}

/// Those that wait find that the image can't be copied.
fn end_lease(mut holder: Child) {
    holder.kill().unwrap();
    holder.wait().unwrap();
}

#[test]
fn a_client_that_leaves_during_create_leaves_no_vm() {
    let daemon = Daemon::start();
    daemon.create(&idle("a"));
    assert_eq!(daemon.delete("/v1/vms/a").status, 204);
    let image = stalled_image(&daemon);
    let copied = |remove| CreateVm {
        name: Some("box".into()),
        root_disk: Some(RootDisk::Copy { plainly: true }),
        remove,
        ..vm(command(&["true"]))
    };
    let run = |vm, detach| serde_json::to_vec(&run_of(vm, detach)).unwrap();
    let requests = [
        ("run", run(copied(true), false)),
        ("run", run(copied(false), true)),
        ("vms", serde_json::to_vec(&copied(false)).unwrap()),
    ];
    for (path, body) in requests {
        let mut stream = connect(&daemon.socket()).unwrap();
        let head = "Host: node\r\nConnection: upgrade\r\nUpgrade: jiffy-frames";
        let length = body.len();
        write!(
            stream,
            "POST /v1/{path} HTTP/1.1\r\n{head}\r\nContent-Length: {length}\r\n\r\n"
        )
        .unwrap();
        stream.write_all(&body).unwrap();
        eventually("the VM is there", || {
            daemon.get("/v1/vms/box").status == 200
        });
        drop(stream);
        daemon.gone("box");
    }
    end_lease(image);
    eventually("nothing is made any more", || {
        fs::read_dir(daemon.data.join("vms")).unwrap().count() == 0
    });
    daemon.assert_nothing_left();
}

#[test]
fn a_late_failure_keeps_a_volume_that_another_vm_uses() {
    let daemon = Daemon::start();
    daemon.create(&idle("a"));
    assert_eq!(daemon.delete("/v1/vms/a").status, 204);
    let image = stalled_image(&daemon);
    let with_data = |name: &str, root_disk| CreateVm {
        disks: vec![jiffy_wire::api::VolumeUse {
            name: "data".into(),
            size_mib: Some(64),
            ..Default::default()
        }],
        root_disk,
        ..idle(name)
    };
    let copied = with_data("first", Some(RootDisk::Copy { plainly: true }));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| daemon.create(&copied));
        eventually("the first VM has a folder", || {
            let found = daemon.get("/v1/vms/first");
            found.status == 200 && daemon.vm_folder(&found.json::<Vm>().id).exists()
        });
        assert_eq!(daemon.create(&with_data("second", None)).status, 200);
        end_lease(image);
        first.join().unwrap().error(ErrorKind::Invalid);
    });
    let volumes: Vec<jiffy_wire::api::Volume> = daemon.get("/v1/volumes").json();
    assert_eq!(volumes[0].attached_to, ["second"]);
}

#[test]
fn the_timeline_has_every_step_in_order() {
    let daemon = Daemon::start();
    daemon.run_detached(CreateVm {
        name: Some("timed".into()),
        ..vm(command(&["true"]))
    });
    daemon.when("timed", VmState::Exited);
    let timeline: Timeline = daemon.get("/v1/vms/timed/timeline").json();
    let mut last = 0;
    for name in [
        names::REQUEST_RECEIVED,
        names::IMAGE_READY,
        names::VMM_SPAWNED,
        names::KVM_VM_CREATED,
        names::KERNEL_LOADED,
        names::FIRST_KVM_RUN,
        names::KERNEL_ENTRY,
        names::KERNEL_BOOT,
        names::PID1,
        names::COMMAND_STARTED,
        names::COMMAND,
        names::COMMAND_DONE,
    ] {
        let span = timeline.find(name).unwrap_or_else(|| panic!("no {name}"));
        assert!(span.start_ns >= last, "{name} is out of order");
        last = span.start_ns;
    }
    let pid1 = timeline.find(names::PID1).unwrap().start_ns;
    let root = timeline.find("mount root").unwrap();
    assert_eq!(
        (root.start_ns, root.end_ns),
        (pid1 + 1_000_000, pid1 + 2_000_000)
    );
    let info: jiffy_wire::api::NodeInfo = daemon.get("/v1/info").json();
    assert_eq!(timeline.clock, info.clock);
    assert!(last < info.now_ns);
    let containment = info.containment.expect("how VMMs are contained");
    assert!(!containment.jailed, "these tests start it without");
    assert_eq!(containment.lacks, ["jiffyd was started with --jail off"]);
}

#[test]
fn a_deep_timeline_has_the_activity_of_the_vmms_threads() {
    let mut daemon = Daemon::start();
    for (name, deep) in [("deep", true), ("plain", false)] {
        daemon.run_detached(CreateVm {
            name: Some(name.into()),
            deep,
            ..vm(command(&["true"]))
        });
        daemon.when(name, VmState::Exited);
    }
    let of = |daemon: &Daemon, name| -> Timeline {
        daemon.get(&format!("/v1/vms/{name}/timeline")).json()
    };
    let timeline = of(&daemon, "deep");
    let activity: Vec<_> = timeline
        .spans
        .iter()
        .filter(|span| span.thread.as_deref() == Some("vcpu 0"))
        .map(|span| (span.name.as_str(), span.duration_ns()))
        .collect();
    assert_eq!(
        activity,
        [("exit: MMIO write", 5), (names::ACTIVITY_CUT, 0)]
    );
    let counters: Vec<_> = timeline
        .counters
        .iter()
        .map(|counter| (counter.name.as_str(), counter.points[0].1))
        .collect();
    assert_eq!(counters, [("exits", 3)]);
    let plain = of(&daemon, "plain");
    assert!(plain.counters.is_empty());
    assert_eq!(plain.spans.len(), plain.steps().count());
    // It is kept.
    daemon.shut_down();
    daemon.up();
    assert_eq!(of(&daemon, "deep"), timeline);
}

#[test]
fn logs_can_be_followed_and_truncated() {
    let daemon = Daemon::start();
    daemon.run_detached(CreateVm {
        name: Some("talk".into()),
        console: true,
        ..crate::daemon::bad_vm(
            "warn",
            Some(shell("for i in 1 2 3 4 5; do echo $i; sleep 0.1; done")),
        )
    });
    // Following ends with the VM.
    let (stdout, stderr) = daemon.logs("talk", "follow=true");
    assert_eq!(stdout, "1\n2\n3\n4\n5\n");
    assert!(stderr.contains("[init] hostname: it would not stick\n"));
    assert!(stderr.contains("[crond] tick\n"));
    assert_eq!(daemon.vm("talk").warnings, ["hostname: it would not stick"]);
    assert_eq!(daemon.logs("talk", "tail=2").0, "4\n5\n");
    assert_eq!(daemon.logs("talk", "tail=0").0, "");
    assert!(
        daemon
            .logs("talk", "source=vmm")
            .0
            .starts_with("fake-vmm: VM ")
    );
    let console = daemon.vm_folder(&daemon.vm("talk").id).join("console.log");
    fs::write(console, "one\ntwo\nthree\n").unwrap();
    assert_eq!(
        daemon.logs("talk", "source=console&tail=1&follow=true").0,
        "three\n"
    );
    daemon
        .get("/v1/vms/talk/logs?source=nonsense")
        .error(ErrorKind::Invalid);
    daemon.create(&idle("silent"));
    daemon
        .get("/v1/vms/silent/logs?source=console")
        .error(ErrorKind::WrongState);
}

#[test]
fn a_console_that_grows_is_followed() {
    let daemon = Daemon::start();
    daemon.run_detached(CreateVm {
        console: true,
        ..idle("con")
    });
    let console = daemon.vm_folder(&daemon.vm("con").id).join("console.log");
    std::thread::scope(|scope| {
        let following = scope.spawn(|| daemon.logs("con", "source=console&follow=true").0);
        std::thread::sleep(Duration::from_millis(200));
        fs::write(&console, "first\n").unwrap();
        std::thread::sleep(Duration::from_millis(200));
        let mut file = fs::OpenOptions::new().append(true).open(&console).unwrap();
        file.write_all(b"second\n").unwrap();
        std::thread::sleep(Duration::from_millis(200));
        daemon.post("/v1/vms/con/kill", b"");
        assert_eq!(following.join().unwrap(), "first\nsecond\n");
    });
}

#[test]
fn a_volume_has_one_writer() {
    let daemon = Daemon::start();
    let with_disk = |name: &str, read_only| CreateVm {
        disks: vec![jiffy_wire::api::VolumeUse {
            name: "data".into(),
            size_mib: Some(64),
            read_only,
            ..Default::default()
        }],
        ..idle(name)
    };
    daemon.run_detached(with_disk("one", false));
    let refused = daemon
        .run_detached(with_disk("two", false))
        .error(ErrorKind::Conflict);
    assert!(refused.message.contains("data") && refused.message.contains("one"));
    daemon.get("/v1/vms/two").error(ErrorKind::NotFound);
    let volumes: Vec<jiffy_wire::api::Volume> = daemon.get("/v1/volumes").json();
    assert_eq!(
        (volumes[0].size_mib, &volumes[0].used_by[..]),
        (64, &["one".to_owned()][..])
    );
    daemon.delete("/v1/volumes/data").error(ErrorKind::Conflict);
    daemon.post("/v1/vms/one/kill", b"");
    let now: Vm = daemon.run_detached(with_disk("two", false)).json();
    assert_eq!(now.state, VmState::Running);
    assert_eq!(daemon.delete("/v1/vms/two?force=true").status, 204);
    assert_eq!(daemon.delete("/v1/vms/one").status, 204);
    eventually("the volume can be removed", || {
        daemon.delete("/v1/volumes/data").status == 204
    });
    daemon.delete("/v1/volumes/data").error(ErrorKind::NotFound);
}
