//! Access control of the proxy: open ports and tokens.

use super::{HOST, connect, daemon, get, head_of, refused, send, sentence, serve_for};
use crate::daemon::{Daemon, named};
use crate::network::{begin, daemon_with};
use crate::ports::{hibernate, own_address, published};
use crate::sleep::starts;
use crate::snapshots::{counter, from, snapshot};
use jiffy_wire::api::{CreateVm, ErrorKind, ForkVm, Forked, NetworkUse, SnapshotMade, Vm, VmState};
use std::io::{Read, Write};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A VM `web` that opens these ports to the proxy.
fn open_at(ports: &[&str]) -> CreateVm {
    let vm = published(counter());
    CreateVm {
        network: NetworkUse {
            proxy_ports: Some(ports.iter().map(|port| port.to_string()).collect()),
            ..vm.network
        },
        ..vm
    }
}

#[test]
fn a_request_for_a_closed_port_is_refused_and_wakes_nobody() {
    let mut daemon = daemon();
    let vm: Vm = daemon.run_detached(open_at(&["3000", "8000-8100"])).json();
    let served = serve_for(&vm);
    let shown = vm.network.as_ref().unwrap().proxy_ports.clone();
    assert_eq!(shown.unwrap(), ["3000", "8000-8100"]);
    hibernate(&daemon);
    for port in [22, 2999, 3001, 7999, 8101] {
        let host = format!("Host: {port}-web.vm.example");
        let why = refused(403, "/", &host);
        assert!(why.contains(&format!("Port {port} of the VM web")), "{why}");
        refused(403, &format!("/vm/{}/{port}/", vm.id), "Host: localhost");
        let headers = format!("Host: localhost\r\nJiffy-Vm: web\r\nJiffy-Port: {port}");
        refused(403, "/", &headers);
    }
    assert_eq!(daemon.vm("web").state, VmState::Hibernated);
    assert_eq!(starts(&daemon, "web"), 1);
    // The next daemon knows the open ports.
    daemon.killed();
    own_address("del", &vm);
    begin(&mut daemon);
    own_address("add", &vm);
    refused(403, "/", "Host: 22-web.vm.example");
    assert_eq!(get("/head", HOST).0, 200);
    // An open port without a listener gets another error.
    refused(502, "/", "Host: 8050-web.vm.example");
    assert_eq!(served.requests.load(Ordering::SeqCst), 1);
    // Children open the same ports.
    let fork = ForkVm {
        name: Some("child".into()),
        ..ForkVm::default()
    };
    let body = serde_json::to_vec(&fork).unwrap();
    daemon.post("/v1/vms/web/fork", &body).json::<Forked>();
    refused(403, "/", "Host: 22-child.vm.example");
}

#[test]
fn the_open_ports_may_be_empty_but_must_be_valid() {
    let daemon = daemon();
    let vm: Vm = daemon.run_detached(open_at(&[])).json();
    serve_for(&vm);
    refused(403, "/", HOST);
    let wrong = named("other", open_at(&["http"]));
    let error = daemon.create(&wrong).error(ErrorKind::Invalid);
    assert!(error.message.contains("\"http\""), "{error:?}");
}

#[test]
fn ports_of_a_snapshot_stay_closed_unless_they_are_opened() {
    let daemon = daemon();
    daemon.run_detached(open_at(&["3000"])).json::<Vm>();
    snapshot(&daemon, "web", "one", true).json::<SnapshotMade>();
    let ports = |name: &str, proxy_ports: Option<&str>| {
        let network = NetworkUse {
            hosts: vec!["db:192.0.2.1".into()],
            proxy_ports: proxy_ports.map(|ports| vec![ports.into()]),
            ..NetworkUse::default()
        };
        let vm = CreateVm {
            network,
            ..named(name, from("one"))
        };
        let vm: Vm = daemon.run_detached(vm).json();
        vm.network.unwrap().proxy_ports.unwrap()
    };
    assert_eq!(ports("kept", None), ["3000"]);
    refused(403, "/", "Host: 22-kept.vm.example");
    assert_eq!(ports("all", Some("1-65535")), ["1-65535"]);
    refused(502, "/", "Host: 22-all.vm.example");
}

fn with_a_token() -> Daemon {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    std::fs::write(&path, "open sesame\n").unwrap();
    daemon_with(&[
        "--proxy",
        "[::]:9000",
        "--proxy-domain",
        "vm.example",
        "--proxy-token",
        path.to_str().unwrap(),
    ])
}

#[test]
fn requests_need_the_token_and_vms_never_see_it() {
    let daemon = with_a_token();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    serve_for(&vm);
    hibernate(&daemon);
    // The client does not learn either which VMs exist.
    for host in [HOST, "Host: 3000-none.vm.example"] {
        let none = refused(401, "/head", host);
        assert!(none.contains("has no token"), "{none}");
        for wrong in [
            "Jiffy-Token: open",
            "Jiffy-Token: open sesame 2",
            "Authorization: Bearer open",
        ] {
            let why = refused(401, "/head", &format!("{host}\r\n{wrong}"));
            assert!(why.contains("not this proxy's"), "{why}");
        }
    }
    let mut stream = send(&format!("GET / HTTP/1.1\r\n{HOST}\r\n\r\n"));
    let head = head_of(&mut stream);
    for line in ["www-authenticate: bearer", "connection: close"] {
        assert!(head.contains(&line.into()), "{line}: {head:?}");
    }
    // The client can't keep its connection by sending more without reading.
    let flood = format!("GET / HTTP/1.1\r\n{HOST}\r\n\r\n").repeat(64);
    let mut rude = connect();
    let begun = Instant::now();
    while rude.write_all(flood.as_bytes()).is_ok() {
        let sending = begun.elapsed();
        assert!(sending < Duration::from_secs(20), "still open: {sending:?}");
    }
    assert_eq!(daemon.vm("web").state, VmState::Hibernated);
    for right in [
        "Jiffy-Token: open sesame",
        "Authorization: Bearer open sesame",
        "Jiffy-Token: open sesame\r\nAuthorization: Bearer its own",
    ] {
        let (status, head) = get("/head", &format!("{HOST}\r\n{right}"));
        assert_eq!(status, 200, "{head}");
        assert!(!head.contains("sesame"), "{head}");
        // The address is not an IPv6 address.
        assert!(head.contains("x-forwarded-for: 127.0.0.1"), "{head}");
        assert_eq!(head.contains("bearer its own"), right.contains("its own"));
    }
    let nobody = get(
        "/",
        "Host: 3000-none.vm.example\r\nJiffy-Token: open sesame",
    );
    assert!(sentence(404, &nobody).contains("no VM none"));
    // A switched connection needs the token, too.
    let upgrade = "Connection: Upgrade\r\nUpgrade: lines";
    let mut stream = send(&format!(
        "GET /echo HTTP/1.1\r\n{HOST}\r\n{upgrade}\r\n\r\n"
    ));
    assert_eq!(head_of(&mut stream)[0], "http/1.1 401 unauthorized");
    let mut stream = send(&format!(
        "GET /echo HTTP/1.1\r\n{HOST}\r\n{upgrade}\r\nJiffy-Token: open sesame\r\n\r\n"
    ));
    assert_eq!(head_of(&mut stream)[0], "http/1.1 101 switching protocols");
    let mut word = [0; 6];
    stream.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"ready\n");
}
