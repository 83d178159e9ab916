//! Networks, policies of VMs, and addresses opened by names.

use super::world::*;
use super::{on_host, open, spec, vm};
use crate::host::{Host, permits_all_of};
use crate::policy::Policy;
use crate::rules::{GuestRules, NameRules};
use std::net::IpAddr;
use std::time::Duration;

fn policy(allow: &[&str], deny: &[&str]) -> Policy {
    let rules = |texts: &[&str]| texts.iter().map(|it| it.parse().expect("a rule")).collect();
    Policy {
        allow: rules(allow),
        deny: rules(deny),
    }
}

#[test]
fn vms_of_a_network_reach_each_other_until_it_is_removed() {
    let world = World::new();
    let (mut host, _) = open(&world);
    let start = |host: &mut Host, number: u32, network: Option<&str>| {
        let attached = on_host(&world, || {
            let mut spec = spec(host, number);
            spec.network = network.map(str::to_owned);
            host.attach(&spec).expect("attached")
        });
        Guest::start(attached)
    };
    let a = start(&mut host, 1, Some("blue"));
    let b = start(&mut host, 2, Some("blue"));
    let c = start(&mut host, 3, Some("red"));
    let d = start(&mut host, 4, None);
    let _servers: Vec<Server> = [&a, &b, &c, &d]
        .iter()
        .map(|it| Server::tcp(&it.namespace, "::", 80, "vm"))
        .collect();
    let v4 = |it: &Guest| it.addresses.v4.to_string();
    assert_eq!(
        a.namespace.run(|| hear(&v4(&b), 80)),
        Some(format!("vm ::ffff:{}", v4(&a)))
    );
    assert!(b.reaches(&v4(&a), 80));
    if let (Some(from), Some(to)) = (a.addresses.v6, b.addresses.v6) {
        assert_eq!(
            a.namespace.run(|| hear(&to.to_string(), 80)),
            Some(format!("vm {from}"))
        );
    }
    for (from, to) in [(&a, &c), (&a, &d), (&c, &a), (&d, &a), (&c, &d), (&d, &b)] {
        assert!(!from.reaches(&v4(to), 80), "{} {}", v4(from), v4(to));
    }
    on_host(&world, || host.remove_network("blue").expect("removed"));
    assert!(!a.reaches(&v4(&b), 80));
}

#[test]
fn a_policy_applies_and_changes_with_connections_open() {
    /// A private address of the host.
    const OWN: &str = "10.88.0.1";
    let world = World::new();
    world
        .host
        .run(|| configure(|batch| address(batch, index("up0"), OWN, 32)));
    let (mut host, _) = open(&world);
    let mut own = on_host(&world, || spec(&mut host, 1));
    own.policy = policy(
        &["10.77.0.1:80", "host:8000/tcp"],
        &["203.0.113.9:81-90", "all:25"],
    );
    let guest = Guest::start(on_host(&world, || host.attach(&own).expect("attached")));
    let ports = [25, 80, 81, 8000];
    let _servers: Vec<Server> = ports
        .iter()
        .flat_map(|port| [PUBLIC, PRIVATE].map(|it| Server::tcp(&world.outside, it, *port, "far")))
        .collect();
    let _host: Vec<Server> = ports
        .iter()
        .map(|it| Server::tcp(&world.host, HOST, *it, "host"))
        .collect();
    let reached = |guest: &Guest| -> Vec<(&str, u16)> {
        let all = [PUBLIC, PRIVATE, HOST]
            .into_iter()
            .flat_map(|it| ports.map(|port| (it, port)));
        all.filter(|(address, port)| guest.reaches(address, *port))
            .collect()
    };
    assert_eq!(
        reached(&guest),
        [(PUBLIC, 80), (PUBLIC, 8000), (PRIVATE, 80), (HOST, 8000)]
    );
    // An open connection ends when the rule that allowed it is removed.
    let talk = |server: &Namespace, address: &str| {
        let at = std::net::SocketAddr::new(address.parse().expect("an address"), 7);
        let listener = server.run(|| std::net::TcpListener::bind(at).expect("a port"));
        let stream = guest
            .namespace
            .run(|| std::net::TcpStream::connect_timeout(&at, TIMEOUT).expect("connected"));
        (listener.accept().expect("a connection").0, stream, listener)
    };
    own.policy = policy(&["10.77.0.1", "host:7"], &[]);
    on_host(&world, || host.change(&own).expect("changed"));
    let (private, public) = (talk(&world.outside, PRIVATE), talk(&world.outside, PUBLIC));
    let gateway = guest.addresses.gateway.to_string();
    let of_host = [HOST, OWN, &gateway].map(|it| talk(&world.host, it));
    let arrives = |(far, near, _): &(std::net::TcpStream, std::net::TcpStream, _), within| {
        use std::io::{Read, Write};
        let (mut far, mut near) = (far, near);
        far.set_read_timeout(Some(within)).expect("a socket");
        let _ = near.write_all(b"x");
        far.read_exact(&mut [0]).is_ok()
    };
    // Those to the host stay, also to a private address of it, as long as they are allowed.
    own.policy = policy(&["host:7"], &[]);
    on_host(&world, || host.change(&own).expect("changed"));
    assert!(!arrives(&private, SILENCE));
    assert!(of_host.iter().all(|it| arrives(it, TIMEOUT)));
    own.policy = Policy::default();
    on_host(&world, || host.change(&own).expect("changed"));
    assert!(arrives(&public, TIMEOUT));
    assert!(!of_host.iter().any(|it| arrives(it, SILENCE)));
    assert_eq!(
        reached(&guest),
        [(PUBLIC, 25), (PUBLIC, 80), (PUBLIC, 81), (PUBLIC, 8000)]
    );
}

#[test]
fn connections_are_searched_only_after_a_change_that_may_forbid_some() {
    let old = GuestRules {
        vm: vm(1),
        link: 7,
        v4: [10, 0, 0, 2].into(),
        v6: None,
        network: None,
        policy: Policy::default(),
        ports: vec!["8080:80".parse().expect("a port")],
        asleep: false,
    };
    let with = |change: fn(&mut GuestRules)| {
        let mut new = old.clone();
        change(&mut new);
        permits_all_of(&new, &old)
    };
    assert!(with(|_| {}));
    assert!(with(|it| it.ports.push("8081:80".parse().expect("a port"))));
    assert!(with(|it| it.network = Some("blue".to_owned())));
    assert!(!with(|it| it.ports.clear()));
    assert!(!with(|it| it.ports[0].guest = 81));
    assert!(!with(|it| it.policy = policy(&[], &["192.0.2.1"])));
    let member = |network: Option<&str>| GuestRules {
        network: network.map(str::to_owned),
        ..old.clone()
    };
    assert!(!permits_all_of(&old, &member(Some("blue"))));
    assert!(!permits_all_of(&member(Some("red")), &member(Some("blue"))));
}

#[test]
fn addresses_of_an_allowed_name_are_open_until_they_expire() {
    let world = World::new();
    let (mut host, _) = open(&world);
    let mut own = on_host(&world, || spec(&mut host, 1));
    own.policy = policy(&["example.com:80"], &["all"]);
    let guest = Guest::start(on_host(&world, || host.attach(&own).expect("attached")));
    let _servers: Vec<Server> = [80, 81]
        .map(|port| Server::tcp(&world.outside, PUBLIC, port, "far"))
        .into();
    let _server6 = Server::tcp(&world.outside, PUBLIC6, 80, "far");
    assert!(!guest.reaches(PUBLIC, 80));
    let addresses: Vec<IpAddr> = [PUBLIC, PUBLIC6]
        .map(|it| it.parse().expect("an address"))
        .into();
    let at = own.policy.allow[0].access();
    let open = |names: &mut NameRules, left: Duration| {
        let addresses: Vec<_> = addresses.iter().map(|it| (*it, left)).collect();
        names.open(vm(1), at, &addresses).expect("opened");
    };
    let mut names = on_host(&world, || NameRules::new().expect("a channel"));
    open(&mut names, Duration::from_secs(1));
    open(&mut names, Duration::from_secs(100));
    std::thread::sleep(Duration::from_millis(1200));
    assert!(guest.reaches(PUBLIC, 80) && !guest.reaches(PUBLIC, 81));
    if guest.addresses.v6.is_some() {
        assert!(guest.reaches(PUBLIC6, 80));
    }
    // Opened addresses survive a replacement of the table.
    on_host(&world, || {
        let again = host.reconcile(&[own.clone()], &Default::default());
        assert_eq!(again.expect("reconciled").without_link, []);
    });
    assert!(guest.reaches(PUBLIC, 80));
    open(&mut names, Duration::from_millis(50));
    std::thread::sleep(Duration::from_millis(100));
    assert!(!guest.reaches(PUBLIC, 80));
    // It is no error if the VM does not exist, or has no such rule.
    names
        .open(vm(9), at, &[(addresses[0], Duration::from_secs(1))])
        .expect("nothing");
}

#[test]
fn addresses_of_names_stay_open_when_a_policy_changes_that_still_allows_the_names() {
    let world = World::new();
    let (mut host, _) = open(&world);
    let mut own = on_host(&world, || spec(&mut host, 1));
    own.policy = policy(&["a.example:7"], &["all"]);
    let guest = Guest::start(on_host(&world, || host.attach(&own).expect("attached")));
    let mut names = on_host(&world, || NameRules::new().expect("a channel"));
    let far = std::net::SocketAddr::new(PUBLIC.parse().expect("an address"), 7);
    let listener = world
        .outside
        .run(|| std::net::TcpListener::bind(far).expect("a port"));
    let at = own.policy.allow[0].access();
    let opened = [(far.ip(), Duration::from_secs(100))];
    names.open(vm(1), at, &opened).expect("opened");
    let near = guest
        .namespace
        .run(|| std::net::TcpStream::connect_timeout(&far, TIMEOUT).expect("connected"));
    let (talks, _) = listener.accept().expect("a connection");
    let arrives = |within| {
        use std::io::{Read, Write};
        talks.set_read_timeout(Some(within)).expect("a socket");
        let _ = (&near).write_all(b"x");
        (&talks).read_exact(&mut [0]).is_ok()
    };
    assert!(arrives(TIMEOUT));
    // More names at the same port, and at another one.
    own.policy = policy(
        &["a.example:7", "b.example:7", "c.example:22/tcp"],
        &["all"],
    );
    on_host(&world, || host.change(&own).expect("changed"));
    assert!(arrives(TIMEOUT), "the open connection");
    assert!(guest.reaches(PUBLIC, 7), "a new one");
    assert_eq!(
        on_host(&world, || host.rules.opened(vm(1)).expect("addresses")),
        [(far.ip(), at)]
    );
    own.policy = policy(&["b.example:7"], &["all"]);
    on_host(&world, || host.change(&own).expect("changed"));
    assert!(!arrives(SILENCE), "a.example is not allowed any more");
    assert!(!guest.reaches(PUBLIC, 7));
}

#[test]
fn names_are_open_at_the_ports_of_their_own_rules_only() {
    let world = World::new();
    let (mut host, _) = open(&world);
    let mut own = on_host(&world, || spec(&mut host, 1));
    own.policy = policy(&["a.example:80", "b.example:22", "c.example/tcp"], &["all"]);
    let guest = Guest::start(on_host(&world, || host.attach(&own).expect("attached")));
    let _servers: Vec<Server> = [22, 80]
        .map(|port| Server::tcp(&world.outside, PUBLIC, port, "far"))
        .into();
    let mut names = on_host(&world, || NameRules::new().expect("a channel"));
    let mut resolved = |name: &str, left: Duration| {
        let opened = [(PUBLIC.parse().expect("an address"), left)];
        for at in own.policy.opened_at(name) {
            names.open(vm(1), at, &opened).expect("opened");
        }
    };
    let reached = || [22, 80].map(|port| guest.reaches(PUBLIC, port));
    assert_eq!(reached(), [false, false]);
    resolved("a.example", Duration::from_secs(100));
    assert_eq!(reached(), [false, true]);
    resolved("a.example", Duration::from_millis(1));
    resolved("b.example", Duration::from_secs(100));
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(reached(), [true, false]);
    resolved("c.example", Duration::from_secs(100));
    assert_eq!(reached(), [true, true]);
}

#[test]
fn no_rule_opens_a_forbidden_host_port() {
    let world = World::new();
    let options = crate::host::HostOptions {
        never: vec![7070],
        ..super::options()
    };
    let opened = on_host(&world, || Host::open(options, &[], &Default::default()));
    let (mut host, _) = opened.expect("open");
    let mut own = on_host(&world, || spec(&mut host, 1));
    own.policy = policy(&["host:7070-7072", HOST, HOST6, "all"], &[]);
    let guest = Guest::start(on_host(&world, || host.attach(&own).expect("attached")));
    let _servers: Vec<Server> = [7070, 7072]
        .map(|port| Server::tcp(&world.host, "::", port, "host"))
        .into();
    let _far = Server::tcp(&world.outside, PUBLIC, 7070, "far");
    let mut addresses = vec![guest.addresses.gateway.to_string(), HOST.into()];
    if let Some(gateway) = guest.addresses.gateway6 {
        addresses.extend([gateway.to_string(), HOST6.into()]);
    }
    for address in &addresses {
        // The first IPv6 packets may be lost, until the link is ready.
        assert!((0..20).any(|_| guest.reaches(address, 7072)), "{address}");
        assert!(!guest.reaches(address, 7070), "{address}");
    }
    assert!(
        guest.reaches(PUBLIC, 7070),
        "the port is forbidden only on the host"
    );
}
