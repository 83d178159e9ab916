use super::*;
use jiffy_content::model::vm::Spec;
use jiffy_wire::api::NetworkPolicy;

const ID: &str = "0123456789ab";

fn by_passt() -> ByPasst {
    let (inbound, waiting) = Acceptor::new(16);
    ByPasst {
        program: "passt".into(),
        why: "there is no /dev/net/tun".into(),
        everywhere: false,
        ports: Arc::default(),
        inbound,
        waiting: Mutex::new(Some(waiting)),
    }
}

fn vm() -> VmId {
    VmId::parse(ID).unwrap()
}

fn record(network: NetworkUse) -> VmRecord {
    let spec = Spec {
        network: Some(network),
        ..Spec::default()
    };
    VmRecord::new(ID.into(), "web".into(), spec, 3)
}

fn with_ports(ports: &[&str]) -> NetworkUse {
    NetworkUse {
        ports: ports.iter().map(ToString::to_string).collect(),
        ..NetworkUse::default()
    }
}

#[test]
fn what_needs_rules_is_refused_with_the_reason() {
    let by = by_passt();
    by.check_use(&with_ports(&["8080:80", "0.0.0.0:53:53/udp"]))
        .unwrap();
    let refused = |network: NetworkUse| {
        let error = by.check_use(&network).unwrap_err().0;
        assert!(error.message.contains("no /dev/net/tun"), "{error:?}");
        error.message
    };
    let named = NetworkUse {
        name: Some("lab".into()),
        ..NetworkUse::default()
    };
    assert!(refused(named).contains("networks of their own"));
    let closed = NetworkPolicy {
        allow: vec!["10.0.0.0/8".into()],
        ..NetworkPolicy::default()
    };
    let with_policy = NetworkUse {
        policy: closed.clone(),
        ..NetworkUse::default()
    };
    assert!(refused(with_policy).contains("may reach"));
    assert!(refused(with_ports(&["[::]:8080:80"])).contains("[::]:8080:80"));
    // A policy that was set while the VM was on another network.
    let mut changed = record(NetworkUse::default());
    by.check_record(&changed).unwrap();
    changed.policy = Some(closed);
    by.check_record(&changed).unwrap_err();
}

#[test]
fn a_standby_suits_vms_without_ports_and_name_servers() {
    let by = by_passt();
    let servers = host::Resolving::of_host().servers(GATEWAY);
    let guard = guard(&[], &servers).unwrap();
    let suits = |network| by.suits(&record(network), &servers, &guard);
    suits(NetworkUse::default()).unwrap();
    suits(with_ports(&["8080:80"])).unwrap_err();
    let dns = NetworkUse {
        dns: vec!["192.0.2.1".into()],
        ..NetworkUse::default()
    };
    suits(dns).unwrap_err();
}

#[test]
fn a_standby_from_before_the_host_changed_its_network_suits_no_vm() {
    let by = by_passt();
    let web = record(NetworkUse::default());
    let servers = host::Resolving::of_host().servers(GATEWAY);
    let now = guard(&[], &servers).unwrap();
    let before = ["198.51.100.53".parse().unwrap()];
    let resolved = guard(&[], &before).unwrap();
    by.suits(&web, &before, &resolved).unwrap_err();
    // An address that the host has got, and one that it has no more.
    let mut fewer = now.clone();
    fewer.closed.pop().expect("an address of this host");
    by.suits(&web, &servers, &fewer).unwrap_err();
    let mut more = now;
    more.closed.push((Ipv4Addr::new(198, 51, 100, 1), 32));
    by.suits(&web, &servers, &more).unwrap_err();
}

#[test]
fn the_host_reaches_published_ports_only() {
    let by = by_passt();
    let ports = ["8080-8082:80-82", "0.0.0.0:9000:90", "5300:91/udp"];
    let ports = published(&ports.map(str::to_owned), false).unwrap();
    lock(&by.ports).published.insert(vm(), ports);
    let server = |port| by.server(vm(), port).map(|at| at.to_string());
    assert_eq!(server(81).as_deref(), Some("127.0.0.1:8081"));
    assert_eq!(server(90).as_deref(), Some("127.0.0.1:9000"));
    assert_eq!([server(83), server(91), server(8080)], [None, None, None]);
    by.release(vm());
    assert_eq!(by.server(vm(), 81), None);
}

#[test]
fn open_connections_of_published_ports_are_counted() {
    let port: Publish = "8080-8081:80-81".parse().unwrap();
    let at = |text: &str| receives(&port, text.parse().unwrap());
    assert!(at("127.0.0.1:8080") && at("127.0.0.1:8081"));
    assert!(!at("127.0.0.1:8082") && !at("127.0.0.1:8079") && !at("192.0.2.1:8080"));
    let all: Publish = "0.0.0.0:8080:80".parse().unwrap();
    assert!(receives(&all, "192.0.2.1:8080".parse().unwrap()));
    // This process has both ends of a connection.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().port();
    let by = by_passt();
    let ports = published(&[format!("{host}:80")], false).unwrap();
    lock(&by.ports).published.insert(vm(), ports);
    assert_eq!(by.open_connections().unwrap().get(ID), None);
    let _client = std::net::TcpStream::connect(("127.0.0.1", host)).unwrap();
    let _server = listener.accept().unwrap();
    assert_eq!(by.open_connections().unwrap()[ID], 1);
}

#[test]
fn the_guard_closes_what_the_rules_of_all_vms_close_and_the_host() {
    let ports = ["8080-8082:80-82", "5300:53/udp"].map(str::to_owned);
    let ports = published(&ports, false).unwrap();
    let servers = ["10.0.0.53", "fd00::53"].map(|it| it.parse().unwrap());
    let guard = guard(&ports, &servers).unwrap();
    for closed in [
        (Ipv4Addr::new(10, 0, 0, 0), 8),
        (Ipv4Addr::new(169, 254, 0, 0), 16),
        (Ipv4Addr::LOCALHOST, 32),
    ] {
        assert!(guard.closed.contains(&closed), "{closed:?}");
    }
    assert_eq!(guard.name_servers, [Ipv4Addr::new(10, 0, 0, 53)]);
    assert_eq!(guard.tcp, [(80, 82)]);
}
