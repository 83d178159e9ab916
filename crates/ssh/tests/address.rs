//! `jiffy ssh --address` with a node that knows one VM, and a program in place of OpenSSH's client.

use serde_json::json;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Output};
use std::sync::mpsc;
use std::thread;

const ID: &str = "0123456789ab";

/// Runs `jiffy ssh --address --wait 5s web`; returns its output and the requests to the node.
fn ssh_to_a_vm_that_is(state: &'static str) -> (Output, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::DirBuilder::new()
        .mode(0o700)
        .create(path("run"))
        .unwrap();
    fs::create_dir(path("bin")).unwrap();
    let print = "#!/bin/sh\nprintf '%s\\n' \"$@\"\n";
    jiffy_sys::testing::write_program(&path("bin/ssh"), print);
    let listener = UnixListener::bind(path("run/jiffyd.sock")).unwrap();
    let (seen, requests) = mpsc::channel();
    thread::spawn(move || {
        for client in listener.incoming() {
            serve(client.unwrap(), state, &seen);
        }
    });
    let mut jiffy = Command::new(env!("CARGO_BIN_EXE_jiffy-ssh"));
    for name in ["data", "run", "lib", "share"] {
        jiffy.env(format!("JIFFY_{}", name.to_uppercase()), path(name));
    }
    let output = jiffy
        .env("JIFFY_MACHINE", "never")
        .env("PATH", path("bin"))
        .args(["ssh", "--address", "--wait", "5s", "web"])
        .output()
        .unwrap();
    (output, requests.try_iter().collect())
}

/// Sends a request's line to `seen`, then answers the request: `jiffy` may end at the answer.
fn serve(mut client: UnixStream, state: &str, seen: &mpsc::Sender<String>) {
    let mut reader = BufReader::new(client.try_clone().unwrap());
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let mut header = String::new();
    let mut length = 0;
    while header != "\r\n" {
        header.clear();
        reader.read_line(&mut header).unwrap();
        if let Some(value) = header.to_lowercase().strip_prefix("content-length: ") {
            length = value.trim().parse().unwrap();
        }
    }
    reader.read_exact(&mut vec![0; length]).unwrap();
    let _ = seen.send(line.trim_end().trim_end_matches(" HTTP/1.1").to_owned());
    let woken = line.starts_with("POST");
    let body = json!({
        "id": ID, "name": "web", "state": if woken { "running" } else { state },
        "image": "base", "kernel": "base", "cpus": 1, "memory_mib": 256, "command": null,
        "disks": [], "created": 100, "started": 100, "ended": null, "pid": 42, "cid": 3,
        "exit": null, "error": null, "remove": false,
        "network": {"name": "default", "addresses": ["192.0.2.7"]}
    })
    .to_string();
    let head = "HTTP/1.1 200 X\r\ncontent-type: application/json\r\nconnection: close";
    let length = body.len();
    write!(client, "{head}\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
}

#[test]
fn a_vm_that_sleeps_is_woken_before_its_address_is_used() {
    for state in ["hibernated", "running"] {
        let (output, requests) = ssh_to_a_vm_that_is(state);
        assert!(output.status.success(), "{output:?}");
        let given = String::from_utf8(output.stdout).unwrap();
        assert!(given.lines().any(|word| word == "192.0.2.7"), "{given}");
        let wake = format!("POST /v1/vms/{ID}/wake?wait_s=5");
        assert_eq!(requests, ["GET /v1/vms/web", &wake]);
    }
}

#[test]
fn a_paused_vm_is_refused() {
    let (output, requests) = ssh_to_a_vm_that_is("paused");
    assert_eq!(output.status.code(), Some(125));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        said,
        "jiffy: web is paused\n  hint: `jiffy resume web` resumes it\n"
    );
    assert_eq!(requests, ["GET /v1/vms/web"]);
}
