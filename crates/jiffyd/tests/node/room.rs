//! Hosts with no memory, disk or descriptors left.

use crate::client::connect;
use crate::daemon::{
    self, Daemon, bad_vm, command, eventually, id_of, named, number_in, release_guest, shell,
    tar_of, vm, vmms,
};
use crate::snapshots::{assert_span_order, counter, entries, fork, snapshot, two_from_one};
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{CreateVm, ErrorKind, Forked, Image, Snapshot, Vm, VmState};
use jiffy_wire::timeline::{Timeline, names};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::thread;

/// A file system of a few MiB. Mounting it needs root; otherwise there is no disk to fill.
pub struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// `None` without the privilege to mount.
    pub fn new(size: &str) -> Option<SmallDisk> {
        let folder = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(folder.path())
            .status()
            .unwrap();
        if !mounted.success() {
            eprintln!("skipped: mounting a small disk takes root");
            return None;
        }
        Some(SmallDisk(folder))
    }

    /// Takes all its room for further files and folders.
    pub fn use_up_inodes(&self) {
        let mut names = (0..).map(|number| self.path().join(format!("ballast-{number}")));
        assert!(names.any(|name| fs::create_dir(name).is_err()));
    }

    /// Its mount point.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Fills the disk, to the last byte.
    pub fn fill(&self) {
        let mut file = fs::File::create(self.path().join("ballast")).unwrap();
        let full = std::io::copy(&mut std::io::repeat(1), &mut file);
        assert!(full.is_err());
    }

    /// Frees the space again.
    pub fn free(&self) {
        let ballast = self.path().join("ballast");
        // A child that another test forked while it was written may have it open still.
        fs::File::create(&ballast).unwrap();
        fs::remove_file(ballast).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

/// A daemon with its data on this disk.
pub fn daemon_on(disk: &SmallDisk) -> Daemon {
    let mut daemon = Daemon::prepared(&[]);
    daemon.data = disk.path().join("data");
    daemon.up();
    daemon
}

#[test]
fn a_vm_larger_than_the_host_is_refused_with_numbers() {
    let daemon = Daemon::start();
    let error = daemon
        .try_run(CreateVm {
            memory_mib: Some(512 << 10),
            ..vm(command(&["true"]))
        })
        .unwrap_err()
        .error(ErrorKind::NoRoom);
    assert!(error.message.contains("524288 MiB"), "{}", error.message);
    assert!(error.hint.is_some());
    daemon.assert_nothing_left();
}

#[test]
fn a_full_disk_is_reported_in_one_sentence_and_leaves_nothing() {
    let Some(disk) = SmallDisk::new("4m") else {
        return;
    };
    let daemon = daemon_on(&disk);
    // The built-in image is made while there is space.
    assert_eq!(daemon.get("/v1/images").status, 200);
    let big = tar_of(&[("big", &[7; 6_000_000])]);
    daemon.post("/v1/images/big", &big).error(ErrorKind::NoRoom);
    assert_eq!(fs::read_dir(daemon.data.join("images")).unwrap().count(), 1);
    disk.fill();
    let error = daemon.create(&CreateVm::default()).error(ErrorKind::NoRoom);
    assert!(error.message.contains("full"), "{}", error.message);
    daemon
        .try_run(vm(command(&["true"])))
        .unwrap_err()
        .error(ErrorKind::NoRoom);
    daemon.assert_nothing_left();
    disk.free();
    let finished = daemon.run(vm(command(&["true"]))).finish();
    assert_eq!(finished.status(), ExitStatus::Code(0));
}

#[test]
fn images_and_snapshots_are_removed_from_a_disk_without_room_for_a_folder() {
    let Some(disk) = SmallDisk::new("14m,nr_inodes=1000") else {
        return;
    };
    let daemon = daemon_on(&disk);
    let image = tar_of(&[("file", b"content")]);
    daemon.post("/v1/images/mine", &image).json::<Image>();
    daemon.run_detached(named("box", counter())).json::<Vm>();
    snapshot(&daemon, "box", "one", true);
    disk.use_up_inodes();
    for path in [
        "/v1/vms/box?force=true",
        "/v1/snapshots/one",
        "/v1/images/mine",
    ] {
        let status = daemon.delete(path).status;
        assert!((200..300).contains(&status), "{path}: {status}");
    }
    for folder in ["vms", "snapshots", "images"] {
        let left = entries(&daemon.data.join(folder));
        assert!(
            !left.iter().any(|name| name == "one" || name == "mine"),
            "{left:?}"
        );
    }
}

#[test]
fn output_waits_for_space_on_a_full_disk_and_is_complete() {
    const BYTES: usize = 600_000;
    let Some(disk) = SmallDisk::new("4m") else {
        return;
    };
    let daemon = daemon_on(&disk);
    let go = daemon.folder.path().join("go");
    let frames = daemon.run(vm(shell(&format!(
        "while ! test -e {}; do sleep 0.02; done; head -c {BYTES} /dev/zero",
        go.display()
    ))));
    let id = id_of(&frames);
    daemon.when(&id, VmState::Running);
    disk.fill();
    fs::write(&go, "").unwrap();
    let log = daemon.folder.path().join("jiffyd.log");
    eventually("the daemon says that output waits", || {
        fs::read_to_string(&log).unwrap().contains("output waits")
    });
    disk.free();
    let finished = frames.finish();
    assert_eq!(finished.stdout.len(), BYTES);
    assert!(String::from_utf8_lossy(&finished.stderr).contains("is full"));
    assert_eq!(finished.status(), ExitStatus::Code(0));
}

#[test]
fn a_snapshot_without_disk_space_leaves_only_the_running_vm() {
    let Some(disk) = SmallDisk::new("4m") else {
        return;
    };
    let daemon = daemon_on(&disk);
    // It writes nothing, and ends with the disk.
    let data = disk.path().join("data");
    let wait = format!("while test -d {}; do sleep 0.02; done", data.display());
    daemon.run_detached(named("box", vm(shell(&wait))));
    let before = daemon.vm("box");
    disk.fill();
    let orders: [(&str, &[u8]); 3] = [
        ("snapshots", b"{\"name\":\"one\",\"stop\":true}"),
        ("snapshots", b"{\"name\":\"one\"}"),
        ("hibernate", b""),
    ];
    for (order, body) in orders {
        let error = daemon
            .post(&format!("/v1/vms/box/{order}"), body)
            .error(ErrorKind::NoRoom);
        assert!(error.message.contains("full"), "{}", error.message);
        let now = daemon.vm("box");
        assert_eq!((now.state, now.pid), (VmState::Running, before.pid));
    }
    let left = |folder: &Path| fs::read_dir(folder).unwrap().count();
    assert_eq!(left(&daemon.data.join("snapshots")), 0);
    assert!(!daemon.vm_folder(&before.id).join("hibernated").exists());
    disk.free();
    let made = daemon.post("/v1/vms/box/snapshots", b"{\"name\":\"one\"}");
    assert_eq!(made.status, 200);
    assert_eq!(daemon.post("/v1/vms/box/hibernate", b"").status, 200);
    assert_eq!(daemon.post("/v1/vms/box/wake", b"").status, 200);
}

#[test]
fn of_two_concurrent_captures_only_the_one_that_fits_is_written() {
    let Some(disk) = SmallDisk::new("14m") else {
        return;
    };
    let daemon = daemon_on(&disk);
    for (order, body) in [("snapshots", "NAME"), ("hibernate", "")] {
        for name in ["one", "two"] {
            daemon.run_detached(named(name, bad_vm("filled", Some(shell("sleep 1000")))));
            daemon.when(name, VmState::Running);
        }
        let capture = |name: &str| {
            let body = body.replace("NAME", &format!("{{\"name\":\"{name}\"}}"));
            daemon.post(&format!("/v1/vms/{name}/{order}"), body.as_bytes())
        };
        let answers = thread::scope(|scope| {
            let one = scope.spawn(|| capture("one"));
            [capture("two"), one.join().unwrap()]
        });
        let (done, refused): (Vec<_>, Vec<_>) =
            answers.into_iter().partition(|answer| answer.status == 200);
        assert_eq!((done.len(), refused.len()), (1, 1), "{order}");
        for answer in refused {
            let error = answer.error(ErrorKind::NoRoom);
            let said = &error.message;
            assert!(
                said.starts_with("The memory of the VM needs up to 9 MiB"),
                "{said}"
            );
            assert!(error.hint.is_some());
        }
        let hibernated = |name: &&str| daemon.vm(name).state == VmState::Hibernated;
        let asleep: Vec<_> = ["one", "two"].into_iter().filter(hibernated).collect();
        assert_eq!(asleep.len(), usize::from(order == "hibernate"));
        let count = |folder: &Path| fs::read_dir(folder).unwrap().count();
        let snapshots = count(&daemon.data.join("snapshots"));
        assert_eq!(snapshots, usize::from(order == "snapshots"));
        for name in ["one", "two"] {
            let vm = daemon.vm(name);
            let folder = daemon.vm_folder(&vm.id).join("hibernated");
            assert_eq!(folder.exists(), asleep.contains(&name));
            daemon.delete(&format!("/v1/vms/{name}?force=true"));
            daemon.delete(&format!("/v1/snapshots/{name}"));
        }
        daemon.assert_nothing_left();
    }
}

#[test]
fn a_node_out_of_descriptors_refuses_only_vms() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let daemon = Daemon::with(&["--spare", "0", "--standby", "0"]);
    let open = fs::read_dir(format!("/proc/{}/fd", daemon.pid()))
        .unwrap()
        .count() as u64;
    let limit = Some(open + 128 + 40);
    let limit = Rlimit {
        current: limit,
        maximum: limit,
    };
    let pid = Pid::from_raw(daemon.pid() as i32);
    prlimit(pid, Resource::Nofile, limit).unwrap();
    let mut started = Vec::new();
    let error = loop {
        let name = format!("vm{}", started.len());
        assert_eq!(
            daemon.create(&named(&name, CreateVm::default())).status,
            200
        );
        let answer = daemon.post(&format!("/v1/vms/{name}/start"), b"");
        if answer.status != 200 {
            break answer.error(ErrorKind::NoRoom);
        }
        started.push(name);
        assert!(started.len() < 100, "no start is refused");
    };
    assert!(error.message.contains("files"), "{}", error.message);
    assert!(!started.is_empty());
    // A large fork is refused before any child is made.
    let many = daemon.post("/v1/vms/vm0/fork", br#"{"count": 50}"#);
    let error = many.error(ErrorKind::NoRoom);
    assert!(
        error.message.contains("50 further VMs"),
        "{}",
        error.message
    );
    let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    assert_eq!(all.len(), started.len() + 1);
    // Running VMs answer, and can be stopped to free descriptors.
    for name in &started {
        assert_eq!(daemon.get(&format!("/v1/vms/{name}/stat")).status, 200);
    }
    let gone = started.pop().unwrap();
    daemon.post(&format!("/v1/vms/{gone}/kill"), b"");
    daemon.when(&gone, VmState::Exited);
    // Connections of the requests before this one may not be closed yet.
    eventually("it starts again", || {
        daemon.post(&format!("/v1/vms/{gone}/start"), b"").status == 200
    });
}

/// A daemon with memory for twenty VMs; requests wait for this many seconds.
fn room_for_twenty(wait: &str) -> Daemon {
    Daemon::with(&["--memory-limit", "2560M", "--memory-wait", wait])
}

/// A daemon with so many MiB for VMs; requests wait without limit.
pub fn patient(limit: &str) -> Daemon {
    Daemon::with(&["--memory-limit", limit, "--memory-wait", "86400"])
}

/// A VM whose command ends when this file exists.
pub fn until(go: &Path) -> CreateVm {
    let script = format!("while ! test -e {}; do sleep 0.02; done", go.display());
    vm(shell(&script))
}

/// Sends a request without waiting for its answer.
pub fn asked(daemon: &Daemon, path: &str, body: &[u8]) -> UnixStream {
    let mut stream = connect(&daemon.socket()).unwrap();
    let length = body.len();
    let head = format!("POST {path} HTTP/1.1\r\nHost: node\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    // A node that refuses may not read the body.
    let _ = stream.write_all(body);
    stream
}

/// How many requests have been first in the queue until now, and found no memory.
fn waited(daemon: &Daemon) -> usize {
    let log = fs::read_to_string(daemon.folder.path().join("jiffyd.log")).unwrap();
    log.matches("a VM waits for memory").count()
}

/// As [`asked`]; returns when the request waits for memory.
fn waits(daemon: &Daemon, path: &str, body: &[u8]) -> UnixStream {
    let before = waited(daemon);
    let stream = asked(daemon, path, body);
    eventually("it waits for memory", || waited(daemon) > before);
    stream
}

pub fn run_of(vm: CreateVm) -> Vec<u8> {
    serde_json::to_vec(&daemon::run_of(vm, true)).unwrap()
}

#[test]
fn two_hundred_runs_with_room_for_twenty_all_succeed() {
    let daemon = room_for_twenty("86400");
    let here = daemon.folder.path().join("here");
    fs::create_dir(&here).unwrap();
    // Each command counts the VMs that run.
    let script = format!("cd {}; : > $$; ls | wc -l; rm $$", here.display());
    let one = || {
        let vm = CreateVm {
            remove: true,
            ..vm(shell(&script))
        };
        let finished = daemon.run(vm).finish();
        assert_eq!(finished.status(), ExitStatus::Code(0));
        finished.text().trim().parse::<usize>().unwrap()
    };
    let most = thread::scope(|scope| {
        let all: Vec<_> = (0..200).map(|_| scope.spawn(one)).collect();
        let counts = all.into_iter().map(|run| run.join().unwrap());
        counts.max()
    });
    assert!((1..=20).contains(&most.unwrap()), "{most:?}");
    daemon.assert_nothing_left();
}

#[test]
fn runs_that_time_out_waiting_for_memory_are_refused() {
    let daemon = room_for_twenty("1");
    let go = daemon.folder.path().join("go");
    let one = || {
        let vm = CreateVm {
            remove: true,
            ..until(&go)
        };
        daemon.try_run(vm).map_err(|answer| {
            let error = answer.error(ErrorKind::NoRoom);
            assert_eq!(
                error.message,
                "The VM wants 128 MiB of memory and waited 1 s for it; VMs have 2560 MiB of the 2560 MiB that they may have in all."
            );
            assert!(error.hint.unwrap().contains("--memory-limit"));
        })
    };
    let run: Vec<_> = (0..20).map(|_| one().unwrap()).collect();
    thread::scope(|scope| {
        let all: Vec<_> = (0..180).map(|_| scope.spawn(one)).collect();
        for other in all {
            other.join().unwrap().unwrap_err();
        }
    });
    fs::write(&go, "").unwrap();
    for frames in run {
        assert_eq!(frames.finish().status(), ExitStatus::Code(0));
    }
    daemon.assert_nothing_left();
    // A request that could never be satisfied does not wait.
    let large = CreateVm {
        memory_mib: Some(2562),
        ..CreateVm::default()
    };
    let error = daemon.run_detached(large).error(ErrorKind::NoRoom);
    assert!(!error.message.contains("waited"), "{}", error.message);
    assert_eq!(daemon.run_detached(vm(command(&["true"]))).status, 200);
}

#[test]
fn a_waiting_vm_starts_when_another_ends() {
    let daemon = patient("128M");
    let go = daemon.folder.path().join("go");
    let first = daemon.run(named("first", until(&go)));
    daemon.when("first", VmState::Running);
    let _second = waits(
        &daemon,
        "/v1/run",
        &run_of(named("second", CreateVm::default())),
    );
    assert_eq!(daemon.vm("second").state, VmState::Created);
    fs::write(&go, "").unwrap();
    assert_eq!(first.finish().status(), ExitStatus::Code(0));
    daemon.when("second", VmState::Running);
    let timeline: Timeline = daemon.get("/v1/vms/second/timeline").json();
    assert_span_order(
        &timeline,
        &[
            names::REQUEST_RECEIVED,
            names::ROOM_WAITED,
            names::IMAGE_READY,
        ],
    );
    // A hibernated VM has no memory, and waits for it when it is woken.
    let slept = daemon.post("/v1/vms/second/hibernate", b"");
    assert_eq!(slept.status, 200);
    assert_eq!(
        daemon
            .run_detached(named("third", CreateVm::default()))
            .status,
        200
    );
    let _wakes = waits(&daemon, "/v1/vms/second/wake", b"");
    assert_eq!(daemon.vm("second").state, VmState::Hibernated);
    assert_eq!(daemon.post("/v1/vms/third/kill", b"").status, 200);
    daemon.when("second", VmState::Running);
}

#[test]
fn a_client_that_leaves_is_removed_from_the_queue() {
    let daemon = patient("256M");
    for name in ["one", "two", "sleeper"] {
        if name == "sleeper" {
            assert_eq!(daemon.post("/v1/vms/two/hibernate", b"").status, 200);
        }
        let vm = named(name, CreateVm::default());
        assert_eq!(daemon.run_detached(vm).status, 200);
    }
    let created = daemon.create(&named("created", CreateVm::default()));
    assert_eq!(created.status, 200);
    let run = run_of(named("run", CreateVm::default()));
    for (path, body) in [
        ("/v1/run", &run[..]),
        ("/v1/vms/created/start", b""),
        ("/v1/vms/two/wake", b""),
        ("/v1/vms/two/start", b""),
        ("/v1/vms/one/fork", b"{\"count\":1,\"name\":\"child\"}"),
    ] {
        // Each is first in the queue, so those before it have left.
        drop(waits(&daemon, path, body));
    }
    daemon.gone("run");
    daemon.gone("child");
    // The request also leaves if its VM is removed, or the parent ends.
    let mut removed = waits(&daemon, "/v1/vms/created/start", b"");
    assert_eq!(daemon.delete("/v1/vms/created").status, 204);
    let mut forked = waits(&daemon, "/v1/vms/one/fork", b"{\"count\":2}");
    let last = asked(&daemon, "/v1/run", &run);
    assert_eq!(daemon.post("/v1/vms/one/kill", b"").status, 200);
    for stream in [&mut removed, &mut forked] {
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.1 409");
    }
    daemon.when("run", VmState::Running);
    assert_eq!(daemon.vm("two").state, VmState::Hibernated);
    drop(last);
    for name in ["run", "two", "one", "sleeper"] {
        let path = format!("/v1/vms/{name}?force=true");
        assert_eq!(daemon.delete(&path).status, 204);
    }
    daemon.assert_nothing_left();
}

#[test]
fn concurrent_forks_get_all_their_children_or_none() {
    let daemon = room_for_twenty("0");
    daemon.run_detached(named("box", CreateVm::default()));
    let before = daemon.vm("box");
    let fork = |count| fork(&daemon, "box", count, None);
    let error = fork(20).error(ErrorKind::NoRoom);
    assert_eq!(
        error.message,
        "20 VMs want 2560 MiB of memory; VMs have 128 MiB of the 2560 MiB that they may have in all."
    );
    let made = thread::scope(|scope| {
        let all: Vec<_> = (0..4).map(|_| scope.spawn(|| fork(8))).collect();
        let all = all.into_iter().map(|one| one.join().unwrap());
        all.filter(|answer| match answer.status {
            200 => true,
            _ => {
                answer.error(ErrorKind::NoRoom);
                false
            }
        })
        .count()
    });
    assert_eq!(made, 2);
    let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    assert_eq!(all.len(), 17);
    let now = daemon.vm("box");
    assert_eq!((now.state, now.pid), (VmState::Running, before.pid));
    fork(3).json::<Forked>();
    fork(1).error(ErrorKind::NoRoom);
}

/// Memory available on the host, MiB.
pub fn available() -> u32 {
    of_host("MemAvailable")
}

/// A value of the host's memory, MiB.
fn of_host(name: &str) -> u32 {
    (number_in("/proc/meminfo", name) / 1024) as u32
}

#[test]
fn memory_is_promised_once_unless_an_option_says_more() {
    // Five of these are more than the host has; a child needs 2 MiB to start.
    let quarter = of_host("MemTotal") / 4;
    let parent = |options: &[&str]| {
        let daemon = Daemon::with(&[&["--memory-wait", "0"], options].concat());
        let vm = CreateVm {
            memory_mib: Some(quarter),
            ..CreateVm::default()
        };
        daemon.run_detached(named("parent", vm)).json::<Vm>();
        daemon
    };
    let refused = fork(&parent(&[]), "parent", 4, None).error(ErrorKind::NoRoom);
    let (said, hint) = (refused.message, refused.hint.unwrap());
    assert!(said.contains("that they may have in all"), "{said}");
    assert!(hint.contains("--memory-overcommit"), "{hint}");
    for more in [["--memory-overcommit", "200"], ["--memory-limit", "none"]] {
        fork(&parent(&more), "parent", 4, None).json::<Forked>();
    }
}

#[test]
fn a_capture_may_not_take_memory_of_starting_vms() {
    let daemon = Daemon::with(&["--memory-limit", "none", "--memory-wait", "0"]);
    let sleeps = CreateVm {
        memory_mib: Some(2048),
        ..vm(command(&["/bin/sleep", "1000"]))
    };
    two_from_one(&daemon, sleeps);
    // How much of its memory is missing is not known any more: it may be all.
    let memory = daemon.data.join("snapshots/one/ram.image");
    fs::write(memory, "no image").unwrap();
    // Another VM starts and reserves nearly all available memory.
    let other = loop {
        let wanted = CreateVm {
            memory_mib: Some(available() - 256),
            ..bad_vm("held", None)
        };
        let id = daemon.create(&named("other", wanted)).json::<Vm>().id;
        // The answer comes when the VM is ready, or if others took the memory meanwhile.
        let mut starting = asked(&daemon, &format!("/v1/vms/{id}/start"), b"");
        let soon = Some(std::time::Duration::from_millis(50));
        starting.set_read_timeout(soon).unwrap();
        let mut begins = false;
        eventually("it begins, or is refused", || {
            begins = daemon.vm(&id).state == VmState::Starting;
            begins || starting.read(&mut [0; 64]).is_ok()
        });
        if begins {
            break (id, starting);
        }
        daemon.delete("/v1/vms/other?force=true");
    };
    let refused = fork(&daemon, "two", 1, None).error(ErrorKind::NoRoom);
    assert!(refused.message.contains("2048 MiB"), "{}", refused.message);
    assert_eq!(daemon.vm("two").state, VmState::Running);
    daemon
        .post("/v1/vms/two/hibernate", b"{}")
        .error(ErrorKind::NoRoom);
    assert_eq!(daemon.vm("two").state, VmState::Running);
    release_guest(&daemon.vm_folder(&other.0));
    daemon.when("other", VmState::Running);
    fork(&daemon, "two", 1, None).json::<Forked>();
}

#[test]
fn vms_of_an_earlier_daemon_count_towards_the_limit() {
    let mut daemon = Daemon::with(&["--memory-limit", "256M", "--memory-wait", "0"]);
    for name in ["one", "two"] {
        let vm = named(name, CreateVm::default());
        assert_eq!(daemon.run_detached(vm).status, 200);
    }
    // Not even the record of one of them can be read.
    let ids = ["one", "two"].map(|name| daemon.vm(name).id);
    let record = daemon.vm_folder(&ids[1]).join("vm.json");
    daemon.killed();
    fs::write(record, "nonsense").unwrap();
    daemon.up();
    let another = || daemon.run_detached(CreateVm::default());
    for id in ids {
        another().error(ErrorKind::NoRoom);
        assert_eq!(daemon.post(&format!("/v1/vms/{id}/kill"), b"").status, 200);
        assert_eq!(another().status, 200);
    }
    another().error(ErrorKind::NoRoom);
}

#[test]
fn a_vm_that_starts_when_the_daemon_changes_still_counts_with_its_memory() {
    let mut daemon = Daemon::with(&["--memory-limit", "none", "--memory-wait", "0"]);
    let most = CreateVm {
        memory_mib: Some(available() / 10 * 6),
        ..bad_vm("held", None)
    };
    let id = daemon.create(&named("first", most)).json::<Vm>().id;
    let starting = asked(&daemon, &format!("/v1/vms/{id}/start"), b"");
    daemon.when("first", VmState::Starting);
    daemon.killed();
    drop(starting);
    daemon.up();
    daemon.when("first", VmState::Starting);
    let other = || {
        let other = CreateVm {
            memory_mib: Some(available() / 10 * 6),
            ..CreateVm::default()
        };
        daemon.run_detached(other)
    };
    other().error(ErrorKind::NoRoom);
    release_guest(&daemon.vm_folder(&id));
    daemon.when("first", VmState::Running);
    other().json::<Vm>();
}

#[test]
fn background_boots_give_their_memory_to_runs() {
    let daemon = Daemon::with(&["--memory-limit", "128M", "--memory-wait", "0"]);
    let run = || {
        let finished = daemon.run(vm(command(&["true"]))).finish();
        assert_eq!(finished.status(), ExitStatus::Code(0));
    };
    run();
    // The run's memory is free when its end is known.
    eventually("a guest boots for a golden snapshot", || {
        let all: Vec<Vm> = daemon.get("/v1/vms").json();
        all.is_empty() && !vmms(&daemon.data).is_empty()
    });
    run();
    eventually("a golden snapshot is made in the end", || {
        let all: Vec<Snapshot> = daemon.get("/v1/snapshots?all=true").json();
        !all.is_empty()
    });
}
