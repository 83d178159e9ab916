//! VMs that are hibernated or stopped when they are idle.

use crate::client::{connect, request};
use crate::daemon::{Daemon, bad_vm, eventually, named, release_guest, shell};
use crate::room::{asked, patient};
use jiffy_wire::agent::ExecInput;
use jiffy_wire::api::{CreateVm, IdleAction, IdlePolicy, Vm, VmIdle, VmState};
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// A VM with this action after one idle second.
fn idle_vm(name: &str, action: IdleAction, vm: CreateVm) -> CreateVm {
    let policy = IdlePolicy { after_s: 1, action };
    CreateVm {
        idle: Some(policy),
        ..named(name, vm)
    }
}

fn sleeper(name: &str) -> CreateVm {
    idle_vm(name, IdleAction::Hibernate, CreateVm::default())
}

fn idle(daemon: &Daemon, name: &str) -> VmIdle {
    daemon.vm(name).idle.expect("an idle time")
}

fn log(daemon: &Daemon) -> String {
    fs::read_to_string(daemon.folder.path().join("jiffyd.log")).unwrap()
}

#[test]
fn an_idle_vm_sleeps_wakes_for_an_exec_and_sleeps_again() {
    let mut daemon = Daemon::start();
    daemon
        .run_detached(named("other", CreateVm::default()))
        .json::<Vm>();
    let policy = IdlePolicy {
        after_s: 3600,
        action: IdleAction::Hibernate,
    };
    let patient = CreateVm {
        idle: Some(policy),
        ..named("patient", CreateVm::default())
    };
    daemon.run_detached(patient).json::<Vm>();
    let vm: Vm = daemon.run_detached(sleeper("box")).json();
    assert_eq!(vm.idle.expect("shown").after_s, 1);
    daemon.when("box", VmState::Hibernated);
    // It stays awake while a command runs in it, and shows why.
    let mut reads = shell("cat; echo done");
    reads.stdin = true;
    let mut exec = daemon.exec("box", &reads).unwrap();
    eventually("the exec is seen", || {
        idle(&daemon, "box").awake == ["1 exec"]
    });
    thread::sleep(Duration::from_secs(3));
    assert_eq!(daemon.vm("box").state, VmState::Running);
    let ends = Instant::now();
    exec.send(&ExecInput::StdinClosed);
    assert_eq!(exec.finish().text(), "done\n");
    let state = daemon.vm("box").state;
    let is_soon = ends.elapsed() < Duration::from_secs(1);
    assert!(state == VmState::Running || !is_soon, "not at once");
    // That of the box is shown only until it sleeps.
    eventually("an idle time is shown", || {
        let list = connect(&daemon.socket())
            .and_then(|stream| request(stream, "GET /v1/vms HTTP/1.1\r\nAccept: text/plain", b""))
            .unwrap();
        let list = String::from_utf8(list.body).unwrap();
        let mut idle = list.lines().filter(|line| line.contains("(idle "));
        idle.any(|line| line.contains("patient"))
    });
    daemon.when("box", VmState::Hibernated);
    // The next daemon applies the same policy.
    daemon.post("/v1/vms/box/wake", b"").json::<Vm>();
    daemon.killed();
    daemon.up();
    daemon.when("box", VmState::Hibernated);
    assert_eq!(daemon.vm("other").state, VmState::Running, "off by default");
    assert_eq!(daemon.vm("other").idle, None);
}

#[test]
fn an_idle_vm_is_stopped_if_its_policy_says_so() {
    let daemon = Daemon::start();
    let command = shell("sleep 1000");
    let vm = CreateVm {
        command: Some(command),
        ..CreateVm::default()
    };
    // An attached client keeps it awake.
    let attached = daemon.run(idle_vm("box", IdleAction::Stop, vm));
    daemon.when("box", VmState::Running);
    thread::sleep(Duration::from_secs(3));
    assert_eq!(daemon.vm("box").state, VmState::Running);
    // The start may have been shown as work.
    eventually("its client is seen", || {
        idle(&daemon, "box").awake == ["1 attached client"]
    });
    drop(attached);
    let ended = daemon.when("box", VmState::Exited);
    assert_eq!(ended.error, None);
}

#[test]
fn vms_with_waiting_forks_do_not_block_hibernating_others() {
    let daemon = patient("384M");
    for name in ["one", "two", "three"] {
        daemon.run_detached(sleeper(name)).json::<Vm>();
    }
    // Two VMs are hibernated at a time.
    let forks = ["one", "two"].map(|name| asked(&daemon, &format!("/v1/vms/{name}/fork"), b"{}"));
    daemon.when("three", VmState::Hibernated);
    drop(forks);
}

#[test]
fn a_vm_that_works_stays_awake() {
    let daemon = Daemon::start();
    daemon
        .run_detached(idle_vm("box", IdleAction::Hibernate, bad_vm("busy", None)))
        .json::<Vm>();
    eventually("its work is seen", || {
        idle(&daemon, "box")
            .awake
            .iter()
            .any(|it| it.starts_with("CPU "))
    });
    thread::sleep(Duration::from_secs(3));
    assert_eq!(daemon.vm("box").state, VmState::Running);
}

#[test]
fn a_vm_whose_data_needs_no_disk_stays_awake() {
    let daemon = Daemon::start();
    let moves = bad_vm("moves-data", None);
    daemon
        .run_detached(idle_vm("box", IdleAction::Hibernate, moves))
        .json::<Vm>();
    eventually("its data is seen", || {
        let awake = idle(&daemon, "box").awake;
        awake.iter().any(|it| it.starts_with("data "))
    });
    thread::sleep(Duration::from_secs(3));
    assert_eq!(daemon.vm("box").state, VmState::Running);
}

#[test]
fn a_failed_hibernation_is_reported_once_and_not_repeated() {
    let daemon = Daemon::start();
    daemon
        .run_detached(idle_vm(
            "box",
            IdleAction::Hibernate,
            bad_vm("capture-fails", None),
        ))
        .json::<Vm>();
    eventually("it was tried", || idle(&daemon, "box").error.is_some());
    let error = idle(&daemon, "box").error.unwrap();
    assert!(
        error.contains("can't be captured") && error.ends_with('.'),
        "{error}"
    );
    thread::sleep(Duration::from_secs(4));
    assert_eq!(log(&daemon).matches("hibernated or stopped").count(), 1);
    let done = daemon.exec("box", &shell("echo here")).unwrap().finish();
    assert_eq!(done.text(), "here\n");
}

#[test]
fn a_command_during_hibernation_waits_and_is_answered() {
    let daemon = Daemon::start();
    let vm = idle_vm("box", IdleAction::Hibernate, bad_vm("held-capture", None));
    let id = daemon.run_detached(vm).json::<Vm>().id;
    let folder = daemon.vm_folder(&id);
    eventually("it is being captured", || folder.join("capturing").exists());
    thread::scope(|scope| {
        let exec = scope.spawn(|| daemon.exec("box", &shell("echo here")).unwrap().finish());
        thread::sleep(Duration::from_millis(300));
        assert!(!exec.is_finished());
        release_guest(&folder);
        assert_eq!(exec.join().unwrap().text(), "here\n");
    });
    assert!(log(&daemon).contains("VM woken"));
}

#[test]
fn commands_succeed_at_any_time_of_the_idle_cycle() {
    let daemon = Daemon::start();
    daemon.run_detached(sleeper("box")).json::<Vm>();
    let answers = |after: &str| {
        let done = daemon.exec("box", &shell("echo here")).unwrap().finish();
        assert_eq!(done.text(), "here\n", "after {after}");
    };
    // It is hibernated after 1 s to 2 s without a command.
    for pause in (900..=2100).step_by(80) {
        thread::sleep(Duration::from_millis(pause));
        answers(&format!("{pause} ms"));
    }
    eventually("it is hibernated", || {
        daemon.vm("box").state == VmState::Hibernated
    });
    answers("its hibernation");
    assert!(log(&daemon).contains("VM woken"));
}
