//! Folders of the host in VMs, with a stand-in for the process that serves them.

use crate::daemon::{Daemon, eventually, named};
use crate::images::configs;
use crate::snapshots::{counter, fork, snapshot};
use jiffy_sys::testing::write_program;
use jiffy_wire::api::{
    CreateVm, ErrorKind, FolderUse, ForkVm, Forked, Hibernated, IdleAction, IdlePolicy,
    MakeSnapshot, SnapshotMade, Vm, VmState,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Writes its arguments and its folder into a file, and ends when the VMM has closed its end.
const SERVER: &str = "#!/bin/sh\n\
    echo \"$(readlink /proc/self/fd/4) $*\" >> \"$0.started\"\n\
    cat <&3 >/dev/null\n\
    echo ended >> \"$0.ended\"\n";

/// Writes 640 KiB a second until the VMM has closed its end.
const BUSY_SERVER: &str = "#!/bin/sh\n\
    (cat <&3 >/dev/null; kill $$) &\n\
    data=$(head -c 65536 /dev/zero | tr '\\0' x)\n\
    while :; do printf %s \"$data\" >/dev/null; sleep 0.1; done\n";

fn daemon() -> Daemon {
    daemon_with(SERVER)
}

fn daemon_with(server: &str) -> Daemon {
    let mut daemon = Daemon::prepared(&[]);
    let program = program(&daemon);
    write_program(&program, server);
    daemon.up();
    daemon
}

fn program(daemon: &Daemon) -> PathBuf {
    daemon.folder.path().join("lib/jiffy-files")
}

fn folder(source: &Path, mount: &str, read_only: bool) -> FolderUse {
    FolderUse {
        source: source.to_str().unwrap().into(),
        mount: mount.into(),
        read_only,
        capture: false,
    }
}

/// A folder whose VM may be captured.
fn captured(source: &Path, mount: &str) -> FolderUse {
    FolderUse {
        capture: true,
        ..folder(source, mount, false)
    }
}

fn sharing(name: &str, folders: Vec<FolderUse>) -> CreateVm {
    CreateVm {
        folders,
        ..named(name, counter())
    }
}

fn vms(daemon: &Daemon) -> Vec<Vm> {
    daemon.get("/v1/vms").json()
}

/// The lines of a file that the server writes, once there are so many.
fn lines(file: PathBuf, count: usize) -> Vec<String> {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let text = fs::read_to_string(&file).unwrap_or_default();
        if text.lines().count() >= count {
            return text.lines().map(str::to_owned).collect();
        }
        assert!(Instant::now() < end, "{} has only {text:?}", file.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_vm_whose_folder_is_used_stays_awake() {
    let daemon = daemon_with(BUSY_SERVER);
    let shared = tempfile::tempdir().unwrap();
    let policy = IdlePolicy {
        after_s: 1,
        action: IdleAction::Stop,
    };
    let vm = CreateVm {
        idle: Some(policy),
        folders: vec![folder(shared.path(), "/src", false)],
        ..named("web", CreateVm::default())
    };
    daemon.run_detached(vm).json::<Vm>();
    eventually("its folder's use is seen", || {
        let idle = daemon.vm("web").idle.expect("an idle time");
        idle.awake.iter().any(|it| it.starts_with("data "))
    });
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(daemon.vm("web").state, VmState::Running);
}

#[test]
fn folders_are_served_as_long_as_the_vm_runs() {
    let mut daemon = daemon();
    let shared = tempfile::tempdir().unwrap();
    let shared = shared.path().canonicalize().unwrap();
    let folders = vec![
        folder(&shared, "/src", false),
        folder(Path::new("/"), "/host", true),
    ];
    let vm: Vm = daemon.run_detached(sharing("web", folders.clone())).json();
    assert_eq!(vm.folders, folders);
    let (config, guest) = configs(&daemon, &vm.id);
    let tags: Vec<_> = config
        .folders
        .iter()
        .map(|folder| folder.tag.as_str())
        .collect();
    assert_eq!(tags, ["folder0", "folder1"]);
    assert!(config.folders.iter().all(|folder| folder.server.is_some()));
    let mounts: Vec<_> = guest
        .folders
        .iter()
        .map(|mount| (&*mount.tag, &*mount.mount_point, mount.read_only))
        .collect();
    assert_eq!(
        mounts,
        [("folder0", "/src", false), ("folder1", "/host", true)]
    );

    let squash = if rustix::process::geteuid().is_root() {
        ""
    } else {
        " --squash"
    };
    let mut started = lines(program(&daemon).with_extension("started"), 2);
    started.sort();
    let fds = "--socket-fd 3 --folder-fd 4";
    let shown = shared.display();
    let mut expected = [
        format!("/ {fds} --read-only{squash}"),
        format!("{shown} {fds}{squash}"),
    ];
    expected.sort();
    assert_eq!(started, expected);

    // They belong to the VM, not to the daemon.
    daemon.killed();
    daemon.up();
    assert_eq!(daemon.vm("web").folders, folders);
    let ended = program(&daemon).with_extension("ended");
    assert!(!ended.exists());
    daemon.post("/v1/vms/web/stop", b"").json::<Vm>();
    assert_eq!(lines(ended, 2).len(), 2);
    // A start serves them again.
    daemon.post("/v1/vms/web/start", b"").json::<Vm>();
    lines(program(&daemon).with_extension("started"), 4);
}

#[test]
fn a_vm_that_shares_folders_is_not_captured() {
    let daemon = daemon();
    // One folder without it is enough.
    let folders = vec![
        captured(Path::new("/etc"), "/etc/host"),
        folder(Path::new("/tmp"), "/src", false),
    ];
    daemon
        .run_detached(sharing("web", folders.clone()))
        .json::<Vm>();
    let snapshot = serde_json::to_vec(&MakeSnapshot {
        name: "warm".into(),
        stop: false,
    });
    let fork = serde_json::to_vec(&ForkVm::default()).unwrap();
    let requests = [
        ("/v1/vms/web/snapshots", snapshot.unwrap()),
        ("/v1/vms/web/fork", fork),
        ("/v1/vms/web/hibernate", Vec::new()),
    ];
    for (path, body) in requests {
        let refused = daemon.post(path, &body).error(ErrorKind::WrongState);
        let why = refused.message;
        assert!(why.contains("shares /tmp with this host"), "{why}");
        let hint = refused.hint.unwrap();
        assert!(hint.contains("-v /tmp:/src:capture"), "{hint}");
    }
    let sleeper = CreateVm {
        idle: Some(IdlePolicy {
            after_s: 60,
            action: IdleAction::Hibernate,
        }),
        ..sharing("sleeper", folders)
    };
    let refused = daemon
        .run_detached(sleeper)
        .error(ErrorKind::Invalid)
        .message;
    assert!(refused.contains("shares folders of the host"), "{refused}");
}

#[test]
fn a_vm_whose_folders_allow_it_is_captured_and_shares_them_again() {
    let daemon = daemon();
    let started = program(&daemon).with_extension("started");
    let shared = tempfile::tempdir().unwrap();
    let shared = shared.path().canonicalize().unwrap();
    let folders = vec![captured(&shared, "/src"), captured(Path::new("/"), "/host")];
    let sleeper = CreateVm {
        idle: Some(IdlePolicy {
            after_s: 3600,
            action: IdleAction::Hibernate,
        }),
        ..sharing("web", folders.clone())
    };
    let vm: Vm = daemon.run_detached(sleeper).json();
    assert_eq!(vm.folders, folders);
    lines(started.clone(), 2);
    let shares = |vm: &Vm| {
        let (config, _) = configs(&daemon, &vm.id);
        let servers = config.folders.iter().filter(|it| it.server.is_some());
        servers.count()
    };

    daemon
        .post("/v1/vms/web/hibernate", b"")
        .json::<Hibernated>();
    lines(program(&daemon).with_extension("ended"), 2);
    daemon.post("/v1/vms/web/wake", b"").json::<Vm>();
    assert_eq!(lines(started.clone(), 4).len(), 4);
    let woken = daemon.vm("web");
    assert_eq!((&woken.folders, shares(&woken)), (&folders, 2));

    // The children of a fork share the same folders.
    let forked: Forked = fork(&daemon, "web", 2, None).json();
    for child in &forked.vms {
        assert_eq!((&child.folders, shares(child)), (&folders, 2));
    }
    lines(started.clone(), 8);

    // A snapshot names no folder of the host, so a VM from it is given one for each.
    snapshot(&daemon, "web", "warm", false).json::<SnapshotMade>();
    let record = daemon
        .folder
        .path()
        .join("data/snapshots/warm/snapshot.json");
    let record = fs::read_to_string(record).unwrap();
    assert!(record.contains("/host"), "{record}");
    assert!(!record.contains(shared.to_str().unwrap()), "{record}");
    let from = |folders| CreateVm {
        from: Some("warm".into()),
        ..named(
            "other",
            CreateVm {
                folders,
                ..CreateVm::default()
            },
        )
    };
    let refused = |folders| {
        let error = daemon.run_detached(from(folders)).error(ErrorKind::Invalid);
        (error.message, error.hint.unwrap_or_default())
    };
    let (why, hint) = refused(Vec::new());
    assert!(why.contains("shared a folder of its host on /src"), "{why}");
    assert!(hint.contains("-v HOST:/src"), "{hint}");
    let etc = folder(Path::new("/etc"), "/host/", true);
    let (why, _) = refused(vec![etc.clone()]);
    assert!(why.contains("on /src"), "{why}");
    let src = captured(&shared, "/src");
    let more = folder(Path::new("/etc"), "/more", false);
    let (why, _) = refused(vec![src.clone(), etc.clone(), more]);
    assert!(
        why.contains("shared no folder of its host on /more"),
        "{why}"
    );
    // In any order.
    let other: Vm = daemon
        .run_detached(from(vec![etc.clone(), src.clone()]))
        .json();
    assert_eq!((&other.folders, shares(&other)), (&vec![src, etc], 2));
    // It may be captured if all of its own folders allow that.
    daemon
        .post("/v1/vms/other/hibernate", b"")
        .error(ErrorKind::WrongState);
    daemon.delete("/v1/vms/other?force=true");

    // A folder that is gone: the VM stays asleep, and wakes when it is there.
    daemon
        .post("/v1/vms/web/hibernate", b"")
        .json::<Hibernated>();
    let aside = shared.with_extension("aside");
    fs::rename(&shared, &aside).unwrap();
    let why = daemon
        .post("/v1/vms/web/wake", b"")
        .error(ErrorKind::Invalid)
        .message;
    assert!(why.contains("does not exist"), "{why}");
    assert_eq!(daemon.vm("web").state, VmState::Hibernated);
    fs::rename(&aside, &shared).unwrap();
    daemon.post("/v1/vms/web/wake", b"").json::<Vm>();
}

#[test]
fn what_can_t_be_shared_is_refused_in_a_sentence() {
    let daemon = daemon();
    let cases = [
        (
            folder(Path::new("/does/not/exist"), "/src", false),
            "does not exist",
        ),
        (
            folder(Path::new("/etc/passwd"), "/src", false),
            "is no folder",
        ),
        (
            folder(Path::new("relative"), "/src", false),
            "absolute path",
        ),
        (
            folder(Path::new("/tmp"), "src", false),
            "a mount point is an absolute path",
        ),
        (
            folder(Path::new("/tmp"), "/", false),
            "a mount point is an absolute path",
        ),
    ];
    for (folder, why) in cases {
        let refused = daemon
            .run_detached(sharing("web", vec![folder]))
            .error(ErrorKind::Invalid)
            .message;
        assert!(refused.contains(why), "{refused}");
        assert!(vms(&daemon).iter().all(|vm| vm.pid.is_none()));
    }
    let twice = vec![
        folder(Path::new("/tmp"), "/src", false),
        folder(Path::new("/etc"), "/src/", false),
    ];
    let refused = daemon
        .run_detached(sharing("web", twice))
        .error(ErrorKind::Invalid)
        .message;
    assert!(refused.contains("Two folders"), "{refused}");
}

#[test]
fn without_its_server_a_vm_does_not_start() {
    let daemon = daemon();
    fs::remove_file(program(&daemon)).unwrap();
    let folders = vec![folder(Path::new("/tmp"), "/src", false)];
    let answer = daemon.run_detached(sharing("web", folders));
    let refused = answer.error(ErrorKind::Internal).message;
    assert!(refused.contains("jiffy-files"), "{refused}");
    assert!(vms(&daemon).iter().all(|vm| vm.pid.is_none()));
}
