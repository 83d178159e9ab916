//! HTTP/2.

use super::clients::{Body, Certificate, request, run, whole};
use super::{HOST, get_over, sentence, serve_for};
use crate::daemon::{bad_vm, eventually, named, release_guest, status_of};
use crate::ports::{hibernate, own_address, published, wake_attempts};
use crate::sleep::starts;
use crate::snapshots::counter;
use bytes::Bytes;
use http_body_util::BodyExt;
use http_body_util::channel::Channel;
use hyper::body::Incoming;
use hyper::ext::Protocol;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use jiffy_wire::api::{CreateVm, Vm, VmState};
use std::fs;
use std::io::{Read, Write};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::task::JoinSet;
use tokio::time::timeout;

pub const WEB: &str = "https://3000-web.vm.example/";

/// The next piece of a body.
async fn piece(body: &mut Incoming) -> String {
    let frame = timeout(Duration::from_secs(60), body.frame()).await;
    let data = frame.unwrap().unwrap().unwrap().into_data().unwrap();
    String::from_utf8(data.into()).unwrap()
}

#[test]
fn each_http2_stream_is_a_separate_request() {
    let certificate = Certificate::new();
    let daemon = certificate.daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    let served = serve_for(&vm);
    let other: Vm = daemon.run_detached(named("other", counter())).json();
    own_address("add", &other);
    hibernate(&daemon);
    run(async {
        let mut client = certificate.http2().await;
        // One request stays open while all others are answered.
        let slow = client
            .send_request(request(&format!("{WEB}held"), &[]))
            .await;
        let mut events = slow.unwrap().into_body();
        assert_eq!(piece(&mut events).await, "data: 1\n\n");
        let cookies = [("cookie", "a=1"), ("cookie", "b=2"), ("te", "trailers")];
        let by_host = client.send_request(request(&format!("{WEB}head?q"), &cookies));
        let (status, head) = whole(by_host.await.unwrap()).await;
        assert_eq!(status, 200);
        for line in [
            "get /head?q http/1.1",
            "host: 3000-web.vm.example",
            "x-forwarded-proto: https",
            "x-forwarded-host: 3000-web.vm.example",
            "cookie: a=1; b=2",
        ] {
            assert!(head.lines().any(|it| it == line), "{line}: {head}");
        }
        assert!(!head.contains("te: "), "{head}");
        let by_path = client.send_request(request("https://localhost/vm/web/3000/head/x", &[]));
        let (_, head) = whole(by_path.await.unwrap()).await;
        assert!(head.starts_with("get /head/x "), "{head}");
        let vm = [("jiffy-vm", "web"), ("jiffy-port", "3000")];
        let by_header = client.send_request(request("https://localhost/head", &vm));
        let (_, head) = whole(by_header.await.unwrap()).await;
        assert!(head.starts_with("get /head "), "{head}");
        for (url, status, words) in [
            ("https://3000-none.vm.example/", 404, "no VM none"),
            ("https://1-web.vm.example/", 502, "Port 1 of the VM web"),
            ("https://1-other.vm.example/", 502, "Port 1 of the VM other"),
            ("https://evil.example/vm/web/3000/", 404, "not this proxy's"),
        ] {
            let refused = client.send_request(request(url, &[])).await.unwrap();
            let why = sentence(status, &whole(refused).await);
            assert!(why.contains(words), "{why}");
        }
        served.is_released.store(true, Ordering::SeqCst);
        assert_eq!(piece(&mut events).await, "data: 2\n\n");
    });
    assert_eq!(starts(&daemon, "web"), 2);
}

#[test]
fn http2_bodies_stream_both_ways() {
    let certificate = Certificate::new();
    let daemon = certificate.daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    serve_for(&vm);
    run(async {
        let mut client = certificate.http2().await;
        // Requests with any method may have a body.
        for method in [Method::POST, Method::GET] {
            let (mut sender, body) = Channel::<Bytes>::new(1);
            let request: Request<Body> = Request::builder()
                .method(method)
                .uri(format!("{WEB}any"))
                .body(body.boxed_unsync())
                .unwrap();
            let sending = client.send_request(request);
            sender.send_data("one".into()).await.unwrap();
            let mut answer = sending.await.unwrap().into_body();
            assert_eq!(piece(&mut answer).await, "one");
            for part in ["two", "three"] {
                sender.send_data(part.into()).await.unwrap();
                assert_eq!(piece(&mut answer).await, part);
            }
            // One direction ends.
            drop(sender);
            let rest = answer.collect().await.unwrap().to_bytes();
            assert!(rest.is_empty());
        }
    });
}

/// A request for a WebSocket (RFC 8441 §5).
fn websocket(url: &str) -> Request<Body> {
    let mut wants = request(url, &[("sec-websocket-version", "13")]);
    *wants.method_mut() = Method::CONNECT;
    let websocket = Protocol::from_static("websocket");
    wants.extensions_mut().insert(websocket);
    wants
}

#[test]
fn an_http2_websocket_reaches_the_vm_as_http1() {
    let certificate = Certificate::new();
    let daemon = certificate.daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    let served = serve_for(&vm);
    hibernate(&daemon);
    run(async {
        let mut client = certificate.http2().await;
        // A client must first learn that the proxy supports it.
        let first = client.send_request(request(&format!("{WEB}head"), &[]));
        assert_eq!(whole(first.await.unwrap()).await.0, 200);
        let opened = client.send_request(websocket(&format!("{WEB}echo?a")));
        let opened = opened.await.unwrap();
        assert_eq!(opened.status(), 200);
        assert!(!opened.headers().contains_key("upgrade"));
        let head = served.switched.lock().unwrap().join("\n");
        for line in [
            "get /echo?a http/1.1",
            "connection: upgrade",
            "upgrade: websocket",
            "sec-websocket-key: ",
            "sec-websocket-version: 13",
        ] {
            assert!(head.contains(line), "{line}: {head}");
        }
        let stream = hyper::upgrade::on(opened).await.unwrap();
        let (reader, mut writer) = tokio::io::split(TokioIo::new(stream));
        let mut lines = BufReader::new(reader).lines();
        assert_eq!(lines.next_line().await.unwrap().unwrap(), "ready");
        for word in ["a", "b"] {
            writer
                .write_all(format!("{word}\n").as_bytes())
                .await
                .unwrap();
            let line = lines.next_line().await.unwrap().unwrap();
            assert_eq!(line, format!("{word}, {word}"));
        }
        // One direction stays open after the end of the other.
        writer.shutdown().await.unwrap();
        assert_eq!(lines.next_line().await.unwrap().unwrap(), "end");
        assert_eq!(lines.next_line().await.unwrap(), None);
        // A server that does not switch, and a tunnel.
        let refused = client.send_request(websocket(&format!("{WEB}head")));
        let why = sentence(502, &whole(refused.await.unwrap()).await);
        assert!(why.contains("does not switch"), "{why}");
        let mut tunnel = request("3000-web.vm.example:443", &[]);
        *tunnel.method_mut() = Method::CONNECT;
        let refused = client.send_request(tunnel).await.unwrap();
        assert!(sentence(404, &whole(refused).await).contains("CONNECT tunnels"));
    });
}

/// Memory of a process, bytes.
fn memory_of(pid: u32) -> usize {
    (status_of(pid, "VmRSS") as usize) << 10
}

#[test]
fn little_is_buffered_for_a_client_that_does_not_read() {
    let certificate = Certificate::new();
    let daemon = certificate.daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    let served = serve_for(&vm);
    assert_eq!(get_over(certificate.connect(), "/head", HOST).0, 200);
    let before = memory_of(daemon.pid());
    let mut kept = Vec::new();
    // Two HTTP/2 streams fit the window of a client's connection.
    for _ in 0..2 {
        let mut stream = certificate.connect();
        write!(stream, "GET /forever HTTP/1.1\r\n{HOST}\r\n\r\n").unwrap();
        kept.push(stream);
    }
    run(async {
        let mut client = certificate.http2().await;
        let mut unread = Vec::new();
        for _ in 0..2 {
            let endless = client.send_request(request(&format!("{WEB}forever"), &[]));
            unread.push(endless.await.unwrap());
        }
        let mut last = usize::MAX;
        while last != served.sent.load(Ordering::SeqCst) {
            last = served.sent.load(Ordering::SeqCst);
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
        // Most of that is in the kernel's socket buffers.
        assert!(last < 4 * (24 << 20), "{last} bytes were taken");
        let more = memory_of(daemon.pid()).saturating_sub(before);
        assert!(more < 24 << 20, "{more} bytes were kept");
        // Others are served meanwhile, also on the same connection.
        let other = client.send_request(request(&format!("{WEB}head"), &[]));
        assert_eq!(whole(other.await.unwrap()).await.0, 200);
    });
    assert_eq!(get_over(certificate.connect(), "/head", HOST).0, 200);
}

/// A frame (RFC 9113 §4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    let head = [&length[1..], &[kind, flags], &stream.to_be_bytes()].concat();
    [head, payload.to_vec()].concat()
}

/// The payloads of this kind of frame that a server sends until it closes.
fn payloads_of(kind: u8, stream: &mut impl Read) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let mut head = [0; 9];
    while stream.read_exact(&mut head).is_ok() {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; length as usize];
        if stream.read_exact(&mut payload).is_err() {
            break;
        }
        if head[3] == kind {
            found.push(payload);
        }
    }
    found
}

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
/// END_STREAM and END_HEADERS.
const WHOLE: u8 = 5;
const ENHANCE_YOUR_CALM: [u8; 4] = 11_u32.to_be_bytes();
const CANCEL: [u8; 4] = 8_u32.to_be_bytes();

#[test]
fn a_client_that_resets_every_stream_is_disconnected() {
    let certificate = Certificate::new();
    let daemon = certificate.daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    let served = serve_for(&vm);
    // GET, https and / of HPACK's table, and an authority (RFC 7541 §6.2.2, appendix A).
    let host = b"3000-web.vm.example";
    let head = [&[0x82, 0x87, 0x84, 0x01, host.len() as u8], &host[..]].concat();
    let mut flood = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    flood.extend(frame(SETTINGS, 0, 0, &[]));
    const STREAMS: usize = 5000;
    for at in 0..STREAMS as u32 {
        let stream = 2 * at + 1;
        flood.extend(frame(HEADERS, WHOLE, stream, &head));
        flood.extend(frame(RST_STREAM, 0, stream, &CANCEL));
    }
    const CLIENTS: usize = 4;
    for _ in 0..CLIENTS {
        let mut stream = certificate.try_connect(&["h2"]).unwrap();
        // It may be disconnected before it has sent everything, and then can't read why.
        let _ = stream.write_all(&flood);
        for last in payloads_of(GOAWAY, &mut stream) {
            assert_eq!(last[4..8], ENHANCE_YOUR_CALM);
        }
        assert_eq!(get_over(certificate.connect(), "/head", HOST).0, 200);
    }
    eventually("all of them are logged", || {
        let log = fs::read_to_string(daemon.folder.path().join("jiffyd.log")).unwrap();
        let is_cut = |line: &&str| {
            line.contains("ended with an error") && line.contains("ENHANCE_YOUR_CALM")
        };
        log.lines().filter(is_cut).count() == CLIENTS
    });
    let seen = served.requests.load(Ordering::SeqCst);
    assert!(seen < STREAMS / 10, "the VM got {seen} requests");
    assert_eq!(daemon.vm("web").state, VmState::Running);
}

#[test]
fn a_too_long_header_ends_only_its_own_request() {
    let certificate = Certificate::new();
    let daemon = certificate.daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    serve_for(&vm);
    run(async {
        let mut client = certificate.http2().await;
        let fits = "x".repeat(40 << 10);
        let good = client.send_request(request(&format!("{WEB}head"), &[("x-long", &fits)]));
        assert_eq!(whole(good.await.unwrap()).await.0, 200);
        let long = "x".repeat(100 << 10);
        let bad = client
            .send_request(request(&format!("{WEB}head"), &[("x-long", &long)]))
            .await;
        assert!(bad.is_err_and(|error| !error.is_closed()) || client.is_ready());
        let next = client.send_request(request(&format!("{WEB}head"), &[]));
        assert_eq!(whole(next.await.unwrap()).await.0, 200);
    });
}

/// Sends `connections * each` concurrent requests; returns their answers.
async fn crowd(
    certificate: &Certificate,
    connections: usize,
    each: usize,
) -> JoinSet<(u16, String)> {
    let mut answers = JoinSet::new();
    for _ in 0..connections {
        let client = certificate.http2().await;
        for _ in 0..each {
            let mut client = client.clone();
            answers.spawn(async move {
                let sent = client.send_request(request(&format!("{WEB}head"), &[]));
                whole(sent.await.unwrap()).await
            });
        }
    }
    answers
}

#[test]
fn ten_thousand_requests_wake_a_vm_once() {
    jiffy_sys::descriptors::raise_limit(1 << 16);
    let certificate = Certificate::new();
    let daemon = certificate.daemon();
    let vm: Vm = daemon
        .run_detached(published(bad_vm("held-capture", None)))
        .json();
    let served = serve_for(&vm);
    let folder = daemon.vm_folder(&vm.id);
    thread::scope(|scope| {
        // They wait while it is being hibernated, and then wake it.
        let slept = scope.spawn(|| hibernate(&daemon));
        eventually("it is being captured", || folder.join("capturing").exists());
        run(async {
            let mut answers = crowd(&certificate, 100, 100).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(served.requests.load(Ordering::SeqCst), 0);
            assert!(answers.try_join_next().is_none());
            release_guest(&folder);
            while let Some(answer) = answers.join_next().await {
                let (status, body) = answer.unwrap();
                assert_eq!(status, 200, "{body}");
            }
        });
        slept.join().unwrap();
    });
    assert_eq!(served.requests.load(Ordering::SeqCst), 10_000);
    assert_eq!(starts(&daemon, "web"), 2);
}

#[test]
fn many_requests_to_a_vm_that_cannot_wake_all_get_the_error() {
    let certificate = Certificate::new();
    let daemon = certificate.daemon();
    let vm: Vm = daemon
        .run_detached(published(CreateVm { ..counter() }))
        .json();
    serve_for(&vm);
    hibernate(&daemon);
    let state = daemon.vm_folder(&vm.id).join("hibernated/state");
    fs::write(&state, jiffy_wire::state::seal("0.1.0", b"nonsense")).unwrap();
    let begun = Instant::now();
    run(async {
        let mut answers = crowd(&certificate, 10, 100).await;
        while let Some(answer) = answers.join_next().await {
            let why = sentence(503, &answer.unwrap());
            assert!(why.contains("could not be woken"), "{why}");
        }
    });
    assert_eq!(daemon.vm("web").state, VmState::Hibernated);
    wake_attempts(&daemon, begun);
}
