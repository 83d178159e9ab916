//! Kills during snapshot, fork, hibernation and wake, commit.

use super::settled;
use super::{OPTIONS, assert_runs, begin, is_done, isolated, killed_at_every_call, quiet, remove};
use crate::daemon::{Daemon, named, pagers, tar_of};
use jiffy_wire::api::{CreateVm, Image, Snapshot, Vm, VmState};

#[test]
fn a_snapshot_is_complete_or_absent() {
    let mut daemon = Daemon::with(&OPTIONS);
    let pid = begin(&daemon, "box").pid;
    let body = b"{\"name\":\"one\"}";
    killed_at_every_call(
        &mut daemon,
        |daemon| is_done(daemon, "POST", "/v1/vms/box/snapshots", body),
        |daemon, done| {
            assert_eq!(daemon.vm("box").pid, pid);
            assert_runs(daemon, "box");
            let made: Vec<Snapshot> = daemon.get("/v1/snapshots").json();
            assert!(made.len() == 1 || !done, "{made:?}");
            for snapshot in &made {
                assert_eq!(snapshot.error, None);
                let child = CreateVm {
                    from: Some("one".into()),
                    ..named("child", CreateVm::default())
                };
                daemon.run_detached(child).json::<Vm>();
                assert_runs(daemon, "child");
                remove(daemon, "child");
                assert_eq!(daemon.delete("/v1/snapshots/one").status, 204);
            }
        },
    );
}

#[test]
fn the_parent_of_a_fork_goes_on() {
    a_fork(Daemon::with(&OPTIONS));
}

#[test]
fn the_isolated_parent_of_a_fork_goes_on() {
    a_fork(isolated::daemon(&OPTIONS));
}

fn a_fork(mut daemon: Daemon) {
    let pid = begin(&daemon, "box").pid;
    let body = b"{\"name\":\"child\"}";
    killed_at_every_call(
        &mut daemon,
        |daemon| is_done(daemon, "POST", "/v1/vms/box/fork", body),
        |daemon, done| {
            assert_eq!(daemon.vm("box").pid, pid);
            assert_runs(daemon, "box");
            let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
            let mut children = all.iter().filter(|vm| vm.name != "box");
            let child = children.next();
            assert!(child.is_some() || !done);
            assert_eq!(children.next(), None);
            if let Some(child) = child {
                if done {
                    assert_runs(daemon, &child.id);
                }
                remove(daemon, &child.id);
            }
        },
    );
    remove(&daemon, "box");
    daemon.assert_nothing_left();
}

#[test]
fn a_hibernating_vm_is_running_or_hibernated() {
    a_hibernation(Daemon::with(&OPTIONS));
}

#[test]
fn an_isolated_hibernating_vm_is_running_or_hibernated() {
    a_hibernation(isolated::daemon(&OPTIONS));
}

fn a_hibernation(mut daemon: Daemon) {
    begin(&daemon, "box");
    killed_at_every_call(
        &mut daemon,
        |daemon| is_done(daemon, "POST", "/v1/vms/box/hibernate", b""),
        |daemon, done| {
            let state = daemon.vm("box").state;
            assert!(state == VmState::Hibernated || !done, "{state:?}");
            if state == VmState::Hibernated {
                daemon.post("/v1/vms/box/wake", b"").json::<Vm>();
            }
            assert_runs(daemon, "box");
            // A VM that was never captured.
            remove(daemon, "box");
            daemon.assert_nothing_left();
            begin(daemon, "box");
        },
    );
}

#[test]
fn a_waking_vm_is_running_or_hibernated() {
    a_wake(Daemon::with(&OPTIONS));
}

#[test]
fn an_isolated_waking_vm_is_running_or_hibernated() {
    a_wake(isolated::daemon(&OPTIONS));
}

fn a_wake(mut daemon: Daemon) {
    begin(&daemon, "box");
    assert_eq!(daemon.post("/v1/vms/box/hibernate", b"").status, 200);
    killed_at_every_call(
        &mut daemon,
        |daemon| is_done(daemon, "POST", "/v1/vms/box/wake", b""),
        |daemon, done| {
            let vm = settled(daemon, "box").unwrap();
            let state = vm.state;
            assert!(state == VmState::Running || !done, "{state:?}");
            if state == VmState::Running {
                assert_runs(daemon, "box");
                // A VM with memory from there.
                assert_eq!(pagers(daemon.folder.path()).len(), 1);
                let pager = daemon.folder.path().join("run/pager");
                assert!(pager.join(format!("{}.sock", vm.id)).exists());
                assert_eq!(daemon.post("/v1/vms/box/hibernate", b"").status, 200);
            }
            assert_eq!(daemon.vm("box").state, VmState::Hibernated);
        },
    );
}

#[test]
fn a_commit_makes_a_complete_image_or_none() {
    let mut daemon = Daemon::with(&OPTIONS);
    let tar = tar_of(&[("one", &[1; 100_000])]);
    daemon
        .post("/v1/images/mine?kind=root", &tar)
        .json::<Image>();
    let of_mine = CreateVm {
        image: Some("mine".into()),
        ..quiet()
    };
    let pid = daemon.run_detached(named("box", of_mine)).json::<Vm>().pid;
    let body = b"{\"image\":\"next\"}";
    killed_at_every_call(
        &mut daemon,
        |daemon| is_done(daemon, "POST", "/v1/vms/box/commit", body),
        |daemon, done| {
            assert_eq!(daemon.vm("box").pid, pid);
            assert_runs(daemon, "box");
            let all: Vec<Image> = daemon.get("/v1/images").json();
            let is_made = all.iter().any(|image| image.name == "next");
            assert!(is_made || !done);
            if is_made {
                let child = CreateVm {
                    image: Some("next".into()),
                    ..named("child", quiet())
                };
                daemon.run_detached(child).json::<Vm>();
                assert_runs(daemon, "child");
                remove(daemon, "child");
                assert_eq!(daemon.delete("/v1/images/next").status, 204);
            }
        },
    );
}
