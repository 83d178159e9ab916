//! Memory that grows and shrinks while a VM runs.

use crate::daemon::{Daemon, bad_vm, named};
use crate::images::configs;
use crate::limits;
use crate::snapshots::{ask_vmm, counter};
use jiffy_wire::api::{
    CreateVm, ErrorKind, ForkVm, Forked, Hibernated, Limits, MakeSnapshot, SnapshotMade, Vm,
};
use jiffy_wire::vmm::PageSize;
use std::fs;
use std::time::{Duration, Instant};

/// Starts with 128 MiB, and may have 1 GiB. Its guest does without all of it.
fn growing(name: &str) -> CreateVm {
    CreateVm {
        memory_mib: Some(128),
        max_memory_mib: Some(1024),
        kernel_args: Some("fake=spare-memory".into()),
        ..named(name, counter())
    }
}

fn change(daemon: &Daemon, vm: &str, memory_mib: u32) -> crate::client::Answer {
    let limits = Limits {
        memory_mib: Some(memory_mib),
        ..Limits::default()
    };
    limits::change(daemon, vm, &limits)
}

/// RAM of its VMM, what it may use of it, and what its guest waits for.
fn started_with(daemon: &Daemon, id: &str) -> (u32, Option<u32>, Option<u32>) {
    let (config, guest) = configs(daemon, id);
    (
        config.memory.size_mib,
        config.usable_memory_mib,
        guest.memory_mib,
    )
}

fn shown(vm: &Vm) -> (u32, Option<u32>) {
    (vm.memory_mib, vm.max_memory_mib)
}

#[test]
fn memory_grows_and_shrinks_while_a_vm_runs() {
    let mut daemon = Daemon::start();
    let vm: Vm = daemon.run_detached(growing("web")).json();
    assert_eq!(shown(&vm), (128, Some(1024)));
    assert_eq!(started_with(&daemon, &vm.id), (1024, Some(128), Some(128)));
    let changed: Vm = change(&daemon, "web", 1024).json();
    assert_eq!(shown(&changed), (1024, None));
    let changed: Vm = change(&daemon, "web", 256).json();
    assert_eq!(shown(&changed), (256, Some(1024)));
    let log = fs::read_to_string(daemon.vm_folder(&vm.id).join("vmm.log")).unwrap();
    let told: Vec<_> = log.lines().filter(|line| line.contains("usable")).collect();
    assert_eq!(
        told,
        [
            "fake-vmm: 1024 MiB are usable",
            "fake-vmm: 256 MiB are usable"
        ]
    );
    // The next daemon, a child and a snapshot know it.
    daemon.killed();
    daemon.up();
    assert_eq!(shown(&daemon.vm("web")), (256, Some(1024)));
    let fork = serde_json::to_vec(&ForkVm::default()).unwrap();
    let forked: Forked = daemon.post("/v1/vms/web/fork", &fork).json();
    let child = &forked.vms[0];
    assert_eq!(shown(child), (256, Some(1024)));
    assert_eq!(started_with(&daemon, &child.id).0, 1024);
    let make = MakeSnapshot {
        name: "warm".into(),
        stop: false,
    };
    let make = serde_json::to_vec(&make).unwrap();
    let made: SnapshotMade = daemon.post("/v1/vms/web/snapshots", &make).json();
    assert_eq!(made.snapshot.memory_mib, 256);
    let restored = CreateVm {
        from: Some("warm".into()),
        ..CreateVm::default()
    };
    let restored: Vm = daemon.run_detached(restored).json();
    assert_eq!(shown(&restored), (256, Some(1024)));
    let grown: Vm = change(&daemon, &restored.name, 512).json();
    assert_eq!(shown(&grown), (512, Some(1024)));
    // One that boots again has that much.
    daemon.post("/v1/vms/web/stop", b"").json::<Vm>();
    change(&daemon, "web", 1024).json::<Vm>();
    daemon.post("/v1/vms/web/start", b"").json::<Vm>();
    assert_eq!(started_with(&daemon, &vm.id), (1024, Some(1024), None));
}

/// Captures `source`, removes it, and makes a VM `web` from the snapshot, which is stopped.
fn stopped_from_snapshot(daemon: &Daemon) {
    let make = br#"{"name": "warm"}"#;
    daemon
        .post("/v1/vms/source/snapshots", make)
        .json::<SnapshotMade>();
    daemon.delete("/v1/vms/source?force=true");
    let restored = CreateVm {
        name: Some("web".into()),
        from: Some("warm".into()),
        ..CreateVm::default()
    };
    daemon.run_detached(restored).json::<Vm>();
    daemon.post("/v1/vms/web/stop", b"").json::<Vm>();
}

#[test]
fn a_vm_from_a_snapshot_starts_with_the_memory_that_was_chosen_since() {
    let daemon = Daemon::with(&["--memory-limit", "512M", "--memory-wait", "0"]);
    daemon.run_detached(growing("source")).json::<Vm>();
    change(&daemon, "source", 256).json::<Vm>();
    stopped_from_snapshot(&daemon);
    let start = || daemon.post("/v1/vms/web/start", b"");
    let usable = |mib: u32| {
        let status = ask_vmm(&daemon, "web", "\"memory\"\n");
        let expected = format!("\"usable_mib\":{mib},\"used_mib\":{mib}");
        assert!(status.contains(&expected), "{status}");
    };
    change(&daemon, "web", 384).json::<Vm>();
    assert_eq!(shown(&start().json()), (384, Some(1024)));
    usable(384);
    daemon.post("/v1/vms/web/stop", b"").json::<Vm>();
    change(&daemon, "web", 128).json::<Vm>();
    let other = CreateVm {
        memory_mib: Some(384),
        ..named("other", counter())
    };
    let other = || daemon.run_detached(other.clone());
    // It begins with the memory that was captured.
    other().json::<Vm>();
    start().error(ErrorKind::NoRoom);
    daemon.delete("/v1/vms/other?force=true");
    assert_eq!(shown(&start().json()), (128, Some(1024)));
    usable(128);
    other().json::<Vm>();
}

#[test]
fn a_vm_from_a_snapshot_that_gives_nothing_back_is_shown_with_what_it_has() {
    let daemon = Daemon::start();
    let stubborn = CreateVm {
        kernel_args: Some("fake=keeps-memory fake=spare-memory".into()),
        ..growing("source")
    };
    daemon.run_detached(stubborn).json::<Vm>();
    stopped_from_snapshot(&daemon);
    change(&daemon, "web", 64).json::<Vm>();
    let started: Vm = daemon.post("/v1/vms/web/start", b"").json();
    assert_eq!(shown(&started), (128, Some(1024)));
    let status = ask_vmm(&daemon, "web", "\"memory\"\n");
    assert!(status.contains("\"usable_mib\":128"), "{status}");
}

#[test]
fn a_hibernated_vm_keeps_its_memory() {
    let daemon = Daemon::start();
    daemon.run_detached(growing("web")).json::<Vm>();
    change(&daemon, "web", 512).json::<Vm>();
    daemon
        .post("/v1/vms/web/hibernate", b"")
        .json::<Hibernated>();
    let refused = change(&daemon, "web", 128).error(ErrorKind::WrongState);
    assert!(refused.hint.unwrap().contains("jiffy wake web"));
    let woken: Vm = daemon.post("/v1/vms/web/wake", b"").json();
    assert_eq!(shown(&woken), (512, Some(1024)));
}

#[test]
fn an_amount_that_can_t_be_is_refused() {
    let daemon = Daemon::start();
    daemon.run_detached(growing("web")).json::<Vm>();
    for mib in [0, 63, 1025] {
        let error = change(&daemon, "web", mib).error(ErrorKind::Invalid);
        assert!(
            error.message.ends_with("it can have 64 to 1024 MiB."),
            "{error:?}"
        );
        assert!(error.hint.unwrap().contains("--max-memory"));
    }
    daemon.run_detached(named("fixed", counter())).json::<Vm>();
    let error = change(&daemon, "fixed", 64).error(ErrorKind::Invalid);
    assert!(
        error.message.ends_with("it always has 128 MiB."),
        "{error:?}"
    );
    let odd = |memory: u32, most: u32, pages| CreateVm {
        memory_mib: Some(memory),
        max_memory_mib: Some(most),
        pages,
        ..named("odd", counter())
    };
    for (memory, most) in [(128, 64), (128, 4096)] {
        let vm = odd(memory, most, PageSize::Small);
        daemon.run_detached(vm).error(ErrorKind::Invalid);
    }
    let huge = odd(128, 256, PageSize::Huge2M);
    let error = daemon.run_detached(huge).error(ErrorKind::Invalid);
    assert!(error.message.contains("huge pages"), "{error:?}");
}

#[test]
fn the_ledger_counts_the_memory_that_a_vm_has_now() {
    let mut daemon = Daemon::with(&["--memory-limit", "640M", "--memory-wait", "0"]);
    let vm: Vm = daemon.run_detached(growing("web")).json();
    // What it may have later does not count.
    daemon.run_detached(named("other", counter())).json::<Vm>();
    let error = change(&daemon, "web", 513).error(ErrorKind::NoRoom);
    assert!(
        error
            .message
            .contains("VMs have 256 MiB of the 640 MiB that they may have in all"),
        "{error:?}"
    );
    let log = fs::read_to_string(daemon.vm_folder(&vm.id).join("vmm.log")).unwrap();
    assert!(!log.contains("usable"), "its guest was not asked: {log}");
    change(&daemon, "web", 512).json::<Vm>();
    daemon
        .run_detached(named("third", counter()))
        .error(ErrorKind::NoRoom);
    // The next daemon counts the same.
    daemon.killed();
    daemon.up();
    daemon
        .run_detached(named("third", counter()))
        .error(ErrorKind::NoRoom);
    change(&daemon, "web", 384).json::<Vm>();
    daemon.run_detached(named("third", counter())).json::<Vm>();
}

#[test]
fn a_guest_that_gives_nothing_back_keeps_its_memory_and_its_reservation() {
    let daemon = Daemon::with(&["--memory-limit", "512M", "--memory-wait", "0"]);
    let stubborn = CreateVm {
        name: Some("web".into()),
        memory_mib: Some(256),
        max_memory_mib: Some(512),
        ..bad_vm("keeps-memory fake=spare-memory", None)
    };
    daemon.run_detached(stubborn).json::<Vm>();
    let error = change(&daemon, "web", 128).error(ErrorKind::VmFailed);
    assert!(
        error
            .message
            .contains("keeps its 256 MiB of memory: its guest still used 256 MiB"),
        "{error:?}"
    );
    assert_eq!(daemon.vm("web").memory_mib, 256);
    let status = ask_vmm(&daemon, "web", "\"memory\"\n");
    assert!(status.contains("\"usable_mib\":256"), "{status}");
    let large = CreateVm {
        memory_mib: Some(384),
        ..named("large", counter())
    };
    daemon.run_detached(large).error(ErrorKind::NoRoom);
    // What it was given and does not take is reserved for it.
    let error = change(&daemon, "web", 512).error(ErrorKind::VmFailed);
    assert!(error.message.contains("only 256 MiB so far"), "{error:?}");
    assert_eq!(daemon.vm("web").memory_mib, 512);
    daemon
        .run_detached(named("other", counter()))
        .error(ErrorKind::NoRoom);
}

#[test]
fn a_guest_is_asked_for_no_more_memory_than_it_can_spare() {
    let daemon = Daemon::start();
    let full = CreateVm {
        kernel_args: Some("fake=caches".into()),
        ..growing("full")
    };
    let vm: Vm = daemon.run_detached(full).json();
    change(&daemon, "full", 512).json::<Vm>();
    let error = change(&daemon, "full", 256).error(ErrorKind::VmFailed);
    assert_eq!(
        error.message,
        "The VM full keeps its 512 MiB of memory: its guest can do without 100 MiB, not without 256."
    );
    let log = fs::read_to_string(daemon.vm_folder(&vm.id).join("vmm.log")).unwrap();
    assert!(!log.contains("256 MiB are usable"), "{log}");
    let changed: Vm = change(&daemon, "full", 412).json();
    assert_eq!(shown(&changed), (412, Some(1024)));
}

#[test]
fn a_guest_whose_agent_hangs_keeps_its_memory_after_a_short_time() {
    let daemon = Daemon::start();
    let hung = CreateVm {
        kernel_args: Some("fake=hung-agent".into()),
        ..growing("hung")
    };
    daemon.run_detached(hung).json::<Vm>();
    // Ten seconds, instead of the minute that an answer may take.
    let begun = Instant::now();
    let error = change(&daemon, "hung", 64).error(ErrorKind::VmFailed);
    assert_eq!(
        error.message,
        "The VM hung keeps its 128 MiB of memory: the guest's agent did not answer in time."
    );
    assert!(
        begun.elapsed() < Duration::from_secs(40),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(shown(&daemon.vm("hung")), (128, Some(1024)));
}
