//! VMs restored ahead: taken over by a run, hidden before that, and ended when they are not needed
//! any more.

use crate::daemon::{Daemon, eventually, id_of, kill, named, shell, tar_of, vm, vmms};
use crate::spares::spare;
use jiffy_wire::api::{CreateVm, Image, NodeInfo, Origin, Pruned, Snapshot, Vm};
use jiffy_wire::timeline::{Timeline, names};
use std::fs;
use std::path::Path;
use std::thread;

pub fn says() -> CreateVm {
    CreateVm {
        remove: false,
        ..vm(shell("echo $RESTORED,$HOSTNAME"))
    }
}

/// Runs it to its end; returns the VM and its output.
pub fn run(daemon: &Daemon, wanted: CreateVm) -> (Vm, String) {
    let frames = daemon.run(wanted);
    let id = id_of(&frames);
    let text = frames.finish().text();
    (daemon.vm(&id), text)
}

/// The process id of the only VMM, which belongs to a hidden VM.
pub fn standby(daemon: &Daemon) -> u32 {
    let mut found = None;
    eventually("a VM is restored ahead, and no other lives", || {
        let lives: Vec<Vm> = daemon.get("/v1/vms").json();
        // One look: a VMM that is ending may be gone in the next one.
        found = <[u32; 1]>::try_from(vmms(&daemon.data)).ok();
        lives.is_empty() && found.is_some()
    });
    let [pid] = found.unwrap();
    pid
}

/// The id of the hidden VM, once a run can take it over. Its process exists a moment before that.
fn ready_standby(daemon: &Daemon) -> String {
    standby(daemon);
    let mut id = String::new();
    eventually("it can be taken over", || {
        let all = daemon.get("/v1/info").json::<NodeInfo>().standbys;
        id = all.first().cloned().unwrap_or_default();
        let said = fs::read_to_string(daemon.vm_folder(&id).join("vmm.log")).unwrap_or_default();
        let log = fs::read_to_string(daemon.folder.path().join("jiffyd.log")).unwrap();
        let is_kept = |line: &str| line.contains("a standby can be taken") && line.contains(&id);
        !all.is_empty() && said.contains("fake-vmm: held") && log.lines().any(is_kept)
    });
    id
}

/// Waits until there are so many golden snapshots, and none of their VMs is left.
pub fn golden(daemon: &Daemon, count: usize) {
    eventually("a golden snapshot is made", || {
        let all: Vec<Snapshot> = daemon.get("/v1/snapshots?all=true").json();
        all.len() == count && vmms(&daemon.data).is_empty()
    });
}

/// A daemon with a golden snapshot and a VM restored from it.
fn with_standby() -> Daemon {
    let daemon = Daemon::start();
    run(&daemon, says());
    golden(&daemon, 1);
    run(&daemon, says());
    standby(&daemon);
    daemon
}

fn timeline(daemon: &Daemon, vm: &Vm) -> Timeline {
    daemon.get(&format!("/v1/vms/{}/timeline", vm.id)).json()
}

#[test]
fn a_run_takes_over_the_standby_vm() {
    let daemon = with_standby();
    let mut before = standby(&daemon);
    for hostname in ["one", "two"] {
        let named = CreateVm {
            hostname: Some(hostname.into()),
            ..says()
        };
        // Its process exists a moment before it can be taken over.
        let mut last = None;
        eventually("a run takes it over", || {
            let (vm, text) = run(&daemon, named.clone());
            assert_eq!(text, format!("1,{hostname}\n"));
            assert_eq!(vm.origin, Some(Origin::Golden));
            let timeline = timeline(&daemon, &vm);
            let has = |name| timeline.find(name).is_some();
            assert_ne!(has(names::STANDBY_TAKEN), has(names::VMM_SPAWNED));
            let taken = has(names::STANDBY_TAKEN);
            last = Some((vm, timeline));
            taken
        });
        let (vm, timeline) = last.unwrap();
        let taken = timeline.find(names::STANDBY_TAKEN).unwrap().start_ns;
        let received = timeline.find(names::REQUEST_RECEIVED).unwrap().start_ns;
        assert!(received <= taken);
        assert!(
            timeline.spans.iter().all(|span| span.start_ns >= received),
            "the timeline contains spans from before the run: {timeline:?}"
        );
        let log = std::fs::read_to_string(daemon.vm_folder(&vm.id).join("vmm.log")).unwrap();
        assert_eq!(log.matches("fake-vmm: VM").count(), 1, "one process: {log}");
        let next = standby(&daemon);
        assert_ne!(next, before, "another one waits");
        before = next;
    }
}

#[test]
fn a_standby_that_has_not_read_its_configuration_is_not_taken_over() {
    let daemon = with_standby();
    ready_standby(&daemon);
    spare(&daemon);
    let unread = daemon.data.join("unread");
    fs::write(&unread, "").unwrap();
    // Takes the standby, so that a new one is made.
    run(&daemon, says());
    let young = standby(&daemon);
    spare(&daemon);
    let (vm, text) = run(&daemon, says());
    assert!(text.starts_with("1,"), "{text}");
    assert_eq!(vm.origin, Some(Origin::Golden));
    let was_taken = |vm: &Vm| timeline(&daemon, vm).find(names::STANDBY_TAKEN).is_some();
    assert!(!was_taken(&vm));
    assert_eq!(standby(&daemon), young, "it is kept for a later run");
    fs::remove_file(&unread).unwrap();
    eventually("a run takes it over", || was_taken(&run(&daemon, says()).0));
}

#[test]
fn a_standby_vm_that_a_failed_run_took_is_replaced() {
    let daemon = with_standby();
    run(&daemon, named("box", says()));
    let before = standby(&daemon);
    eventually("a run takes it and fails, and another waits", || {
        assert_eq!(daemon.run_detached(named("box", says())).status, 409);
        standby(&daemon) != before
    });
}

#[test]
fn a_dead_standby_vm_is_replaced() {
    let daemon = with_standby();
    let pid = standby(&daemon);
    kill(pid);
    eventually("it is gone", || vmms(&daemon.data).is_empty());
    // An unreaped process would still exist.
    let process = format!("/proc/{pid}");
    eventually("the process is reaped", || !Path::new(&process).exists());
    eventually("nothing of it is left", || {
        let known: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
        fs::read_dir(daemon.data.join("vms")).unwrap().count() == known.len()
    });
    let (vm, text) = run(&daemon, says());
    assert!(text.starts_with("1,"), "{text}");
    assert_eq!(
        vm.origin,
        Some(Origin::Golden),
        "the snapshot is still used"
    );
    assert!(timeline(&daemon, &vm).find(names::VMM_SPAWNED).is_some());
    standby(&daemon);
}

#[test]
fn a_run_in_a_standby_vm_survives_removal_of_its_snapshot() {
    let daemon = with_standby();
    let named = |wanted| CreateVm {
        name: Some("box".into()),
        ..wanted
    };
    // The VM has ended, but is not removed before its output is read; until then, requests for its
    // name wait.
    let unread = daemon.run(named(CreateVm {
        remove: true,
        ..vm(shell("head -c 4000000 /dev/zero"))
    }));
    let id = ready_standby(&daemon);
    let standbys = || daemon.get("/v1/info").json::<NodeInfo>().standbys;
    thread::scope(|scope| {
        let waiting = scope.spawn(|| run(&daemon, named(says())));
        eventually("the run has it", || !standbys().contains(&id));
        daemon.post("/v1/snapshots/prune", b"").json::<Pruned>();
        drop(unread);
        let (vm, text) = waiting.join().unwrap();
        assert_eq!((&vm.id, text), (&id, ",\n".to_owned()));
        assert_eq!((vm.origin, vm.error), (None, None));
    });
    eventually("no VMM is left", || vmms(&daemon.data).is_empty());
    assert!(daemon.vm_folder(&id).join("vm.json").exists());
    remove_all(&daemon);
}

#[test]
fn a_standby_vm_ends_with_its_snapshot_image_or_daemon() {
    let mut daemon = with_standby();
    let pruned: Pruned = daemon.post("/v1/snapshots/prune", b"").json();
    assert_eq!(pruned.names.len(), 1);
    eventually("the standby ends with its snapshot", || {
        vmms(&daemon.data).is_empty()
    });
    remove_all(&daemon);
    daemon.assert_nothing_left();

    // A killed daemon can't end it; the next one does.
    let make = |daemon: &Daemon| {
        run(daemon, says());
        golden(daemon, 1);
        run(daemon, says());
        standby(daemon)
    };
    let left = make(&daemon);
    daemon.killed();
    assert_eq!(vmms(&daemon.data), [left]);
    daemon.up();
    eventually("it is found and ended", || vmms(&daemon.data).is_empty());
    run(&daemon, says());
    standby(&daemon);

    // A daemon that shuts down ends it.
    daemon.shut_down();
    assert!(vmms(&daemon.data).is_empty());
    daemon.up();

    let tar = tar_of(&[("hello", b"one")]);
    daemon.post("/v1/images/mine", &tar).json::<Image>();
    let mine = || CreateVm {
        image: Some("mine".into()),
        remove: true,
        ..vm(shell("true"))
    };
    daemon.run(mine()).finish();
    golden(&daemon, 2);
    daemon.run(mine()).finish();
    standby(&daemon);
    assert_eq!(daemon.delete("/v1/images/mine").status, 204);
    eventually("the standby ends with its image", || {
        vmms(&daemon.data).is_empty()
    });
}

fn remove_all(daemon: &Daemon) {
    let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    for vm in all {
        daemon.delete(&format!("/v1/vms/{}?force=true", vm.id));
    }
}

#[test]
fn no_standby_vm_is_kept_if_disabled() {
    let daemon = Daemon::with(&["--standby", "0"]);
    run(&daemon, says());
    golden(&daemon, 1);
    for _ in 0..2 {
        let (vm, _) = run(&daemon, says());
        let timeline = timeline(&daemon, &vm);
        assert!(timeline.find(names::STANDBY_TAKEN).is_none());
        eventually("it ends", || vmms(&daemon.data).is_empty());
    }
}

#[test]
fn a_vm_without_a_command_takes_over_the_standby_vm() {
    let daemon = with_standby();
    let id = ready_standby(&daemon);
    let idle: Vm = daemon
        .run_detached(CreateVm {
            name: Some("idle".into()),
            ..CreateVm::default()
        })
        .json();
    assert_eq!((&idle.id, &idle.error), (&id, &None));
    assert_eq!(idle.origin, Some(Origin::Golden));
    let said = daemon.exec("idle", &shell("echo here")).unwrap().finish();
    assert_eq!(said.text(), "here\n");
}
