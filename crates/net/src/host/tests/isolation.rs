//! Which addresses VMs reach, and who reaches VMs.

use super::world::{self, *};
use super::{on_host, open, spec};

#[test]
fn a_vm_reaches_public_addresses_and_nothing_else() {
    let world = World::new();
    let (mut host, report) = open(&world);
    assert!(
        report
            .settings
            .contains(&"net.ipv4.conf.up0.forwarding=1".to_owned()),
        "{report:?}"
    );
    let (a, b) = on_host(&world, || {
        let (a, b) = (spec(&mut host, 1), spec(&mut host, 2));
        (
            host.attach(&a).expect("attached"),
            host.attach(&b).expect("attached"),
        )
    });
    let (a, b) = (Guest::start(a), Guest::start(b));
    let _servers: Vec<Server> = [PUBLIC, PRIVATE, METADATA, PUBLIC6, PRIVATE6]
        .iter()
        .map(|it| Server::tcp(&world.outside, it, 80, "outside"))
        .collect();
    let _host = Server::tcp(&world.host, "0.0.0.0", 80, "host");
    let _host6 = Server::tcp(&world.host, "::", 81, "host");
    let _b = Server::tcp(&b.namespace, "0.0.0.0", 80, "b");

    let heard = a.namespace.run(|| hear(PUBLIC, 80));
    assert_eq!(heard.as_deref(), Some("outside 198.51.100.1"));
    let gateway = a.addresses.gateway.to_string();
    let other = b.addresses.v4.to_string();
    for closed in [
        PRIVATE,
        METADATA,
        HOST,
        "127.0.0.2",
        gateway.as_str(),
        other.as_str(),
    ] {
        assert!(!a.reaches(closed, 80), "{closed}");
    }
    // The host reaches its VMs, by the gateway's address.
    let heard = on_host(&world, || world::hear(&other, 80));
    assert_eq!(heard, Some(format!("b {gateway}")));
    // No other host reaches them.
    let routed = world.outside.run(|| {
        let index = index("down0");
        configure(|batch| route(batch, index, "10.118.0.0", 16, Some(HOST)));
        connects_soon(&other, 80)
    });
    assert!(!routed);
    if report.no_ipv6.is_none() {
        let heard = a.namespace.run(|| hear(PUBLIC6, 80));
        assert_eq!(heard.as_deref(), Some("outside 2001:db8:1::1"));
        for closed in [PRIVATE6, HOST6] {
            assert!(!a.reaches(closed, 81) && !a.reaches(closed, 80), "{closed}");
        }
    }
    let counted = on_host(&world, || host.counters(super::vm(1)).expect("counters"));
    assert!(counted.1.refused >= 4, "{counted:?}");
    assert!(counted.0.sent_packets > 4, "{counted:?}");
}
