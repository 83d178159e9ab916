//! HTTP to VMs by name. The daemon is in a network namespace of the test, which needs root; there a
//! server of the test has the VM's address.

mod access;
mod clients;
mod http2;
mod places;
mod reuse;
mod secure;

use crate::daemon::{Daemon, eventually, named, run_of};
use crate::network::daemon_with;
use crate::ports::{hibernate, listen_for, published, wake_attempts};
use crate::room::asked;
use crate::sleep::starts;
use crate::snapshots::counter;
use jiffy_wire::api::{
    ApiError, CreateVm, IdleAction, IdlePolicy, NetworkUse, Purpose, Queued, Vm, VmState,
};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const PROXY: &str = "127.0.0.1:9000";

const OPTIONS: [&str; 4] = ["--proxy", PROXY, "--proxy-domain", "vm.example"];

fn daemon() -> Daemon {
    daemon_with(&OPTIONS)
}

/// A daemon with memory for one VM, for which others wait, and with these options.
fn daemon_for_one_vm(more: &[&str]) -> Daemon {
    let room = ["--memory-limit", "128M", "--memory-wait", "600"];
    daemon_with(&[&OPTIONS[..], &room, more].concat())
}

/// The lines of a header, the request line first.
fn head_of(stream: &mut impl BufRead) -> Vec<String> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).unwrap_or(0) == 0 || line == "\r\n" {
            return lines;
        }
        lines.push(line.trim_end().to_ascii_lowercase());
    }
}

/// Records what a server has seen.
#[derive(Default)]
struct Served {
    /// Number of requests.
    requests: AtomicUsize,
    /// Requests for `/events` before their second event, and most of them at a time.
    open: AtomicUsize,
    most_open: AtomicUsize,
    /// Whether `/held` sends its second event.
    is_released: AtomicBool,
    /// Bytes sent for `/forever`.
    sent: AtomicUsize,
    /// Data that clients of `/last` have sent.
    heard: Mutex<String>,
    /// The header of the last request that switched protocols.
    switched: Mutex<Vec<String>>,
}

/// Serves HTTP at port 3000 of the VM's address. `/head` answers with the request's header,
/// `/events` with an event and, after three seconds, another, `/held` with another as soon as the
/// test wants, `/forever` with endless data. `/echo` switches to a protocol that repeats each line,
/// and `/last` to one in which the server shuts down its side first. All else is answered with the
/// request's body as it comes.
fn serve_for(vm: &Vm) -> Arc<Served> {
    let listener = listen_for(vm);
    let served = Arc::<Served>::default();
    let seen = Arc::clone(&served);
    thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let served = Arc::clone(&served);
            thread::spawn(move || answer(client, &served));
        }
    });
    seen
}

fn answer(mut client: TcpStream, served: &Served) {
    let mut input = BufReader::new(client.try_clone().unwrap());
    let head = head_of(&mut input);
    if head.is_empty() {
        // The proxy's client disconnected before its request was sent.
        return;
    }
    served.requests.fetch_add(1, Ordering::SeqCst);
    let path = head[0].split(' ').nth(1).unwrap().to_owned();
    let chunk = |client: &mut TcpStream, text: &str| {
        let _ = write!(client, "{:x}\r\n{text}\r\n", text.len());
    };
    let switch = |mut client: &TcpStream, word: &str| {
        *served.switched.lock().unwrap() = head.clone();
        write!(
            client,
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n{word}\n"
        )
        .unwrap();
    };
    if path.starts_with("/last") {
        switch(&client, "bye");
        client.shutdown(Shutdown::Write).unwrap();
        let mut heard = String::new();
        input.read_to_string(&mut heard).unwrap();
        served.heard.lock().unwrap().push_str(&heard);
        return;
    }
    if path.starts_with("/echo") {
        switch(&client, "ready");
        for line in input.lines().map_while(Result::ok) {
            writeln!(client, "{line}, {line}").unwrap();
        }
        return writeln!(client, "end").unwrap();
    }
    write!(
        client,
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    .unwrap();
    match path.as_str() {
        "/events" => {
            let open = served.open.fetch_add(1, Ordering::SeqCst) + 1;
            served.most_open.fetch_max(open, Ordering::SeqCst);
            chunk(&mut client, "data: 1\n\n");
            thread::sleep(Duration::from_secs(3));
            served.open.fetch_sub(1, Ordering::SeqCst);
            chunk(&mut client, "data: 2\n\n");
        }
        "/held" => {
            chunk(&mut client, "data: 1\n\n");
            while !served.is_released.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(5));
            }
            chunk(&mut client, "data: 2\n\n");
        }
        "/forever" => {
            let piece = "x".repeat(64 << 10);
            while write!(client, "{:x}\r\n{piece}\r\n", piece.len()).is_ok() {
                served.sent.fetch_add(piece.len(), Ordering::SeqCst);
            }
        }
        _ if path.starts_with("/head") => chunk(&mut client, &head.join("\n")),
        _ => loop {
            let mut size = String::new();
            input.read_line(&mut size).unwrap();
            let size = usize::from_str_radix(size.trim(), 16).unwrap();
            let mut data = vec![0; size + 2];
            input.read_exact(&mut data).unwrap();
            if size == 0 {
                break;
            }
            chunk(&mut client, std::str::from_utf8(&data[..size]).unwrap());
        },
    }
    let _ = write!(client, "0\r\n\r\n");
}

/// Sends a request's header; returns the connection with the answer.
fn send(head: &str) -> BufReader<TcpStream> {
    let mut stream = connect();
    stream.write_all(head.as_bytes()).unwrap();
    BufReader::new(stream)
}

fn connect() -> TcpStream {
    let stream = TcpStream::connect(PROXY).expect("the proxy");
    let patience = Some(Duration::from_secs(60));
    stream.set_read_timeout(patience).unwrap();
    stream
}

/// Status, and body without its framing.
fn get(path: &str, headers: &str) -> (u16, String) {
    get_over(connect(), path, headers)
}

/// The same over this connection.
fn get_over(mut stream: impl Read + Write, path: &str, headers: &str) -> (u16, String) {
    write!(
        stream,
        "GET {path} HTTP/1.1\r\n{headers}\r\nConnection: close\r\n\r\n"
    )
    .unwrap();
    let mut stream = BufReader::new(stream);
    let head = head_of(&mut stream);
    let mut body = String::new();
    stream.read_to_string(&mut body).unwrap();
    let status = head[0].split(' ').nth(1).unwrap().parse().unwrap();
    if head.iter().any(|line| line == "transfer-encoding: chunked") {
        let chunk = body.split_once("\r\n").unwrap().1;
        body = chunk.split("\r\n").next().unwrap().to_owned();
    }
    (status, body)
}

/// The message of a refusal with this status.
fn refused(status: u16, path: &str, headers: &str) -> String {
    sentence(status, &get(path, headers))
}

/// The message in this answer, a refusal with this status.
fn sentence(status: u16, (was, body): &(u16, String)) -> String {
    assert_eq!(*was, status, "{body}");
    let error: ApiError = serde_json::from_str(body).unwrap();
    assert!(error.message.ends_with('.'), "{error:?}");
    error.message
}

const HOST: &str = "Host: 3000-web.vm.example";

#[test]
fn a_request_wakes_its_vm_and_is_answered() {
    let daemon = daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    serve_for(&vm);
    hibernate(&daemon);
    let (status, head) = get(
        "/head?a=b",
        &format!("{HOST}:9000\r\nX-Own: 1\r\nKeep-Alive: 5"),
    );
    assert_eq!(status, 200);
    assert_eq!(daemon.vm("web").state, VmState::Running);
    for line in [
        "get /head?a=b http/1.1",
        "host: 3000-web.vm.example:9000",
        "x-own: 1",
        "x-forwarded-for: 127.0.0.1",
        "x-forwarded-proto: http",
        "x-forwarded-host: 3000-web.vm.example:9000",
    ] {
        assert!(head.lines().any(|it| it == line), "{line}: {head}");
    }
    assert!(
        !head.contains("keep-alive") && !head.contains("close"),
        "{head}"
    );
    // The VM is found by id, by path and by headers.
    let by_id = format!("Host: 3000-{}.vm.example", vm.id);
    assert!(get("/head", &by_id).1.starts_with("get /head "));
    let by_path = get("/vm/web/3000/head/x", "Host: localhost").1;
    assert!(by_path.starts_with("get /head/x "), "{by_path}");
    assert!(
        by_path.contains("x-forwarded-prefix: /vm/web/3000"),
        "{by_path}"
    );
    let by_header = get(
        "/head",
        "Host: localhost\r\nJiffy-Vm: web\r\nJiffy-Port: 3000",
    )
    .1;
    assert!(by_header.starts_with("get /head ") && !by_header.contains("jiffy-"));
    // Many concurrent requests wake it once.
    hibernate(&daemon);
    thread::scope(|scope| {
        for _ in 0..400 {
            scope.spawn(|| assert_eq!(get("/head", HOST).0, 200));
        }
    });
    assert_eq!(starts(&daemon, "web"), 3);
}

#[test]
fn bodies_stream_both_ways_and_protocols_are_switched() {
    let daemon = daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    serve_for(&vm);
    // Each part comes back before the next is sent.
    let mut stream = send(&format!(
        "POST /any HTTP/1.1\r\n{HOST}\r\nTransfer-Encoding: chunked\r\n\r\n"
    ));
    let mut answered = false;
    for part in ["one", "three"] {
        write!(stream.get_mut(), "{:x}\r\n{part}\r\n", part.len()).unwrap();
        if !answered {
            assert_eq!(head_of(&mut stream)[0], "http/1.1 200 ok");
            answered = true;
        }
        let mut lines = stream.by_ref().lines();
        lines.next().unwrap().unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), part);
    }
    write!(stream.get_mut(), "0\r\n\r\n").unwrap();
    assert_eq!(stream.lines().next().unwrap().unwrap(), "0");

    let mut stream = send(&format!(
        "GET /echo HTTP/1.1\r\n{HOST}\r\nConnection: keep-alive, Upgrade\r\nUpgrade: lines\r\n\r\n"
    ));
    let head = head_of(&mut stream);
    assert_eq!(head[0], "http/1.1 101 switching protocols");
    assert!(head.contains(&"upgrade: lines".to_owned()), "{head:?}");
    let writer = stream.get_ref().try_clone().unwrap();
    let mut lines = stream.lines().map(Result::unwrap);
    assert_eq!(lines.next().unwrap(), "ready");
    for word in ["a", "b"] {
        writeln!(&writer, "{word}").unwrap();
        assert_eq!(lines.next().unwrap(), format!("{word}, {word}"));
    }
    writer.shutdown(Shutdown::Write).unwrap();
    assert_eq!(lines.next().unwrap(), "end", "the other direction is open");
    assert_eq!(lines.next(), None);
}

#[test]
fn either_side_may_close_first() {
    let daemon = daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    let served = serve_for(&vm);
    // A client that shut down its side gets the whole answer.
    let stream = send(&format!("GET /events HTTP/1.1\r\n{HOST}\r\n\r\n"));
    stream.get_ref().shutdown(Shutdown::Write).unwrap();
    let lines: Vec<String> = stream.lines().map(Result::unwrap).collect();
    let events = lines.iter().filter(|line| line.starts_with("data"));
    assert_eq!(events.collect::<Vec<_>>(), ["data: 1", "data: 2"]);
    // A server that shut down its side gets the whole request.
    let mut stream = send(&format!(
        "GET /last HTTP/1.1\r\n{HOST}\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n"
    ));
    head_of(&mut stream);
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    assert_eq!(said, "bye\n");
    write!(stream.get_mut(), "still here").unwrap();
    drop(stream);
    eventually("the server has it", || {
        *served.heard.lock().unwrap() == "still here"
    });
}

#[test]
fn a_stream_of_events_keeps_its_vm_awake_and_ends_with_it() {
    let daemon = daemon();
    let idle = IdlePolicy {
        after_s: 1,
        action: IdleAction::Hibernate,
    };
    let vm = CreateVm {
        idle: Some(idle),
        ..published(CreateVm::default())
    };
    let served = serve_for(&daemon.run_detached(vm).json::<Vm>());
    daemon.when("web", VmState::Hibernated);
    let mut stream = send(&format!("GET /held HTTP/1.1\r\n{HOST}\r\n\r\n"));
    assert_eq!(head_of(&mut stream)[0], "http/1.1 200 ok");
    let mut events = stream
        .lines()
        .map(Result::unwrap)
        .filter(|line| line.starts_with("data"));
    assert_eq!(events.next().unwrap(), "data: 1");
    assert_eq!(daemon.vm("web").idle.unwrap().awake[0], "1 connection");
    thread::sleep(Duration::from_secs(3));
    served.is_released.store(true, Ordering::SeqCst);
    assert_eq!(events.next().unwrap(), "data: 2");
    assert_eq!(starts(&daemon, "web"), 2, "it did not sleep in between");
    daemon.when("web", VmState::Hibernated);
    // The connection is cut when its VM ends.
    served.is_released.store(false, Ordering::SeqCst);
    let mut stream = send(&format!("GET /held HTTP/1.1\r\n{HOST}\r\n\r\n"));
    head_of(&mut stream);
    assert_eq!(daemon.delete("/v1/vms/web?force=true").status, 204);
    let mut rest = String::new();
    let _ = stream.read_to_string(&mut rest);
    assert!(!rest.contains("data: 2"), "{rest}");
    served.is_released.store(true, Ordering::SeqCst);
}

#[test]
fn requests_that_cannot_be_forwarded_are_refused() {
    let daemon = daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    assert!(refused(404, "/", "Host: 3000-none.vm.example").contains("no VM none"));
    assert!(refused(404, "/", "Host: localhost").contains("PORT-NAME.vm.example"));
    assert!(refused(404, "/vm/web/x/", HOST).contains("NAME/PORT"));
    assert!(refused(502, "/vm/web/1/", HOST).contains("Port 1 of the VM web"));
    daemon
        .create(&named("made", CreateVm::default()))
        .json::<Vm>();
    assert!(refused(503, "/vm/made/1/", HOST).contains("does not run"));
    let alone = CreateVm {
        network: NetworkUse {
            name: Some("none".into()),
            ..NetworkUse::default()
        },
        ..named("alone", counter())
    };
    daemon.run_detached(alone).json::<Vm>();
    assert!(refused(502, "/vm/alone/1/", HOST).contains("has no network"));
    hibernate(&daemon);
    let state = daemon.vm_folder(&vm.id).join("hibernated/state");
    // Only the VMM detects the damage.
    fs::write(&state, jiffy_wire::state::seal("0.1.0", b"nonsense")).unwrap();
    let begun = Instant::now();
    thread::scope(|scope| {
        for _ in 0..50 {
            scope.spawn(|| {
                assert!(refused(503, "/", HOST).contains("could not be woken"));
            });
        }
    });
    assert_eq!(daemon.vm("web").state, VmState::Hibernated);
    wake_attempts(&daemon, begun);
    // Invalid HTTP ends only its own connection.
    let mut nonsense = send("NONSENSE\r\n\r\n");
    assert_eq!(head_of(&mut nonsense)[0], "http/1.1 400 bad request");
    refused(404, "/", "Host: x");
}

#[test]
fn a_request_that_no_queue_accepts_is_told_when_to_come_again() {
    let daemon = daemon_for_one_vm(&["--queue-limit", "1"]);
    let vm: Vm = daemon.run_detached(published(counter())).json();
    serve_for(&vm);
    hibernate(&daemon);
    let other = named("other", CreateVm::default());
    daemon.run_detached(other).json::<Vm>();
    let third = serde_json::to_vec(&run_of(named("third", CreateVm::default()), true)).unwrap();
    let third = asked(&daemon, "/v1/run", &third);
    let waiting = || daemon.get("/v1/queue").json::<Vec<Queued>>();
    eventually("it waits", || waiting().len() == 1);
    let mut refused = send(&format!("GET /head HTTP/1.1\r\n{HOST}\r\n\r\n"));
    let head = head_of(&mut refused);
    assert_eq!(head[0], "http/1.1 503 service unavailable");
    assert!(head.contains(&"retry-after: 60".to_owned()), "{head:?}");
    assert_eq!(daemon.vm("web").state, VmState::Hibernated);
    drop(third);
    daemon.gone("third");
    // Now the queue has a place: the request is held there, and answered when there is room.
    thread::sleep(Duration::from_secs(1));
    thread::scope(|scope| {
        let held = scope.spawn(|| get("/head", HOST));
        eventually("the wake waits", || {
            waiting().iter().any(|one| one.purpose == Purpose::Wake)
        });
        assert!(!held.is_finished());
        daemon.delete("/v1/vms/other?force=true");
        assert_eq!(held.join().unwrap().0, 200);
    });
}

#[test]
fn a_request_waits_for_room_as_long_as_its_header_says() {
    let daemon = daemon_for_one_vm(&[]);
    let vm: Vm = daemon.run_detached(published(counter())).json();
    serve_for(&vm);
    hibernate(&daemon);
    daemon.run_detached(named("other", counter())).json::<Vm>();
    let waiting = |seconds: &str| format!("{HOST}\r\nJiffy-Wait: {seconds}");
    let said = refused(503, "/head", &waiting("0"));
    assert!(said.contains("memory"), "{said}");
    for wrong in ["soon", "-1", "86401", ""] {
        let said = refused(400, "/head", &waiting(wrong));
        assert!(
            said.contains("wait") || said.contains("Jiffy-Wait"),
            "{said}"
        );
    }
    thread::scope(|scope| {
        let held = scope.spawn(|| get("/head", &waiting("300")));
        eventually("the wake waits", || {
            !daemon.get("/v1/queue").json::<Vec<Queued>>().is_empty()
        });
        refused(503, "/head", &waiting("0"));
        assert!(!held.is_finished());
        daemon.delete("/v1/vms/other?force=true");
        let (status, head) = held.join().unwrap();
        assert_eq!(status, 200);
        assert!(!head.contains("jiffy-wait"), "{head}");
    });
}

#[test]
fn a_damaged_body_is_not_blamed_on_the_vm() {
    let daemon = daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    // The kernel accepts, but nothing answers.
    let _never_answers = listen_for(&vm);
    let mut stream = send(&format!(
        "POST / HTTP/1.1\r\n{HOST}\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n"
    ));
    assert_eq!(head_of(&mut stream)[0], "http/1.1 400 bad request");
    let mut body = String::new();
    let _ = stream.read_to_string(&mut body);
    assert!(sentence(400, &(400, body)).contains("damaged"));
}

#[test]
fn a_daemon_whose_proxy_has_no_address_ends_and_leaves_no_socket() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let daemon = Daemon::prepared(&["--proxy", &address]);
    let ended = daemon.command().output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.contains("The proxy can't listen on"), "{said}");
    assert!(!ended.status.success());
    assert!(!daemon.socket().exists());
}
