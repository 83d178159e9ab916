//! VMs with a CPU profile that hides features of the host's processor.

use crate::daemon::{Daemon, named};
use crate::images::configs;
use jiffy_wire::api::{CreateVm, ErrorKind, Vm, VmState};
use jiffy_wire::cpu::testing::processor;
use jiffy_wire::cpu::{Profile, Wanted};
use std::fs;

fn with(profile: Wanted) -> CreateVm {
    CreateVm {
        cpu_profile: Some(profile),
        ..CreateVm::default()
    }
}

/// The CPU profile in the configuration of the VM's VMM.
fn vmm_profile(daemon: &Daemon, vm: &Vm) -> Option<Wanted> {
    let (config, _) = configs(daemon, &vm.id);
    config.cpu_profile
}

fn profile() -> Profile {
    processor("GenuineIntel", 1, &[(1, 0, [0, 0, 0, 1 << 26])])
}

#[test]
fn a_cpu_profile_reaches_the_vmm_also_after_a_new_daemon() {
    let mut daemon = Daemon::start();
    let wanted = [
        ("level", Wanted::Named("x86-64-v2".into())),
        ("given", Wanted::Given(Box::new(profile()))),
    ];
    for (name, profile) in &wanted {
        let vm: Vm = daemon
            .run_detached(named(name, with(profile.clone())))
            .json();
        assert_eq!(vmm_profile(&daemon, &vm).as_ref(), Some(profile), "{name}");
    }
    let plain: Vm = daemon
        .run_detached(named("plain", CreateVm::default()))
        .json();
    assert_eq!(vmm_profile(&daemon, &plain), None);
    daemon.killed();
    daemon.up();
    for (name, profile) in &wanted {
        let vm = daemon.vm(name);
        assert_eq!(vm.state, VmState::Running);
        daemon.post(&format!("/v1/vms/{name}/stop"), b"");
        daemon.when(name, VmState::Exited);
        fs::remove_file(daemon.vm_folder(&vm.id).join("vmm.json")).unwrap();
        daemon.post(&format!("/v1/vms/{name}/start"), b"");
        assert_eq!(vmm_profile(&daemon, &vm).as_ref(), Some(profile), "{name}");
    }
}

#[test]
fn an_invalid_cpu_profile_is_refused_and_leaves_nothing() {
    let daemon = Daemon::start();
    let refused = |profile| {
        let answer = daemon.create(&with(profile));
        answer.error(ErrorKind::Invalid).message
    };
    let unknown = refused(Wanted::Named("x86-64-v5".into()));
    assert!(unknown.contains("x86-64-v4"), "{unknown}");
    let newer = Profile {
        version: 2,
        ..profile()
    };
    let newer = refused(Wanted::Given(Box::new(newer)));
    assert!(newer.contains("version 2"), "{newer}");
    let liar = Profile {
        vendor: "AuthenticAMD".into(),
        ..profile()
    };
    refused(Wanted::Given(Box::new(liar)));
    daemon.assert_nothing_left();
}
