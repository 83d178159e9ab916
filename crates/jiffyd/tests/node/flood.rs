//! Clients that wait, drip, flood or never end: they have bounds, and nobody else
//! waits for them.

use crate::client::{Answer, connect, request};
use crate::daemon::{Daemon, command, eventually, named, shell, started, tar_of, vm};
use jiffy_wire::api::{CreateVm, ErrorKind, Image};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;

const SOCKET: &str = "JIFFY_TEST_SOCKET";
/// `--connections`, and what one process may have of them.
const ALL: usize = 16;
const SHARE: usize = 12;

/// Asks as another process does.
fn ask_as_somebody_else(daemon: &Daemon) -> String {
    let asked = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "flood::asks", "--ignored", "--nocapture"])
        .env(SOCKET, daemon.socket())
        .output()
        .unwrap();
    String::from_utf8(asked.stdout).unwrap()
}

#[test]
#[ignore = "what ask_as_somebody_else runs"]
fn asks() {
    let Some(socket) = std::env::var_os(SOCKET) else {
        return;
    };
    let answer = request(
        connect(socket.as_ref()).unwrap(),
        "GET /v1/info HTTP/1.1",
        b"",
    );
    println!("status {}", answer.unwrap().status);
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
fn who_keeps_connections_open_is_refused_and_others_are_served() {
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
    let kept: Vec<UnixStream> = (0..SHARE).map(|at| begun(beginnings[at % 3])).collect();
    let error = info(&daemon).error(ErrorKind::NoRoom);
    let us = format!("of process {}", std::process::id());
    assert!(error.message.contains(&us), "{}", error.message);
    assert!(ask_as_somebody_else(&daemon).contains("status 200"));
    // An end does not wait for them either.
    drop(kept);
    eventually("there is room again", || info(&daemon).status == 200);
    let _kept: Vec<UnixStream> = (0..SHARE + 40).map(|_| begun(b"")).collect();
    daemon.shut_down_by_signal();
}

#[test]
fn streams_have_places_like_other_connections() {
    let daemon = flooded();
    let mut frames = daemon.run(named("box", vm(shell("while true; do sleep 0.1; done"))));
    started(&mut frames);
    let mut streams = vec![frames];
    while streams.len() < SHARE {
        match daemon.stream("/v1/vms/box/attach", b"") {
            Ok(stream) => streams.push(stream),
            // The connection before it is about to end.
            Err(answer) => drop(answer.error(ErrorKind::NoRoom)),
        }
    }
    let answer = daemon.stream("/v1/vms/box/attach", b"").unwrap_err();
    answer.error(ErrorKind::NoRoom);
    assert!(ask_as_somebody_else(&daemon).contains("status 200"));
    streams.clear();
    eventually("there is room again", || info(&daemon).status == 200);
}

#[test]
fn uploads_that_never_end_are_few_and_hold_up_nobody() {
    const UPLOADS: usize = 16;
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
        stream.write_all(&tar[..600]).unwrap();
        stream
    };
    let refused = || daemon.post("/v1/images/one-more?kind=root", &tar).status == 507;
    // One that ends at once may have had the place of one of them.
    let mut kept: Vec<UnixStream> = (0..UPLOADS).map(begin).collect();
    eventually("as many are under way as may be", || {
        kept.push(begin(kept.len()));
        refused()
    });
    // Threads are left for everything else.
    let done = daemon.run(vm(command(&["true"]))).finish();
    assert!(done.started);
    daemon.create(&CreateVm::default());
    // Whoever goes on is served.
    let served = kept.iter_mut().position(|stream| {
        let _ = stream.write_all(&tar[600..]);
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).unwrap();
        &answer == b"HTTP/1.1 200"
    });
    let served = format!("drip-{}", served.unwrap());
    drop(kept);
    eventually("there is room again", || !refused());
    let all: Vec<Image> = daemon.get("/v1/images").json();
    let mut names: Vec<&str> = all.iter().map(|image| image.name.as_str()).collect();
    names.sort();
    assert_eq!(names, ["base", &served, "one-more"]);
}

/// Has each of the daemon's threads take a minute for each file that it removes.
struct SlowRemovals(std::process::Child);

impl SlowRemovals {
    fn of(daemon: &Daemon) -> SlowRemovals {
        let strace = Command::new("strace")
            .args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=unlinkat"])
            .args(["-e", "inject=unlinkat:delay_enter=60s", "-p"])
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
        SlowRemovals(strace)
    }
}

impl Drop for SlowRemovals {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn what_takes_long_to_remove_holds_up_nobody() {
    let daemon = Daemon::start();
    // As many as the daemon has threads that answer, and one more.
    let names = ["one", "two", "three"];
    for name in names {
        daemon
            .create(&named(name, CreateVm::default()))
            .json::<jiffy_wire::api::Vm>();
    }
    let slow = SlowRemovals::of(&daemon);
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
    daemon.nothing_left();
}
