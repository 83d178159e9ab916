//! VMs of a daemon without root: their network by real passts, over which the test plays their
//! guests. The daemon is in a network namespace of the test, which needs root.

mod guest;

use crate::daemon::{Daemon, eventually, named, processes};
use crate::network::enter_namespace;
use crate::snapshots::counter;
use crate::standby::{golden, run, says, standby};
use guest::{Guest, interface};
use jiffy_sys::testing::write_program;
use jiffy_wire::api::{
    CreateVm, ErrorKind, ForkVm, Forked, Hibernated, Network, NetworkPolicy, NetworkUse, Origin,
    Vm, VmState,
};
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// An address of the host that is not on loopback.
const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 118, 0, 1);

/// A daemon of an ordinary user, without spares, whose descriptors have other numbers.
fn daemon() -> Daemon {
    enter_namespace();
    let added = Command::new("busybox")
        .args(["ip", "addr", "add", &format!("{HOST}/32"), "dev", "lo"])
        .status();
    assert!(added.expect("busybox").success());
    let mut daemon = Daemon::prepared(&["--spare", "0", "--standby", "0"]);
    begin(&mut daemon);
    daemon
}

fn begin(daemon: &mut Daemon) {
    begin_with(daemon, "on", None);
}

/// Begins it with this network, and with programs of this folder only.
fn begin_with(daemon: &mut Daemon, network: &str, path: Option<&Path>) {
    let command = daemon.command();
    let mut other = Command::new("/usr/bin/unshare");
    other.args(["--user", "--map-user=1000", "--map-group=1000", "--"]);
    other.arg(command.get_program()).args(command.get_args());
    let set = |(name, value): (_, Option<_>)| Some((name, value?));
    other.envs(command.get_envs().filter_map(set));
    other.env("JIFFY_VM_NETWORK", network);
    other.envs(path.map(|path| ("PATH", path)));
    daemon.begin(other);
    daemon.answers();
}

fn on(network: NetworkUse, name: &str) -> CreateVm {
    CreateVm {
        network,
        ..named(name, counter())
    }
}

fn published(ports: &[&str]) -> NetworkUse {
    NetworkUse {
        ports: ports.iter().map(ToString::to_string).collect(),
        ..NetworkUse::default()
    }
}

/// What a client of this port of the host is told, after it said `text`. The port moves between
/// passt and the daemon; for some milliseconds neither has it.
fn told(text: &str) -> String {
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut client = loop {
        match TcpStream::connect("127.0.0.1:8080") {
            Ok(client) => break client,
            Err(error) => assert!(Instant::now() < deadline, "the port is gone: {error}"),
        }
        thread::sleep(Duration::from_millis(5));
    };
    client
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    client.write_all(text.as_bytes()).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    answer
}

/// Checks that clients of the host reach port 3000 of this guest.
fn is_reached(guest: &mut Guest) {
    thread::scope(|scope| {
        let client = scope.spawn(|| told("question"));
        let (from, said) = guest.serve(3000, "answer");
        assert_eq!((from, &*said), (GATEWAY, "question"));
        assert_eq!(client.join().unwrap(), "answer");
    });
}

/// A server of the host that says `hello`.
fn server() -> SocketAddrV4 {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let at = listener.local_addr().unwrap();
    thread::spawn(move || {
        while let Ok((mut client, _)) = listener.accept() {
            let _ = client.write_all(b"hello");
        }
    });
    SocketAddrV4::new(HOST, at.port())
}

/// Does the daemon listen at port 8080? A passt that is ending may still have the port after its
/// command line is gone. A connection would wake the VM.
fn listens(daemon: &Daemon) -> bool {
    let sockets = fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
    let at_port = |line: &&str| line.contains(":1F90 00000000:0000 0A");
    let inode = sockets
        .lines()
        .find(at_port)
        .and_then(|line| line.split_whitespace().nth(9));
    let Some(inode) = inode else {
        return false;
    };
    let socket = PathBuf::from(format!("socket:[{inode}]"));
    let descriptors = fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap();
    descriptors
        .flatten()
        .any(|it| fs::read_link(it.path()).is_ok_and(|link| link == socket))
}

/// The passts of VMs in this network namespace.
fn passts() -> usize {
    let own = fs::read_link("/proc/thread-self/ns/net").unwrap();
    let here = |pid: &u32| fs::read_link(format!("/proc/{pid}/ns/net")).is_ok_and(|it| it == own);
    let all = processes(|line| line.contains("passt") && line.contains("--ipv4-only"));
    all.iter().filter(|pid| here(pid)).count()
}

#[test]
fn a_vm_reaches_and_is_reached_by_passt() {
    let daemon = daemon();
    let default: Network = daemon.get("/v1/networks/default").json();
    let note = default.note.expect("a note");
    assert!(
        note.contains("passt") && note.contains("CAP_NET_ADMIN"),
        "{note}"
    );
    assert_eq!(default.error, None);
    let network = published(&["8080:3000", "5300:53/udp"]);
    let vm: Vm = daemon.run_detached(on(network, "web")).json();
    // It has the same address as every other, so none is shown.
    let shown = vm.network.clone().expect("a network");
    assert!(
        shown.name == "default" && shown.addresses.is_empty(),
        "{shown:?}"
    );
    let net = interface(&daemon, &vm);
    let guard = net.guard.expect("a guard");
    assert!(
        guard.closed.contains(&(HOST, 32)) && guard.closed.contains(&([10, 0, 0, 0].into(), 8))
    );
    assert_eq!(guard.tcp, [(3000, 3000)]);
    let config = fs::read_to_string(daemon.vm_folder(&vm.id).join("vmm.json")).unwrap();
    for part in ["10.118.0.2", "10.118.0.1", "02:6a:66:00:00:01"] {
        assert!(config.contains(part), "{part}: {config}");
    }
    assert!(!config.contains("jiffy.internal"), "{config}");

    let mut guest = Guest::of(&daemon, &vm);
    is_reached(&mut guest);
    assert_eq!(guest.ask(server()), "hello");
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.send_to(b"question", "127.0.0.1:5300").unwrap();
    let (from, said) = guest.hear(53);
    assert_eq!((*from.ip(), &*said), (GATEWAY, &b"question"[..]));
    guest.say(53, from, b"answer");
    let mut answer = [0; 16];
    client
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    assert_eq!(client.recv(&mut answer).unwrap(), 6);

    // Its ports are its own until it ends.
    let taken = daemon
        .run_detached(on(published(&["8080:80"]), "other"))
        .error(ErrorKind::Conflict);
    assert!(taken.message.contains("127.0.0.1:8080/tcp"), "{taken:?}");
    assert_eq!(daemon.delete("/v1/vms/web?force=true").status, 204);
    // The test had an end of the connection, too.
    drop(guest);
    eventually("its passt ends", || passts() == 0);
    let other: Vm = daemon
        .run_detached(on(published(&["8080:3000"]), "other"))
        .json();
    is_reached(&mut Guest::of(&daemon, &other));
}

#[test]
fn a_vm_keeps_its_network_without_a_daemon_and_with_the_next() {
    let mut daemon = daemon();
    let vm: Vm = daemon
        .run_detached(on(published(&["8080:3000"]), "web"))
        .json();
    let mut guest = Guest::of(&daemon, &vm);
    is_reached(&mut guest);
    daemon.killed();
    is_reached(&mut guest);
    begin(&mut daemon);
    assert_eq!(daemon.vm("web").state, VmState::Running);
    assert_eq!(passts(), 1);
    is_reached(&mut guest);
    daemon.post("/v1/vms/web/kill", b"").json::<Vm>();
    drop(guest);
    eventually("its passt ends", || passts() == 0);
    // A new start has a new one.
    let vm: Vm = daemon.post("/v1/vms/web/start", b"").json();
    is_reached(&mut Guest::of(&daemon, &vm));
    assert_eq!(passts(), 1);
}

#[test]
fn forks_and_restored_vms_have_their_own_passt() {
    let daemon = daemon();
    let parent: Vm = daemon
        .run_detached(on(published(&["8080:3000"]), "parent"))
        .json();
    let server = server();
    let forked: Forked = daemon
        .post(
            "/v1/vms/parent/fork",
            &serde_json::to_vec(&ForkVm::default()).unwrap(),
        )
        .json();
    daemon
        .post("/v1/vms/parent/snapshots", br#"{"name":"kept"}"#)
        .json::<serde_json::Value>();
    let restored = CreateVm {
        from: Some("kept".into()),
        ..on(NetworkUse::default(), "restored")
    };
    let restored: Vm = daemon.run_detached(restored).json();
    for child in [&forked.vms[0], &restored] {
        assert!(interface(&daemon, child).guard.unwrap().tcp.is_empty());
        assert_eq!(Guest::of(&daemon, child).ask(server), "hello");
    }
    is_reached(&mut Guest::of(&daemon, &parent));
    assert_eq!(passts(), 3);
}

#[test]
fn a_connection_wakes_a_hibernated_vm_and_is_forwarded_to_its_new_passt() {
    let mut daemon = daemon();
    let vm: Vm = daemon
        .run_detached(on(published(&["8080:3000"]), "web"))
        .json();
    is_reached(&mut Guest::of(&daemon, &vm));
    let hibernate = |daemon: &Daemon| {
        daemon
            .post("/v1/vms/web/hibernate", b"")
            .json::<Hibernated>();
        assert_eq!(daemon.vm("web").pid, None);
        eventually("its passt has ended", || passts() == 0);
        eventually("the daemon has its port", || listens(daemon));
    };
    hibernate(&daemon);
    let wakes = |daemon: &Daemon| {
        thread::scope(|scope| {
            let client = scope.spawn(|| told("question"));
            daemon.when("web", VmState::Running);
            let mut guest = Guest::of(daemon, &vm);
            assert_eq!(guest.serve(3000, "answer").1, "question");
            assert_eq!(client.join().unwrap(), "answer");
            is_reached(&mut guest);
        });
    };
    wakes(&daemon);
    // The next daemon has the port, too.
    hibernate(&daemon);
    daemon.killed();
    begin(&mut daemon);
    eventually("the next daemon has its port", || listens(&daemon));
    wakes(&daemon);
    assert_eq!(daemon.delete("/v1/vms/web?force=true").status, 204);
    eventually("the port is free", || {
        TcpListener::bind("127.0.0.1:8080").is_ok()
    });
}

#[test]
fn a_run_with_ports_has_a_passt_of_its_own_beside_the_standby() {
    enter_namespace();
    let mut daemon = Daemon::prepared(&["--spare", "0"]);
    begin(&mut daemon);
    run(&daemon, says());
    golden(&daemon, 1);
    run(&daemon, says());
    standby(&daemon);
    eventually("only the standby has one", || passts() == 1);
    let vm: Vm = daemon
        .run_detached(on(published(&["8080:3000"]), "web"))
        .json();
    assert_eq!(vm.origin, Some(Origin::Golden));
    is_reached(&mut Guest::of(&daemon, &vm));
}

#[test]
fn what_needs_root_is_refused() {
    let daemon = daemon();
    let refused = |network: NetworkUse| {
        let error = daemon
            .run_detached(on(network, "refused"))
            .error(ErrorKind::WrongState);
        assert!(error.message.contains("by passt"), "{error:?}");
        assert!(error.hint.unwrap().contains("root"));
    };
    let closed = NetworkPolicy {
        deny: vec!["all".into()],
        ..NetworkPolicy::default()
    };
    refused(NetworkUse {
        policy: closed.clone(),
        ..NetworkUse::default()
    });
    refused(NetworkUse {
        name: Some("lab".into()),
        ..NetworkUse::default()
    });
    refused(published(&["[::]:8080:80"]));
    daemon
        .post("/v1/networks/lab", b"")
        .error(ErrorKind::WrongState);
    let all: Vec<Network> = daemon.get("/v1/networks").json();
    assert_eq!(all.len(), 1);
    daemon
        .run_detached(on(NetworkUse::default(), "web"))
        .json::<Vm>();
    let policy = serde_json::to_vec(&closed).unwrap();
    daemon
        .post("/v1/vms/web/policy", &policy)
        .error(ErrorKind::WrongState);
    assert!(daemon.vm("web").network.unwrap().policy.is_default());
    assert!(daemon.get("/v1/vms/refused").status == 404);
    assert_eq!(passts(), 1);
}

#[test]
fn without_a_passt_that_works_vms_have_no_network() {
    enter_namespace();
    let mut daemon = Daemon::prepared(&[]);
    let programs = daemon.folder.path().join("programs");
    fs::create_dir(&programs).unwrap();
    let program = programs.join("passt");
    let why = |daemon: &mut Daemon| {
        begin_with(daemon, "on", Some(&programs));
        let default: Network = daemon.get("/v1/networks/default").json();
        let vm: Vm = daemon.run_detached(named("web", counter())).json();
        assert_eq!((vm.network, default.note), (None, None));
        assert_eq!(daemon.delete("/v1/vms/web?force=true").status, 204);
        daemon.shut_down();
        default.error.expect("a reason")
    };
    let none = why(&mut daemon);
    assert!(none.contains("apt install passt"), "{none}");
    write_program(&program, "#!/bin/sh\necho no namespaces >&2\nexit 1\n");
    let fails = why(&mut daemon);
    assert!(fails.contains("passt says \"no namespaces\""), "{fails}");
    // One that works at first, and fails for a VM.
    let fails_later = "#!/bin/sh\n[ -e $0.used ] && echo later >&2 && exit 1\n: > $0.used\n";
    write_program(&program, fails_later);
    begin_with(&mut daemon, "passt", Some(&programs));
    let refused = daemon
        .run_detached(named("web", counter()))
        .error(ErrorKind::Internal);
    assert!(
        refused.message.contains("passt says \"later\""),
        "{refused:?}"
    );
    daemon.assert_nothing_left();
}
