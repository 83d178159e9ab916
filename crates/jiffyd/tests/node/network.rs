//! VMs on a network: a daemon in a network namespace of the test's, which needs root.

use crate::client::Answer;
use crate::daemon::{Daemon, eventually, named};
use crate::snapshots::counter;
use jiffy_wire::api::{CreateVm, ErrorKind, ForkVm, Forked, Hibernated, NetworkUse, Vm, VmNetwork};
use rustix::thread::UnshareFlags;
use std::fs;
use std::net::TcpListener;

/// A daemon with a network, in a namespace that this thread is in from now on.
fn daemon() -> Daemon {
    #[allow(deprecated, reason = "of this thread's own, the network only")]
    rustix::thread::unshare(UnshareFlags::NEWNET)
        .expect("these tests need root (CAP_SYS_ADMIN, CAP_NET_ADMIN)");
    let up = std::process::Command::new("busybox")
        .args(["ip", "link", "set", "lo", "up"])
        .status();
    assert!(up.expect("busybox").success());
    let mut daemon = Daemon::prepared(&[]);
    begin(&mut daemon);
    daemon
}

fn begin(daemon: &mut Daemon) {
    let mut command = daemon.command();
    command.env("JIFFY_VM_NETWORK", "on");
    daemon.begin(command);
    daemon.answers();
}

/// Links of VMs.
fn links() -> Vec<String> {
    let text = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let names = text.lines().filter_map(|line| line.split_once(':'));
    let names = names.map(|(name, _)| name.trim().to_owned());
    names
        .filter(|name| name.starts_with("jf-") && name != "jf-host")
        .collect()
}

fn network(vm: &Vm) -> VmNetwork {
    vm.network.clone().expect("a network")
}

fn on(network: NetworkUse, name: &str) -> CreateVm {
    CreateVm {
        network,
        ..named(name, counter())
    }
}

/// What the guest was told.
fn told(daemon: &Daemon, vm: &Vm) -> String {
    fs::read_to_string(daemon.vm_folder(&vm.id).join("vmm.json")).unwrap()
}

#[test]
fn a_vm_has_a_link_from_its_start_to_its_end() {
    let daemon = daemon();
    let vm: Vm = daemon.run_detached(on(NetworkUse::default(), "web")).json();
    assert_eq!(links(), [format!("jf-{}", vm.id)]);
    let told = told(&daemon, &vm);
    let shown = network(&daemon.vm("web"));
    assert_eq!(shown.name, "default");
    let address = &shown.addresses[0];
    assert!(address.starts_with("10.118.0."), "{shown:?}");
    for part in [address.as_str(), "jiffy.internal", "02:6a:66:00:00:01"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert_eq!(shown.counters.expect("counters").spoofed, 0);
    let alone: Vm = daemon
        .run_detached(on(
            NetworkUse {
                name: Some("none".into()),
                ..NetworkUse::default()
            },
            "alone",
        ))
        .json();
    assert_eq!(alone.network, None);
    assert_eq!(links().len(), 1);
    daemon.post("/v1/vms/web/kill", b"").json::<Vm>();
    assert!(links().is_empty());
    assert!(network(&daemon.vm("web")).addresses.is_empty());
    // The next start is a new one.
    let again: Vm = daemon.post("/v1/vms/web/start", b"").json();
    assert_ne!(&network(&again).addresses[0], address);
    assert_eq!(daemon.delete("/v1/vms/web?force=true").status, 204);
    assert!(links().is_empty());
}

#[test]
fn what_sleeps_keeps_its_address_and_the_next_daemon_knows_all() {
    let mut daemon = daemon();
    let port = NetworkUse {
        ports: vec!["8080:80".into()],
        ..NetworkUse::default()
    };
    let runs: Vm = daemon.run_detached(on(port, "runs")).json();
    let sleeps: Vm = daemon
        .run_detached(on(NetworkUse::default(), "sleeps"))
        .json();
    daemon
        .post("/v1/vms/sleeps/hibernate", b"")
        .json::<Hibernated>();
    assert_eq!(links().len(), 2);
    daemon.killed();
    // Nobody holds the link of the one that sleeps; a stranger's is in the way.
    eventually("its link goes", || links() == [format!("jf-{}", runs.id)]);
    let stray = std::process::Command::new("busybox")
        .args(["tunctl", "-t", "jf-00112233aabb"])
        .status();
    assert!(stray.expect("busybox").success());
    begin(&mut daemon);
    let mut expected = [format!("jf-{}", runs.id), format!("jf-{}", sleeps.id)];
    let mut there = links();
    expected.sort();
    there.sort();
    assert_eq!(there, expected);
    let woken: Vm = daemon.post("/v1/vms/sleeps/wake", b"").json();
    assert_eq!(network(&woken).addresses, network(&sleeps).addresses);
    // Its port is its own, before and after.
    for name in ["other", "another"] {
        let port = NetworkUse {
            ports: vec!["8080:81".into()],
            ..NetworkUse::default()
        };
        let refused: Answer = daemon.run_detached(on(port, name));
        let error = refused.error(ErrorKind::Conflict);
        assert!(error.message.contains("8080"), "{error:?}");
    }
    for name in ["runs", "sleeps"] {
        let path = format!("/v1/vms/{name}?force=true");
        assert_eq!(daemon.delete(&path).status, 204);
    }
    assert!(links().is_empty());
    TcpListener::bind("127.0.0.1:8080").expect("the port is free");
}

#[test]
fn children_have_links_of_their_own_and_no_ports() {
    let daemon = daemon();
    let port = NetworkUse {
        ports: vec!["8080:80".into()],
        ..NetworkUse::default()
    };
    let parent: Vm = daemon.run_detached(on(port, "parent")).json();
    let fork = ForkVm {
        count: Some(3),
        name: Some("child".into()),
    };
    let body = serde_json::to_vec(&fork).unwrap();
    let forked: Forked = daemon.post("/v1/vms/parent/fork", &body).json();
    assert_eq!(links().len(), 4);
    let mut addresses: Vec<String> = forked
        .vms
        .iter()
        .chain([&parent])
        .map(|vm| network(vm).addresses[0].clone())
        .collect();
    addresses.sort();
    addresses.dedup();
    assert_eq!(addresses.len(), 4);
    for child in &forked.vms {
        assert!(network(child).ports.is_empty());
        let own = &network(child).addresses[0];
        assert!(told(&daemon, child).contains(own.as_str()));
    }
    assert_eq!(network(&parent).ports, ["127.0.0.1:8080:80/tcp"]);
}

#[test]
fn a_second_daemon_has_no_network_and_says_why() {
    let first = daemon();
    let mut second = Daemon::prepared(&[]);
    begin(&mut second);
    let vm: Vm = second.run_detached(on(NetworkUse::default(), "web")).json();
    assert_eq!(vm.network, None);
    let asked = NetworkUse {
        name: Some("default".into()),
        ..NetworkUse::default()
    };
    let error = second
        .run_detached(on(asked, "asked"))
        .error(ErrorKind::WrongState);
    assert!(error.message.contains("another jiffyd"), "{error:?}");
    let info: jiffy_wire::api::NodeInfo = second.get("/v1/info").json();
    assert!(
        info.network
            .expect("a sentence")
            .starts_with("none: another")
    );
    drop(first);
}

#[test]
fn a_vm_whose_record_is_lost_keeps_its_link_until_its_end() {
    let mut daemon = daemon();
    let vm: Vm = daemon.run_detached(on(NetworkUse::default(), "web")).json();
    let link = [format!("jf-{}", vm.id)];
    daemon.killed();
    fs::write(daemon.vm_folder(&vm.id).join("vm.json"), "nonsense").unwrap();
    begin(&mut daemon);
    assert_eq!(links(), link);
    // Its address is nobody else's.
    let other: Vm = daemon
        .run_detached(on(NetworkUse::default(), "other"))
        .json();
    assert_ne!(network(&other).addresses, network(&vm).addresses);
    let path = format!("/v1/vms/{}?force=true", vm.id);
    assert_eq!(daemon.delete(&path).status, 204);
    assert_eq!(links(), [format!("jf-{}", other.id)]);
}
