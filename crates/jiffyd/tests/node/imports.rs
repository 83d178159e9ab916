//! The process that makes an image: killed, cancelled, missing, or taken over.

use crate::client::{answer, connect};
use crate::daemon::{Daemon, eventually, is_alive, kill, processes, tar_of};
use crate::images::{by_name, noise, pull};
use crate::pulls::kept;
use crate::registry::Registry;
use jiffy_sys::testing::write_program;
use jiffy_wire::api::{ErrorKind, Image};
use serde_json::json;
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Processes that make images for this daemon.
fn importers(daemon: &Daemon) -> Vec<u32> {
    let marker = format!("{}/lib/jiffy-import", daemon.folder.path().display());
    processes(|line| line.contains(&marker))
}

/// Puts a script in the place of the program.
fn replace_program(daemon: &Daemon, script: &str) {
    let program = daemon.folder.path().join("lib/jiffy-import");
    fs::remove_file(&program).unwrap();
    write_program(&program, &format!("#!/bin/sh\n{script}\n"));
}

/// Begins an import, of which only these bytes are sent; returns its process.
fn half(daemon: &Daemon, sent: &[u8]) -> (UnixStream, u32) {
    let mut stream = connect(&daemon.socket()).unwrap();
    let head = "POST /v1/images/mine?kind=root HTTP/1.1\r\nHost: node\r\nConnection: close\r\nContent-Length: 5000000\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(sent).unwrap();
    eventually("the process is started", || importers(daemon).len() == 1);
    let pid = importers(daemon)[0];
    (stream, pid)
}

fn tar() -> Vec<u8> {
    tar_of(&[("noise", &noise(1 << 20))])
}

/// The daemon makes the same image as if nothing had happened.
fn assert_recovers(daemon: &Daemon) {
    let _: Image = daemon.post("/v1/images/mine?kind=root", &tar()).json();
    assert_eq!(daemon.delete("/v1/images/mine").status, 204);
    assert!(importers(daemon).is_empty());
}

fn leaves_nothing(daemon: &Daemon) {
    eventually("nothing is left", || kept(daemon).is_empty());
}

#[test]
fn a_killed_process_is_the_error_of_its_import_only() {
    let daemon = Daemon::start();
    let (mut stream, pid) = half(&daemon, &tar());
    kill(pid);
    // Its end is noticed when the client sends more after it; the pipe takes what comes before.
    for _ in 0..500 {
        if stream.write_all(&[0; 4096]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let error = answer(&stream).unwrap().error(ErrorKind::Internal);
    assert_eq!(
        error.message,
        "The image can't be made: the import process was ended by signal 9, perhaps for lack of memory, before the image was complete."
    );
    leaves_nothing(&daemon);
    assert_recovers(&daemon);
}

#[test]
fn an_import_whose_client_or_daemon_is_gone_ends() {
    let mut daemon = Daemon::start();
    let (stream, pid) = half(&daemon, &tar());
    drop(stream);
    eventually("the process ends with its client", || !is_alive(pid));
    leaves_nothing(&daemon);

    let (_stream, pid) = half(&daemon, &tar());
    daemon.killed();
    eventually("the process ends with its daemon", || !is_alive(pid));
    daemon.up();
    leaves_nothing(&daemon);
    assert_recovers(&daemon);
}

#[test]
fn a_process_that_hangs_ends_with_the_last_watcher_of_its_pull() {
    let registry = Registry::start();
    registry.put("web:1", &[("file", &[7; 50_000])], json!({}));
    let daemon = Daemon::start();
    replace_program(&daemon, "while :; do sleep 0.05; done");
    let body = serde_json::to_vec(&by_name(&registry.name("web:1"))).unwrap();
    let mut stream = connect(&daemon.socket()).unwrap();
    let head = format!(
        "POST /v1/pulls HTTP/1.1\r\nHost: node\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(&body).unwrap();
    eventually("the process is started", || importers(&daemon).len() == 1);
    let pid = importers(&daemon)[0];
    drop(stream);
    eventually("the process ends with its watcher", || !is_alive(pid));
}

#[test]
fn what_a_process_that_was_taken_over_says_is_bounded() {
    let registry = Registry::start();
    registry.put("web:1", &[("file", &[7; 50_000])], json!({}));
    let wanted = by_name(&registry.name("web:1"));
    let daemon = Daemon::start();
    for (script, expected) in [
        ("kill -SEGV $$", "ended by signal 11"),
        ("exit 7", "ended with status 7"),
        (
            "printf '\\377\\377\\377\\177' >&3; exec sleep 1000",
            "over the limit",
        ),
        (
            "printf '\\10\\0\\0\\0\\1\\0\\0\\0abcd' >&3; exec sleep 1000",
            "not valid",
        ),
        ("cat /dev/urandom >&3", "can't be understood"),
    ] {
        replace_program(&daemon, script);
        let error = pull(&daemon, &wanted).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Internal, "{}", error.message);
        assert!(error.message.contains(expected), "{}", error.message);
        assert!(error.message.len() < 500, "{}", error.message);
    }
    // Blobs are kept for the next pull.
    let pulls = daemon.data.join("pulls");
    let left = kept(&daemon);
    assert!(left.iter().all(|path| path.starts_with(&pulls)), "{left:?}");
}

#[test]
fn a_missing_program_is_named() {
    let daemon = Daemon::start();
    let program = daemon.folder.path().join("lib/jiffy-import");
    fs::remove_file(&program).unwrap();
    let answer = daemon.post("/v1/images/mine?kind=root", &tar());
    let error = answer.error(ErrorKind::Internal);
    let name = program.display().to_string();
    assert!(error.message.contains(&name), "{}", error.message);
    assert!(error.hint.unwrap().contains("--lib"));
    leaves_nothing(&daemon);
}
