//! Kills during run, stop, remove, exec, adoption.

use super::{Began, OPTIONS, assert_runs, begin, is_done, killed_at_every_call, killed_wherever};
use super::{ask, isolated, quiet, remove, settled};
use crate::client::connect;
use crate::daemon::{Daemon, named, shell, vmms};
use jiffy_wire::api::{Image, RunVm, VmState};
use std::io::{Read, Write};
use std::time::Duration;

#[test]
fn a_run_is_complete_or_absent() {
    a_run(Daemon::with(&OPTIONS));
}

#[test]
fn a_run_of_an_isolated_vm_is_complete_or_absent() {
    a_run(isolated::daemon(&OPTIONS));
}

#[test]
fn a_run_in_a_spare_vmm_is_complete_or_absent() {
    a_run(Daemon::with(&["--standby", "0", "--spare", "1"]));
}

fn a_run(mut daemon: Daemon) {
    // The first run makes the image.
    daemon.get("/v1/images").json::<Vec<Image>>();
    let wanted = RunVm {
        vm: named("box", quiet()),
        detach: true,
        ..RunVm::default()
    };
    let body = serde_json::to_vec(&wanted).unwrap();
    killed_at_every_call(
        &mut daemon,
        |daemon| is_done(daemon, "POST", "/v1/run", &body),
        |daemon, done| {
            let made = settled(daemon, "box");
            assert!(made.is_some() || !done);
            if let Some(vm) = made {
                match vm.error {
                    None => assert_runs(daemon, "box"),
                    Some(error) => assert!(!done, "{error}"),
                }
                remove(daemon, "box");
            }
            daemon.assert_nothing_left();
        },
    );
}

#[test]
fn a_stop_leaves_a_vm_running_or_stopped() {
    a_stop(Daemon::with(&OPTIONS));
}

#[test]
fn a_stop_of_an_isolated_vm_leaves_it_running_or_stopped() {
    a_stop(isolated::daemon(&OPTIONS));
}

fn a_stop(mut daemon: Daemon) {
    begin(&daemon, "box");
    killed_at_every_call(
        &mut daemon,
        |daemon| is_done(daemon, "POST", "/v1/vms/box/stop?grace_ms=100", b""),
        |daemon, done| {
            let vm = settled(daemon, "box").unwrap();
            if vm.state == VmState::Running {
                assert!(!done);
                // Its guest may have got the request already, and end at any time, so other
                // requests prove nothing. It can be stopped, or has just ended.
                daemon.post("/v1/vms/box/stop?grace_ms=100", b"");
            }
            daemon.when("box", VmState::Exited);
            assert!(vmms(&daemon.data).is_empty());
            assert_eq!(daemon.post("/v1/vms/box/start", b"").status, 200);
            assert_runs(daemon, "box");
        },
    );
}

#[test]
fn a_removed_vm_is_absent_or_complete() {
    a_removal(Daemon::with(&OPTIONS));
}

#[test]
fn a_removed_isolated_vm_is_absent_or_complete() {
    a_removal(isolated::daemon(&OPTIONS));
}

fn a_removal(mut daemon: Daemon) {
    begin(&daemon, "box");
    killed_at_every_call(
        &mut daemon,
        |daemon| is_done(daemon, "DELETE", "/v1/vms/box?force=true", b""),
        |daemon, done| {
            if settled(daemon, "box").is_some() {
                assert!(!done);
                remove(daemon, "box");
            }
            daemon.assert_nothing_left();
            begin(daemon, "box");
        },
    );
}

#[test]
fn an_exec_leaves_the_vm_unchanged() {
    let mut daemon = Daemon::with(&OPTIONS);
    let pid = begin(&daemon, "box").pid;
    let body = serde_json::to_vec(&shell("echo well")).unwrap();
    let exec = |daemon: &Daemon| {
        let mut stream = connect(&daemon.socket())?;
        let length = body.len();
        write!(
            stream,
            "POST /v1/vms/box/exec HTTP/1.1\r\nHost: node\r\nConnection: upgrade\r\nUpgrade: jiffy-frames\r\nContent-Length: {length}\r\n\r\n"
        )?;
        stream.write_all(&body)?;
        let mut said = Vec::new();
        stream.read_to_end(&mut said)?;
        Ok(said.windows(4).any(|bytes| bytes == b"well"))
    };
    killed_at_every_call(&mut daemon, exec, |daemon, _| {
        assert_eq!(daemon.vm("box").pid, pid);
        assert_runs(daemon, "box");
    });
}

#[test]
fn vms_survive_a_daemon_killed_during_adoption() {
    an_adoption(Daemon::with(&OPTIONS));
}

#[test]
fn isolated_vms_survive_a_daemon_killed_during_adoption() {
    an_adoption(isolated::daemon(&OPTIONS));
}

fn an_adoption(mut daemon: Daemon) {
    let pid = begin(&daemon, "box").pid;
    begin(&daemon, "rest");
    assert_eq!(daemon.post("/v1/vms/rest/hibernate", b"").status, 200);
    let answers = |daemon: &Daemon| {
        while crate::daemon::is_alive(daemon.pid()) {
            if ask(daemon, "GET", "/v1/info", b"").is_ok() {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(false)
    };
    killed_wherever(&mut daemon, Began::Then, answers, |daemon, _| {
        assert_eq!(daemon.vm("box").pid, pid);
        assert_runs(daemon, "box");
        assert_eq!(daemon.vm("rest").state, VmState::Hibernated);
    });
    for name in ["box", "rest"] {
        remove(&daemon, name);
    }
    daemon.assert_nothing_left();
}
