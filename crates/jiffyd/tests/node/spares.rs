//! VMMs that were started ahead: used by the next start, hidden before that, and ended with their
//! daemon.

use crate::daemon::{
    Daemon, bad_vm, eventually, id_of, kill, named, release_guest, shell, spares, vm, vmms,
};
use jiffy_wire::api::{CreateVm, ForkVm, Forked, Vm, VmState};
use jiffy_wire::timeline::{Timeline, names};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The process id of the waiting spare. Its process exists a moment before it can be taken.
pub fn spare(daemon: &Daemon) -> u32 {
    let mut pid = 0;
    eventually("a VMM waits", || {
        let all = spares(&daemon.data);
        pid = all.first().copied().unwrap_or_default();
        let told = format!("a spare VMM can be taken pid={pid}");
        let log = fs::read_to_string(daemon.folder.path().join("jiffyd.log")).unwrap();
        all.len() == 1 && log.lines().any(|line| line.ends_with(&told))
    });
    pid
}

fn timeline(daemon: &Daemon, vm: &Vm) -> Timeline {
    daemon.get(&format!("/v1/vms/{}/timeline", vm.id)).json()
}

fn link(pid: u32, name: &str) -> PathBuf {
    fs::read_link(format!("/proc/{pid}/{name}")).unwrap()
}

#[test]
fn the_next_start_takes_the_spare() {
    let mut daemon = Daemon::start();
    let first = spare(&daemon);
    let seen: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    assert!(seen.is_empty() && vmms(&daemon.data).is_empty());
    daemon.assert_nothing_left();

    daemon.run_detached(named("idle", CreateVm::default()));
    let idle = daemon.vm("idle");
    assert_eq!(idle.pid, Some(first));
    assert_eq!(vmms(&daemon.data), [first], "its command line names its VM");
    let folder = daemon.vm_folder(&idle.id);
    assert_eq!(link(first, "cwd"), folder);
    for stream in ["fd/1", "fd/2"] {
        assert_eq!(link(first, stream), folder.join("vmm.log"));
    }
    let log = fs::read_to_string(folder.join("vmm.log")).unwrap();
    assert!(log.contains(&format!("fake-vmm: VM {}", idle.id)), "{log}");
    let timeline = timeline(&daemon, &idle);
    let spawned = timeline.find(names::VMM_SPAWNED).unwrap();
    assert_eq!(spawned.detail.as_deref(), Some("a spare"));
    let received = timeline.find(names::REQUEST_RECEIVED).unwrap().start_ns;
    assert!(timeline.spans.iter().all(|span| span.start_ns >= received));

    // A fork passes descriptors to spares.
    let second = spare(&daemon);
    assert_ne!(second, first);
    let body = serde_json::to_vec(&ForkVm {
        count: Some(2),
        name: Some("child".into()),
        ..ForkVm::default()
    })
    .unwrap();
    let forked: Forked = daemon.post("/v1/vms/idle/fork", &body).json();
    let pids: Vec<_> = forked.vms.iter().filter_map(|vm| vm.pid).collect();
    assert_eq!(pids.len(), 2);
    assert!(pids.contains(&second), "one takes it, one is spawned");

    // A killed daemon leaves VMs, but no spare.
    let third = spare(&daemon);
    daemon.killed();
    let process = format!("/proc/{third}");
    eventually("it ends by itself", || !Path::new(&process).exists());
    daemon.up();
    assert_eq!(daemon.vm("idle").pid, Some(first));
    spare(&daemon);

    // It is its daemon's child, and is reaped.
    for vm in ["idle", "child-1", "child-2"] {
        assert_eq!(
            daemon.delete(&format!("/v1/vms/{vm}?force=true")).status,
            204
        );
    }
    daemon.assert_nothing_left();
    daemon.run_detached(named("own", CreateVm::default()));
    let own = daemon.vm("own").pid.unwrap();
    assert_eq!(daemon.delete("/v1/vms/own?force=true").status, 204);
    let process = format!("/proc/{own}");
    eventually("the process is reaped", || !Path::new(&process).exists());
    spare(&daemon);
    daemon.shut_down();
    assert!(
        spares(&daemon.data).is_empty(),
        "a daemon that shuts down ends its spare"
    );
}

#[test]
fn a_dead_spare_is_replaced() {
    let daemon = Daemon::start();
    let dead = spare(&daemon);
    kill(dead);
    let process = format!("/proc/{dead}");
    eventually("the process is reaped", || !Path::new(&process).exists());
    let frames = daemon.run(CreateVm {
        remove: false,
        ..vm(shell("echo hello"))
    });
    let id = id_of(&frames);
    assert_eq!(frames.finish().text(), "hello\n");
    let spawned = timeline(&daemon, &daemon.vm(&id));
    let spawned = spawned.find(names::VMM_SPAWNED).unwrap();
    assert_eq!(spawned.detail, None);
    spare(&daemon);
}

#[test]
fn a_configured_spare_outlives_its_daemon() {
    spare_outlives_its_daemon(Duration::ZERO);
}

#[test]
fn a_configured_spare_outlives_its_daemon_also_on_a_host_that_stalls_it() {
    spare_outlives_its_daemon(Duration::from_secs(3));
}

/// The spare does not run for this time after the next daemon was started.
fn spare_outlives_its_daemon(stalled: Duration) {
    let mut daemon = Daemon::start();
    let pid = spare(&daemon);
    let signal = |signal| {
        let pid = Pid::from_raw(pid as i32).unwrap();
        kill_process(pid, signal).unwrap();
    };
    // It receives its configuration only after its daemon is dead.
    signal(Signal::STOP);
    let frames = daemon.run(named("slow", bad_vm("held", Some(shell("sleep 100")))));
    let id = id_of(&frames);
    eventually("its record is written", || {
        daemon.vm_folder(&id).join("vm.json").exists()
    });
    daemon.killed();
    assert!(vmms(&daemon.data).is_empty());
    daemon.begin(daemon.command());
    std::thread::sleep(stalled);
    signal(Signal::CONT);
    daemon.answers();
    assert_eq!(daemon.vm("slow").state, VmState::Starting);
    release_guest(&daemon.vm_folder(&id));
    let slow = daemon.when("slow", VmState::Running);
    assert_eq!(slow.pid, Some(pid));
}

#[test]
fn no_spare_is_kept_if_disabled() {
    let daemon = Daemon::with(&["--spare", "0"]);
    for _ in 0..2 {
        daemon.run(vm(shell("true"))).finish();
        assert!(spares(&daemon.data).is_empty());
    }
}
