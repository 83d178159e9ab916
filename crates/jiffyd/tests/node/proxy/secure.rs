//! TLS.

use super::clients::{Certificate, Secure};
use super::{HOST, connect, get, get_over, head_of, sentence, serve_for};
use crate::daemon::{Daemon, eventually};
use crate::ports::{hibernate, published};
use crate::snapshots::counter;
use jiffy_wire::api::{Vm, VmState};
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Shuts down this side of the connection, in TLS and TCP.
fn end_writing(stream: &mut Secure) {
    stream.conn.send_close_notify();
    stream.conn.complete_io(&mut stream.sock).unwrap();
    stream.sock.shutdown(std::net::Shutdown::Write).unwrap();
}

fn send(certificate: &Certificate, head: &str) -> BufReader<Secure> {
    let mut stream = certificate.connect();
    stream.write_all(head.as_bytes()).unwrap();
    BufReader::new(stream)
}

#[test]
fn tls_supports_all_features_of_plain_http() {
    let certificate = Certificate::new();
    let daemon = certificate.daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    let served = serve_for(&vm);
    hibernate(&daemon);
    let (status, head) = get_over(certificate.connect(), "/head", HOST);
    assert_eq!(status, 200);
    assert_eq!(daemon.vm("web").state, VmState::Running);
    assert!(head.contains("x-forwarded-proto: https"), "{head}");
    assert!(head.contains("host: 3000-web.vm.example"), "{head}");
    // A client that offers no ALPN protocol, or other ones as well.
    for protocols in [&[][..], &["http/1.1", "spdy/3"]] {
        let stream = certificate.try_connect(protocols).unwrap();
        assert_eq!(get_over(stream, "/head", HOST).0, 200);
    }
    certificate.try_connect(&["spdy/3"]).unwrap_err();
    // Each event is forwarded at once, also after the client has shut down its side.
    let mut stream = send(
        &certificate,
        &format!("GET /held HTTP/1.1\r\n{HOST}\r\n\r\n"),
    );
    end_writing(stream.get_mut());
    let mut events = stream
        .lines()
        .map(Result::unwrap)
        .filter(|line| line.starts_with("data"));
    assert_eq!(events.next().unwrap(), "data: 1");
    served.is_released.store(true, Ordering::SeqCst);
    assert_eq!(events.next().unwrap(), "data: 2");
    // The client shuts down first.
    let upgrade = format!("{HOST}\r\nConnection: Upgrade\r\nUpgrade: lines\r\n\r\n");
    let mut stream = send(&certificate, &format!("GET /echo HTTP/1.1\r\n{upgrade}"));
    assert_eq!(head_of(&mut stream)[0], "http/1.1 101 switching protocols");
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    writeln!(stream.get_mut(), "a").unwrap();
    end_writing(stream.get_mut());
    let rest: Vec<String> = stream.lines().map(Result::unwrap).collect();
    assert_eq!(rest, ["a, a", "end"]);
    // The server shuts down first.
    let mut stream = send(&certificate, &format!("GET /last HTTP/1.1\r\n{upgrade}"));
    head_of(&mut stream);
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    assert_eq!(said, "bye\n");
    write!(stream.get_mut(), "still here").unwrap();
    end_writing(stream.get_mut());
    eventually("the server has it", || {
        *served.heard.lock().unwrap() == "still here"
    });
}

#[test]
fn plain_http_is_refused_on_a_tls_port() {
    let certificate = Certificate::new();
    let _daemon = certificate.daemon();
    let why = sentence(400, &get("/", HOST));
    assert!(why.contains("HTTPS"), "{why}");
}

#[test]
fn a_signal_reloads_the_certificate() {
    let mut certificate = Certificate::new();
    let mut daemon = certificate.daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    serve_for(&vm);
    let kept = certificate.connect();
    let hangup = |daemon: &Daemon| {
        let pid = rustix::process::Pid::from_raw(daemon.pid() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    };
    let log =
        |daemon: &Daemon| fs::read_to_string(daemon.folder.path().join("jiffyd.log")).unwrap();
    // Only one of the files is new: the previous certificate stays.
    let before = fs::read(certificate.chain()).unwrap();
    let key = fs::read(certificate.key()).unwrap();
    certificate.replace_with_another();
    let after = fs::read(certificate.chain()).unwrap();
    let new_key = fs::read(certificate.key()).unwrap();
    fs::write(certificate.key(), &key).unwrap();
    hangup(&daemon);
    eventually("the failed reload is logged", || {
        log(&daemon).contains("keeps its previous certificate")
    });
    fs::write(certificate.chain(), &before).unwrap();
    assert_eq!(get_over(certificate.connect(), "/head", HOST).0, 200);
    // Both files are new.
    fs::write(certificate.chain(), &after).unwrap();
    fs::write(certificate.key(), &new_key).unwrap();
    hangup(&daemon);
    eventually("the new certificate is used", || {
        certificate.try_connect(&["http/1.1"]).is_ok()
    });
    assert_eq!(get_over(certificate.connect(), "/head", HOST).0, 200);
    assert_eq!(get_over(kept, "/head", HOST).0, 200);
    assert!(daemon.is_up());
}

#[test]
fn slow_handshakes_delay_no_others_and_time_out() {
    let certificate = Certificate::new();
    let daemon = certificate.daemon();
    let vm: Vm = daemon.run_detached(published(counter())).json();
    serve_for(&vm);
    // Clients send nothing, the beginning of a record, or one byte a second.
    let beginning = [22, 3, 1, 2, 0, 1];
    let begun = Instant::now();
    let mut slow: Vec<TcpStream> = (0..300)
        .map(|at| {
            let mut stream = connect();
            stream.write_all(&beginning[..at % 7]).unwrap();
            stream
        })
        .collect();
    let mut times = Vec::new();
    while begun.elapsed() < Duration::from_secs(8) {
        for stream in &mut slow[..100] {
            let _ = stream.write_all(&[0]);
        }
        let asked = Instant::now();
        assert_eq!(get_over(certificate.connect(), "/head", HOST).0, 200);
        times.push(asked.elapsed());
        std::thread::sleep(Duration::from_millis(500));
    }
    // The host may have stalled during one of them.
    times.sort();
    let longest = times[times.len().saturating_sub(2)];
    assert!(longest < Duration::from_secs(5), "{longest:?}");
    for mut stream in slow {
        // Their data is not read any more, so it may be a reset.
        let _ = stream.read_to_end(&mut Vec::new());
    }
    let lasted = begun.elapsed();
    assert!(lasted < Duration::from_secs(40), "{lasted:?}");
}

/// The error of a daemon that does not start with these files.
fn refusal(chain: &Path, key: &Path) -> String {
    let daemon = Daemon::prepared(&["--proxy", "127.0.0.1:9000"]);
    let mut command = daemon.command();
    command.arg("--proxy-cert").arg(chain);
    command.arg("--proxy-key").arg(key);
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let mut lines = said.lines();
    let sentence = lines.next().unwrap().strip_prefix("jiffyd: ").unwrap();
    assert!(sentence.ends_with('.'), "{said}");
    assert!(lines.count() <= 1, "{said}");
    assert!(!daemon.socket().exists());
    sentence.to_owned()
}

#[test]
fn unusable_tls_files_are_reported_at_startup() {
    let certificate = Certificate::new();
    let (chain, key) = (certificate.chain(), certificate.key());
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, contents: &str| {
        let path = folder.path().join(name);
        fs::write(&path, contents).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        path
    };
    let has = |sentence: String, path: &Path, words: &str| {
        let path = path.display().to_string();
        assert!(sentence.contains(&path), "{sentence}");
        assert!(sentence.contains(words), "{sentence}");
    };
    let missing = folder.path().join("missing");
    has(refusal(&missing, &key), &missing, "can't be read");
    has(refusal(&chain, &missing), &missing, "can't be read");
    let empty = file("empty", "");
    has(refusal(&empty, &key), &empty, "contains no certificate");
    has(refusal(&chain, &empty), &empty, "contains no private key");
    has(refusal(&key, &key), &key, "contains no certificate");
    has(refusal(&chain, &chain), &chain, "mode 0644");
    let text = fs::read_to_string(&chain).unwrap();
    let damaged = file("damaged", &text.replace("MII", "!!!"));
    has(refusal(&damaged, &key), &damaged, "damaged");
    let nonsense = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let nonsense = file("nonsense", nonsense);
    has(refusal(&nonsense, &key), &nonsense, "is not valid");
    let nonsense = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
    let nonsense = file("nonsense.key", nonsense);
    has(refusal(&chain, &nonsense), &nonsense, "can't be used");
    let other = Certificate::new();
    let sentence = refusal(&chain, &other.key());
    has(sentence, &chain, "is not that of the first certificate");
    let encrypted = folder.path().join("encrypted");
    let made = Command::new("openssl")
        .args(["pkey", "-aes128", "-passout", "pass:secret", "-in"])
        .args([&key, Path::new("-out"), &encrypted])
        .output()
        .unwrap();
    assert!(made.status.success());
    fs::set_permissions(&encrypted, Permissions::from_mode(0o600)).unwrap();
    has(refusal(&chain, &encrypted), &encrypted, "is encrypted");
    for mode in [0o644, 0o604, 0o620, 0o601] {
        let open = file("open", &fs::read_to_string(&key).unwrap());
        fs::set_permissions(&open, Permissions::from_mode(mode)).unwrap();
        has(refusal(&chain, &open), &open, &format!("mode {mode:04o}"));
    }
    // One file without the other.
    let daemon = Daemon::prepared(&["--proxy", "127.0.0.1:9000"]);
    let mut command = daemon.command();
    let output = command.arg("--proxy-cert").arg(&chain).output().unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("--proxy-key"), "{said}");
}
