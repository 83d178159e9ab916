//! Clients that stall, trickle, flood or never finish: they are limited, and delay no others.

use crate::client::{Answer, connect, request};
use crate::daemon::{Daemon, command, eventually, named, shell, started, tar_of, vm};
use jiffy_wire::api::{CreateVm, ErrorKind, Image};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

const SOCKET: &str = "JIFFY_TEST_SOCKET";
const REQUEST: &str = "JIFFY_TEST_REQUEST";
/// `--connections`, and the share of one process.
const ALL: usize = 16;
const SHARE: usize = 12;

/// Sends a request from another process; returns the status.
fn ask_as_somebody_else(daemon: &Daemon, request: &str, body: &[u8]) -> u16 {
    let mut asks = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "flood::asks", "--ignored", "--nocapture"])
        .env(SOCKET, daemon.socket())
        .env(REQUEST, request)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    asks.stdin.take().unwrap().write_all(body).unwrap();
    let said = String::from_utf8(asks.wait_with_output().unwrap().stdout).unwrap();
    let status = said.split("status ").nth(1).expect(&said);
    status.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
#[ignore = "what ask_as_somebody_else runs"]
fn asks() {
    let Some(socket) = std::env::var_os(SOCKET) else {
        return;
    };
    let mut body = Vec::new();
    std::io::stdin().read_to_end(&mut body).unwrap();
    let line = format!("{} HTTP/1.1", std::env::var(REQUEST).unwrap());
    let answer = request(connect(socket.as_ref()).unwrap(), &line, &body);
    println!("status {}", answer.unwrap().status);
}

fn info_for_somebody_else(daemon: &Daemon) -> u16 {
    ask_as_somebody_else(daemon, "GET /v1/info", b"")
}

fn info(daemon: &Daemon) -> Answer {
    request(
        connect(&daemon.socket()).unwrap(),
        "GET /v1/info HTTP/1.1",
        b"",
    )
    .unwrap()
}

fn flooded() -> Daemon {
    Daemon::with(&["--connections", &ALL.to_string()])
}

#[test]
fn a_client_with_too_many_connections_is_refused_others_served() {
    let mut daemon = flooded();
    let begun = |text: &[u8]| {
        let mut stream = connect(&daemon.socket()).unwrap();
        stream.write_all(text).unwrap();
        stream
    };
    // Some send nothing, some half a header, some half a body.
    let beginnings: [&[u8]; 3] = [
        b"",
        b"GET /v1/info HTT",
        b"POST /v1/vms HTTP/1.1\r\nHost: node\r\nContent-Length: 100\r\n\r\n{",
    ];
    let mut kept: Vec<UnixStream> = (0..SHARE).map(|at| begun(beginnings[at % 3])).collect();
    // The connection before them, which was just ending, may have had the place of one of them.
    let error = loop {
        let answer = info(&daemon);
        if answer.status != 200 {
            break answer.error(ErrorKind::NoRoom);
        }
        assert!(kept.len() < 10 * SHARE, "all are served");
        kept.push(begun(b""));
    };
    let us = format!("of process {}", std::process::id());
    assert!(error.message.contains(&us), "{}", error.message);
    assert_eq!(info_for_somebody_else(&daemon), 200);
    // A shutdown does not wait for them either.
    drop(kept);
    eventually("a place is free again", || info(&daemon).status == 200);
    let _kept: Vec<UnixStream> = (0..SHARE + 40).map(|_| begun(b"")).collect();
    daemon.shut_down_by_signal();
}

#[test]
fn streams_count_as_connections_of_their_client() {
    let daemon = flooded();
    let waits = shell("while kill -0 $PPID; do sleep 0.1; done");
    let mut frames = daemon.run(named("box", vm(waits)));
    started(&mut frames);
    let mut streams = vec![frames];
    while streams.len() < SHARE {
        match daemon.stream("/v1/vms/box/attach", b"") {
            Ok(stream) => streams.push(stream),
            // The connection before it is just ending.
            Err(answer) => drop(answer.error(ErrorKind::NoRoom)),
        }
    }
    let answer = daemon.stream("/v1/vms/box/attach", b"").unwrap_err();
    answer.error(ErrorKind::NoRoom);
    assert_eq!(info_for_somebody_else(&daemon), 200);
    streams.clear();
    eventually("a place is free again", || info(&daemon).status == 200);
}

#[test]
fn endless_uploads_are_limited_and_delay_no_others() {
    // The share of one process of 16.
    const UPLOADS: usize = 12;
    let daemon = Daemon::start();
    let tar = tar_of(&[("one", &[1; 1000])]);
    let begin = |nth: usize| {
        let mut stream = connect(&daemon.socket()).unwrap();
        let path = format!("POST /v1/images/drip-{nth}?kind=root HTTP/1.1");
        let length = tar.len();
        write!(
            stream,
            "{path}\r\nHost: node\r\nContent-Length: {length}\r\n\r\n"
        )
        .unwrap();
        // One that is refused may be closed by now.
        let _ = stream.write_all(&tar[..600]);
        stream
    };
    let one_more = || daemon.post("/v1/images/one-more?kind=root", &tar);
    let refused = || one_more().status == 507;
    // A short upload might have had the place of one of them.
    let mut kept: Vec<UnixStream> = (0..UPLOADS).map(begin).collect();
    eventually("the limit of uploads is reached", || {
        kept.push(begin(kept.len()));
        refused()
    });
    let error = one_more().error(ErrorKind::NoRoom);
    let ours = format!("12 uploads in progress of process {}", std::process::id());
    assert!(error.message.contains(&ours), "{}", error.message);
    // Other processes still have places.
    let theirs = "POST /v1/images/theirs?kind=root";
    assert_eq!(ask_as_somebody_else(&daemon, theirs, &tar), 200);
    // Threads are left for all other requests.
    let done = daemon.run(vm(command(&["true"]))).finish();
    assert!(done.started);
    daemon.create(&CreateVm::default());
    // An upload that continues is served.
    let served = kept.iter_mut().position(|stream| {
        let _ = stream.write_all(&tar[600..]);
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).unwrap();
        &answer == b"HTTP/1.1 200"
    });
    let served = format!("drip-{}", served.unwrap());
    drop(kept);
    eventually("a place is free again", || !refused());
    let all: Vec<Image> = daemon.get("/v1/images").json();
    let mut names: Vec<&str> = all.iter().map(|image| image.name.as_str()).collect();
    names.sort();
    assert_eq!(names, ["base", &served, "one-more", "theirs"]);
}

/// Makes a system call take a minute in each of the daemon's threads.
struct Slow(std::process::Child);

impl Slow {
    fn call(daemon: &Daemon, call: &str) -> Slow {
        let strace = Command::new("strace")
            .args(["-f", "-qq", "-o", "/dev/null"])
            .args(["-e", &format!("trace={call}")])
            .args(["-e", &format!("inject={call}:delay_enter=60s"), "-p"])
            .arg(daemon.pid().to_string())
            .spawn()
            .expect("strace is installed");
        let tasks = format!("/proc/{}/task", daemon.pid());
        eventually("all threads are watched", || {
            let mut all = std::fs::read_dir(&tasks).unwrap();
            all.all(|task| {
                let status = task.unwrap().path().join("status");
                let text = std::fs::read_to_string(status).unwrap_or_default();
                !text.contains("TracerPid:\t0\n")
            })
        });
        Slow(strace)
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn slow_removals_delay_no_other_requests() {
    let daemon = Daemon::start();
    // One more than the daemon has threads for requests.
    let names = ["one", "two", "three"];
    for name in names {
        daemon
            .create(&named(name, CreateVm::default()))
            .json::<jiffy_wire::api::Vm>();
    }
    let slow = Slow::call(&daemon, "unlinkat");
    std::thread::scope(|scope| {
        let daemon = &daemon;
        let remove = |name| move || daemon.delete(&format!("/v1/vms/{name}"));
        let removals = names.map(|name| scope.spawn(remove(name)));
        eventually("all of them have begun", || {
            let left = std::fs::read_dir(daemon.data.join("vms")).unwrap();
            let gone = left.filter(|entry| {
                let name = entry.as_ref().unwrap().file_name();
                name.to_string_lossy().starts_with(".gone-")
            });
            gone.count() == names.len()
        });
        assert_eq!(info(daemon).status, 200);
        assert!(removals.iter().all(|removal| !removal.is_finished()));
        drop(slow);
        for removal in removals {
            assert_eq!(removal.join().unwrap().status, 204);
        }
    });
    daemon.assert_nothing_left();
}

#[test]
fn slow_starts_delay_no_other_requests() {
    let daemon = Daemon::start();
    let slow = Slow::call(&daemon, "bind");
    // One more than the daemon has threads for requests.
    let names = ["one", "two", "three"];
    std::thread::scope(|scope| {
        let daemon = &daemon;
        let start = |name| move || daemon.run_detached(named(name, vm(command(&["true"]))));
        let starts = names.map(|name| scope.spawn(start(name)));
        let folder = daemon.folder.path().join("run/vms");
        eventually("all of them have begun", || {
            std::fs::read_dir(&folder).is_ok_and(|folders| folders.count() == names.len())
        });
        assert_eq!(info(daemon).status, 200);
        assert!(starts.iter().all(|start| !start.is_finished()));
        drop(slow);
        for start in starts {
            let status = start.join().unwrap().status;
            assert_eq!(status, 200);
        }
    });
}
