//! Limits of connections and requests.

use super::clients::{Certificate, request, run, whole};
use super::http2::WEB;
use super::{HOST, connect, daemon, get, get_over, head_of, send, serve_for};
use crate::daemon::{Daemon, eventually, named};
use crate::ports::{listen_for, published};
use crate::snapshots::counter;
use jiffy_wire::api::{CreateVm, IdleAction, IdlePolicy, Vm, VmState};
use rustix::net::sockopt::set_socket_linger;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// An eighth of the files that the daemon may open.
const PLACES: usize = 32;
/// More clients than the backlog of the standard library, 128.
const BURST: usize = 400;
/// The share of one VM.
const OF_ONE_VM: usize = PLACES / 4 * 3;

/// Restarts the daemon's process with a low limit of files.
fn restart_with_few_files(daemon: &mut Daemon) {
    daemon.killed();
    let whole = daemon.command();
    let mut limited = Command::new("/bin/sh");
    limited
        .args(["-c", "ulimit -n $0; exec \"$@\""])
        .arg((8 * PLACES).to_string())
        .arg(whole.get_program())
        .args(whole.get_args())
        .envs(
            whole
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        )
        .env("JIFFY_VM_NETWORK", "on");
    daemon.begin(limited);
    daemon.answers();
}

#[test]
fn handshakes_are_limited_and_requests_wait_for_connections() {
    let certificate = Certificate::new();
    let mut daemon = certificate.daemon();
    restart_with_few_files(&mut daemon);
    let vm: Vm = daemon.run_detached(published(counter())).json();
    let served = serve_for(&vm);
    // More requests than connections to VMs; each takes three seconds.
    let begun = Instant::now();
    run(async {
        let client = certificate.http2().await;
        let mut answers = JoinSet::new();
        for _ in 0..2 * PLACES {
            let mut client = client.clone();
            answers.spawn(async move {
                let sent = client.send_request(request(&format!("{WEB}events"), &[]));
                whole(sent.await.unwrap()).await
            });
        }
        while let Some(answer) = answers.join_next().await {
            let (status, body) = answer.unwrap();
            assert_eq!((status, &*body), (200, "data: 1\n\ndata: 2\n\n"));
        }
    });
    assert!(begun.elapsed() > Duration::from_secs(6));
    let most = served.most_open.load(Ordering::SeqCst);
    assert!(most <= OF_ONE_VM, "{most} connections to a VM");
    // Silent clients take all places until they time out.
    let begun = Instant::now();
    let silent: Vec<_> = (0..PLACES).map(|_| connect()).collect();
    assert_eq!(get_over(certificate.connect(), "/head", HOST).0, 200);
    let waited = begun.elapsed();
    assert!(waited > Duration::from_secs(8), "it waited for {waited:?}");
    assert!(waited < Duration::from_secs(40), "it waited for {waited:?}");
    drop(silent);
}

#[test]
fn a_burst_of_clients_waits_until_the_daemon_accepts_it() {
    let daemon = daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    serve_for(&vm);
    let pid = Pid::from_raw(daemon.pid() as i32).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    // A connection that does not fit into the backlog is tried again, or reset at its first bytes.
    let (connected, all) = mpsc::channel();
    let clients: Vec<_> = (0..BURST)
        .map(|_| {
            let connected = connected.clone();
            thread::spawn(move || {
                let client = connect();
                connected.send(()).unwrap();
                get_over(client, "/head", HOST).0
            })
        })
        .collect();
    let patience = Duration::from_secs(20);
    let count = (0..BURST)
        .map_while(|_| all.recv_timeout(patience).ok())
        .count();
    kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(count, BURST, "connected while the daemon was stopped");
    for client in clients {
        assert_eq!(client.join().unwrap(), 200);
    }
}

/// Switches protocols for each client of this port, and then is silent.
fn serve_silent_upgrades(listener: TcpListener) {
    thread::spawn(move || {
        let mut kept = Vec::new();
        while let Ok((mut client, _)) = listener.accept() {
            head_of(&mut BufReader::new(&client));
            let switch = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n";
            client.write_all(switch.as_bytes()).unwrap();
            kept.push(client);
        }
    });
}

#[test]
fn reset_connections_hold_no_place_and_keep_no_vm_awake() {
    let mut daemon = daemon();
    restart_with_few_files(&mut daemon);
    let idle = IdlePolicy {
        after_s: 1,
        action: IdleAction::Hibernate,
    };
    let vm = CreateVm {
        idle: Some(idle),
        ..published(counter())
    };
    let vm: Vm = daemon.run_detached(vm).json();
    serve_for(&vm);
    let address = &vm.network.as_ref().unwrap().addresses[0];
    let listen = |port: u16| TcpListener::bind((address.as_str(), port)).unwrap();
    // The kernel accepts, but nothing answers.
    let _never_answers = listen(3001);
    serve_silent_upgrades(listen(3002));
    let mut clients = Vec::new();
    for _ in 0..OF_ONE_VM / 2 {
        clients.push(send("GET / HTTP/1.1\r\nHost: 3001-web.vm.example\r\n\r\n"));
        let mut switched = send(
            "GET / HTTP/1.1\r\nHost: 3002-web.vm.example\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
        );
        assert!(head_of(&mut switched)[0].contains(" 101 "));
        // The client could still read.
        switched.get_ref().shutdown(Shutdown::Write).unwrap();
        clients.push(switched);
    }
    let awake = format!("{OF_ONE_VM} connections");
    eventually("all count", || {
        daemon.vm("web").idle.unwrap().awake.contains(&awake)
    });
    let begun = Instant::now();
    for client in clients {
        set_socket_linger(client.get_ref(), Some(Duration::ZERO)).unwrap();
    }
    eventually("their places are free", || get("/head", HOST).0 == 200);
    daemon.when("web", VmState::Hibernated);
    // Long before keep-alive would detect it.
    let noticed = begun.elapsed();
    assert!(
        noticed < Duration::from_secs(40),
        "noticed after {noticed:?}"
    );
}

#[test]
fn a_request_whose_vm_ends_does_not_wait_for_its_port() {
    let daemon = daemon();
    let web: Vm = daemon.run_detached(published(counter())).json();
    // One connection fills the backlog; the kernel drops the next ones.
    let full = listen_for(&web);
    rustix::net::listen(&full, 0).unwrap();
    let _first = TcpStream::connect(full.local_addr().unwrap()).unwrap();
    let mut client = send(&format!(
        "GET / HTTP/1.1\r\n{HOST}\r\nConnection: close\r\n\r\n"
    ));
    let connects = || {
        let sockets = fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
        // Port 3000 in state SYN_SENT.
        let waits = |line: &str| line.contains(":0BB8 02 ");
        sockets.lines().any(waits)
    };
    eventually("the proxy connects", connects);
    let begun = Instant::now();
    daemon.post("/v1/vms/web/kill", b"").json::<Vm>();
    assert!(head_of(&mut client)[0].contains(" 502 "));
    let mut said = String::new();
    client.read_to_string(&mut said).unwrap();
    assert!(
        said.contains("Port 3000 of the VM web had not accepted when the VM ended."),
        "{said}"
    );
    let waited = begun.elapsed();
    assert!(waited < Duration::from_secs(15), "it waited for {waited:?}");
}

#[test]
fn a_vm_that_never_answers_leaves_connections_to_others() {
    let mut daemon = daemon();
    restart_with_few_files(&mut daemon);
    let vm = CreateVm {
        idle: Some(IdlePolicy {
            after_s: 3600,
            action: IdleAction::Hibernate,
        }),
        ..published(counter())
    };
    let web: Vm = daemon.run_detached(vm).json();
    let _never_answers = listen_for(&web);
    let other: Vm = daemon.run_detached(named("other", counter())).json();
    serve_for(&other);
    let ask = || send(&format!("GET / HTTP/1.1\r\n{HOST}\r\n\r\n"));
    let clients: Vec<_> = (0..OF_ONE_VM).map(|_| ask()).collect();
    let awake = format!("{OF_ONE_VM} connections");
    eventually("all are under way", || {
        daemon.vm("web").idle.unwrap().awake.contains(&awake)
    });
    let (status, said) = get("/", HOST);
    assert_eq!(status, 503);
    assert!(
        said.contains("requests in progress, in all or to the VM web"),
        "{said}"
    );
    assert_eq!(get("/head", "Host: 3000-other.vm.example").0, 200);
    drop(clients);
}
