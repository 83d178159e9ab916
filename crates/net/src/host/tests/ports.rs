//! Published ports, reached from outside, from the host and from VMs.

use super::world::*;
use super::{on_host, open, spec};
use crate::policy::hold::Held;
use std::net::{TcpListener, TcpStream, UdpSocket};

#[test]
fn published_ports_are_reached_from_where_they_are_published() {
    let world = World::new();
    let (mut host, _) = open(&world);
    let mut own = on_host(&world, || spec(&mut host, 1));
    let published = [
        "8080:80",
        "0.0.0.0:8081:80",
        "198.51.100.1:8082:80",
        "0.0.0.0:9000-9002:79-81",
        "0.0.0.0:5353:53/udp",
        "[::]:8081:80",
    ];
    own.ports = published.map(|it| it.parse().expect(it)).into();
    let guest = Guest::start(on_host(&world, || host.attach(&own).expect("attached")));
    let other = Guest::start(on_host(&world, || {
        let spec = spec(&mut host, 2);
        host.attach(&spec).expect("attached")
    }));
    let _web = Server::tcp(&guest.namespace, "0.0.0.0", 80, "web");
    let _web6 = Server::tcp(
        &guest.namespace,
        guest
            .addresses
            .v6
            .map_or("::1".into(), |it| it.to_string())
            .as_str(),
        80,
        "web6",
    );
    let _dns = Server::udp(&guest.namespace, "0.0.0.0", 53, "dns");
    let gateway = guest.addresses.gateway.to_string();

    let outside = |port| world.outside.run(move || hear(HOST, port));
    let local = |address: &'static str, port| on_host(&world, move || hear(address, port));
    assert_eq!(outside(8080), None);
    assert_eq!(local("127.0.0.1", 8080), Some(format!("web {gateway}")));
    assert_eq!(local(HOST, 8080), None);
    // The VM sees the address of an outside client.
    assert_eq!(outside(8081).as_deref(), Some("web 198.51.100.2"));
    assert_eq!(local("127.0.0.1", 8081), Some(format!("web {gateway}")));
    assert_eq!(local(HOST, 8081).as_deref(), Some("web 198.51.100.1"));
    assert_eq!(outside(8082).as_deref(), Some("web 198.51.100.2"));
    assert_eq!(local("127.0.0.1", 8082), None);
    assert_eq!(outside(9001).as_deref(), Some("web 198.51.100.2"));
    assert_eq!(outside(9003), None);
    let asked = world.outside.run(|| ask(HOST, 5353));
    assert_eq!(asked.as_deref(), Some("dns 198.51.100.2"));
    let asked = on_host(&world, || ask("127.0.0.1", 5353));
    assert_eq!(asked, Some(format!("dns {gateway}")));
    if guest.addresses.v6.is_some() {
        let heard = world.outside.run(|| hear(HOST6, 8081));
        assert_eq!(heard.as_deref(), Some("web6 2001:db8:1::2"));
        assert_eq!(local(HOST6, 8081).as_deref(), Some("web6 2001:db8:1::1"));
    }
    // A published port is at the host's address, which VMs do not reach.
    assert!(!other.reaches(HOST, 8081) && !other.reaches(&gateway, 8081));

    own.ports = vec!["0.0.0.0:8083:80".parse().expect("ports")];
    on_host(&world, || host.change(&own).expect("changed"));
    assert_eq!(outside(8081), None);
    assert_eq!(outside(8083).as_deref(), Some("web 198.51.100.2"));
    on_host(&world, || host.detach(own.vm).expect("detached"));
    assert_eq!(outside(8083), None);
}

#[test]
fn ports_of_a_hibernated_vm_lead_to_this_process() {
    let world = World::new();
    let (mut host, _) = open(&world);
    let mut own = on_host(&world, || spec(&mut host, 1));
    let published = [
        "0.0.0.0:8080:80",
        "[::]:8080:80",
        "0.0.0.0:8090:90",
        "0.0.0.0:5353:53/udp",
    ];
    own.ports = published.map(|it| it.parse().expect(it)).into();
    let guest = Guest::start(on_host(&world, || host.attach(&own).expect("attached")));
    let _web = Server::tcp(&guest.namespace, "0.0.0.0", 80, "web");
    let _dns = Server::udp(&guest.namespace, "0.0.0.0", 53, "dns");
    let held = on_host(&world, || Held::all(&own.ports).expect("held"));
    let outside = || world.outside.run(|| hear(HOST, 8080));
    assert_eq!(outside().as_deref(), Some("web 198.51.100.2"));

    let tracked = world
        .outside
        .run(|| UdpSocket::bind("0.0.0.0:0").expect("a socket"));
    tracked.set_read_timeout(Some(TIMEOUT)).expect("a socket");
    let ask_again = || {
        tracked.send_to(b"?", (HOST, 5353)).expect("sent");
        let mut said = [0; 200];
        let (length, _) = tracked.recv_from(&mut said).expect("an answer");
        String::from_utf8_lossy(&said[..length]).into_owned()
    };
    assert_eq!(ask_again(), "dns 198.51.100.2");
    // Neither side closes it: after a FIN that was sent twice, it would count as closed by both.
    let listener = guest.namespace.run(|| TcpListener::bind("0.0.0.0:90"));
    let _listener = listener.expect("a port");
    let open = world.outside.run(|| TcpStream::connect((HOST, 8090)));
    let open = open.expect("a connection");
    let counted = on_host(&world, || host.open_connections().expect("counted"));
    assert!(counted[&own.vm] >= 1, "{counted:?}");
    on_host(&world, || host.set_asleep(own.vm, true).expect("asleep"));
    // A change of the policy meanwhile does not change that.
    own.policy.deny = vec!["192.0.2.0/24".parse().expect("a rule")];
    on_host(&world, || host.change(&own).expect("changed"));
    drop(held);
    assert_eq!(outside(), None, "nobody accepts");
    let front = world
        .host
        .run(|| Server::tcp(&world.host, "0.0.0.0", 8080, "front"));
    assert_eq!(outside().as_deref(), Some("front 198.51.100.2"));
    drop(front);
    let resolved = || world.outside.run(|| ask(HOST, 5353));
    let front = world
        .host
        .run(|| Server::udp(&world.host, "0.0.0.0", 5353, "front"));
    assert_eq!(resolved().as_deref(), Some("front 198.51.100.2"));
    assert_eq!(ask_again(), "front 198.51.100.2", "a flow that was tracked");
    drop(front);
    // An open connection stays with the VM.
    let counted = on_host(&world, || host.open_connections().expect("counted"));
    assert!(counted[&own.vm] >= 1, "{counted:?}");
    drop(open);
    on_host(&world, || host.set_asleep(own.vm, false).expect("awake"));
    assert_eq!(outside().as_deref(), Some("web 198.51.100.2"));
}
