//! Connections to published ports of hibernated VMs. The daemon is in a network namespace of the
//! test, which needs root; there a server of the test has the VM's address.

use crate::daemon::{Daemon, bad_vm, eventually, named, release_guest, shell};
use crate::network::{begin, daemon};
use crate::sleep::starts;
use crate::snapshots::counter;
use jiffy_wire::api::{CreateVm, Hibernated, IdleAction, IdlePolicy, NetworkUse, Vm, VmState};
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

/// A VM whose port 3000 is published as the host's 8080.
pub fn published(vm: CreateVm) -> CreateVm {
    CreateVm {
        network: NetworkUse {
            ports: vec!["8080:3000".into()],
            ..NetworkUse::default()
        },
        ..named("web", vm)
    }
}

/// Adds the VM's address to this namespace, or removes it.
pub fn own_address(how: &str, vm: &Vm) -> String {
    let address = vm.network.as_ref().expect("a network").addresses[0].clone();
    let done = std::process::Command::new("busybox")
        .args(["ip", "addr", how, &format!("{address}/32"), "dev", "lo"])
        .status();
    assert!(done.expect("busybox").success());
    address
}

/// Listens at port 3000 of the VM's address, with the largest backlog that Linux allows. With 128,
/// the standard library's, it sends SYN cookies to further clients, and takes the end of a stream
/// for its beginning if at most three bytes before it were dropped; and it forgets a client that a
/// full backlog has kept waiting for some seconds, and resets its connection.
pub fn listen_for(vm: &Vm) -> TcpListener {
    let address = own_address("add", vm);
    let listener = TcpListener::bind(format!("{address}:3000")).expect("the VM's port");
    rustix::net::listen(&listener, i32::MAX).expect("more places");
    listener
}

/// Serves port 3000 of the VM's address: after the end of a client's data, sends it back with the
/// client's address.
fn serve_for(vm: &Vm) {
    let listener = listen_for(vm);
    thread::spawn(move || {
        while let Ok((mut client, from)) = listener.accept() {
            thread::spawn(move || {
                let mut heard = String::new();
                let _ = client.read_to_string(&mut heard);
                let _ = write!(client, "{heard} from {}", from.ip());
            });
        }
    });
}

fn connect() -> TcpStream {
    TcpStream::connect("127.0.0.1:8080").expect("the port is there")
}

/// Sends this; returns the answer.
fn ask(mut server: TcpStream, what: &str) -> std::io::Result<String> {
    server.set_read_timeout(Some(Duration::from_secs(60)))?;
    server.write_all(what.as_bytes())?;
    server.shutdown(Shutdown::Write)?;
    let mut heard = String::new();
    server.read_to_string(&mut heard)?;
    Ok(heard)
}

pub fn hibernate(daemon: &Daemon) {
    daemon
        .post("/v1/vms/web/hibernate", b"")
        .json::<Hibernated>();
}

/// Checks that wakes were attempted at most once a second, however many clients there were since
/// then; returns their number. The VM was started once before.
pub fn wake_attempts(daemon: &Daemon, begun: Instant) -> usize {
    let tried = starts(daemon, "web") - 1;
    let most = 1 + begun.elapsed().as_secs() as usize;
    assert!((1..=most).contains(&tried), "{tried} times, not {most}");
    tried
}

/// The client address of the last answer.
fn client_of(answer: &str) -> IpAddr {
    answer.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_datagram_wakes_a_hibernated_vm_and_is_answered() {
    let mut daemon = daemon();
    let mut vm = published(counter());
    vm.network.ports = vec!["8080:3000/udp".into()];
    let vm: Vm = daemon.run_detached(vm).json();
    let address = own_address("add", &vm);
    let server = UdpSocket::bind((address.as_str(), 3000)).expect("the VM's port");
    thread::spawn(move || {
        let mut heard = [0; 100];
        while let Ok((length, from)) = server.recv_from(&mut heard) {
            let _ = server.send_to(&heard[..length], from);
        }
    });
    let ask = |client: &UdpSocket, what: &[&str]| {
        for what in what {
            client.send(what.as_bytes()).unwrap();
        }
        for what in what {
            let mut heard = [0; 100];
            let length = client.recv(&mut heard).unwrap();
            assert_eq!(&heard[..length], what.as_bytes());
        }
    };
    let client = || {
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect("127.0.0.1:8080").unwrap();
        let limit = Some(Duration::from_secs(60));
        client.set_read_timeout(limit).unwrap();
        client
    };
    let (one, two) = (client(), client());
    // The kernel tracks this flow when the VM falls asleep.
    ask(&one, &["by the kernel"]);
    hibernate(&daemon);
    ask(&one, &["a", "b", "c"]);
    assert_eq!(starts(&daemon, "web"), 2);
    assert_eq!(daemon.vm("web").state, VmState::Running);
    ask(&one, &["later"]);
    ask(&two, &["by the kernel"]);
    // Also a flow that the daemon relays at that time, and with the next daemon.
    hibernate(&daemon);
    ask(&one, &["a", "b"]);
    assert_eq!(starts(&daemon, "web"), 3);
    hibernate(&daemon);
    let mut restart = || {
        daemon.killed();
        own_address("del", &vm);
        begin(&mut daemon);
        own_address("add", &vm);
    };
    restart();
    ask(&two, &["a"]);
    // What an earlier daemon relayed is relayed by the next one.
    restart();
    assert_eq!(daemon.vm("web").state, VmState::Running);
    ask(&two, &["b"]);
}

#[test]
fn a_connection_wakes_a_hibernated_vm_and_is_forwarded() {
    let mut daemon = daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    serve_for(&vm);
    let led = ask(connect(), "one").unwrap();
    assert_eq!(led, "one from 127.0.0.1", "by the kernel");
    hibernate(&daemon);
    let carried = ask(connect(), "two").unwrap();
    assert!(carried.starts_with("two from "), "{carried}");
    assert_ne!(client_of(&carried), client_of(&led), "by the daemon");
    assert_eq!(daemon.vm("web").state, VmState::Running);
    assert_eq!(starts(&daemon, "web"), 2);
    assert_eq!(ask(connect(), "three").unwrap(), "three from 127.0.0.1");
    // Many concurrent connections wake it once.
    hibernate(&daemon);
    thread::scope(|scope| {
        let all: Vec<_> = (0..400)
            .map(|number| {
                scope.spawn(move || {
                    let answer = ask(connect(), &number.to_string()).unwrap();
                    assert!(answer.starts_with(&format!("{number} from ")), "{answer}");
                })
            })
            .collect();
        all.into_iter().for_each(|one| one.join().unwrap());
    });
    assert_eq!(starts(&daemon, "web"), 3);
    // The next daemon holds the port, too.
    hibernate(&daemon);
    daemon.killed();
    own_address("del", &vm);
    begin(&mut daemon);
    own_address("add", &vm);
    assert_eq!(daemon.vm("web").state, VmState::Hibernated);
    assert!(ask(connect(), "four").unwrap().starts_with("four from "));
    assert_eq!(daemon.vm("web").state, VmState::Running);
    // A relayed connection ends with its VM, and the port is free.
    hibernate(&daemon);
    let mut open = connect();
    daemon.when("web", VmState::Running);
    assert_eq!(daemon.delete("/v1/vms/web?force=true").status, 204);
    TcpListener::bind("127.0.0.1:8080").expect("the port is free");
    let cut = open.read(&mut [0; 8]).unwrap_err();
    assert_eq!(cut.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_connection_during_hibernation_waits_and_is_forwarded() {
    let daemon = daemon();
    let vm: Vm = daemon
        .run_detached(published(bad_vm("held-capture", None)))
        .json();
    serve_for(&vm);
    let folder = daemon.vm_folder(&vm.id);
    thread::scope(|scope| {
        let slept = scope.spawn(|| hibernate(&daemon));
        eventually("it is being captured", || folder.join("capturing").exists());
        let answer = scope.spawn(|| ask(connect(), "hello").unwrap());
        thread::sleep(Duration::from_millis(300));
        assert!(!answer.is_finished());
        release_guest(&folder);
        slept.join().unwrap();
        assert!(answer.join().unwrap().starts_with("hello from "));
    });
    assert_eq!(starts(&daemon, "web"), 2);
}

#[test]
fn connections_are_reset_if_a_vm_cannot_be_woken() {
    let daemon = daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    serve_for(&vm);
    hibernate(&daemon);
    let state = daemon.vm_folder(&vm.id).join("hibernated/state");
    let good = fs::read(&state).unwrap();
    // Only the VMM detects the damage.
    fs::write(&state, jiffy_wire::state::seal("0.1.0", b"nonsense")).unwrap();
    let begun = Instant::now();
    thread::scope(|scope| {
        for _ in 0..50 {
            scope.spawn(|| {
                let refused = ask(connect(), "hello").unwrap_err().kind();
                // The reset may come before all is sent.
                let cut = [
                    ErrorKind::ConnectionReset,
                    ErrorKind::BrokenPipe,
                    ErrorKind::NotConnected,
                ];
                assert!(cut.contains(&refused), "{refused}");
            });
        }
    });
    let shown = daemon.vm("web");
    assert_eq!(shown.state, VmState::Hibernated);
    assert!(shown.error.unwrap().contains("could not be woken"));
    let tried = wake_attempts(&daemon, begun);
    let log = fs::read_to_string(daemon.folder.path().join("jiffyd.log")).unwrap();
    assert_eq!(log.matches("can't be woken for a request").count(), tried);
    fs::write(&state, good).unwrap();
    eventually("it is woken again", || {
        connect().shutdown(Shutdown::Write).is_ok() && daemon.vm("web").state == VmState::Running
    });
    assert_eq!(daemon.vm("web").error, None);
}

#[test]
fn an_open_connection_keeps_a_vm_awake() {
    let daemon = daemon();
    let policy = IdlePolicy {
        after_s: 1,
        action: IdleAction::Hibernate,
    };
    let vm: Vm = daemon
        .run_detached(CreateVm {
            idle: Some(policy),
            ..published(CreateVm::default())
        })
        .json();
    serve_for(&vm);
    // Otherwise it may sleep before the first connection.
    let mut exec = Some(daemon.exec("web", &shell("sleep 1000")).unwrap());
    for (round, why) in ["1 connection to a published port", "1 connection"]
        .iter()
        .enumerate()
    {
        // The kernel forwards the first connection; the second wakes the VM and is relayed.
        let open = connect();
        drop(exec.take());
        eventually("it is awake for the connection only", || {
            let shown = daemon.vm("web");
            shown.state == VmState::Running && shown.idle.expect("its activity").awake == [*why]
        });
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(4) {
            thread::sleep(Duration::from_millis(100));
        }
        let shown = daemon.vm("web");
        assert_eq!(shown.state, VmState::Running, "round {round}");
        assert_eq!(shown.idle.expect("its activity").awake, [*why]);
        assert!(ask(open, "still").unwrap().starts_with("still from "));
        daemon.when("web", VmState::Hibernated);
    }
    assert!(ask(connect(), "again").unwrap().starts_with("again from "));
}
