//! `run`, `exec` and attached clients.

use crate::daemon::{
    Daemon, bad_vm, command, eventually, id_of, is_alive, release_guest, shell, started, tar_of, vm,
};
use crate::images::configs;
use jiffy_wire::agent::{
    Command, CopyDone, CopyEntry, CopyFrame, CopyKind, ExecInput, ExecOutput, ExitStatus,
    StartFailure, WindowSize,
};
use jiffy_wire::api::{CreateVm, ErrorKind, NoCommand, Vm, VmState};
use std::fs;
use std::time::Duration;

#[test]
fn a_command_runs_and_its_streams_and_status_come_back() {
    let daemon = Daemon::start();
    let frames = daemon.run(vm(shell("echo out; echo err >&2; exit 7")));
    let id = id_of(&frames);
    let finished = frames.finish();
    assert!(finished.started);
    assert_eq!(finished.text(), "out\n");
    assert_eq!(finished.stderr, b"err\n");
    assert_eq!(finished.status(), ExitStatus::Code(7));
    let vm = daemon.when(&id, VmState::Exited);
    assert_eq!(vm.exit, Some(ExitStatus::Code(7)));
    assert_eq!(vm.error, None);
    assert_eq!(daemon.logs(&id, ""), ("out\n".into(), "err\n".into()));
    assert!(!daemon.run_folder(&id).exists());
}

#[test]
fn a_vm_run_for_one_command_leaves_nothing_but_its_timeline() {
    let daemon = Daemon::start();
    let frames = daemon.run(CreateVm {
        remove: true,
        ..vm(command(&["true"]))
    });
    let id = id_of(&frames);
    assert_eq!(frames.finish().status(), ExitStatus::Code(0));
    daemon.gone(&id);
    daemon.assert_nothing_left();
    let timeline = daemon.get(&format!("/v1/vms/{id}/timeline"));
    assert_eq!(timeline.status, 200);
    assert_eq!(daemon.post(&format!("/v1/vms/{id}/wait"), b"").status, 200);
}

#[test]
fn the_name_of_an_ending_vm_can_be_reused_at_once() {
    let daemon = Daemon::start();
    for _ in 0..5 {
        let again = CreateVm {
            name: Some("again".into()),
            remove: true,
            ..vm(command(&["true"]))
        };
        assert_eq!(daemon.run(again).finish().status(), ExitStatus::Code(0));
    }
}

#[test]
fn a_missing_command_exits_with_127() {
    let daemon = Daemon::start();
    let frames = daemon.run(vm(command(&["/no/such/program"])));
    let id = id_of(&frames);
    match frames.finish().end {
        Some(ExecOutput::Failed(error)) => {
            assert_eq!(error.kind, StartFailure::NotFound);
            assert!(error.message.contains("/no/such/program"));
        }
        other => panic!("{other:?}"),
    }
    let vm = daemon.when(&id, VmState::Exited);
    assert_eq!(vm.exit, Some(ExitStatus::Code(127)));
    assert!(vm.error.unwrap().contains("/no/such/program"));
}

#[test]
fn input_and_its_end_reach_the_command() {
    let daemon = Daemon::start();
    let sent: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
    let mut cat = command(&["cat"]);
    cat.stdin = true;
    let mut frames = daemon.run(vm(cat));
    let mut writer = crate::client::Frames::clone_writer(&frames);
    let to_send = sent.clone();
    let writing = std::thread::spawn(move || {
        writer.input(&to_send);
        writer.send(&ExecInput::StdinClosed);
    });
    started(&mut frames);
    let finished = frames.finish();
    writing.join().unwrap();
    assert_eq!(finished.status(), ExitStatus::Code(0));
    assert!(
        finished.stdout == sent,
        "{} bytes came back",
        finished.stdout.len()
    );
}

#[test]
fn a_signal_reaches_the_command() {
    let daemon = Daemon::start();
    let mut frames = daemon.run(vm(command(&["sleep", "100"])));
    started(&mut frames);
    frames.send(&ExecInput::Signal(15));
    assert_eq!(frames.finish().status(), ExitStatus::Signal(15));
}

#[test]
fn ctrl_c_before_the_command_runs_ends_the_vm() {
    let daemon = Daemon::start();
    let mut frames = daemon.run(bad_vm("held", Some(command(&["true"]))));
    let id = id_of(&frames);
    // The size of a terminal is kept until the command runs, and does not delay it.
    frames.send(&ExecInput::Resize(WindowSize {
        rows: 24,
        columns: 80,
    }));
    frames.send(&ExecInput::Signal(2));
    assert_eq!(frames.finish().status(), ExitStatus::Signal(2));
    daemon.when(&id, VmState::Exited);
}

#[test]
fn a_client_that_attaches_later_sees_everything_from_the_start() {
    let daemon = Daemon::start();
    let mut cat = shell("echo begin; cat");
    cat.stdin = true;
    let vm: jiffy_wire::api::Vm = daemon
        .run_detached(CreateVm {
            name: Some("cat".into()),
            ..vm(cat)
        })
        .json();
    assert_eq!(vm.state, VmState::Running);
    let attach = || daemon.stream("/v1/vms/cat/attach", b"").unwrap();
    let (mut one, mut two) = (attach(), attach());
    one.until("begin\n");
    one.input(b"from one\n");
    one.until("from one\n");
    two.until("begin\nfrom one\n");
    two.send(&ExecInput::StdinClosed);
    assert_eq!(one.finish().status(), ExitStatus::Code(0));
    assert_eq!(two.finish().status(), ExitStatus::Code(0));
    daemon.when("cat", VmState::Exited);
    let late = attach().finish();
    assert_eq!(late.text(), "begin\nfrom one\n");
    assert_eq!(late.status(), ExitStatus::Code(0));
}

#[test]
fn a_slow_client_slows_the_command_and_loses_no_output() {
    const BYTES: usize = 80_000_000;
    let daemon = Daemon::start();
    let mut frames = daemon.run(vm(shell(&format!(
        "head -c {BYTES} /dev/zero; echo end >&2"
    ))));
    let id = id_of(&frames);
    started(&mut frames);
    let kept = wait_until_blocked(&daemon, &id);
    assert!(kept < 20 << 20, "{kept} bytes are kept");
    assert_eq!(daemon.vm(&id).state, VmState::Running);
    let finished = frames.finish();
    assert_eq!(finished.stdout.len(), BYTES);
    assert_eq!(finished.stderr, b"end\n");
    assert_eq!(finished.status(), ExitStatus::Code(0));
}

/// Waits until the log stops growing, well before everything is written; returns its size.
fn wait_until_blocked(daemon: &Daemon, id: &str) -> u64 {
    let log = || {
        let files = fs::read_dir(daemon.vm_folder(id)).unwrap();
        let logs = files.map(|file| file.unwrap()).filter(|file| {
            file.file_name()
                .to_string_lossy()
                .starts_with("command.log")
        });
        logs.map(|file| file.metadata().unwrap().len()).sum::<u64>()
    };
    let mut last = 0;
    eventually("the command is blocked", || {
        let before = std::mem::replace(&mut last, log());
        std::thread::sleep(Duration::from_millis(300));
        last > 16 << 20 && last == before
    });
    last
}

#[test]
fn a_vm_whose_client_does_not_read_can_be_stopped() {
    let daemon = Daemon::start();
    let mut frames = daemon.run(vm(shell("exec cat /dev/zero")));
    let id = id_of(&frames);
    started(&mut frames);
    wait_until_blocked(&daemon, &id);
    let killed: Vm = daemon.post(&format!("/v1/vms/{id}/kill"), b"").json();
    assert_eq!(killed.state, VmState::Exited);
    assert_eq!(frames.finish().status(), ExitStatus::Signal(9));
}

#[test]
fn stop_waits_for_a_guest_blocked_on_unread_output() {
    let daemon = Daemon::start();
    let zeros = Some(shell("exec cat /dev/zero"));
    let mut frames = daemon.run(bad_vm("deaf", zeros));
    let id = id_of(&frames);
    started(&mut frames);
    wait_until_blocked(&daemon, &id);
    std::thread::scope(|scope| {
        let stop = scope.spawn(|| daemon.post(&format!("/v1/vms/{id}/stop?grace_ms=0"), b""));
        // The agent refuses, so the VMM would be killed after two seconds.
        std::thread::sleep(Duration::from_millis(2500));
        assert_eq!(daemon.vm(&id).state, VmState::Stopping);
        daemon.post(&format!("/v1/vms/{id}/kill"), b"");
        let stopped: Vm = stop.join().unwrap().json();
        assert_eq!(stopped.state, VmState::Exited);
    });
}

#[test]
fn unread_output_is_kept_up_to_a_bound() {
    let daemon = Daemon::start();
    daemon.run_detached(CreateVm {
        name: Some("loud".into()),
        ..vm(shell("head -c 100000000 /dev/zero; echo; echo the end"))
    });
    daemon.when("loud", VmState::Exited);
    assert_eq!(daemon.vm("loud").exit, Some(ExitStatus::Code(0)));
    let size: u64 = fs::read_dir(daemon.vm_folder(&daemon.vm("loud").id))
        .unwrap()
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum();
    assert!(size < 65 << 20, "{size}");
    let (stdout, stderr) = daemon.logs("loud", "");
    assert!(stdout.ends_with("\nthe end\n"));
    assert!(stderr.contains("older output was dropped"));
    assert_eq!(daemon.logs("loud", "tail=1").0, "the end\n");
}

#[test]
fn a_client_that_vanishes_leaves_the_command_running() {
    let daemon = Daemon::start();
    let done = daemon.folder.path().join("done");
    let mut frames = daemon.run(CreateVm {
        remove: true,
        ..vm(shell(&format!(
            "echo go; sleep 0.5; echo > {}",
            done.display()
        )))
    });
    frames.until("go\n");
    drop(frames);
    eventually("the command continued", || done.exists());
    daemon.assert_nothing_left();
}

#[test]
fn a_client_that_vanishes_ends_the_input_of_a_command_that_reads() {
    let daemon = Daemon::start();
    let mut reading = shell("echo go; cat; exit 5");
    reading.stdin = true;
    let mut frames = daemon.run(vm(reading));
    let id = id_of(&frames);
    frames.until("go\n");
    drop(frames);
    assert_eq!(
        daemon.when(&id, VmState::Exited).exit,
        Some(ExitStatus::Code(5))
    );
}

#[test]
fn a_client_that_only_watches_leaves_the_commands_input_open() {
    let daemon = Daemon::start();
    let mut cat = shell("echo go; cat");
    cat.stdin = true;
    let mut writer = daemon.run(vm(cat));
    let id = id_of(&writer);
    let mut watcher = daemon
        .stream(&format!("/v1/vms/{id}/attach?stdin=false"), b"")
        .unwrap();
    watcher.until("go\n");
    drop(watcher);
    // The end of input would have come by then.
    std::thread::sleep(Duration::from_millis(500));
    writer.input(b"still read\n");
    writer.until("go\nstill read\n");
    writer.send(&ExecInput::StdinClosed);
    assert_eq!(writer.finish().status(), ExitStatus::Code(0));
}

#[test]
fn exec_runs_beside_the_first_command() {
    let daemon = Daemon::start();
    daemon.run_detached(CreateVm {
        name: Some("host".into()),
        ..CreateVm::default()
    });
    let mut cat = command(&["cat"]);
    cat.stdin = true;
    let mut frames = daemon.exec("host", &cat).unwrap();
    frames.input(&vec![b'x'; 500_000]);
    frames.send(&ExecInput::StdinClosed);
    let finished = frames.finish();
    assert_eq!(finished.stdout.len(), 500_000);
    assert_eq!(finished.status(), ExitStatus::Code(0));
    let failed = daemon.exec("host", &command(&["/none"])).unwrap().finish();
    assert!(matches!(failed.end, Some(ExecOutput::Failed(_))));
    let killed = daemon.exec("host", &shell("kill -9 $$")).unwrap().finish();
    assert_eq!(killed.status(), ExitStatus::Signal(9));
}

#[test]
fn exec_inherits_the_settings_of_its_vm() {
    let daemon = Daemon::start();
    let settings = |argv: &[&str]| Command {
        argv: argv.iter().map(|word| (*word).to_owned()).collect(),
        env: vec!["A=vm".into(), "B=vm".into()],
        cwd: Some("/tmp".into()),
        ..Command::default()
    };
    let print = Command {
        env: vec!["B=exec".into()],
        ..shell("echo $A $B $(pwd)")
    };
    // One waits for `exec`, the other has a command.
    for (name, argv) in [("waits", &[][..]), ("works", &["sleep", "100"])] {
        daemon
            .run_detached(CreateVm {
                name: Some(name.into()),
                no_command: NoCommand::Wait,
                ..vm(settings(argv))
            })
            .json::<Vm>();
        let ran = daemon.exec(name, &print).unwrap().finish();
        assert_eq!(ran.text(), "vm exec /tmp\n", "{name}");
        let elsewhere = Command {
            cwd: Some("/".into()),
            ..print.clone()
        };
        let ran = daemon.exec(name, &elsewhere).unwrap().finish();
        assert_eq!(ran.text(), "vm exec /\n", "{name}");
    }
}

#[test]
fn exec_waits_for_a_vm_that_is_starting() {
    let daemon = Daemon::start();
    let created = daemon.create(&bad_vm("held", None));
    let id = created.json::<jiffy_wire::api::Vm>().id;
    std::thread::scope(|scope| {
        let starting = scope.spawn(|| daemon.post(&format!("/v1/vms/{id}/start"), b""));
        eventually("it is starting", || {
            daemon.vm(&id).state == VmState::Starting
        });
        let waiting = scope.spawn(|| daemon.exec(&id, &command(&["true"])).unwrap().finish());
        std::thread::sleep(Duration::from_millis(100));
        assert!(!waiting.is_finished());
        release_guest(&daemon.vm_folder(&id));
        assert_eq!(waiting.join().unwrap().status(), ExitStatus::Code(0));
        assert_eq!(starting.join().unwrap().status, 200);
    });
}

#[test]
fn an_exec_client_that_vanishes_ends_its_program() {
    let daemon = Daemon::start();
    daemon.run_detached(CreateVm {
        name: Some("host".into()),
        ..CreateVm::default()
    });
    let mut frames = daemon.exec("host", &shell("echo $$; sleep 100")).unwrap();
    started(&mut frames);
    let Some(ExecOutput::Output { data, .. }) = frames.next() else {
        panic!("no output");
    };
    let pid = String::from_utf8(data).unwrap().trim().parse().unwrap();
    assert!(is_alive(pid));
    drop(frames);
    eventually("the program ended", || !is_alive(pid));
}

#[test]
fn copied_in_files_can_be_copied_out() {
    let daemon = Daemon::start();
    daemon.run_detached(CreateVm {
        name: Some("box".into()),
        ..CreateVm::default()
    });
    let sent = [
        CopyFrame::Entry(CopyEntry {
            path: String::new(),
            kind: CopyKind::File(5),
            mode: 0o600,
            uid: 0,
            gid: 0,
            mtime: 1,
        }),
        CopyFrame::Data(b"hello".to_vec()),
    ];
    let mut copy = daemon
        .stream("/v1/vms/box/copy-in?path=%2Ftmp%2Fa%20b", b"")
        .unwrap();
    for frame in &sent {
        copy.send(frame);
    }
    copy.send(&CopyFrame::End);
    let done: CopyDone = copy.next().unwrap();
    assert_eq!((done.entries, done.error), (2, None));
    let mut copy = daemon
        .stream("/v1/vms/box/copy-out?path=/tmp/a%20b", b"")
        .unwrap();
    for frame in &sent {
        assert_eq!(copy.next::<CopyFrame>().as_ref(), Some(frame));
    }
    assert_eq!(copy.next(), Some(CopyFrame::End));
    assert_eq!(copy.next::<CopyFrame>(), None);
    let mut copy = daemon
        .stream("/v1/vms/box/copy-out?path=/none", b"")
        .unwrap();
    assert!(
        matches!(copy.next(), Some(CopyFrame::Failed { message }) if message.contains("/none"))
    );
    daemon
        .stream("/v1/vms/box/copy-out?path=", b"")
        .unwrap_err()
        .error(ErrorKind::Invalid);
}

#[test]
fn a_vm_runs_the_imported_image() {
    let daemon = Daemon::start();
    let answer = daemon.post("/v1/images/mine", &tar_of(&[("a", b"b")]));
    let image: jiffy_wire::api::Image = answer.json();
    assert_eq!((image.name.as_str(), image.entries), ("mine", 1));
    let frames = daemon.run(CreateVm {
        image: Some("mine".into()),
        ..vm(command(&["true"]))
    });
    let id = id_of(&frames);
    assert_eq!(frames.finish().status(), ExitStatus::Code(0));
    let (config, _) = configs(&daemon, &id);
    assert!(config.disks[0].path.ends_with("images/mine/image.erofs"));
    assert!(config.disks[0].read_only);
}
