//! Reconciles damaged states, and removes everything.

use super::world::*;
use super::{on_host, open, options, spec, vm};
use crate::conntrack;
use crate::host::{Attached, GuestSpec, Host};
use crate::links::{self, found};
use crate::netlink::{Channel, Refusal};
use crate::nft::{Element, Hook, Set, Transaction, read};
use crate::policy::Policy;
use crate::rules::TABLE;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};

/// All objects of ours in this thread's namespace as text, without counters.
fn snapshot() -> Vec<String> {
    let mut channel = Channel::route().expect("a socket");
    let mut netfilter = Channel::netfilter().expect("a socket");
    let mut all = Vec::new();
    for link in found::links(&mut channel).expect("links") {
        if links::is_ours(&link) {
            all.push(format!("link {} {:x}", link.name, link.group));
            for it in found::addresses(&mut channel, link.index).expect("addresses") {
                all.push(format!("address {} {it:?}", link.name));
            }
            for it in found::neighbours(&mut channel, link.index).expect("neighbours") {
                all.push(format!("neighbour {} {it}", link.name));
            }
        }
    }
    for it in found::routes(&mut channel).expect("routes") {
        if it.protocol == links::ROUTE_PROTOCOL {
            all.push(format!("route {} {} {}", it.to, it.unicast, it.metric));
        }
    }
    for it in read::chains(&mut netfilter).expect("chains") {
        if it.table == TABLE {
            all.push(format!("chain {}", it.name));
        }
    }
    for set in [
        "sources4",
        "sources6",
        "spoofed",
        "refused",
        "guests",
        "host-access",
        "closed4",
        "closed6",
        "uplinks4",
        "uplinks6",
        "ports-at4",
        "ports4",
        "ports-at6",
        "ports6",
        "net-blue",
    ] {
        for it in elements(&mut netfilter, TABLE, set) {
            all.push(format!("element {set} {:02x?}", it.key));
        }
    }
    all.sort();
    all
}

fn elements(netfilter: &mut Channel, table: &str, set: &str) -> Vec<read::FoundElement> {
    match read::elements(netfilter, table, set) {
        Err(it) if it.errno() == Some(rustix::io::Errno::NOENT) => Vec::new(),
        other => other.expect("elements"),
    }
}

fn change(table: &'static str, write: impl FnOnce(&mut Transaction)) -> Result<(), Refusal> {
    let mut changes = Transaction::new(table);
    write(&mut changes);
    changes.commit(&mut Channel::netfilter().expect("a socket"))
}

fn networks() -> BTreeSet<String> {
    ["blue".to_owned()].into()
}

fn three(host: &mut Host) -> (Vec<GuestSpec>, Vec<Attached>) {
    let mut specs: Vec<_> = (1..=3).map(|it| spec(host, it)).collect();
    specs[0].network = Some("blue".to_owned());
    specs[0].ports = vec!["0.0.0.0:8080:80".parse().expect("ports")];
    specs[1].policy = Policy {
        allow: vec![
            "example.com".parse().expect("a rule"),
            "host:80".parse().expect("a rule"),
        ],
        deny: vec!["all".parse().expect("a rule")],
    };
    let attached = specs
        .iter()
        .map(|it| host.attach(it).expect("attached"))
        .collect();
    (specs, attached)
}

/// Damages the state in one way. Errors are ignored: the same damage may have been done before.
fn damage(kind: u8, attached: &[Attached]) {
    let one = &attached[usize::from(kind) % attached.len()];
    let index = one.tap.index;
    let link = Element::new(index.to_ne_bytes());
    let mut channel = Channel::route().expect("a socket");
    let mut ask = |write: &dyn Fn(&mut crate::netlink::Batch)| {
        let mut batch = crate::netlink::Batch::new();
        write(&mut batch);
        let last = batch.len() - 1;
        let _ = channel.transact(batch, last);
    };
    let wrong = "10.118.9.9";
    match kind % 12 {
        0 => {
            // Only the table knows which settings were made.
            _ = change(TABLE, |it| it.delete_table());
            for setting in ["ipv4/conf/up0/forwarding", "ipv6/conf/up0/force_forwarding"] {
                _ = std::fs::write(format!("/proc/sys/net/{setting}"), "0");
            }
        }
        1 => _ = change(TABLE, |it| it.delete_elements("guests", &[link])),
        2 => _ = change(TABLE, |it| it.add_elements("uplinks4", &[link])),
        3 => _ = change(TABLE, |it| it.add_chain("stranger", None)),
        4 => ask(&|it| route(it, index, wrong, 32, None)),
        5 => ask(&|it| neighbour(it, index, wrong, one.addresses.mac)),
        6 => {
            if let Some(host) = find_index(links::HOST_LINK) {
                ask(&|it| address(it, host, wrong, 32));
            }
        }
        7 => ask(&|it| {
            // The route of one VM is changed to another's link.
            let other = attached[0].tap.index;
            route(it, other, &one.addresses.v4.to_string(), 32, None);
        }),
        8 => {
            if let Some(host) = find_index(links::HOST_LINK) {
                links::remove(&mut Channel::route().expect("a socket"), host).expect("removed");
            }
        }
        9 => _ = links::remove_routes(&mut Channel::route().expect("a socket"), None),
        10 => {
            let name = std::ffi::CString::new(vm(77 + u32::from(kind)).link()).expect("a name");
            _ = jiffy_sys::tap::Tap::create(&jiffy_sys::tap::TapOptions {
                name: &name,
                queues: 1,
                owner: None,
                offloads: false,
                persistent: true,
            });
        }
        _ => _ = std::fs::write("/proc/sys/net/ipv4/conf/up0/forwarding", "0"),
    }
}

#[test]
fn any_damaged_state_is_reconciled() {
    let world = World::new();
    let (mut host, _) = open(&world);
    let (specs, attached) = on_host(&world, || three(&mut host));
    let right = on_host(&world, snapshot);
    let ports = right.iter().filter(|it| it.starts_with("element ports4"));
    assert_eq!(ports.count(), 1, "{right:#?}");
    drop(host);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(40));
    let damages = proptest::collection::vec(any::<u8>(), 0..6);
    let tried = runner.run(&damages, |kinds| {
        let (after, report) = on_host(&world, || {
            kinds.iter().for_each(|it| damage(*it, &attached));
            let (host, report) = Host::open(options(), &specs, &networks()).expect("it opens");
            drop(host);
            (snapshot(), report)
        });
        prop_assert_eq!(&after, &right);
        prop_assert!(report.without_link.is_empty());
        Ok(())
    });
    tried.unwrap_or_else(|error| panic!("{error}"));
    // The reconciled state works.
    let _server = Server::tcp(&world.outside, PUBLIC, 80, "far");
    let mut attached = attached.into_iter();
    let guest = Guest::start(attached.next().expect("one"));
    assert!(guest.reaches(PUBLIC, 80));
}

#[test]
fn a_flushed_table_and_changed_settings_are_reconciled_while_vms_run() {
    let world = World::new();
    let (mut host, _) = open(&world);
    let (_, attached) = on_host(&world, || three(&mut host));
    let right = on_host(&world, snapshot);
    let mut reconcile = || on_host(&world, || host.reconcile_rules().expect("reconciled"));
    assert!(!reconcile(), "nothing to do");
    // The whole table, a VM's element, a setting: with the elements and chains of other kinds.
    for kind in [0, 1, 11] {
        on_host(&world, || damage(kind, &attached));
        let changes_rules = kind != 11;
        assert_eq!(reconcile(), changes_rules, "damage {kind}");
        assert_eq!(on_host(&world, snapshot), right, "damage {kind}");
        assert!(!reconcile(), "damage {kind} once");
        let forwards = on_host(&world, || crate::sysctl::read("ipv4/conf/up0/forwarding"));
        assert_eq!(forwards, Some(1), "damage {kind}");
    }
    // The rules without the chains, as `nft flush chain` leaves them.
    on_host(&world, || {
        change(TABLE, |it| it.flush_chain("forward")).expect("flushed");
    });
    let guest = Guest::start(attached.into_iter().next().expect("one"));
    let _private = Server::tcp(&world.outside, PRIVATE, 80, "private");
    assert!(guest.reaches(PRIVATE, 80), "nothing is denied meanwhile");
    assert!(reconcile());
    assert!(!guest.reaches(PRIVATE, 80));
    // The host's route uses another link now.
    on_host(&world, || {
        let made = jiffy_sys::tap::Tap::create(&jiffy_sys::tap::TapOptions {
            name: c"up1",
            queues: 1,
            owner: None,
            offloads: false,
            persistent: true,
        });
        drop(made.expect("a link"));
        configure(|batch| up(batch, index("up1")));
        configure(|batch| route(batch, index("up1"), "192.0.2.0", 24, None));
    });
    assert!(reconcile());
    let forwards = on_host(&world, || crate::sysctl::read("ipv4/conf/up1/forwarding"));
    assert_eq!(forwards, Some(1));
    assert!(!reconcile());
}

#[test]
fn a_vm_with_a_missing_link_is_reported_and_reattached() {
    let world = World::new();
    let (mut host, _) = open(&world);
    let (specs, attached) = on_host(&world, || three(&mut host));
    let right = on_host(&world, snapshot);
    drop((attached, host));
    let report = on_host(&world, || {
        let (mut host, report) = Host::open(options(), &specs, &networks()).expect("it opens");
        let all: Vec<_> = specs
            .iter()
            .map(|it| host.attach(it).expect("attached"))
            .collect();
        // The links have new indexes; all else is unchanged.
        let strip = |it: Vec<String>| -> Vec<String> {
            it.into_iter()
                .filter(|it| !it.starts_with("element"))
                .collect()
        };
        assert_eq!(strip(snapshot()), strip(right));
        let taken: Vec<Ipv4Addr> = specs.iter().map(|it| it.v4).collect();
        assert!(!taken.contains(&host.take_address().expect("an address")));
        drop(all);
        report
    });
    assert_eq!(report.without_link, [vm(1), vm(2), vm(3)]);
}

/// A daemon may be killed between forgetting a network and removing its rules.
#[test]
fn rules_of_a_network_that_is_not_known_any_more_are_removed() {
    let world = World::new();
    let members = || {
        let mut netfilter = Channel::netfilter().expect("a socket");
        read::elements(&mut netfilter, TABLE, "net-blue").map(|it| it.len())
    };
    on_host(&world, || {
        let (mut host, _) = Host::open(options(), &[], &networks()).expect("it opens");
        let (mut specs, taps) = three(&mut host);
        drop(host);
        assert_eq!(members().ok(), Some(1));
        specs[0].network = None;
        drop(Host::open(options(), &specs, &BTreeSet::new()).expect("it opens"));
        let gone = members().expect_err("the set is gone");
        assert_eq!(gone.errno(), Some(rustix::io::Errno::NOENT));
        drop(taps);
    });
}

#[test]
fn a_vm_whose_address_is_not_its_own_is_reported() {
    let world = World::new();
    let (mut host, _) = open(&world);
    let mut specs: Vec<_> = on_host(&world, || (1..=4).map(|it| spec(&mut host, it)).collect());
    drop(host);
    specs[1].v4 = [10, 9, 0, 2].into();
    specs[2].v4 = specs[0].v4;
    let opened = on_host(&world, || Host::open(options(), &specs, &networks()));
    let (_, report) = opened.expect("it opens");
    assert_eq!(report.displaced, [vm(2), vm(3)]);
}

#[test]
fn monitors_may_end_while_their_links_are_reconciled() {
    let world = World::new();
    for round in 0..20 {
        let (mut host, _) = open(&world);
        let (specs, attached) = on_host(&world, || three(&mut host));
        drop(host);
        std::thread::scope(|scope| {
            let ending = scope.spawn(|| drop(attached));
            while !ending.is_finished() {
                let opened = on_host(&world, || Host::open(options(), &specs, &networks()));
                opened.unwrap_or_else(|error| panic!("round {round}: {error:?}"));
            }
        });
    }
}

#[test]
fn a_thousand_attached_and_detached_vms_leave_nothing() {
    let world = World::new();
    let before = on_host(&world, || (our_links(), snapshot()));
    let (mut host, _) = open(&world);
    let empty = on_host(&world, snapshot);
    on_host(&world, || {
        for ten in 0..100 {
            let specs: Vec<_> = (0..10).map(|it| spec(&mut host, ten * 10 + it)).collect();
            let taps: Vec<_> = specs
                .iter()
                .map(|it| host.attach(it).expect("attached"))
                .collect();
            for (place, it) in specs.iter().enumerate() {
                // Some monitors end first.
                if place % 3 == 0 {
                    drop(host.detach(it.vm));
                    host.free_address(it.v4);
                }
            }
            drop(taps);
            for it in &specs {
                host.detach(it.vm).expect("detached");
                host.free_address(it.v4);
            }
        }
    });
    assert_eq!(on_host(&world, snapshot), empty);
    on_host(&world, || host.uninstall().expect("uninstalled"));
    assert_eq!(on_host(&world, || (our_links(), snapshot())), before);
    let forwarding = on_host(&world, || crate::sysctl::read("ipv4/conf/up0/forwarding"));
    assert_eq!(forwarding, Some(0));
}

#[test]
fn foreign_tables_and_links_are_left_alone() {
    const FOREIGN: &str = "foreign";
    let world = World::new();
    let foreign = || {
        let mut netfilter = Channel::netfilter().expect("a socket");
        let chains = read::chains(&mut netfilter).expect("chains").into_iter();
        let chains: Vec<_> = chains.filter(|it| it.table == FOREIGN).collect();
        (chains, elements(&mut netfilter, FOREIGN, "set"))
    };
    let before = on_host(&world, || {
        let made = change(FOREIGN, |it| {
            it.add_table(b"theirs");
            let set = Set {
                key: (7, 4),
                each: Some(crate::nft::Each::Counter),
                ..Set::default()
            };
            it.add_set("set", &set);
            it.add_elements(
                "set",
                &[Element::new([10, 0, 0, 1]), Element::new([10, 0, 0, 2])],
            );
            let hook = Hook {
                kind: "filter",
                hook: 2,
                priority: 0,
            };
            it.add_chain("forward", Some(hook));
        });
        made.expect("a table");
        let tap = jiffy_sys::tap::Tap::create(&jiffy_sys::tap::TapOptions {
            name: c"jf0",
            queues: 1,
            owner: None,
            offloads: false,
            persistent: true,
        });
        tap.expect("a TAP");
        foreign()
    });
    let (mut host, _) = open(&world);
    on_host(&world, || {
        let (specs, taps) = three(&mut host);
        host.detach(specs[0].vm).expect("detached");
        host.reconcile(&specs[1..], &networks())
            .expect("reconciled");
        drop(taps);
        host.uninstall().expect("uninstalled");
        index("jf0");
    });
    assert_eq!(on_host(&world, foreign), before);
}

#[test]
fn conntrack_entries_are_deleted_before_an_address_is_reused() {
    let world = World::new();
    let small = crate::host::HostOptions {
        v4: Some("10.118.0.0/30".parse().expect("a range")),
        ..options()
    };
    let opened = on_host(&world, || Host::open(small.clone(), &[], &BTreeSet::new()));
    let (mut host, _) = opened.expect("open");
    let first = on_host(&world, || spec(&mut host, 1));
    let guest = Guest::start(on_host(&world, || host.attach(&first).expect("attached")));
    // Neither side closes a connection: the kernel forgets one that was reset after 10 s.
    let listener = world.outside.run(|| TcpListener::bind((PUBLIC, 80)));
    let _listener = listener.expect("a port");
    let connect = |guest: &Guest| {
        let open = guest.namespace.run(|| TcpStream::connect((PUBLIC, 80)));
        open.expect("a connection")
    };
    let _open = connect(&guest);
    let connections = || {
        let mut netfilter = Channel::netfilter().expect("a socket");
        let all = conntrack::list(&mut netfilter).expect("connections");
        all.iter()
            .filter(|it| it.source == IpAddr::V4(first.v4))
            .count()
    };
    assert_eq!(on_host(&world, connections), 1);
    let again = on_host(&world, || {
        host.detach(first.vm).expect("detached");
        host.free_address(first.v4);
        assert_eq!(connections(), 1);
        host.take_address().expect("an address")
    });
    assert_eq!(again, first.v4);
    assert_eq!(on_host(&world, connections), 0);

    // Also those of a VM that lost its link while no daemon ran.
    let guest = Guest::start(on_host(&world, || host.attach(&first).expect("attached")));
    let _another = connect(&guest);
    drop((guest, host));
    while on_host(&world, || find_index(&first.vm.link())).is_some() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    on_host(&world, || {
        let opened = Host::open(small, std::slice::from_ref(&first), &BTreeSet::new());
        let (mut host, report) = opened.expect("open");
        assert_eq!(report.without_link, [first.vm]);
        host.detach(first.vm).expect("not attached");
        host.free_address(first.v4);
        assert_eq!(connections(), 1);
        assert_eq!(host.take_address().expect("an address"), first.v4);
        assert_eq!(connections(), 0);
    });
}

#[test]
fn a_range_used_by_the_host_is_refused_and_never_chosen() {
    let world = World::new();
    on_host(&world, || {
        configure(|batch| {
            route(batch, index("up0"), "10.118.0.0", 16, Some("198.51.100.2"));
        });
        let taken = crate::host::HostOptions {
            v4: Some("10.118.4.0/24".parse().expect("a range")),
            ..options()
        };
        let error = Host::open(taken, &[], &BTreeSet::new()).expect_err("it is refused");
        assert_eq!(
            error.to_string(),
            "the range 10.118.4.0/24 for VMs overlaps the host's route to 10.118.0.0/16"
        );
        assert!(our_links().is_empty());
        let (host, report) = Host::open(options(), &[], &BTreeSet::new()).expect("open");
        assert_eq!(report.ranges.v4().to_string(), "10.119.0.0/16");
        // Its own range is no conflict the next time.
        drop(host);
        let (_, report) = Host::open(options(), &[], &BTreeSet::new()).expect("open");
        assert_eq!(report.ranges.v4().to_string(), "10.119.0.0/16");
    });
}

#[test]
fn ranges_of_the_operator_are_used_where_none_could_be_chosen() {
    let world = World::new();
    on_host(&world, || {
        configure(|batch| {
            let up = index("up0");
            route(batch, up, "10.0.0.0", 8, Some("198.51.100.2"));
            route(batch, up, "172.16.0.0", 12, Some("198.51.100.2"));
            route(batch, up, "fd00::", 8, Some("2001:db8:1::2"));
        });
        let range = |text: &str| Some(text.parse().expect("a range"));
        let v4 = crate::host::HostOptions {
            v4: range("100.64.0.0/16"),
            ..options()
        };
        let error = Host::open(v4.clone(), &[], &BTreeSet::new()).expect_err("there is no IPv6");
        assert_eq!(
            error.to_string(),
            "the host has routes into all private IPv6 ranges: choose a range for VMs with jiffyd --vm-ipv6"
        );
        let both = crate::host::HostOptions {
            v6: range("2001:db8:7::/64"),
            ..v4
        };
        let (_, report) = Host::open(both, &[], &BTreeSet::new()).expect("open");
        assert_eq!(report.ranges.v4().to_string(), "100.64.0.0/16");
        assert_eq!(report.ranges.v6().to_string(), "2001:db8:7::/64");
    });
}
