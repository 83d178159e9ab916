//! `jiffy run` and `jiffy exec` against a fake node.

mod support;

use jiffy_wire::agent::{ExecInput, ExecOutput, ExitStatus, StartError, StartFailure, Stream};
use jiffy_wire::api::{ApiError, ErrorKind, NoCommand, PullImage, PullStep, RunVm};
use jiffy_wire::timeline::{Span, Timeline, Track, names};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{Read, Write};
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use support::{
    FakeNode, Peer, Request, TIMEOUT, VM_ID, eventually, is_session, stderr, stdout, vm,
};

fn pid(child: &Child) -> Pid {
    Pid::from_child(child)
}

/// Reads until the command has printed `ready`.
fn until_ready(child: &mut Child) {
    let mut ready = [0; 6];
    let stdout = child.stdout.as_mut().unwrap();
    stdout.read_exact(&mut ready).unwrap();
}

fn ends_with(code: i32) -> FakeNode {
    FakeNode::playing(move |peer| {
        peer.send(&ExecOutput::Started { pid: 7 });
        peer.output(Stream::Stdout, b"to stdout\n");
        peer.output(Stream::Stderr, b"to stderr\n");
        peer.exit(code);
    })
}

#[test]
fn output_and_exit_status_are_the_commands_own() {
    for code in [0, 1, 42, 255] {
        let node = ends_with(code);
        let output = node.jiffy().args(["run", "--", "date"]).output().unwrap();
        assert_eq!(output.status.code(), Some(code));
        assert_eq!(stdout(&output), "to stdout\n");
        assert_eq!(stderr(&output), "to stderr\n");
    }
}

#[test]
fn the_run_request_carries_the_given_options() {
    let node = ends_with(0);
    let status = node
        .jiffy()
        .args([
            "run", "--name", "box", "--cpus", "2", "-m", "1G", "--image", "debian",
        ])
        .args([
            "-e",
            "A=1",
            "-e",
            "FROM_SHELL",
            "-e",
            "UNSET_THERE",
            "-w",
            "/srv",
            "-u",
            "1:2",
        ])
        .args([
            "--disk",
            "data:1G",
            "--init",
            "--hostname",
            "h",
            "--rm",
            "echo",
            "-n",
            "x",
        ])
        .env("FROM_SHELL", "yes")
        .env_remove("UNSET_THERE")
        .status()
        .unwrap();
    assert!(status.success());
    let request = &node.requests()[0];
    assert_eq!(request.line, "POST /v1/run");
    let header = |name: &str| request.header(name).map(str::to_lowercase);
    assert_eq!(header("connection").as_deref(), Some("upgrade"));
    assert_eq!(header("upgrade").as_deref(), Some("jiffy-frames"));
    let run: RunVm = request.json();
    let command = run.vm.command.unwrap();
    assert_eq!(command.argv, ["echo", "-n", "x"]);
    assert_eq!(command.env, ["A=1", "FROM_SHELL=yes"]);
    assert_eq!(command.cwd.as_deref(), Some("/srv"));
    assert_eq!(command.user.as_deref(), Some("1:2"));
    assert!(command.tty.is_none() && command.stdin);
    assert_eq!(run.vm.cpus, Some(2));
    assert_eq!(run.vm.memory_mib, Some(1024));
    assert_eq!(run.vm.disks[0].size_mib, Some(1024));
    assert_eq!(run.vm.init, Some(vec!["/sbin/init".to_owned()]));
    assert!(run.vm.remove && !run.detach && !run.vm.timeline);
    assert_eq!(node.requests().len(), 1, "one request is enough");
}

#[test]
fn stdin_and_its_end_are_forwarded() {
    let node = FakeNode::playing(|peer| {
        let input = peer.stdin();
        peer.output(Stream::Stdout, &input);
        peer.exit(0);
    });
    let mut child = node
        .jiffy()
        .args(["run", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let sent: Vec<u8> = (0..1_000_000u32).map(|n| (n * 31 % 251) as u8).collect();
    let mut stdin = child.stdin.take().unwrap();
    let to_send = sent.clone();
    let sending = std::thread::spawn(move || stdin.write_all(&to_send).unwrap());
    let output = child.wait_with_output().unwrap();
    sending.join().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stdout == sent, "a megabyte went there and back");
}

#[test]
fn a_file_on_stdin_is_forwarded() {
    let node = FakeNode::playing(|peer| {
        let input = peer.stdin();
        peer.output(Stream::Stdout, &input);
        peer.exit(0);
    });
    let file = node.folder.path().join("input");
    std::fs::write(&file, b"from a file").unwrap();
    let output = node
        .jiffy()
        .args(["run", "cat"])
        .stdin(std::fs::File::open(&file).unwrap())
        .output()
        .unwrap();
    assert_eq!(stdout(&output), "from a file");
}

#[test]
fn an_idle_stdin_does_not_delay_the_exit() {
    let node = ends_with(3);
    let mut child = node
        .jiffy()
        .args(["run", "true"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let idle = child.stdin.take();
    assert_eq!(child.wait().unwrap().code(), Some(3));
    drop(idle);
}

#[test]
fn an_endless_stdin_does_not_delay_the_exit() {
    let node = FakeNode::playing(|peer| {
        let _ = peer.receive::<ExecInput>();
        peer.exit(3);
    });
    // Whether it first receives the end or notices that the reader is gone is random.
    for _ in 0..20 {
        let mut child = node
            .jiffy()
            .args(["exec", "web", "head", "-c1"])
            .stdin(std::fs::File::open("/dev/zero").unwrap())
            .spawn()
            .unwrap();
        let mut status = None;
        eventually("it ends", || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        assert_eq!(status.unwrap().code(), Some(3));
    }
}

#[test]
fn signals_reach_the_command() {
    for signal in [
        Signal::TERM,
        Signal::INT,
        Signal::HUP,
        Signal::QUIT,
        Signal::USR1,
        Signal::USR2,
    ] {
        let number = signal.as_raw();
        let node = FakeNode::playing(|peer| {
            peer.output(Stream::Stdout, b"ready\n");
            let signal = peer.signal();
            peer.send(&ExecOutput::Exited(ExitStatus::Signal(signal)));
        });
        let mut child = node
            .jiffy()
            .args(["run", "sleep", "1000"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        until_ready(&mut child);
        kill_process(pid(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(128 + number));
    }
}

#[test]
fn a_signal_ends_a_client_that_only_watches_and_is_not_forwarded() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP, Signal::USR1] {
        let (received, messages) = mpsc::channel();
        let received = std::sync::Mutex::new(received);
        let node = FakeNode::playing(move |peer| {
            peer.output(Stream::Stdout, b"ready\n");
            let _ = received.lock().unwrap().send(peer.receive::<ExecInput>());
        });
        let mut child = node
            .jiffy()
            .args(["attach", "--no-stdin", "--wait", "5s", "web"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        until_ready(&mut child);
        kill_process(pid(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(128 + signal.as_raw()));
        assert_eq!(messages.recv_timeout(TIMEOUT).unwrap(), None);
        assert_eq!(
            node.session().line,
            "POST /v1/vms/web/attach?stdin=false&wait_s=5"
        );
    }
}

#[test]
fn a_closed_stdout_ends_a_client_that_only_watches() {
    let (received, messages) = mpsc::channel();
    let received = std::sync::Mutex::new(received);
    let node = FakeNode::playing(move |peer| {
        while peer.try_output(b"y\n") {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = received.lock().unwrap().send(peer.receive::<ExecInput>());
    });
    let mut child = node
        .jiffy()
        .args(["attach", "--no-stdin", "web"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 2];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + 13));
    assert_eq!(messages.recv_timeout(TIMEOUT).unwrap(), None);
}

/// A command that prints `ready` and ignores every signal.
fn stubborn() -> FakeNode {
    FakeNode::playing(|peer| {
        peer.output(Stream::Stdout, b"ready\n");
        while peer.receive::<ExecInput>().is_some() {}
    })
}

/// Whether a process handles this signal.
fn catches(child: &std::process::Child, signal: Signal) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = u64::from_str_radix(caught.unwrap().trim(), 16).unwrap();
    caught & 1 << (signal.as_raw() - 1) != 0
}

fn interrupted_twice(node: &FakeNode, arguments: &[&str]) -> Option<i32> {
    let mut child = node
        .jiffy()
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until_ready(&mut child);
    kill_process(pid(&child), Signal::INT).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(
        child.try_wait().unwrap().is_none(),
        "one Ctrl-C ended the session"
    );
    // Two signals count if they come within a second, which on a busy host some don't.
    let mut ended = None;
    eventually("it ends", || {
        let _ = kill_process(pid(&child), Signal::INT);
        std::thread::sleep(Duration::from_millis(100));
        ended = child.try_wait().unwrap();
        ended.is_some()
    });
    ended.unwrap().code()
}

#[test]
fn a_second_interrupt_ends_the_vm() {
    let node = stubborn();
    assert_eq!(interrupted_twice(&node, &["run", "stubborn"]), Some(130));
    // It waits only 3 s for the answer.
    eventually("the VM is ended", || node.lines().len() > 1);
    assert_eq!(
        node.lines(),
        [
            "POST /v1/run".to_owned(),
            format!("POST /v1/vms/{VM_ID}/kill")
        ]
    );
}

#[test]
fn a_second_interrupt_detaches_from_an_exec_and_keeps_the_vm() {
    let node = stubborn();
    assert_eq!(
        interrupted_twice(&node, &["exec", "web", "stubborn"]),
        Some(130)
    );
    assert_eq!(node.lines(), ["POST /v1/vms/web/exec"]);
}

#[test]
fn a_signal_overtakes_unread_stdin() {
    let (told, hears) = mpsc::channel::<String>();
    let told = std::sync::Mutex::new(told);
    let (over, is_over) = mpsc::channel::<()>();
    let is_over = std::sync::Mutex::new(is_over);
    let node = FakeNode::new(move |request, peer| {
        if is_session(request) {
            peer.upgrade();
            peer.output(Stream::Stdout, b"ready\n");
            // Reads nothing, so the connection becomes full.
            let is_over = is_over.lock().unwrap();
            is_over.recv().unwrap();
            peer.send(&ExecOutput::Exited(ExitStatus::Signal(15)));
            let _ = is_over.recv();
        } else {
            let _ = told.lock().unwrap().send(request.line.clone());
            peer.json(200, &vm());
        }
    });
    let mut child = node
        .jiffy()
        .args(["run", "sleep", "1000"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::thread::spawn(move || while stdin.write_all(&[0; 65536]).is_ok() {});
    until_ready(&mut child);
    // As long as the connection is not full, the signal is sent through it.
    let mut line = None;
    eventually("a signal is sent as a request of its own", || {
        kill_process(pid(&child), Signal::TERM).unwrap();
        line = hears.recv_timeout(Duration::from_millis(300)).ok();
        line.is_some()
    });
    assert_eq!(
        line.unwrap(),
        format!("POST /v1/vms/{VM_ID}/kill?signal=15")
    );
    over.send(()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    drop((over, hears));
}

#[test]
fn a_signal_ends_jiffy_when_the_exec_does_not_read_stdin() {
    let (over, is_over) = mpsc::channel::<()>();
    let is_over = std::sync::Mutex::new(is_over);
    let node = FakeNode::playing(move |peer| {
        peer.output(Stream::Stdout, b"ready\n");
        let _ = is_over.lock().unwrap().recv();
    });
    let mut child = node
        .jiffy()
        .args(["exec", "web", "sleep", "1000"])
        .stdin(std::fs::File::open("/dev/zero").unwrap())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    until_ready(&mut child);
    // The first signal may find space, and wait in the connection forever.
    let mut status = None;
    eventually("it ends", || {
        let _ = kill_process(pid(&child), Signal::TERM);
        std::thread::sleep(Duration::from_millis(300));
        status = child.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(status.unwrap().code(), Some(143));
    assert_eq!(node.lines(), ["POST /v1/vms/web/exec"]);
    drop(over);
}

#[test]
fn an_exec_that_reads_stdin_slowly_gets_the_signal() {
    // A second without space is too long. If the whole host was stopped for so long, the test is
    // repeated.
    loop {
        match exec_that_is_slow_to_read() {
            (Some(138), took) if took > Duration::from_secs(1) => {}
            (code, _) => return assert_eq!(code, Some(10)),
        }
    }
}

/// The status of an exec that gets a signal shortly before its node reads on, and how long it took
/// to end after that signal.
fn exec_that_is_slow_to_read() -> (Option<i32>, Duration) {
    let (sent, is_sent) = mpsc::channel::<()>();
    let is_sent = std::sync::Mutex::new(is_sent);
    let node = FakeNode::playing(move |peer| {
        peer.output(Stream::Stdout, b"ready\n");
        is_sent.lock().unwrap().recv().unwrap();
        let signal = peer.signal();
        peer.exit(signal);
    });
    let mut child = node
        .jiffy()
        .args(["exec", "web", "dd"])
        .stdin(std::fs::File::open("/dev/zero").unwrap())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    until_ready(&mut child);
    // The connection is full by now.
    std::thread::sleep(Duration::from_millis(300));
    let signalled = Instant::now();
    kill_process(pid(&child), Signal::USR1).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    sent.send(()).unwrap();
    (child.wait().unwrap().code(), signalled.elapsed())
}

#[test]
fn a_command_that_cannot_start_is_named() {
    for (kind, code) in [
        (StartFailure::NotFound, 127),
        (StartFailure::NotExecutable, 126),
    ] {
        let node = FakeNode::playing(move |peer| {
            peer.send(&ExecOutput::Failed(StartError {
                kind,
                message: "nope: \x1b[31mno such program".into(),
            }));
        });
        let output = node.jiffy().args(["run", "nope"]).output().unwrap();
        assert_eq!(output.status.code(), Some(code));
        assert_eq!(
            stderr(&output),
            "jiffy: nope: \u{fffd}[31mno such program\n"
        );
    }
}

#[test]
fn errors_of_the_node_are_printed_with_their_hints() {
    for kind in [
        ErrorKind::NotFound,
        ErrorKind::Conflict,
        ErrorKind::NoRoom,
        ErrorKind::Invalid,
    ] {
        let node = FakeNode::new(move |_, peer| {
            peer.error(
                kind,
                "There is no image \"nope\".",
                Some("`jiffy image ls` lists them."),
            );
        });
        let output = node
            .jiffy()
            .args(["run", "--image", "nope", "true"])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(125));
        assert_eq!(
            stderr(&output),
            "jiffy: There is no image \"nope\"\n  hint: `jiffy image ls` lists them\n"
        );
    }
}

#[test]
fn a_vm_that_ends_before_its_command_is_reported() {
    let node = FakeNode::playing(|peer| {
        peer.output(Stream::Stdout, b"partial");
        peer.send(&ExecOutput::Lost {
            message: "the guest crashed".into(),
            hint: Some("look at the console".into()),
        });
    });
    let output = node.jiffy().args(["run", "x"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert_eq!(stdout(&output), "partial");
    assert_eq!(
        stderr(&output),
        "jiffy: the guest crashed\n  hint: look at the console\n"
    );
}

#[test]
fn a_lost_connection_is_reported() {
    let node = FakeNode::playing(|peer| peer.output(Stream::Stdout, b"partial"));
    let output = node.jiffy().args(["run", "x"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert_eq!(stdout(&output), "partial");
    let said = stderr(&output);
    assert!(said.starts_with("jiffy: the connection to jiffyd was lost while the command ran\n"));
    assert!(said.contains(&format!("jiffy attach {VM_ID}")), "{said}");
    assert_eq!(said.lines().count(), 2);
}

#[test]
fn hostile_answers_are_refused() {
    let answers: [fn(&mut Peer); 6] = [
        |peer| peer.raw(b"not HTTP at all\r\n\r\n"),
        |peer| peer.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"),
        |peer| peer.raw(b"HTTP/1.1 500 X\r\ncontent-length: 4\r\n\r\noops"),
        |peer| {
            peer.upgrade();
            peer.raw(&u32::MAX.to_le_bytes());
        },
        |peer| {
            peer.upgrade();
            peer.raw(&[3, 0, 0, 0, 0xff, 0xff, 0xff]);
        },
        |peer| {
            peer.upgrade();
            peer.raw(&[200, 0, 0, 0, 1]);
        },
    ];
    for (index, answer) in answers.into_iter().enumerate() {
        let node = FakeNode::new(move |_, peer| answer(peer));
        let output = node.jiffy().args(["run", "x"]).output().unwrap();
        assert_eq!(output.status.code(), Some(125), "answer {index}");
        let said = stderr(&output);
        assert!(said.starts_with("jiffy: "), "answer {index}: {said}");
        assert!(said.lines().count() <= 2, "answer {index}: {said}");
    }
}

#[test]
fn a_closed_stdout_sends_sigpipe_to_the_command() {
    let (leaves, left) = mpsc::channel::<()>();
    let left = std::sync::Mutex::new(left);
    let node = FakeNode::playing(move |peer| {
        peer.output(Stream::Stdout, b"first\n");
        // The reader is gone, which a write of output notices, though not always the first: between
        // fork and exec, a child of another test may hold the pipe, too.
        left.lock().unwrap().recv().unwrap();
        let signal = peer.signal_while(|peer| peer.output(Stream::Stdout, b"more\n"));
        peer.output(Stream::Stdout, b"ignored\n");
        peer.send(&ExecOutput::Exited(ExitStatus::Signal(signal)));
    });
    let mut child = node
        .jiffy()
        .args(["run", "yes"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 6];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    leaves.send(()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 13));
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_broken_pipe_overtakes_unread_stdin() {
    let (told, hears) = mpsc::channel::<()>();
    let (told, hears) = (std::sync::Mutex::new(told), std::sync::Mutex::new(hears));
    let node = FakeNode::new(move |request, peer| {
        if is_session(request) {
            peer.upgrade();
            // The unread bytes are the only sign of input.
            peer.waits_for_input();
            // As `yes` does: writes forever, and reads nothing.
            let hears = hears.lock().unwrap();
            while hears.try_recv().is_err() {
                peer.output(Stream::Stdout, b"y\n");
                std::thread::sleep(Duration::from_millis(1));
            }
            peer.send(&ExecOutput::Exited(ExitStatus::Signal(13)));
            let _ = hears.recv_timeout(Duration::from_secs(5));
        } else {
            let _ = told.lock().unwrap().send(());
            peer.json(200, &vm());
        }
    });
    let mut child = node
        .jiffy()
        .args(["run", "yes"])
        .stdin(std::fs::File::open("/dev/zero").unwrap())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 2];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let mut status = None;
    eventually("it ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(status.unwrap().code(), Some(128 + 13));
    assert_eq!(
        node.lines(),
        [
            "POST /v1/run".to_owned(),
            format!("POST /v1/vms/{VM_ID}/kill?signal=13")
        ]
    );
}

#[test]
fn a_slow_reader_gets_everything_and_signals_still_work() {
    let node = FakeNode::playing(|peer| {
        peer.output(Stream::Stdout, &vec![b'x'; 2_000_000]);
        let signal = peer.signal();
        peer.send(&ExecOutput::Exited(ExitStatus::Signal(signal)));
    });
    let mut child = node
        .jiffy()
        .args(["run", "flood"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // stdout is not read yet, but the signal arrives.
    eventually("it takes signals", || catches(&child, Signal::TERM));
    std::thread::sleep(Duration::from_millis(300));
    kill_process(pid(&child), Signal::TERM).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let mut all = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut all).unwrap();
    assert_eq!(all.len(), 2_000_000);
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn a_detached_run_prints_the_id() {
    let node = FakeNode::new(|_, peer| peer.json(200, &vm()));
    let output = node.jiffy().args(["run", "-d"]).output().unwrap();
    assert_eq!(stdout(&output), format!("{VM_ID}\n"));
    let run: RunVm = node.requests()[0].json();
    assert!(run.detach && run.vm.command.unwrap().argv.is_empty());
    assert_eq!(run.vm.no_command, NoCommand::Wait);
    let status = node
        .jiffy()
        .args(["run", "-dit", "sh"])
        .stdout(Stdio::null())
        .status();
    assert!(status.unwrap().success());
    let run: RunVm = node.requests()[1].json();
    let command = run.vm.command.unwrap();
    assert!(run.detach && command.stdin && command.tty.is_some());
    let output = node
        .jiffy()
        .args(["run", "-d", "--format", "json", "sleep", "9"])
        .output()
        .unwrap();
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shown["name"], "web");
}

/// A node with a timeline, whose clock is a second behind ours.
fn with_timeline() -> FakeNode {
    // The clocks are compared by round trips, which take long on a busy host.
    let pause = || std::thread::sleep(Duration::from_millis(200));
    let behind = 1_000_000_000;
    let now = move || jiffy_sys::clock::monotonic_ns() - behind;
    let began = std::sync::Mutex::new(0);
    FakeNode::new(move |request, peer| {
        if is_session(request) {
            pause();
            *began.lock().unwrap() = now();
            peer.upgrade();
            pause();
            peer.output(Stream::Stdout, b"answer\n");
            peer.exit(0);
        } else if request.line.ends_with("/timeline") {
            let began = *began.lock().unwrap();
            let mut timeline = Timeline::new("another clock");
            timeline.spans = vec![
                Span::moment(Track::Node, names::REQUEST_RECEIVED, began),
                Span::new(
                    Track::Kernel,
                    names::KERNEL_BOOT,
                    began + 1_000_000,
                    began + 20_000_000,
                ),
            ];
            peer.json(200, &timeline);
        } else if request.line == "GET /v1/info" {
            peer.json(
                200,
                &serde_json::json!({
                    "version": "0", "api": 1, "pid": 1, "clock": "another clock",
                    "now_ns": now(), "data": "/", "running": 0, "vms": 0
                }),
            );
        } else if request.line.starts_with("DELETE") {
            peer.raw(b"HTTP/1.1 204 X\r\n\r\n");
        } else {
            peer.json(200, &vm());
        }
    })
}

#[test]
fn a_timeline_includes_cli_spans_on_one_clock() {
    let node = with_timeline();
    let file = node.folder.path().join("t.json");
    let output = node
        .jiffy()
        .args(["run", &format!("--timeline=json:{}", file.display()), "x"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stdout(&output), "answer\n");
    assert_eq!(stderr(&output), "");
    let timeline: Timeline = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let order: Vec<&str> = timeline
        .spans
        .iter()
        .map(|span| span.name.as_str())
        .collect();
    assert_eq!(
        order,
        [
            names::CLI_START,
            names::REQUEST_RECEIVED,
            names::KERNEL_BOOT,
            names::ANSWER_DELIVERED
        ]
    );
    let total = timeline.spans[3].end_ns - timeline.spans[0].start_ns;
    assert!(total > 400_000_000, "{total}");
    let run: RunVm = node.requests()[0].json();
    assert!(run.vm.timeline);
}

#[test]
fn a_timeline_is_shown_after_the_output() {
    let node = with_timeline();
    let output = node
        .jiffy()
        .args(["run", "--timeline", "x"])
        .output()
        .unwrap();
    let table = stderr(&output);
    assert!(
        table.contains("CLI start") && table.contains("kernel"),
        "{table}"
    );
    assert!(
        table
            .trim_end()
            .lines()
            .last()
            .unwrap()
            .starts_with("nothing exists → answer: ")
    );
    assert!(!table.contains('\x1b'), "no colours in a pipe");
}

#[test]
fn a_timeline_is_fetched_before_the_vm_is_removed() {
    let node = with_timeline();
    let output = node
        .jiffy()
        .args(["run", "--rm", "--timeline=perfetto", "x"])
        .output()
        .unwrap();
    let run: RunVm = node.requests()[0].json();
    assert!(run.vm.remove);
    assert!(
        node.lines()
            .contains(&format!("GET /v1/vms/{VM_ID}/timeline"))
    );
    let trace: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 4);
}

#[test]
fn a_failed_timeline_write_does_not_change_the_exit_status() {
    let node = with_timeline();
    let output = node
        .jiffy()
        .args(["run", "--timeline=json:/no/such/x", "--format", "json", "x"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0));
    let told = "jiffy: the timeline can't be written to /no/such/x: No such file or directory\n";
    assert_eq!(stderr(&output), told);
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shown["stdout"], "answer\n");
    assert_eq!(shown["status"], 0);
}

#[test]
fn json_collects_the_output() {
    let node = ends_with(9);
    let output = node
        .jiffy()
        .args(["run", "--format", "json", "x"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(9));
    assert_eq!(stderr(&output), "");
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shown["stdout"], "to stdout\n");
    assert_eq!(shown["stderr"], "to stderr\n");
    assert_eq!(shown["exit"], serde_json::json!({ "code": 9 }));
    assert_eq!(shown["status"], 9);
    assert_eq!(shown["vm"]["name"], "web");
}

#[test]
fn an_interrupt_ends_the_wait_for_the_end_of_the_vm() {
    let node = FakeNode::new(|request, peer| {
        if is_session(request) {
            peer.upgrade();
            peer.exit(9);
        } else {
            assert!(request.line.ends_with("/wait"), "{}", request.line);
            std::thread::sleep(TIMEOUT);
        }
    });
    let mut jiffy = node.jiffy();
    jiffy.args(["run", "--format", "json", "x"]);
    let child = jiffy.stdout(Stdio::piped()).spawn().unwrap();
    eventually("it waits", || node.requests().len() == 2);
    let begun = Instant::now();
    kill_process(pid(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    // Without a signal it waits for 150 s.
    assert!(begun.elapsed() < Duration::from_secs(100));
    assert_eq!(output.status.code(), Some(9), "the command's own");
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shown["vm"], serde_json::Value::Null);
}

/// A node that keeps the kernels that it gets, and runs commands that succeed.
fn keeps_kernels() -> FakeNode {
    let kernels = std::sync::Mutex::new(Vec::<serde_json::Value>::new());
    FakeNode::new(move |request, peer| {
        if request.line == "GET /v1/kernels" {
            peer.json(200, &*kernels.lock().unwrap());
        } else if let Some(name) = request.line.strip_prefix("PUT /v1/kernels/") {
            let digest = blake3::hash(&request.body).to_hex().to_string();
            let info = serde_json::json!({
                "name": name, "size": request.body.len(), "digest": digest
            });
            kernels.lock().unwrap().push(info.clone());
            peer.json(200, &info);
        } else {
            peer.upgrade();
            peer.exit(0);
        }
    })
}

#[test]
fn a_kernel_file_is_uploaded_once() {
    let node = keeps_kernels();
    let file = node.folder.path().join("vmlinux");
    let contents = vec![0x7f; 700_000];
    std::fs::write(&file, &contents).unwrap();
    for _ in 0..2 {
        let status = node
            .jiffy()
            .args(["run", "--kernel"])
            .arg(&file)
            .arg("true")
            .status()
            .unwrap();
        assert!(status.success());
    }
    let digest = blake3::hash(&contents).to_hex();
    let uploads: Vec<String> = node
        .lines()
        .into_iter()
        .filter(|line| line.starts_with("PUT"))
        .collect();
    assert_eq!(uploads, [format!("PUT /v1/kernels/{}", &digest[..32])]);
    let run: RunVm = node.requests().last().unwrap().json();
    assert_eq!(run.vm.kernel.as_deref(), Some(&digest[..32]));
    let missing = node
        .jiffy()
        .args(["run", "--kernel", "./missing", "true"])
        .output()
        .unwrap();
    assert!(stderr(&missing).contains("./missing can't be read: No such file"));
}

#[test]
fn a_kernel_is_named_by_its_flavour_once_it_was_built() {
    let node = keeps_kernels();
    let cache = node.folder.path().join("cache");
    let build = |flavour: &str, contents: &[u8]| {
        let kernel = cache.join(format!("jiffy/kernel/{flavour}-00ff"));
        std::fs::create_dir_all(&kernel).unwrap();
        std::fs::write(kernel.join("vmlinux"), contents).unwrap();
        let meta = serde_json::json!({
            "format": 1, "flavour": flavour, "hash": "00ff", "release": "6.12.0",
            "source": "linux-source-6.12", "bytes": contents.len()
        });
        std::fs::write(kernel.join("meta.json"), meta.to_string()).unwrap();
    };
    let used = |name: &str| {
        let mut jiffy = node.jiffy();
        jiffy.env("XDG_CACHE_HOME", &cache);
        let status = jiffy.args(["run", "--kernel", name, "true"]).status();
        assert!(status.unwrap().success());
        let run: RunVm = node.requests().last().unwrap().json();
        run.vm.kernel.unwrap()
    };
    assert_eq!(used("full"), "full");
    build("full", b"a kernel for containers");
    build("base", b"another kernel");
    let digest = |contents: &[u8]| blake3::hash(contents).to_hex()[..32].to_owned();
    assert_eq!(used("full"), digest(b"a kernel for containers"));
    // The node comes with that one.
    assert_eq!(used("base"), "base");
    assert_eq!(used("base-00ff"), digest(b"another kernel"));
}

#[test]
fn killing_jiffy_closes_the_connection() {
    let (told, hears) = mpsc::channel();
    let told = std::sync::Mutex::new(told);
    let node = FakeNode::playing(move |peer| {
        peer.output(Stream::Stdout, b"ready\n");
        while peer.receive::<ExecInput>().is_some() {}
        told.lock().unwrap().send(()).unwrap();
    });
    let mut child = node
        .jiffy()
        .args(["run", "x"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    until_ready(&mut child);
    child.kill().unwrap();
    child.wait().unwrap();
    hears.recv_timeout(TIMEOUT).unwrap();
}

#[test]
fn a_run_is_a_single_request() {
    let node = ends_with(0);
    let status = node
        .jiffy()
        .args(["run", "x"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    assert!(status.unwrap().success());
    // The command line has ended, so it sends no other.
    eventually("the request", || !node.lines().is_empty());
    assert_eq!(node.lines().len(), 1, "{:?}", node.lines());
}

#[test]
fn the_image_signature_is_verified_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key.pem");
    std::fs::write(&key, "-----BEGIN PUBLIC KEY-----\n").unwrap();
    // The node reports that another key has signed it.
    let node = FakeNode::new(|request, peer| {
        let said = PullStep::Failed(ApiError {
            kind: ErrorKind::Invalid,
            message: "It is not signed by this key.".into(),
            hint: None,
            retry_after_s: None,
            exit_code: None,
        });
        let line = serde_json::to_string(&said).unwrap();
        let answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{line}\n",
            line.len() + 1
        );
        match request.line.contains("/v1/pulls") {
            true => peer.raw(answer.as_bytes()),
            false => peer.error(ErrorKind::Internal, "It was run all the same.", None),
        }
    });
    let run = |arguments: &[&str]| {
        let mut command = node.jiffy();
        command.args(["run", "--verify-key"]).arg(&key);
        command.args(arguments).output().unwrap()
    };
    let output = run(&["h.example/a:1", "true"]);
    assert!(!output.status.success());
    assert!(
        stderr(&output).contains("not signed"),
        "{}",
        stderr(&output)
    );
    let requests = node.requests();
    let pulls = |request: &&Request| request.line.contains("/v1/pulls");
    let pull: PullImage = requests.iter().find(pulls).unwrap().json();
    assert!(
        !pull.renew,
        "an image that is stored here is not pulled again"
    );
    assert!(pull.access.verify_key.unwrap().contains("PUBLIC KEY"));
    assert!(node.lines().iter().all(|line| !line.contains("/v1/run")));
    // Without an image there is nothing that the key could have signed.
    let output = run(&["--", "true"]);
    assert!(!output.status.success());
    assert!(
        stderr(&output).contains("--verify-key needs an image"),
        "{}",
        stderr(&output)
    );
    assert!(node.lines().iter().all(|line| !line.contains("/v1/run")));
    let output = run(&["--pull", "never", "h.example/a:1", "true"]);
    assert!(
        stderr(&output).contains("--pull never"),
        "{}",
        stderr(&output)
    );
}
