//! Rate limits of disks and networks, at the start and while a VM runs.

use crate::daemon::{Daemon, eventually, named};
use crate::golden::made;
use crate::images::configs;
use crate::network::{begin, daemon};
use crate::snapshots::counter;
use jiffy_wire::api::{
    CreateVm, ErrorKind, ForkVm, Forked, Hibernated, Limits, NetworkUse, Origin, Vm, VolumeUse,
};
use jiffy_wire::vmm::{DiskLimit, NetLimit};
use std::fs;
use std::num::NonZeroU64;

fn disk(bytes: u64) -> DiskLimit {
    DiskLimit {
        bytes_per_second: NonZeroU64::new(bytes),
        ..DiskLimit::default()
    }
}

fn net(packets: u64) -> NetLimit {
    NetLimit {
        packets_per_second: NonZeroU64::new(packets),
        ..NetLimit::default()
    }
}

/// A VM with a volume, and limits of all its devices.
fn limited() -> CreateVm {
    CreateVm {
        root_limit: disk(1000),
        disks: vec![VolumeUse {
            name: "data".into(),
            size_mib: Some(1),
            limit: disk(2000),
            ..VolumeUse::default()
        }],
        network: NetworkUse {
            limit: net(30),
            ..NetworkUse::default()
        },
        ..named("web", counter())
    }
}

/// The limits with which its VMM was started: of each disk, and of its interface.
fn started_with(daemon: &Daemon, vm: &Vm) -> (Vec<DiskLimit>, NetLimit) {
    let (config, _) = configs(daemon, &vm.id);
    let net = &config.nets[0];
    assert_eq!(net.receive_limit, net.send_limit);
    let disks = config.disks.iter().map(|disk| disk.limit).collect();
    (disks, net.receive_limit)
}

pub fn change(daemon: &Daemon, vm: &str, limits: &Limits) -> crate::client::Answer {
    let body = serde_json::to_vec(limits).unwrap();
    daemon.post(&format!("/v1/vms/{vm}/limits"), &body)
}

#[test]
fn limits_of_a_running_vm_can_be_changed_and_persist() {
    let mut daemon = daemon();
    let vm: Vm = daemon.run_detached(limited()).json();
    assert_eq!(
        started_with(&daemon, &vm),
        (vec![disk(1000), disk(2000)], net(30))
    );
    let changes = Limits {
        root: Some(disk(5000)),
        network: Some(NetLimit::default()),
        ..Limits::default()
    };
    let changed: Vm = change(&daemon, "web", &changes).json();
    assert_eq!(changed.limits.root, Some(disk(5000)));
    assert_eq!(changed.limits.network, None);
    assert_eq!(
        changed.disks[0].limit,
        disk(2000),
        "a limit that was not in the request has changed"
    );
    let log = fs::read_to_string(daemon.vm_folder(&vm.id).join("vmm.log")).unwrap();
    let told = r#"{"set_limits":{"disks":[{"bytes_per_second":5000},{"bytes_per_second":2000}],"nets":[{}]}}"#;
    assert!(log.contains(told), "{log}");
    // A daemon may end before it has told the VMM: the next one tells it.
    daemon.killed();
    begin(&mut daemon);
    let log = || fs::read_to_string(daemon.vm_folder(&vm.id).join("vmm.log")).unwrap();
    eventually("the next daemon sets the limits", || {
        log().matches(told).count() == 2
    });
    // The next start has them, too.
    daemon
        .post("/v1/vms/web/hibernate", b"")
        .json::<Hibernated>();
    let volume = Limits {
        volumes: [("data".to_owned(), disk(7))].into(),
        ..Limits::default()
    };
    let asleep: Vm = change(&daemon, "web", &volume).json();
    assert_eq!(asleep.disks[0].limit, disk(7));
    daemon.post("/v1/vms/web/wake", b"").json::<Vm>();
    let now = (vec![disk(5000), disk(7)], NetLimit::default());
    assert_eq!(started_with(&daemon, &vm), now);
}

#[test]
fn a_forked_child_has_its_parents_current_limits() {
    let daemon = daemon();
    let parent = CreateVm {
        disks: Vec::new(),
        ..limited()
    };
    daemon.run_detached(parent).json::<Vm>();
    let changes = Limits {
        root: Some(disk(5000)),
        network: Some(net(1)),
        ..Limits::default()
    };
    change(&daemon, "web", &changes).json::<Vm>();
    let fork = serde_json::to_vec(&ForkVm::default()).unwrap();
    let forked: Forked = daemon.post("/v1/vms/web/fork", &fork).json();
    let limits = started_with(&daemon, &forked.vms[0]);
    assert_eq!(limits, (vec![disk(5000)], net(1)));
}

#[test]
fn a_golden_run_has_its_own_limits() {
    let daemon = daemon();
    let limited = |bytes| CreateVm {
        root_limit: disk(bytes),
        disks: Vec::new(),
        name: None,
        ..limited()
    };
    let booted: Vm = daemon.run_detached(limited(1000)).json();
    assert_eq!(booted.origin, None);
    daemon.delete(&format!("/v1/vms/{}?force=true", booted.id));
    made(&daemon);
    let golden: Vm = daemon.run_detached(limited(2000)).json();
    assert_eq!(golden.origin, Some(Origin::Golden));
    assert_eq!(started_with(&daemon, &golden), (vec![disk(2000)], net(30)));
}

#[test]
fn limits_of_devices_that_a_vm_lacks_are_refused() {
    let daemon = daemon();
    let none = NetworkUse {
        name: Some("none".into()),
        ..NetworkUse::default()
    };
    let alone = CreateVm {
        network: none.clone(),
        ..named("alone", counter())
    };
    daemon.run_detached(alone).json::<Vm>();
    let refused = |limits: Limits, kind, why: &str| {
        let error = change(&daemon, "alone", &limits).error(kind);
        assert!(error.message.contains(why), "{error:?}");
    };
    refused(Limits::default(), ErrorKind::Invalid, "contains no limit");
    let volumes = [("data".to_owned(), disk(1))].into();
    let volume = Limits {
        volumes,
        ..Limits::default()
    };
    refused(volume, ErrorKind::NotFound, "no volume data");
    let network = Limits {
        network: Some(net(1)),
        ..Limits::default()
    };
    refused(network, ErrorKind::WrongState, "no network");
    let limited_none = CreateVm {
        network: NetworkUse {
            limit: net(1),
            ..none
        },
        ..named("other", counter())
    };
    daemon.run_detached(limited_none).error(ErrorKind::Invalid);
}
