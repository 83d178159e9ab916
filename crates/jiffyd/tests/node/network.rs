//! VMs on a network: a daemon in a network namespace of the test, which needs root.

use crate::client::Answer;
use crate::daemon::{Daemon, bad_vm, eventually, id_of, named, run_of, shell, status_of};
use crate::images::{configs, layout};
use crate::room::asked;
use crate::snapshots::{assert_span_order, counter};
use jiffy_net::pool::Ranges;
use jiffy_net::rules::{Rules, table::Base};
use jiffy_wire::api::{
    CreateVm, ErrorKind, ForkVm, Forked, Hibernated, Image, Network, NetworkPolicy, NetworkUse, Vm,
    VmNetwork,
};
use jiffy_wire::timeline::{Timeline, names};
use rustix::thread::UnshareFlags;
use std::fs;
use std::net::TcpListener;

/// A daemon with a network, in a new namespace that this thread enters.
pub fn daemon() -> Daemon {
    daemon_with(&[])
}

/// As [`daemon`], with these options.
pub fn daemon_with(options: &[&str]) -> Daemon {
    enter_namespace();
    let mut daemon = Daemon::prepared(options);
    begin(&mut daemon);
    daemon
}

/// Moves this thread to a new network namespace.
pub fn enter_namespace() {
    #[allow(deprecated, reason = "of this thread's own, the network only")]
    rustix::thread::unshare(UnshareFlags::NEWNET)
        .expect("these tests need root (CAP_SYS_ADMIN, CAP_NET_ADMIN)");
    let up = std::process::Command::new("busybox")
        .args(["ip", "link", "set", "lo", "up"])
        .status();
    assert!(up.expect("busybox").success());
}

pub fn begin(daemon: &mut Daemon) {
    let mut command = daemon.command();
    command.env("JIFFY_VM_NETWORK", "on");
    daemon.begin(command);
    daemon.answers();
}

/// Does this VM have a link?
fn has_link(id: &str) -> bool {
    let text = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    text.contains(&format!("jf-{id}:"))
}

/// Number of links of VMs, and of those that are prepared. One more belongs to the node.
fn links() -> usize {
    let text = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    text.matches("jf-").count() - 1
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

/// The network configuration of the guest.
fn guest_config(daemon: &Daemon, vm: &Vm) -> String {
    fs::read_to_string(daemon.vm_folder(&vm.id).join("vmm.json")).unwrap()
}

#[test]
fn a_vm_has_a_link_from_its_start_to_its_end() {
    let daemon = daemon();
    let vm: Vm = daemon.run_detached(on(NetworkUse::default(), "web")).json();
    assert!(has_link(&vm.id));
    let told = guest_config(&daemon, &vm);
    let shown = network(&daemon.vm("web"));
    assert_eq!(shown.name, "default");
    let address = &shown.addresses[0];
    assert!(address.starts_with("10.118.0."), "{shown:?}");
    for part in [address.as_str(), "jiffy.internal", "02:6a:66:00:00:01"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert_eq!(shown.counters.expect("counters").spoofed, 0);
    let timeline: Timeline = daemon.get("/v1/vms/web/timeline").json();
    let spans = [
        names::ADDRESS_TAKEN,
        names::LINK_MADE,
        names::RULES_MADE,
        names::NAME_KNOWN,
    ];
    assert_span_order(&timeline, &spans);
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
    assert!(!has_link(&alone.id));
    daemon.post("/v1/vms/web/kill", b"").json::<Vm>();
    eventually("its link is removed", || !has_link(&vm.id));
    assert!(network(&daemon.vm("web")).addresses.is_empty());
    // The next start attaches it anew.
    let again: Vm = daemon.post("/v1/vms/web/start", b"").json();
    assert_ne!(&network(&again).addresses[0], address);
    assert!(has_link(&vm.id));
    assert_eq!(daemon.delete("/v1/vms/web?force=true").status, 204);
    assert!(!has_link(&vm.id), "at once");
}

#[test]
fn a_run_whose_client_leaves_while_it_waits_for_its_name_leaves_no_link() {
    let daemon = daemon();
    let slow = CreateVm {
        remove: true,
        ..named("web", bad_vm("slow-off", Some(shell("true"))))
    };
    let frames = daemon.run(slow);
    let off = daemon.vm_folder(&id_of(&frames)).join("off");
    eventually("it is ending", || off.exists());
    eventually("a link is prepared besides its own", || links() == 2);
    let next = run_of(named("web", CreateVm::default()), true);
    let waiting = asked(&daemon, "/v1/run", &serde_json::to_vec(&next).unwrap());
    eventually("the run has taken it, and another one is prepared", || {
        links() == 3
    });
    drop(waiting);
    eventually("it is given back", || links() == 2);
    assert!(off.exists(), "its name is still in use");
}

#[test]
fn exposed_ports_are_published_and_the_guest_gets_its_own_resolvers_and_hosts() {
    let daemon = daemon();
    let tar = layout(serde_json::json!({ "ExposedPorts": {"80/tcp": {}, "53/udp": {}} }));
    daemon
        .post("/v1/images/web?kind=layout", &tar)
        .json::<Image>();
    let asked = NetworkUse {
        publish_all: true,
        dns: vec!["192.0.2.53".into(), "2001:db8::53".into()],
        search: vec!["corp.example".into()],
        hosts: vec!["db:192.0.2.7".into(), "six:[2001:db8::1]".into()],
        ..NetworkUse::default()
    };
    let web = CreateVm {
        image: Some("web".into()),
        ..on(asked, "web")
    };
    let vm: Vm = daemon.run_detached(web).json();
    let shown = network(&daemon.vm("web"));
    let mut guest_ports: Vec<&str> = shown
        .ports
        .iter()
        .map(|port| port.strip_prefix("127.0.0.1:").expect("loopback"))
        .map(|port| port.split_once(':').expect("two ports").1)
        .collect();
    guest_ports.sort_unstable();
    assert_eq!(guest_ports, ["53/udp", "80/tcp"]);
    let tcp = shown.ports.iter().find(|it| it.ends_with("/tcp")).unwrap();
    let host_port: u16 = tcp.split(':').nth(1).unwrap().parse().unwrap();
    TcpListener::bind(("127.0.0.1", host_port)).expect_err("the daemon holds the port");

    let (_, guest) = configs(&daemon, &vm.id);
    assert_eq!(guest.name_servers, ["192.0.2.53", "2001:db8::53"]);
    assert_eq!(guest.search, ["corp.example", "jiffy.internal"]);
    let hosts: Vec<(&str, &str)> = guest
        .hosts
        .iter()
        .map(|it| (it.names[0].as_str(), it.address.as_str()))
        .collect();
    assert!(hosts.contains(&("db", "192.0.2.7")), "{hosts:?}");
    assert!(hosts.contains(&("six", "2001:db8::1")), "{hosts:?}");
    assert_eq!(hosts[0], ("web", shown.addresses[0].as_str()));
}

#[test]
fn a_hibernated_vm_keeps_address_and_ports_across_daemons() {
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
    assert!(has_link(&runs.id) && has_link(&sleeps.id));
    daemon.killed();
    // Nothing holds the link of the hibernated VM; a foreign link is in the way.
    eventually("its link is removed", || !has_link(&sleeps.id));
    assert!(has_link(&runs.id));
    let stray = std::process::Command::new("busybox")
        .args(["tunctl", "-t", "jf-00112233aabb"])
        .status();
    assert!(stray.expect("busybox").success());
    begin(&mut daemon);
    assert!(has_link(&runs.id) && has_link(&sleeps.id));
    assert!(!has_link("00112233aabb"));
    let woken: Vm = daemon.post("/v1/vms/sleeps/wake", b"").json();
    assert_eq!(network(&woken).addresses, network(&sleeps).addresses);
    // Its port stays reserved, before and after.
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
    assert!(!has_link(&runs.id) && !has_link(&sleeps.id));
    TcpListener::bind("127.0.0.1:8080").expect("the port is free");
}

#[test]
fn a_port_is_free_as_soon_as_its_vm_has_ended() {
    let daemon = daemon();
    for number in 0..5 {
        let name = format!("web-{number}");
        let port = NetworkUse {
            ports: vec!["8080-8081:80-81".into(), "8080:53/udp".into()],
            ..NetworkUse::default()
        };
        daemon.run_detached(on(port, &name)).json::<Vm>();
        daemon
            .post(&format!("/v1/vms/{name}/kill"), b"")
            .json::<Vm>();
    }
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
        ..ForkVm::default()
    };
    let body = serde_json::to_vec(&fork).unwrap();
    let forked: Forked = daemon.post("/v1/vms/parent/fork", &body).json();
    assert!(forked.vms.iter().all(|child| has_link(&child.id)));
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
        assert!(guest_config(&daemon, child).contains(own.as_str()));
    }
    assert_eq!(network(&parent).ports, ["127.0.0.1:8080:80/tcp"]);
}

#[test]
fn children_and_snapshots_have_the_policy_that_was_set_last() {
    let daemon = daemon();
    let made: Vm = daemon
        .run_detached(on(NetworkUse::default(), "parent"))
        .json();
    assert_eq!(network(&made).policy, NetworkPolicy::default());
    let closed = NetworkPolicy {
        allow: vec!["198.51.100.7:443/tcp".into()],
        deny: vec!["all".into()],
    };
    let body = serde_json::to_vec(&closed).unwrap();
    daemon
        .post("/v1/vms/parent/policy", &body)
        .json::<serde_json::Value>();

    let fork = serde_json::to_vec(&ForkVm::default()).unwrap();
    let forked: Forked = daemon.post("/v1/vms/parent/fork", &fork).json();
    assert_eq!(network(&forked.vms[0]).policy, closed);

    let made = br#"{"name":"snap"}"#;
    daemon
        .post("/v1/vms/parent/snapshots", made)
        .json::<serde_json::Value>();
    let from = |name: &str, network: NetworkUse| -> Vm {
        let vm = CreateVm {
            from: Some("snap".into()),
            network,
            ..named(name, counter())
        };
        daemon.run_detached(vm).json()
    };
    let restored = from("restored", NetworkUse::default());
    assert_eq!(network(&restored).policy, closed);
    // Another option of the network changes nothing else of it.
    let published = NetworkUse {
        ports: vec!["8080:80".into()],
        ..NetworkUse::default()
    };
    let published = from("published", published);
    assert_eq!(network(&published).policy, closed);
    assert_eq!(network(&published).ports, ["127.0.0.1:8080:80/tcp"]);
}

#[test]
fn a_link_is_prepared_for_the_next_run_and_removed_if_refused() {
    let daemon = daemon();
    let first: Vm = daemon
        .run_detached(on(NetworkUse::default(), "first"))
        .json();
    eventually("the next link is there", || links() == 2);
    // The name is taken: the promised link is removed, and the next one is made.
    daemon
        .run_detached(on(NetworkUse::default(), "first"))
        .error(ErrorKind::Conflict);
    eventually("the next link is there again", || links() == 2);
    let rule = NetworkUse {
        policy: NetworkPolicy {
            deny: vec!["all".into()],
            ..NetworkPolicy::default()
        },
        ..NetworkUse::default()
    };
    let second: Vm = daemon.run_detached(on(rule, "second")).json();
    eventually("the link after that is there", || links() == 3);
    assert_eq!(network(&second).policy.deny, ["all"]);
    assert_ne!(network(&first).addresses, network(&second).addresses);
}

#[test]
fn a_second_daemon_has_its_network_by_passt_or_none_and_says_why() {
    let first = daemon();
    let mut second = Daemon::prepared(&[]);
    begin(&mut second);
    let vm: Vm = second.run_detached(on(NetworkUse::default(), "web")).json();
    assert_eq!(network(&vm).name, "default");
    assert!(!has_link(&vm.id));
    let default: Network = second.get("/v1/networks/default").json();
    let note = default.note.expect("a sentence");
    assert!(note.contains("another jiffyd"), "{note}");
    let mut third = Daemon::prepared(&[]);
    let mut command = third.command();
    let empty = third.folder.path().join("lib");
    command.env("JIFFY_VM_NETWORK", "on").env("PATH", empty);
    third.begin(command);
    third.answers();
    let vm: Vm = third.run_detached(on(NetworkUse::default(), "web")).json();
    assert_eq!(vm.network, None);
    let asked = NetworkUse {
        name: Some("default".into()),
        ..NetworkUse::default()
    };
    let error = third
        .run_detached(on(asked, "asked"))
        .error(ErrorKind::WrongState);
    assert!(error.message.contains("another jiffyd"), "{error:?}");
    let default: Network = third.get("/v1/networks/default").json();
    let why = default.error.expect("a sentence");
    assert!(why.contains("another jiffyd"), "{why}");
    drop(first);
}

#[test]
fn a_vm_without_a_record_keeps_its_link_until_it_ends() {
    let mut daemon = daemon();
    let vm: Vm = daemon.run_detached(on(NetworkUse::default(), "web")).json();
    daemon.killed();
    fs::write(daemon.vm_folder(&vm.id).join("vm.json"), "nonsense").unwrap();
    begin(&mut daemon);
    assert!(has_link(&vm.id));
    // No other VM gets its address.
    let other: Vm = daemon
        .run_detached(on(NetworkUse::default(), "other"))
        .json();
    assert_ne!(network(&other).addresses, network(&vm).addresses);
    let path = format!("/v1/vms/{}?force=true", vm.id);
    assert_eq!(daemon.delete(&path).status, 204);
    eventually("its link is removed", || !has_link(&vm.id));
    assert!(has_link(&other.id));
}

#[test]
fn a_guest_that_floods_the_name_server_costs_the_daemon_little() {
    // The stand-in takes a TAP only if it inherits it.
    let daemon = daemon_with(&["--spare", "0"]);
    daemon
        .run_detached(on(NetworkUse::default(), "first"))
        .json::<Vm>();
    let log = daemon.folder.path().join("jiffyd.log");
    let written = || fs::metadata(&log).unwrap().len();
    let before = (status_of(daemon.pid(), "VmRSS"), written());
    let floods = CreateVm {
        kernel_args: Some("fake=query-flood".into()),
        ..on(NetworkUse::default(), "floods")
    };
    daemon.run_detached(floods).json::<Vm>();
    let dropped = || network(&daemon.vm("floods")).counters.unwrap().limited;
    eventually("most packets are dropped", || dropped() > 50_000);
    let grown = status_of(daemon.pid(), "VmRSS").saturating_sub(before.0);
    let said = written() - before.1;
    eprintln!("the daemon grew by {grown} KiB, its log by {said} bytes");
    assert!(grown < 8 << 10 && said < 64 << 10);
    assert_eq!(daemon.delete("/v1/vms/floods?force=true").status, 204);
}

#[test]
fn remove_network_removes_all_links_and_rules() {
    let mut daemon = daemon();
    let remove = |daemon: &Daemon| {
        let mut command = daemon.command();
        command
            .env("JIFFY_VM_NETWORK", "on")
            .arg("--remove-network");
        command.output().unwrap()
    };
    assert!(!remove(&daemon).status.success(), "a daemon runs");
    daemon.shut_down();
    let removed = remove(&daemon);
    assert!(removed.status.success(), "{removed:?}");
    let left = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    assert!(!left.contains("jf-"), "{left}");
    begin(&mut daemon);
    let vm: Vm = daemon.run_detached(on(NetworkUse::default(), "web")).json();
    assert!(has_link(&vm.id));
}

#[test]
fn rules_that_another_program_removes_are_restored_while_a_vm_runs() {
    let daemon = daemon();
    let vm: Vm = daemon.run_detached(on(NetworkUse::default(), "web")).json();
    let log = daemon.folder.path().join("jiffyd.log");
    let restored = || {
        fs::read_to_string(&log)
            .unwrap()
            .contains("is created again")
    };
    // As `nft flush ruleset`, in this network namespace.
    let ranges = Ranges::new(
        "10.118.0.0/16".parse().unwrap(),
        "fd00::/64".parse().unwrap(),
    );
    let mut rules = Rules::new(Base::new(ranges.unwrap())).unwrap();
    assert!(!restored());
    rules.uninstall().unwrap();
    eventually("the rules are back", restored);
    assert!(has_link(&vm.id));
}

#[test]
fn networks_can_be_created_used_and_removed() {
    let mut daemon = daemon();
    let made: Network = daemon.post("/v1/networks/lab", b"").json();
    assert_eq!((made.name.as_str(), made.vms.len()), ("lab", 0));
    daemon
        .post("/v1/networks/lab", b"")
        .error(ErrorKind::Conflict);
    daemon
        .post("/v1/networks/none", b"")
        .error(ErrorKind::Conflict);
    daemon
        .post("/v1/networks/a%20b", b"")
        .error(ErrorKind::Invalid);
    let within = |name: &str| NetworkUse {
        name: Some(name.into()),
        ..NetworkUse::default()
    };
    daemon
        .run_detached(on(within("nowhere"), "lost"))
        .error(ErrorKind::NotFound);
    daemon.run_detached(on(within("lab"), "web")).json::<Vm>();
    let used = daemon.delete("/v1/networks/lab").error(ErrorKind::Conflict);
    assert!(used.message.contains("web"), "{used:?}");
    daemon
        .delete("/v1/networks/default")
        .error(ErrorKind::Invalid);

    // A policy applies at once, and still after a restart of the daemon.
    let policy = NetworkPolicy {
        allow: vec!["10.0.0.0/8:5432/tcp".into()],
        deny: vec!["all".into()],
    };
    let body = serde_json::to_vec(&policy).unwrap();
    let changed: Vm = daemon.post("/v1/vms/web/policy", &body).json();
    assert_eq!(network(&changed).policy, policy);
    for wrong in [r#"{"allow":["10.0.0.0/33"]}"#, r#"{"deny":["host:80"]}"#] {
        let wrong = daemon.post("/v1/vms/web/policy", wrong.as_bytes());
        wrong.error(ErrorKind::Invalid);
    }
    daemon
        .run_detached(on(within("none"), "alone"))
        .json::<Vm>();
    daemon
        .post("/v1/vms/alone/policy", &body)
        .error(ErrorKind::WrongState);
    daemon.killed();
    begin(&mut daemon);
    assert_eq!(network(&daemon.vm("web")).policy, policy);
    let all: Vec<Network> = daemon.get("/v1/networks").json();
    let names: Vec<&str> = all.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["default", "lab"]);
    assert_eq!(all[1].vms, ["web"]);
    assert_eq!(daemon.delete("/v1/vms/web?force=true").status, 204);
    assert_eq!(daemon.delete("/v1/networks/lab").status, 204);
    daemon.delete("/v1/networks/lab").error(ErrorKind::NotFound);

    // Options that exclude each other.
    let refused = |network: NetworkUse| {
        let error = daemon
            .run_detached(on(network, "wrong"))
            .error(ErrorKind::Invalid);
        error.message
    };
    let mut ports = within("none");
    ports.ports = vec!["80:80".into()];
    assert!(refused(ports).contains("without a network"));
    let mut twice = within("default");
    twice.ports = vec!["80:80".into(), "80:81".into()];
    assert!(refused(twice).contains("twice"));
    let mut rule = within("default");
    rule.policy.allow = vec!["nonsense:".into()];
    assert!(refused(rule).contains("nonsense"));
}
