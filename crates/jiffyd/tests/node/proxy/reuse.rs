//! Connections to VMs that are used for several requests.

use super::{HOST, daemon, get, head_of, send};
use crate::daemon::{Daemon, eventually, named};
use crate::ports::{hibernate, listen_for, own_address, published};
use crate::sleep::starts;
use crate::snapshots::{counter, fork, snapshot};
use jiffy_wire::api::{
    CreateVm, Forked, IdleAction, IdlePolicy, NetworkPolicy, SnapshotMade, Vm, VmState,
};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// How long the proxy keeps a connection, less what a server may miss of it.
const KEPT: Duration = Duration::from_millis(700);
/// How long after its header a body comes that should not.
const STRAY: Duration = Duration::from_millis(20);
/// Most connections that the proxy keeps to a port.
const MOST: usize = 16;

/// What a server that keeps its connections has seen.
#[derive(Default)]
struct Seen {
    accepted: AtomicUsize,
    /// Connections that are open.
    open: AtomicUsize,
    /// Requests for `/held` that wait, until the test releases them.
    held: AtomicUsize,
    is_released: AtomicBool,
    /// Requests for `/last`.
    last: AtomicUsize,
    /// How long each connection that was closed had been idle.
    idle: Mutex<Vec<Duration>>,
}

impl Seen {
    fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}

/// Serves HTTP/1.1, each connection until its client closes it. The answer is the number of the
/// connection. `/close` is answered with `Connection: close`, `/old` in HTTP/1.0, `/leave` by an answer
/// and the unannounced end of the connection, and `/last` only by its end, except on a new connection.
/// `/switch` switches to a protocol that repeats lines. `/stray` is answered as if the method were GET, the
/// body after [`STRAY`].
fn keep_for(listener: TcpListener) -> Arc<Seen> {
    let seen = Arc::<Seen>::default();
    let served = Arc::clone(&seen);
    thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let number = served.accepted.fetch_add(1, Ordering::SeqCst) + 1;
            let seen = Arc::clone(&served);
            thread::spawn(move || {
                seen.open.fetch_add(1, Ordering::SeqCst);
                serve(client, number, &seen);
                seen.open.fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
    seen
}

fn serve(mut client: TcpStream, number: usize, seen: &Seen) {
    let mut input = BufReader::new(client.try_clone().unwrap());
    for request in 1.. {
        let since = Instant::now();
        let head = head_of(&mut input);
        if head.is_empty() {
            return seen.idle.lock().unwrap().push(since.elapsed());
        }
        let path = head[0].split(' ').nth(1).unwrap();
        let length = head
            .iter()
            .find_map(|it| it.strip_prefix("content-length: "));
        let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
        input.read_exact(&mut body).unwrap();
        let mut version = "1.1";
        let mut more = "";
        match path {
            "/held" => {
                seen.held.fetch_add(1, Ordering::SeqCst);
                while !seen.is_released.load(Ordering::SeqCst) {
                    thread::sleep(Duration::from_millis(5));
                }
            }
            "/stray" => {
                let head = "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n";
                client.write_all(head.as_bytes()).unwrap();
                thread::sleep(STRAY);
                // The client has the whole answer, and may be gone.
                let _ = client.write_all(b"x");
                continue;
            }
            "/old" => (version, more) = ("1.0", "Connection: keep-alive\r\n"),
            "/close" => more = "Connection: close\r\n",
            "/last" => {
                seen.last.fetch_add(1, Ordering::SeqCst);
                if request > 1 {
                    return;
                }
            }
            "/switch" => {
                let switch = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n";
                client.write_all(switch.as_bytes()).unwrap();
                for line in input.lines().map_while(Result::ok) {
                    writeln!(client, "{line}, {line}").unwrap();
                }
                return;
            }
            _ => {}
        }
        let answer = number.to_string();
        let length = answer.len();
        let answer =
            format!("HTTP/{version} 200 OK\r\n{more}Content-Length: {length}\r\n\r\n{answer}");
        client.write_all(answer.as_bytes()).unwrap();
        if matches!(path, "/leave" | "/close") {
            return;
        }
    }
}

/// The number of the connection that answers.
fn ask(path: &str) -> usize {
    ask_at(path, HOST)
}

fn ask_at(path: &str, host: &str) -> usize {
    let (status, body) = get(path, host);
    assert_eq!(status, 200, "{body}");
    body.parse().unwrap()
}

/// The VM `web`, and its server.
fn web(daemon: &Daemon) -> Arc<Seen> {
    web_of(daemon, counter())
}

fn web_of(daemon: &Daemon, vm: CreateVm) -> Arc<Seen> {
    let vm: Vm = daemon.run_detached(published(vm)).json();
    keep_for(listen_for(&vm))
}

#[test]
fn requests_of_all_clients_use_a_connection_again() {
    let daemon = daemon();
    let seen = web(&daemon);
    // A busy computer may need longer for some requests than a connection is kept.
    eventually("many requests use one connection", || {
        let before = seen.accepted();
        for _ in 0..20 {
            ask("/");
        }
        seen.accepted() <= before + 1
    });
    // Without requests, it is closed after a moment, and not before.
    eventually("one is kept for its time", || !closes_at_once(&seen, || {}));
}

#[test]
fn a_bounded_number_of_connections_is_kept() {
    let daemon = daemon();
    let seen = web(&daemon);
    let all = 2 * MOST;
    // Where an answer takes long, on a busy computer, the proxy closes idle connections for it.
    eventually("some are kept", || {
        seen.held.store(0, Ordering::SeqCst);
        seen.is_released.store(false, Ordering::SeqCst);
        seen.idle.lock().unwrap().clear();
        thread::scope(|scope| {
            for _ in 0..all {
                scope.spawn(|| ask("/held"));
            }
            eventually("all wait", || seen.held.load(Ordering::SeqCst) == all);
            seen.is_released.store(true, Ordering::SeqCst);
        });
        eventually("all are closed", || seen.open.load(Ordering::SeqCst) == 0);
        let idle = seen.idle.lock().unwrap();
        let kept = idle.iter().filter(|idle| **idle >= KEPT).count();
        assert_eq!(idle.len(), all);
        assert!(kept <= MOST, "{kept} were kept");
        kept > 0
    });
}

#[test]
fn connections_are_kept_for_one_port_of_one_vm() {
    let daemon = daemon();
    let first: Vm = daemon.run_detached(published(counter())).json();
    let second: Vm = daemon.run_detached(named("other", counter())).json();
    own_address("add", &second);
    let address = |vm: &Vm| vm.network.as_ref().unwrap().addresses[0].clone();
    let listen = |address: &str, port: u16| TcpListener::bind((address, port)).unwrap();
    let servers = [
        ("3000-web", keep_for(listen_for(&first))),
        ("3001-web", keep_for(listen(&address(&first), 3001))),
        ("3000-other", keep_for(listen(&address(&second), 3000))),
    ];
    eventually("each is asked over a connection of its own", || {
        let before = servers.each_ref().map(|(_, seen)| seen.accepted());
        for _ in 0..5 {
            for (host, seen) in &servers {
                let number = ask_at("/", &format!("Host: {host}.vm.example"));
                // The server of another port or VM has not answered.
                assert_eq!(number, seen.accepted(), "{host}");
            }
        }
        let mut all = servers.iter().zip(before);
        all.all(|((_, seen), before)| seen.accepted() <= before + 1)
    });
}

/// Does this close an idle connection to the VM `web` at once?
fn closes_at_once(seen: &Seen, change: impl FnOnce()) -> bool {
    let number = ask("/");
    assert_eq!(number, seen.accepted());
    seen.idle.lock().unwrap().clear();
    change();
    eventually("it is closed", || seen.open.load(Ordering::SeqCst) == 0);
    seen.idle.lock().unwrap().iter().all(|idle| *idle < KEPT)
}

/// The same; tries some times, because a busy computer may need longer than the connection is kept.
fn closes(seen: &Seen, mut change: impl FnMut()) -> bool {
    (0..5).any(|_| closes_at_once(seen, &mut change))
}

#[test]
fn what_changes_a_vm_closes_its_idle_connections() {
    let daemon = daemon();
    let seen = web(&daemon);
    let post = |path: &str, body: &[u8]| daemon.post(&format!("/v1/vms/web/{path}"), body);
    // What happens after its start is over.
    eventually("nothing changes", || !closes_at_once(&seen, || {}));
    assert!(closes(&seen, || hibernate(&daemon)), "hibernated");
    assert!(
        closes(&seen, || {
            post("pause", b"").json::<Vm>();
            post("resume", b"").json::<Vm>();
        }),
        "paused"
    );
    let policy = serde_json::to_vec(&NetworkPolicy::default()).unwrap();
    assert!(
        closes(&seen, || drop(post("policy", &policy).json::<Vm>())),
        "another policy"
    );
    let mut count = 0;
    assert!(
        closes(&seen, || {
            count += 1;
            snapshot(&daemon, "web", &format!("taken-{count}"), false).json::<SnapshotMade>();
        }),
        "captured"
    );
    assert!(
        closes(&seen, || drop(
            fork(&daemon, "web", 1, None).json::<Forked>()
        )),
        "forked"
    );
    ask("/");
    assert_eq!(daemon.delete("/v1/vms/web?force=true").status, 204);
    eventually("removed", || seen.open.load(Ordering::SeqCst) == 0);
}

#[test]
fn a_kept_connection_keeps_no_vm_awake_and_is_not_used_after_its_sleep() {
    let daemon = daemon();
    let idle = Some(IdlePolicy {
        after_s: 1,
        action: IdleAction::Hibernate,
    });
    web_of(&daemon, CreateVm { idle, ..counter() });
    let number = ask("/");
    eventually("no request is counted", || {
        let awake = daemon.vm("web").idle.map(|idle| idle.awake);
        awake
            .iter()
            .flatten()
            .all(|why| !why.contains("connection"))
    });
    daemon.when("web", VmState::Hibernated);
    let before = starts(&daemon, "web");
    thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| assert!(ask("/") > number));
        }
    });
    assert_eq!(starts(&daemon, "web"), before + 1);
    // By request it sleeps at once: the next request wakes it over a new connection.
    let number = ask("/");
    hibernate(&daemon);
    assert!(ask("/") > number);
    assert_eq!(starts(&daemon, "web"), before + 2);
}

#[test]
fn a_connection_that_its_server_closed_costs_no_client_an_error() {
    let daemon = daemon();
    let seen = web(&daemon);
    let post = |path: &str| {
        let mut stream = send(&format!(
            "POST {path} HTTP/1.1\r\n{HOST}\r\nContent-Length: 2\r\n\r\nhi"
        ));
        head_of(&mut stream)[0].clone()
    };
    // The server closes each connection, and says so or not.
    for path in ["/close", "/old", "/leave"] {
        for _ in 0..50 {
            let (before, number) = (seen.accepted(), ask(path));
            assert_eq!(number, before + 1, "{path}");
            assert_eq!(post(path), "http/1.1 200 ok", "{path}");
        }
    }
    // It closes a connection that it has kept, when it has a request: one without a body is sent
    // again, once, over a new connection.
    eventually("a kept connection was tried", || {
        let number = ask("/");
        seen.last.store(0, Ordering::SeqCst);
        assert!(ask("/last") > number);
        seen.last.load(Ordering::SeqCst) == 2
    });
    // What may have had an effect is not.
    eventually("a kept connection was tried", || {
        for _ in 0..3 {
            ask("/");
        }
        seen.last.store(0, Ordering::SeqCst);
        let status = post("/last");
        assert_eq!(seen.last.load(Ordering::SeqCst), 1, "{status}");
        status == "http/1.1 502 bad gateway"
    });
}

/// A server that does not read a body takes it for the next request.
#[test]
fn a_connection_is_not_kept_after_a_request_with_a_body() {
    let daemon = daemon();
    let _seen = web(&daemon);
    for method in ["POST", "GET"] {
        let mut stream = send(&format!(
            "{method} / HTTP/1.1\r\n{HOST}\r\nContent-Length: 2\r\n\r\nhi"
        ));
        assert_eq!(head_of(&mut stream)[0], "http/1.1 200 ok");
        let mut number = [0];
        stream.read_exact(&mut number).unwrap();
        assert_ne!(ask("/").to_string().as_bytes(), number, "{method}");
    }
}

#[test]
fn bytes_after_an_answer_cost_the_next_client_no_error() {
    let daemon = daemon();
    let _seen = web(&daemon);
    for _ in 0..10 {
        let mut stream = send(&format!("HEAD /stray HTTP/1.1\r\n{HOST}\r\n\r\n"));
        assert_eq!(head_of(&mut stream)[0], "http/1.1 200 ok");
        ask("/");
    }
}

#[test]
fn a_connection_that_switched_protocols_is_not_used_for_requests() {
    let daemon = daemon();
    let seen = web(&daemon);
    let number = ask("/");
    let mut switched = send(&format!(
        "GET /switch HTTP/1.1\r\n{HOST}\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n"
    ));
    assert!(head_of(&mut switched)[0].contains(" 101 "));
    assert!(seen.accepted() > number, "it is a new connection");
    let switched_number = seen.accepted();
    for _ in 0..10 {
        assert_ne!(ask("/"), switched_number);
        writeln!(switched.get_mut(), "line").unwrap();
        let mut line = String::new();
        switched.read_line(&mut line).unwrap();
        assert_eq!(line, "line, line\n");
    }
    drop(switched);
    eventually("all are closed", || seen.open.load(Ordering::SeqCst) == 0);
    assert_ne!(ask("/"), switched_number);
}

#[test]
fn a_server_with_one_connection_at_a_time_serves_all_requests() {
    let daemon = daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    let listener = listen_for(&vm);
    let seen = Arc::<Seen>::default();
    let served = Arc::clone(&seen);
    thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            serve(client, 1, &served);
        }
    });
    eventually(
        "another request does not wait for an idle connection",
        || {
            seen.held.store(0, Ordering::SeqCst);
            seen.is_released.store(false, Ordering::SeqCst);
            thread::scope(|scope| {
                let first = scope.spawn(|| ask("/held"));
                eventually("it waits", || seen.held.load(Ordering::SeqCst) == 1);
                let second = scope.spawn(|| ask("/"));
                thread::sleep(Duration::from_millis(20));
                seen.is_released.store(true, Ordering::SeqCst);
                first.join().unwrap();
                let answered = Instant::now();
                second.join().unwrap();
                answered.elapsed() < KEPT
            })
        },
    );
}
