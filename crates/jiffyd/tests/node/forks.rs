//! Forks.

use crate::daemon::{Daemon, eventually, named, shell, vm};
use crate::snapshots::{assert_span_order, counter, fork};
use jiffy_wire::api::{CreateVm, ErrorKind, Forked, Origin, Vm, VmState};
use jiffy_wire::timeline::names;
use std::collections::HashSet;
use std::fs;

#[test]
fn forked_children_run_at_once_and_differ() {
    let daemon = Daemon::start();
    daemon.run_detached(named("box", counter()));
    // A child inherits a command only if its parent is known to run it.
    eventually("its command runs", || {
        daemon.logs("box", "").0.contains("begun")
    });
    let forked: Forked = fork(&daemon, "box", 3, Some("child")).json();
    assert_span_order(
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
        eventually("its command continues", || {
            daemon.logs(&child.id, "").0.contains("begun 1\n1\n")
        });
    }
    let before = daemon.logs("box", "").0;
    eventually("the parent continues", || {
        daemon.logs("box", "").0.len() > before.len()
    });
    // A second fork, and a fork of a child; the parent is removed first.
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
    // With a name that is taken, no child is made.
    fork(&daemon, "child-1", 2, Some("child")).error(ErrorKind::Conflict);
    fork(&daemon, "child-1", 0, None).error(ErrorKind::Invalid);
    let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    assert_eq!(all.len(), 6);
    for vm in all {
        daemon.delete(&format!("/v1/vms/{}?force=true", vm.id));
    }
    daemon.assert_nothing_left();
}

#[test]
fn a_child_has_a_host_name_of_its_own() {
    let daemon = Daemon::start();
    daemon.run_detached(CreateVm {
        hostname: Some("chosen".into()),
        ..named("box", counter())
    });
    let forked: Forked = fork(&daemon, "box", 1, Some("child")).json();
    let configured = |id: &str| {
        let config = fs::read_to_string(daemon.vm_folder(id).join("vmm.json")).unwrap();
        let name = config.split(r#"\"hostname\":\""#).nth(1).unwrap();
        name.split('\\').next().unwrap().to_owned()
    };
    assert_eq!(configured(&daemon.vm("box").id), "chosen");
    assert_eq!(configured(&forked.vms[0].id), "child");
}

#[test]
fn output_from_before_a_fork_stays_with_the_parent() {
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
