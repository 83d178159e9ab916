//! The other verbs against a fake node.

mod support;

use jiffy_wire::agent::Stream;
use jiffy_wire::api::{ErrorKind, LogChunk, REQUEST_HEADER, RequestState};
use jiffy_wire::frame::to_vec;
use jiffy_wire::text::list;
use std::io::{Read, Write};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use support::{FakeNode, Peer, VM_ID, install, jiffy_in, stderr, stdout, vm};

#[test]
fn ps_lists_vms() {
    let node = FakeNode::new(|_, peer| {
        let mut second = vm();
        second.id = "ffffffffffff".into();
        second.name = "bad\x1b[2Jname".into();
        second.command = None;
        second.created = 50;
        peer.json(200, &[second, vm()]);
    });
    let output = node.jiffy().args(["ps", "-a"]).output().unwrap();
    let table = stdout(&output);
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("ID "), "{table}");
    assert!(
        lines[1].starts_with(VM_ID) && lines[1].contains("sleep 1000"),
        "newest first"
    );
    assert!(lines[2].contains("bad\u{fffd}[2Jname"), "{table}");
    let quiet = node.jiffy().args(["ps", "-q"]).output().unwrap();
    assert_eq!(stdout(&quiet), format!("{VM_ID}\nffffffffffff\n"));
    let json = node
        .jiffy()
        .args(["ps", "--format", "json"])
        .output()
        .unwrap();
    let shown: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(shown[0]["cpus"], 2);
    assert_eq!(
        node.lines(),
        [
            "GET /v1/vms?all=true",
            "GET /v1/vms?all=false",
            "GET /v1/vms?all=false"
        ]
    );
}

#[test]
fn ps_marks_damaged_vms_and_prints_their_errors() {
    let node = FakeNode::new(|request, peer| {
        let mut damaged = vm();
        damaged.error = Some("The record of the VM web can't be read.".into());
        let mut failed = vm();
        failed.state = jiffy_wire::api::VmState::Exited;
        failed.error = Some("It failed a week ago.".into());
        let vms = [damaged, failed];
        let wants_text = |(name, value): &(String, String)| {
            name.eq_ignore_ascii_case("accept") && value == list::MEDIA_TYPE
        };
        if !request.headers.iter().any(wants_text) {
            return peer.json(200, &vms);
        }
        let text = list::List::of(&vms, 1000).text();
        let (kind, length) = (list::MEDIA_TYPE, text.len());
        let head =
            format!("HTTP/1.1 200 X\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n");
        peer.raw(&[head.as_bytes(), text.as_bytes()].concat());
    });
    let output = node.jiffy().args(["ps", "-a"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("(error)"), "{}", stdout(&output));
    assert_eq!(
        stderr(&output),
        "jiffy: The record of the VM web can't be read\n"
    );
}

#[test]
fn a_recording_that_could_not_be_written_is_not_begun() {
    let node = FakeNode::new(|_, peer| peer.error(ErrorKind::Internal, "It was asked.", None));
    let output = node
        .jiffy()
        .args(["sched", "trace", "--output", "/nowhere/trace.json"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert_eq!(
        stderr(&output),
        "jiffy: the recording can't be written to /nowhere/trace.json: No such file or directory\n"
    );
    assert!(node.lines().is_empty());
}

/// A node that has only the VM `web`.
fn knows_web() -> FakeNode {
    FakeNode::new(|request, peer| {
        if !request.line.contains("/web") {
            return peer.error(ErrorKind::NotFound, "There is no VM \"gone\".", None);
        }
        match request.line.starts_with("DELETE") {
            true => peer.raw(b"HTTP/1.1 204 X\r\n\r\n"),
            false => {
                let mut vm = vm();
                vm.exit = Some(jiffy_wire::agent::ExitStatus::Signal(9));
                peer.json(200, &vm);
            }
        }
    })
}

#[test]
fn verbs_on_several_vms_continue_after_a_failure() {
    let cases: [(&[&str], &str, &str); 6] = [
        (
            &["stop", "-t", "3"],
            "POST /v1/vms/web/stop?grace_ms=3000",
            "web\n",
        ),
        (&["kill"], "POST /v1/vms/web/kill", "web\n"),
        (
            &["kill", "-s", "HUP"],
            "POST /v1/vms/web/kill?signal=1",
            "web\n",
        ),
        (&["start"], "POST /v1/vms/web/start", "web\n"),
        (&["rm"], "DELETE /v1/vms/web?force=false", "web\n"),
        (&["wait"], "POST /v1/vms/web/wait", "137\n"),
    ];
    for (arguments, line, printed) in cases {
        let node = knows_web();
        let output = node
            .jiffy()
            .args(arguments)
            .args(["gone", "web"])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(125), "{arguments:?}");
        assert_eq!(stdout(&output), printed);
        assert_eq!(stderr(&output), "jiffy: There is no VM \"gone\"\n");
        assert_eq!(node.lines()[1], line);
    }
    let node = knows_web();
    let output = node
        .jiffy()
        .args(["rm", "-f", "gone", "web"])
        .output()
        .unwrap();
    assert_eq!(
        output.status.code(),
        Some(0),
        "rm -f ignores VMs that do not exist"
    );
    assert_eq!(stderr(&output), "");
    let output = node
        .jiffy()
        .args(["inspect", "gone", "web"])
        .output()
        .unwrap();
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shown.as_array().unwrap().len(), 1);
    assert_eq!(output.status.code(), Some(125));
}

#[test]
fn images_that_exist_are_shown_beside_a_missing_one() {
    let node = FakeNode::new(|request, peer| match request.line.contains("/missing") {
        true => peer.error(ErrorKind::NotFound, "There is no image \"missing\".", None),
        false => peer.json(200, &image("web")),
    });
    let output = node
        .jiffy()
        .args(["image", "inspect", "web", "missing"])
        .output()
        .unwrap();
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shown[0]["name"], "web");
    assert!(stderr(&output).contains("no image \"missing\""));
    assert_eq!(output.status.code(), Some(125));
}

#[test]
fn vm_names_are_encoded_in_the_request_path() {
    let node = knows_web();
    let _ = node
        .jiffy()
        .args(["kill", "../images/x?y"])
        .output()
        .unwrap();
    assert_eq!(node.lines(), ["POST /v1/vms/..%2Fimages%2Fx%3Fy/kill"]);
}

fn chunked(peer: &mut Peer, bytes: &[u8]) {
    peer.raw(format!("{:x}\r\n", bytes.len()).as_bytes());
    peer.raw(bytes);
    peer.raw(b"\r\n");
}

fn chunk(stream: Stream, text: &str) -> Vec<u8> {
    to_vec(&LogChunk {
        stream,
        data: text.into(),
    })
    .unwrap()
}

#[test]
fn logs_go_to_their_streams() {
    let node = FakeNode::new(|_, peer| {
        peer.raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
        let mut all = chunk(Stream::Stdout, "one\n");
        all.extend(chunk(Stream::Stderr, "two\n"));
        let (first, second) = all.split_at(9);
        chunked(peer, first);
        chunked(peer, second);
        chunked(peer, b"");
    });
    let output = node
        .jiffy()
        .args(["logs", "-f", "-n", "10", "--console", "web"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stdout(&output), "one\n");
    assert_eq!(stderr(&output), "two\n");
    assert_eq!(
        node.lines(),
        ["GET /v1/vms/web/logs?follow=true&source=console&tail=10"]
    );
}

#[test]
fn truncated_logs_are_an_error_and_a_broken_pipe_is_silent() {
    let node = FakeNode::new(|_, peer| {
        peer.raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
        chunked(peer, &chunk(Stream::Stdout, "one\n"));
    });
    let output = node.jiffy().args(["logs", "web"]).output().unwrap();
    assert_eq!(stdout(&output), "one\n");
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr(&output).contains("lost"), "{}", stderr(&output));

    let node = FakeNode::new(|_, peer| {
        peer.raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
        for _ in 0..1000 {
            chunked(peer, &chunk(Stream::Stdout, &"x".repeat(4096)));
        }
        chunked(peer, b"");
    });
    let mut child = node
        .jiffy()
        .args(["logs", "web"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut some = [0; 10];
    child.stdout.take().unwrap().read_exact(&mut some).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(141));
    assert_eq!(stderr(&output), "");
}

fn image(name: &str) -> serde_json::Value {
    serde_json::json!({
        "name": name, "digest": "abcdef0123456789", "size": 4096, "entries": 3, "created": 1
    })
}

#[test]
fn a_folder_a_tar_and_stdin_become_images() {
    let node = FakeNode::new(|request, peer| {
        let path = request.line.split('?').next().unwrap();
        peer.json(200, &image(path.rsplit('/').next().unwrap()));
    });
    let root = node.folder.path().join("root");
    std::fs::create_dir_all(root.join("etc")).unwrap();
    std::fs::write(root.join("etc/hostname"), "h").unwrap();
    let output = node
        .jiffy()
        .args(["image", "import", "one"])
        .arg(&root)
        .output()
        .unwrap();
    assert_eq!(stdout(&output), "one\n", "{}", stderr(&output));
    let sent = &node.requests()[0];
    let line = sent.line.as_str();
    assert!(line.starts_with("POST /v1/images/one?from="), "{line}");
    assert!(line.ends_with("&kind=root"), "{line}");
    let mut archive = tar::Archive::new(&sent.body[..]);
    let paths: Vec<String> = archive
        .entries()
        .unwrap()
        .map(|entry| entry.unwrap().path().unwrap().display().to_string())
        .collect();
    assert_eq!(paths, ["./", "etc/", "etc/hostname"]);

    let file = node.folder.path().join("big.tar");
    let contents: Vec<u8> = (0..3_000_000u32).map(|n| (n % 253) as u8).collect();
    std::fs::write(&file, &contents).unwrap();
    let status = node
        .jiffy()
        .args(["image", "import", "two"])
        .arg(&file)
        .status()
        .unwrap();
    assert!(status.success());
    assert!(node.requests()[1].body == contents);

    let mut child = node
        .jiffy()
        .args(["image", "import", "three", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"a tar").unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(node.requests()[2].body, b"a tar");
}

#[test]
fn a_refused_or_unreadable_import_is_reported() {
    let node = FakeNode::new(|_, peer| {
        peer.error(
            ErrorKind::Conflict,
            "There is an image \"one\" already.",
            None,
        );
    });
    let output = node
        .jiffy()
        .args(["image", "import", "one", "/nowhere/at/all"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert_eq!(
        stderr(&output),
        "jiffy: /nowhere/at/all can't be read: No such file or directory\n"
    );
    let root = node.folder.path().join("root");
    std::fs::create_dir(&root).unwrap();
    let output = node
        .jiffy()
        .args(["image", "import", "one"])
        .arg(&root)
        .output()
        .unwrap();
    assert_eq!(
        stderr(&output),
        "jiffy: There is an image \"one\" already\n"
    );
}

#[test]
fn a_refusal_during_an_upload_is_reported() {
    let root = tempfile::tempdir().unwrap();
    let run = root.path().join("run");
    std::fs::create_dir(&run).unwrap();
    let listener = std::os::unix::net::UnixListener::bind(run.join("jiffyd.sock")).unwrap();
    let big = root.path().join("big.tar");
    std::fs::File::create(&big)
        .unwrap()
        .set_len(50_000_000)
        .unwrap();
    for linger in [true, false] {
        let listener = listener.try_clone().unwrap();
        let node = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut head = [0; 100];
            stream.read_exact(&mut head).unwrap();
            let body = r#"{"kind":"conflict","message":"It is there already."}"#;
            let answer = format!(
                "HTTP/1.1 409 X\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            stream.write_all(answer.as_bytes()).unwrap();
            // Stops reading, and closes the connection at once or a little later.
            if linger {
                std::thread::sleep(std::time::Duration::from_millis(300));
            }
        });
        let output = jiffy_in(root.path())
            .args(["image", "import", "big"])
            .arg(&big)
            .output()
            .unwrap();
        node.join().unwrap();
        assert_eq!(output.status.code(), Some(125));
        assert_eq!(stderr(&output), "jiffy: It is there already\n");
    }
}

#[test]
fn version_and_doctor_need_no_node() {
    let root = tempfile::tempdir().unwrap();
    let output = jiffy_in(root.path()).arg("version").output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(
        stdout(&output).contains("does not run"),
        "{}",
        stdout(&output)
    );
    let output = jiffy_in(root.path())
        .args(["doctor", "--format", "json"])
        .output()
        .unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    // No programs of Jiffy are installed there.
    assert_eq!(report["verdict"], "nowhere");
    assert_eq!(output.status.code(), Some(4));
    let checks: Vec<&str> = report["checks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|check| check["id"].as_str().unwrap())
        .collect();
    assert_eq!(
        checks,
        [
            "kvm",
            "programs",
            "guest_kernel",
            "userfaultfd",
            "huge_pages",
            "transparent_huge_pages",
            "priorities",
            "scheduler",
            "tun",
            "cgroup2",
            "containment",
            "reflink",
            "space",
            "qemu",
            "mkfs",
            "machine"
        ]
    );
    assert!(
        !root.path().join("run").exists(),
        "version or doctor created the run folder"
    );
    assert!(!root.path().join("data").exists());
}

#[test]
fn a_node_that_does_not_start_says_why() {
    let root = tempfile::tempdir().unwrap();
    let output = jiffy_in(root.path()).arg("ps").output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(
        stderr(&output).contains("jiffyd is not installed"),
        "{}",
        stderr(&output)
    );

    install(
        root.path(),
        "jiffyd",
        "echo 'jiffyd: the data folder is full' >&2; exit 1",
    );
    let output = jiffy_in(root.path()).arg("ps").output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    let said = stderr(&output);
    assert!(
        said.starts_with(
            "jiffy: jiffyd did not start: the data folder is full\n  hint: its log is "
        ),
        "{said}"
    );
}

#[test]
fn concurrent_commands_start_one_node() {
    let root = tempfile::tempdir().unwrap();
    // The node is the test's; the installed program only makes it appear.
    let node = FakeNode::new(|_, peer| peer.json(200, &[vm()]));
    let socket = node.folder.path().join("run/jiffyd.sock");
    install(
        root.path(),
        "jiffyd",
        &format!(
            "echo \"$@\" >> {root}/started; sleep 0.2; mv {} {root}/run/jiffyd.sock; printf x >&3",
            socket.display(),
            root = root.path().display()
        ),
    );
    let children: Vec<_> = (0..5)
        .map(|_| {
            jiffy_in(root.path())
                .args(["ps", "-q"])
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert_eq!(stdout(&output), format!("{VM_ID}\n"));
    }
    let started = std::fs::read_to_string(root.path().join("started")).unwrap();
    assert_eq!(started.lines().count(), 1, "{started}");
    for option in [
        "--data",
        "--run",
        "--lib",
        "--share",
        "--socket",
        "--ready-fd 3",
    ] {
        assert!(started.contains(option), "{started}");
    }
}

#[test]
fn a_stale_socket_makes_jiffy_start_a_node() {
    let root = tempfile::tempdir().unwrap();
    let run = root.path().join("run");
    std::fs::create_dir(&run).unwrap();
    std::fs::set_permissions(&run, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let stale = std::os::unix::net::UnixListener::bind(run.join("jiffyd.sock")).unwrap();
    // Closing is not sufficient: between fork and exec, a child of another test has the socket,
    // too.
    rustix::net::shutdown(&stale, rustix::net::Shutdown::Both).unwrap();
    install(root.path(), "jiffyd", "echo started >&2; exit 1");
    let output = jiffy_in(root.path()).arg("ps").output().unwrap();
    assert!(
        stderr(&output).contains("did not start: started"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_failed_machine_start_names_what_is_missing() {
    let root = tempfile::tempdir().unwrap();
    let output = jiffy_in(root.path())
        .args(["--machine", "always", "ps"])
        .env("PATH", root.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125));
    let said = stderr(&output);
    let lines: Vec<&str> = said.lines().collect();
    assert!(
        lines[0].starts_with("jiffy: the machine needs QEMU"),
        "{said}"
    );
    assert!(lines[1].starts_with("  hint: apt-get install"), "{said}");
    assert_eq!(lines.len(), 2, "a start was reported");
    let status = jiffy_in(root.path())
        .args(["machine", "status", "--format", "json"])
        .output()
        .unwrap();
    assert_eq!(status.status.code(), Some(3));
    let shown: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(shown["state"], "stopped");
    let shell = jiffy_in(root.path())
        .args(["machine", "shell"])
        .output()
        .unwrap();
    assert!(stderr(&shell).starts_with("jiffy: the machine is not running\n  hint:"));
}

#[test]
fn kernels_are_checked_without_a_node() {
    let root = tempfile::tempdir().unwrap();
    let config = root.path().join("config");
    std::fs::write(&config, "CONFIG_64BIT=y\n# CONFIG_PVH is not set\n").unwrap();
    let check = |file: &std::path::Path| {
        let mut jiffy = jiffy_in(root.path());
        jiffy.args(["kernel", "check"]).arg(file).output().unwrap()
    };
    let output = check(&config);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(
        stdout(&output).contains("CONFIG_PVH"),
        "{}",
        stdout(&output)
    );
    assert!(stdout(&output).contains("guests do not boot with it"));
    std::fs::write(&config, "neither\n").unwrap();
    let output = check(&config);
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr(&output).contains("neither a kernel image nor a configuration"));
    let output = check(&root.path().join("missing"));
    assert!(stderr(&output).contains("can't be read: No such file"));
}

#[test]
fn a_kernel_build_is_shown_and_its_path_printed() {
    let root = tempfile::tempdir().unwrap();
    let jiffy = |variant: &str| {
        let mut jiffy = jiffy_in(root.path());
        jiffy.args(["kernel", "build", variant]).output().unwrap()
    };
    assert!(stderr(&jiffy("base")).contains("there is no kernel build"));
    let folder = root.path().join("share/kernel");
    std::fs::create_dir_all(&folder).unwrap();
    let script = install(
        root.path(),
        "script",
        "[ $1 = full ] || { echo 'kernel/build: gcc is missing' >&2; exit 1; }
         echo 'step: unpacking' >&2; echo 'progress: 1/2' >&2; echo \"$0\"",
    );
    std::fs::rename(script, folder.join("build")).unwrap();
    let output = jiffy("full");
    assert_eq!(
        stdout(&output),
        format!("{}\n", folder.join("build").display())
    );
    assert_eq!(stderr(&output), "jiffy: kernel: unpacking\n");
    let output = jiffy("base");
    assert_eq!(output.status.code(), Some(125));
    assert_eq!(
        stderr(&output),
        "jiffy: the kernel was not built: gcc is missing\n"
    );
    assert!(stderr(&jiffy("odd")).contains("base, full, plain or sched"));
}

#[test]
fn completions_and_help_are_printed() {
    let root = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let output = jiffy_in(root.path())
            .args(["completions", shell])
            .output()
            .unwrap();
        assert!(stdout(&output).contains("critical-chain"), "{shell}");
    }
    let help = jiffy_in(root.path())
        .args(["doctor", "--help"])
        .output()
        .unwrap();
    assert!(stdout(&help).contains("3 when they run only in the machine"));
    let wrong = jiffy_in(root.path()).arg("nonsense").output().unwrap();
    assert_eq!(wrong.status.code(), Some(2));
}

#[test]
fn bench_pager_passes_arguments_and_exit_status_through() {
    let folder = tempfile::tempdir().unwrap();
    install(
        folder.path(),
        "jiffy-pager",
        "echo \"$@\"; echo complaint >&2; exit 7",
    );
    let recording = folder.path().join("recording");
    let bench = |words: &[&str]| {
        let mut jiffy = jiffy_in(folder.path());
        jiffy.args(["bench", "pager"]).arg(&recording).args(words);
        jiffy.output().unwrap()
    };
    let without = bench(&[]);
    assert_eq!(without.status.code(), Some(125));
    assert!(stderr(&without).contains("--image"), "{}", stderr(&without));

    let image = folder.path().join("ram.image");
    std::fs::write(&image, "").unwrap();
    let output = bench(&["--repeat", "5", "--cold", "--only=-x"]);
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(stderr(&output), "complaint\n");
    let wanted = format!(
        "replay --image {} --repeat 5 --cold --only=-x --format text -- {}\n",
        image.display(),
        recording.display()
    );
    assert_eq!(stdout(&output), wanted);
}

/// A node that closes the connection without an answer for the first so many requests, then has
/// `web` once.
fn restarted(times: usize) -> FakeNode {
    let left = std::sync::Mutex::new(times);
    FakeNode::new(move |request, peer| {
        let mut left = left.lock().unwrap();
        if *left > 0 {
            *left -= 1;
            return;
        }
        match request.line.starts_with("DELETE") {
            true => peer.error(ErrorKind::NotFound, "There is no VM web.", None),
            false if request.line.contains("/v1/vms?") => peer.json(200, &[vm()]),
            false => peer.json(200, &vm()),
        }
    })
}

#[test]
fn idempotent_requests_are_retried_when_the_node_restarts() {
    for (arguments, line) in [
        (&["ps"][..], "GET /v1/vms?all=false"),
        (&["inspect", "web"], "GET /v1/vms/web"),
        (&["stop", "web"], "POST /v1/vms/web/stop"),
        (&["wake", "web"], "POST /v1/vms/web/wake"),
        (&["rm", "web"], "DELETE /v1/vms/web?force=false"),
    ] {
        let node = restarted(2);
        let output = node.jiffy().args(arguments).output().unwrap();
        assert!(output.status.success(), "{line}: {}", stderr(&output));
        let lines = node.lines();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines.iter().all(|seen| seen.starts_with(line)), "{lines:?}");
    }
}

/// Requests that must not be done twice.
const ONCE: [&[&str]; 7] = [
    &["run", "-d", "--", "true"],
    &["create", "--name", "web"],
    &["exec", "web", "--", "true"],
    &["kill", "web"],
    &["kill", "--signal", "HUP", "web"],
    &["fork", "web"],
    &["snapshot", "create", "web", "one"],
];

/// A node that closes the connection without an answer for the first request, and then says this
/// about it.
fn asked(state: impl Fn(&mut Peer) + Send + Sync + 'static) -> FakeNode {
    let lost = AtomicBool::new(false);
    FakeNode::new(move |request, peer| {
        if request.line.starts_with("GET /v1/requests/") {
            return state(peer);
        }
        if lost.swap(true, Ordering::Relaxed) {
            peer.error(ErrorKind::Conflict, "It came again.", None);
        }
    })
}

#[test]
fn a_lost_request_that_had_begun_is_not_repeated() {
    for (begun, said) in [
        (Some(true), "it had begun the request"),
        (None, "may have been started"),
    ] {
        for arguments in ONCE {
            let node = asked(move |peer| peer.json(200, &RequestState { begun }));
            let output = node.jiffy().args(arguments).output().unwrap();
            assert_eq!(output.status.code(), Some(125));
            assert!(stderr(&output).contains(said), "{}", stderr(&output));
            let [first, asked] = &node.requests()[..] else {
                panic!("{arguments:?}: {:?}", node.lines());
            };
            assert_eq!(
                asked.line,
                format!(
                    "GET /v1/requests/{}",
                    first.header(REQUEST_HEADER).expect("an id")
                )
            );
        }
    }
}

#[test]
fn a_lost_request_that_had_not_begun_is_sent_again() {
    for arguments in ONCE {
        let begun = Some(false);
        let node = asked(move |peer| peer.json(200, &RequestState { begun }));
        let output = node.jiffy().args(arguments).output().unwrap();
        assert!(stderr(&output).contains("It came again"), "{arguments:?}");
        let [first, _, again] = &node.requests()[..] else {
            panic!("{arguments:?}: {:?}", node.lines());
        };
        assert_eq!((&first.line, &first.body), (&again.line, &again.body));
        // The first may still arrive: the node refuses it now.
        assert_ne!(first.header(REQUEST_HEADER), again.header(REQUEST_HEADER));
        assert!(again.header(REQUEST_HEADER).is_some());
    }
}

#[test]
fn a_lost_request_to_an_older_node_is_not_repeated() {
    let node = asked(|peer| peer.error(ErrorKind::NotFound, "The API has no such path.", None));
    let output = node.jiffy().args(ONCE[0]).output().unwrap();
    assert!(
        stderr(&output).contains("may have been started"),
        "{}",
        stderr(&output)
    );
    assert_eq!(node.lines().len(), 2);
}

#[test]
fn waiting_for_a_lost_node_ends_after_a_time_limit() {
    let node = FakeNode::new(|_, _| ());
    let output = node.jiffy().arg("ps").output().unwrap();
    assert!(!output.status.success());
    let said = stderr(&output);
    assert!(said.contains("no jiffyd answered for 5 s"), "{said}");
    assert!(node.lines().len() > 1, "it was not sent again");
}
