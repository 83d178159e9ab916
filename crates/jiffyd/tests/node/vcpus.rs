//! vCPUs that go on and off line while a VM runs.

use crate::daemon::{Daemon, eventually, named};
use crate::images::configs;
use crate::limits;
use crate::snapshots::counter;
use jiffy_wire::api::{
    CreateVm, ErrorKind, ForkVm, Forked, Hibernated, Limits, MakeSnapshot, SnapshotMade, Vm,
};
use std::fs;

/// Starts with 2 vCPUs, and may have 4.
fn growing(name: &str) -> CreateVm {
    CreateVm {
        cpus: Some(2),
        max_cpus: Some(4),
        ..named(name, counter())
    }
}

fn change(daemon: &Daemon, vm: &str, cpus: u8) -> crate::client::Answer {
    let limits = Limits {
        cpus: Some(cpus),
        ..Limits::default()
    };
    limits::change(daemon, vm, &limits)
}

/// vCPUs of its VMM, and how many the kernel brings up, if not all.
fn started_with(daemon: &Daemon, id: &str) -> (u8, Option<String>) {
    let (config, _) = configs(daemon, id);
    let mut words = config.boot.command_line.split(' ');
    let maxcpus = words.find_map(|word| word.strip_prefix("maxcpus="));
    (config.vcpus, maxcpus.map(str::to_owned))
}

#[test]
fn vcpus_go_on_and_off_line_while_a_vm_runs() {
    let mut daemon = Daemon::start();
    let vm: Vm = daemon.run_detached(growing("web")).json();
    assert_eq!((vm.cpus, vm.max_cpus), (2, Some(4)));
    assert_eq!(started_with(&daemon, &vm.id), (4, Some("2".into())));
    let changed: Vm = change(&daemon, "web", 4).json();
    assert_eq!((changed.cpus, changed.max_cpus), (4, None));
    let changed: Vm = change(&daemon, "web", 1).json();
    assert_eq!((changed.cpus, changed.max_cpus), (1, Some(4)));
    let log = fs::read_to_string(daemon.vm_folder(&vm.id).join("vmm.log")).unwrap();
    let told: Vec<_> = log.lines().filter(|line| line.contains("online")).collect();
    assert_eq!(told, ["4 vCPUs are online", "1 vCPUs are online"]);
    // The next daemon, a child and a snapshot know it.
    daemon.killed();
    daemon.up();
    // It may not have been told before the daemon ended.
    eventually("the next daemon sets the number", || {
        let log = fs::read_to_string(daemon.vm_folder(&vm.id).join("vmm.log")).unwrap();
        log.matches("1 vCPUs are online").count() == 2
    });
    let fork = serde_json::to_vec(&ForkVm::default()).unwrap();
    let forked: Forked = daemon.post("/v1/vms/web/fork", &fork).json();
    let child = &forked.vms[0];
    assert_eq!((child.cpus, child.max_cpus), (1, Some(4)));
    assert_eq!(started_with(&daemon, &child.id).0, 4);
    let make = MakeSnapshot {
        name: "warm".into(),
        stop: false,
    };
    let make = serde_json::to_vec(&make).unwrap();
    let made: SnapshotMade = daemon.post("/v1/vms/web/snapshots", &make).json();
    assert_eq!(made.snapshot.cpus, 1);
    // So does one from that snapshot, until another number is chosen.
    let restored = CreateVm {
        name: Some("restored".into()),
        from: Some("warm".into()),
        ..CreateVm::default()
    };
    let restored: Vm = daemon.run_detached(restored).json();
    daemon.post("/v1/vms/restored/stop", b"").json::<Vm>();
    change(&daemon, "restored", 2).json::<Vm>();
    let started: Vm = daemon.post("/v1/vms/restored/start", b"").json();
    assert_eq!((started.cpus, started.max_cpus), (2, Some(4)));
    let log = fs::read_to_string(daemon.vm_folder(&restored.id).join("vmm.log")).unwrap();
    assert!(log.contains("2 vCPUs are online"), "{log}");
    // One that boots again brings up that many.
    daemon.post("/v1/vms/web/stop", b"").json::<Vm>();
    change(&daemon, "web", 3).json::<Vm>();
    daemon.post("/v1/vms/web/start", b"").json::<Vm>();
    assert_eq!(started_with(&daemon, &vm.id), (4, Some("3".into())));
}

#[test]
fn a_hibernated_vm_keeps_its_vcpus() {
    let daemon = Daemon::start();
    daemon.run_detached(growing("web")).json::<Vm>();
    change(&daemon, "web", 3).json::<Vm>();
    daemon
        .post("/v1/vms/web/hibernate", b"")
        .json::<Hibernated>();
    let refused = change(&daemon, "web", 1).error(ErrorKind::WrongState);
    assert!(refused.hint.unwrap().contains("jiffy wake web"));
    let woken: Vm = daemon.post("/v1/vms/web/wake", b"").json();
    assert_eq!((woken.cpus, woken.max_cpus), (3, Some(4)));
}

#[test]
fn a_number_that_can_t_be_is_refused() {
    let daemon = Daemon::start();
    daemon.run_detached(growing("web")).json::<Vm>();
    for cpus in [0, 5] {
        let error = change(&daemon, "web", cpus).error(ErrorKind::Invalid);
        assert!(error.message.ends_with("it can have 1 to 4."), "{error:?}");
        assert!(error.hint.unwrap().contains("--max-cpus"));
    }
    for (cpus, most) in [(2, 1), (1, 33)] {
        let odd = CreateVm {
            cpus: Some(cpus),
            max_cpus: Some(most),
            ..named("odd", counter())
        };
        daemon.run_detached(odd).error(ErrorKind::Invalid);
    }
}

#[test]
fn a_guest_that_does_not_change_its_vcpus_keeps_them() {
    let daemon = Daemon::start();
    let old = CreateVm {
        kernel_args: Some("fake=old".into()),
        ..growing("web")
    };
    daemon.run_detached(old).json::<Vm>();
    for cpus in [1, 4] {
        let error = change(&daemon, "web", cpus).error(ErrorKind::VmFailed);
        assert!(error.message.contains("keeps its 2 vCPUs"), "{error:?}");
        let vm: Vm = daemon.get("/v1/vms/web").json();
        assert_eq!((vm.cpus, vm.max_cpus), (2, Some(4)));
    }
}

#[test]
fn vcpus_come_from_what_vms_may_have_in_all() {
    // Of however many processors, one vCPU; the VM that has it may have no other.
    let daemon = Daemon::with(&["--cpu-share", "0.001", "--memory-wait", "0"]);
    let one = CreateVm {
        cpus: Some(1),
        ..growing("web")
    };
    let vm: Vm = daemon.run_detached(one).json();
    let error = change(&daemon, "web", 2).error(ErrorKind::NoRoom);
    assert!(error.message.contains("1 of the 1 vCPU"), "{error:?}");
    let log = fs::read_to_string(daemon.vm_folder(&vm.id).join("vmm.log")).unwrap();
    assert!(!log.contains("online"), "its guest was not asked: {log}");
}
