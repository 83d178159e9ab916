//! Golden snapshots: made once, then used, and dropped when damaged.

use crate::daemon::{Daemon, command, eventually, id_of, kill, shell, tar_of, vm, vmms};
use crate::images::{by_name, configs, encoded, pull, push};
use crate::network;
use crate::registry::Registry;
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{CreateVm, ErrorKind, NetworkUse, Origin, Pruned, Snapshot, Vm};
use jiffy_wire::timeline::{Timeline, names};
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

fn golden(daemon: &Daemon) -> Vec<Snapshot> {
    let mut all: Vec<Snapshot> = daemon.get("/v1/snapshots?all=true").json();
    all.retain(|snapshot| snapshot.golden);
    all
}

pub fn made(daemon: &Daemon) -> Snapshot {
    eventually("a golden snapshot is made", || golden(daemon).len() == 1);
    eventually("the VM it was made of is gone", || {
        vmms(&daemon.data).is_empty()
    });
    golden(daemon).remove(0)
}

/// Runs a command; returns the VM's origin, too.
fn run(daemon: &Daemon, wanted: CreateVm) -> (String, Option<Origin>) {
    let frames = daemon.run(wanted);
    let id = id_of(&frames);
    let finished = frames.finish();
    assert_eq!(finished.status(), ExitStatus::Code(0));
    (finished.text(), daemon.vm(&id).origin)
}

#[test]
fn the_second_run_starts_from_a_golden_snapshot() {
    let mut daemon = Daemon::start();
    let restored = || vm(shell("echo $RESTORED,$HOSTNAME"));
    let named = CreateVm {
        hostname: Some("mine".into()),
        ..restored()
    };
    let (_, origin) = run(&daemon, restored());
    assert_eq!(origin, None);
    let first = made(&daemon);
    assert_eq!((first.cpus, first.memory_mib), (1, 128));
    assert!(first.name.starts_with("golden-"));
    assert!(
        daemon
            .get("/v1/snapshots")
            .json::<Vec<Snapshot>>()
            .is_empty()
    );
    let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    assert_eq!(all.len(), 1, "the VM that it was made of is hidden");
    for _ in 0..3 {
        let (text, origin) = run(&daemon, named.clone());
        assert_eq!((text.as_str(), origin), ("1,mine\n", Some(Origin::Golden)));
    }
    // The ranges that the trial has written are prefaulted in each VM.
    let last: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    let log = fs::read_to_string(daemon.vm_folder(&last[3].id).join("vmm.log")).unwrap();
    assert!(log.contains("prefault"), "{log}");
    // A run without a command uses it, too, and shares no identity with the captured VM.
    let idle: Vm = daemon.run_detached(CreateVm::default()).json();
    assert_eq!((idle.origin, idle.command), (Some(Origin::Golden), None));
    daemon.delete(&format!("/v1/vms/{}?force=true", idle.id));
    // Another shape is another kind; some shapes have no golden snapshot.
    let larger = CreateVm {
        memory_mib: Some(256),
        ..restored()
    };
    assert_eq!(run(&daemon, larger.clone()).1, None);
    eventually("another one is made", || golden(&daemon).len() == 2);
    assert_eq!(run(&daemon, larger).1, Some(Origin::Golden));
    let cold = CreateVm {
        cold: true,
        ..restored()
    };
    assert_eq!(run(&daemon, cold).1, None);
    // The next daemon uses them, too, from its first run on.
    daemon.killed();
    daemon.up();
    assert_eq!(run(&daemon, restored()).1, Some(Origin::Golden));
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(golden(&daemon).len(), 2, "none is made twice");
    let report = daemon.get(&format!("/v1/snapshots/{}/memory?map=true", first.name));
    assert_eq!(report.status, 200);
    let pruned: Pruned = daemon.post("/v1/snapshots/prune", b"").json();
    assert_eq!(pruned.names.len(), 2);
    assert!(pruned.bytes > 0);
    assert!(golden(&daemon).is_empty());
    assert_eq!(fs::read_dir(daemon.data.join("golden")).unwrap().count(), 0);
    assert_eq!(run(&daemon, restored()).1, None);
}

#[test]
fn vms_with_and_without_a_network_keep_their_golden_snapshots() {
    let daemon = network::daemon();
    let connected = || vm(command(&["true"]));
    let alone = || CreateVm {
        network: NetworkUse {
            name: Some("none".into()),
            ..NetworkUse::default()
        },
        ..connected()
    };
    run(&daemon, connected());
    let first = made(&daemon);
    assert_eq!(run(&daemon, alone()).1, None);
    eventually("another one is made", || {
        let now = golden(&daemon);
        now.iter().any(|it| it.name != first.name)
    });
    assert_eq!(golden(&daemon).len(), 2);
    assert_eq!(run(&daemon, connected()).1, Some(Origin::Golden));
    assert_eq!(run(&daemon, alone()).1, Some(Origin::Golden));
}

#[test]
fn an_untested_golden_snapshot_is_made_again() {
    let mut daemon = Daemon::start();
    run(&daemon, vm(command(&["true"])));
    let first = made(&daemon);
    // As if the daemon had ended between capture and trial.
    daemon.killed();
    let folder = fs::read_dir(daemon.data.join("golden")).unwrap().next();
    let folder = folder.unwrap().unwrap().path();
    fs::remove_file(folder.join("prefault.json")).unwrap();
    daemon.up();
    assert!(golden(&daemon).is_empty());
    assert_eq!(run(&daemon, vm(command(&["true"]))).1, None);
    assert_eq!(made(&daemon).name, first.name);
    assert!(folder.join("prefault.json").exists());
    assert_eq!(run(&daemon, vm(command(&["true"]))).1, Some(Origin::Golden));
}

#[test]
fn the_timeline_of_a_golden_run_has_its_spans() {
    let daemon = Daemon::start();
    run(&daemon, vm(command(&["true"])));
    made(&daemon);
    let frames = daemon.run(vm(command(&["true"])));
    let id = id_of(&frames);
    frames.finish();
    let timeline: Timeline = daemon.get(&format!("/v1/vms/{id}/timeline")).json();
    let mut last = 0;
    for name in [
        names::REQUEST_RECEIVED,
        names::IMAGE_READY,
        names::VMM_SPAWNED,
        names::STATE_LOADED,
        names::MEMORY_ATTACHED,
        names::VCPUS_RESUMED,
        names::GATE_ENTERED,
        names::GATE_ACKNOWLEDGED,
        names::COMMAND_STARTED,
        names::COMMAND_DONE,
    ] {
        let span = timeline.find(name).unwrap_or_else(|| panic!("no {name}"));
        assert!(span.start_ns >= last, "{name} is out of order");
        last = span.start_ns;
    }
}

#[test]
fn a_damaged_golden_snapshot_is_dropped_and_the_run_succeeds() {
    let daemon = Daemon::start();
    run(&daemon, vm(command(&["true"])));
    made(&daemon);
    let folder = fs::read_dir(daemon.data.join("golden"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    fs::write(folder.join("state"), b"nonsense").unwrap();
    let frames = daemon.run(vm(shell("echo once; exit 4")));
    let id = id_of(&frames);
    let finished = frames.finish();
    assert_eq!(finished.text(), "once\n");
    assert_eq!(finished.status(), ExitStatus::Code(4));
    let vm = daemon.vm(&id);
    assert_eq!((vm.origin, vm.error), (None, None));
    assert!(golden(&daemon).is_empty());
    let log = fs::read_to_string(daemon.folder.path().join("jiffyd.log")).unwrap();
    assert!(log.contains("a golden snapshot can't be restored"));
    // It is not made again automatically: the next one would be as bad.
    std::thread::sleep(Duration::from_millis(1500));
    assert!(golden(&daemon).is_empty());
}

/// A VMM that is killed during a restore, by a user or the OOM killer, does not make the snapshot
/// bad.
#[test]
fn a_golden_snapshot_survives_a_killed_restore() {
    // No other VMM may read the state.
    let daemon = Daemon::with(&["--standby", "0"]);
    run(&daemon, vm(command(&["true"])));
    let before = made(&daemon).name;
    let (state, kept) = with_endless_state(&daemon);
    let frames = daemon.run(vm(shell("echo once; exit 4")));
    let mut pipe = None;
    eventually("a VMM reads the state", || {
        let mut options = fs::OpenOptions::new();
        options
            .write(true)
            .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
        pipe = options.open(&state).ok();
        pipe.is_some()
    });
    fs::rename(&kept, &state).unwrap();
    kill(vmms(&daemon.data)[0]);
    let finished = frames.finish();
    assert_eq!(finished.text(), "once\n");
    assert_eq!(finished.status(), ExitStatus::Code(4));
    assert_eq!(golden(&daemon)[0].name, before);
    assert_eq!(run(&daemon, vm(command(&["true"]))).1, Some(Origin::Golden));
}

/// Replaces the golden snapshot's state by an empty pipe, from which a VMM reads forever. Returns the
/// pipe's path and where the state is now.
fn with_endless_state(daemon: &Daemon) -> (PathBuf, PathBuf) {
    let goldens = daemon.data.join("golden");
    let folder = fs::read_dir(goldens).unwrap().next().unwrap().unwrap();
    let state = folder.path().join("state");
    let kept = folder.path().join("kept");
    fs::rename(&state, &kept).unwrap();
    let made = std::process::Command::new("mkfifo").arg(&state).status();
    assert!(made.unwrap().success());
    (state, kept)
}

#[test]
fn a_golden_snapshot_that_is_not_restored_in_time_is_dropped() {
    let daemon = Daemon::with(&["--standby", "0", "--start-timeout", "3"]);
    run(&daemon, vm(command(&["true"])));
    let before = made(&daemon).name;
    with_endless_state(&daemon);
    let (text, origin) = run(&daemon, vm(shell("echo once")));
    assert_eq!((text.as_str(), origin), ("once\n", None));
    eventually("the snapshot is dropped", || {
        golden(&daemon)
            .iter()
            .all(|snapshot| snapshot.name != before)
    });
}

#[test]
fn a_changed_kernel_or_image_gets_a_new_golden_snapshot() {
    let daemon = Daemon::start();
    let tar = |text: &[u8]| tar_of(&[("hello", text)]);
    daemon
        .post("/v1/images/mine", &tar(b"one"))
        .json::<jiffy_wire::api::Image>();
    let mine = || CreateVm {
        image: Some("mine".into()),
        remove: true,
        ..vm(command(&["true"]))
    };
    daemon.run(mine()).finish();
    made(&daemon);
    // Another kernel: the old snapshot is not found, and is removed when it is replaced.
    let kernel = daemon.folder.path().join("share/kernels/base/vmlinux");
    fs::write(&kernel, b"another kernel").unwrap();
    let before = made(&daemon);
    assert_eq!(
        run(
            &daemon,
            CreateVm {
                remove: false,
                ..mine()
            }
        )
        .1,
        None
    );
    eventually("another takes its place", || {
        let now = golden(&daemon);
        now.len() == 1 && now[0].name != before.name
    });
    let users: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    for vm in users {
        daemon.delete(&format!("/v1/vms/{}?force=true", vm.id));
    }
    // The snapshot is removed with its image.
    assert_eq!(daemon.delete("/v1/images/mine").status, 204);
    assert!(golden(&daemon).is_empty());
    daemon
        .try_run(mine())
        .unwrap_err()
        .error(ErrorKind::NotFound);
    daemon.assert_nothing_left();
}

#[test]
fn a_lazy_image_has_a_golden_snapshot_removed_with_it() {
    let registry = Registry::start();
    let maker = Daemon::start();
    let push_of = |contents: &[u8]| {
        let tar = tar_of(&[("hello", contents)]);
        maker
            .post("/v1/images/mine?kind=root", &tar)
            .json::<jiffy_wire::api::Image>();
        push(&maker, "mine", &registry.name("mine:1")).unwrap();
    };
    push_of(b"one");
    let mut daemon = Daemon::start();
    let name = registry.name("mine:1");
    pull(&daemon, &by_name(&name)).unwrap();
    let mine = || CreateVm {
        image: Some(name.clone()),
        ..vm(shell("echo $RESTORED"))
    };
    assert_eq!(run(&daemon, mine()).1, None);
    made(&daemon);
    // The snapshot has no file of the lazy root.
    let folders = || fs::read_dir(daemon.data.join("golden")).unwrap().flatten();
    let folder = folders().next().unwrap().path();
    assert!(folder.join("ram.raw").exists());
    assert!(!folder.join("root.erofs").exists());
    // First with a new process, then in a standby: both fetch missing chunks on demand.
    let reads = |id: &str, daemon: &Daemon| {
        let (config, _) = configs(daemon, id);
        let residency = config.disks[0].residency.as_ref();
        assert!(
            residency.is_some_and(|it| it.present.exists()),
            "{config:?}"
        );
        assert!(!config.disks[0].note_reads);
    };
    let again = |daemon: &Daemon| {
        let frames = daemon.run(mine());
        let id = id_of(&frames);
        assert_eq!(frames.finish().text(), "1\n");
        assert_eq!(daemon.vm(&id).origin, Some(Origin::Golden));
        reads(&id, daemon);
        let timeline: Timeline = daemon.get(&format!("/v1/vms/{id}/timeline")).json();
        timeline.find(names::STANDBY_TAKEN).is_some()
    };
    assert!(!again(&daemon));
    eventually("one is restored ahead and taken", || again(&daemon));
    // A user's snapshot of its guest is complete, and needs no registry.
    let idle: Vm = daemon
        .run_detached(CreateVm {
            image: Some(name.clone()),
            ..CreateVm::default()
        })
        .json();
    assert_eq!(idle.origin, Some(Origin::Golden));
    let path = format!("/v1/vms/{}/snapshots", idle.id);
    assert_eq!(daemon.post(&path, br#"{"name":"whole"}"#).status, 200);
    assert!(daemon.data.join("snapshots/whole/root.erofs").exists());
    daemon.killed();
    daemon.up();
    again(&daemon);
    let remove_vms = |daemon: &Daemon| {
        for vm in daemon.get("/v1/vms?all=true").json::<Vec<Vm>>() {
            daemon.delete(&format!("/v1/vms/{}?force=true", vm.id));
        }
    };
    remove_vms(&daemon);

    // Another pull brings another image; its removal removes all of it.
    push_of(b"two");
    pull(&daemon, &by_name(&name)).unwrap();
    assert!(golden(&daemon).is_empty());
    assert_eq!(run(&daemon, mine()).1, None);
    made(&daemon);
    remove_vms(&daemon);
    let path = format!("/v1/images/{}", encoded(&name));
    assert_eq!(daemon.delete(&path).status, 204);
    assert!(golden(&daemon).is_empty());
    for folder in ["chunks", "disks"] {
        let left = fs::read_dir(daemon.data.join(folder)).unwrap();
        assert_eq!(left.count(), 0, "{folder}");
    }
    eventually("its golden snapshot is removed afterwards", || {
        fs::read_dir(daemon.data.join("golden")).unwrap().count() == 0
    });
    daemon.assert_nothing_left();
}
