//! `jiffy run` on a pseudo-terminal, whose other end the test holds.

mod support;

use jiffy_wire::agent::{ExecInput, ExecOutput, ExitStatus, Stream, WindowSize};
use jiffy_wire::api::{NoCommand, RunVm};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Termios, Winsize, tcgetattr, tcsetwinsize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};
use support::{FakeNode, Peer, TIMEOUT, VM_ID, eventually, is_session, queued, snapshot, vm};

/// Both ends of a pseudo-terminal.
struct Terminal {
    keyboard: File,
    line: File,
}

impl Terminal {
    fn new(rows: u16, columns: u16) -> Terminal {
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let name = ptsname(&keyboard, Vec::new()).unwrap();
        let line = OpenOptions::new()
            .read(true)
            .write(true)
            .open(name.to_str().unwrap())
            .unwrap();
        let terminal = Terminal {
            keyboard: keyboard.into(),
            line,
        };
        terminal.resize(rows, columns);
        terminal
    }

    fn resize(&self, rows: u16, columns: u16) {
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&self.keyboard, size).unwrap();
    }

    /// Starts a program with this controlling terminal.
    fn spawn(&self, jiffy: &Command) -> Child {
        let end = || Stdio::from(OwnedFd::from(self.line.try_clone().unwrap()));
        let mut session = Command::new("setsid");
        session.arg("--ctty").arg(jiffy.get_program());
        session.args(jiffy.get_args());
        for (name, value) in jiffy.get_envs() {
            match value {
                Some(value) => session.env(name, value),
                None => session.env_remove(name),
            };
        }
        session.stdin(end()).stdout(end()).stderr(end());
        session.env("TERM", "vt-test").spawn().unwrap()
    }

    fn mode(&self) -> Termios {
        tcgetattr(self.line.as_fd()).unwrap()
    }

    fn is_raw(&self) -> bool {
        !self.mode().local_modes.contains(LocalModes::ICANON)
    }

    fn type_keys(&mut self, keys: &[u8]) {
        self.keyboard.write_all(keys).unwrap();
    }

    /// Reads until the screen shows this text; returns everything that was shown.
    fn shows(&mut self, wanted: &str) -> String {
        let mut screen = Vec::new();
        let mut buffer = [0; 4096];
        let timeout = TIMEOUT.try_into().unwrap();
        loop {
            // The test also holds the other end, so it gets no notice of jiffy's end.
            let mut ready = [PollFd::new(&self.keyboard, PollFlags::IN)];
            assert_eq!(poll(&mut ready, Some(&timeout)), Ok(1), "no {wanted:?}");
            let count = self.keyboard.read(&mut buffer).unwrap();
            screen.extend_from_slice(&buffer[..count]);
            let text = String::from_utf8_lossy(&screen).into_owned();
            if text.contains(wanted) {
                return text;
            }
        }
    }
}

/// A command that prints `$`, then echoes typed text in capitals, and prints sizes and signals; `q`
/// ends it with status 5.
fn shell() -> FakeNode {
    FakeNode::playing(|peer| {
        peer.send(&ExecOutput::Started { pid: 2 });
        peer.output(Stream::Stdout, b"$");
        loop {
            match peer.receive() {
                Some(ExecInput::Stdin(keys)) if keys == b"q" => return peer.exit(5),
                Some(ExecInput::Stdin(keys)) if keys == b"\x03" => {
                    peer.output(Stream::Stdout, b"<interrupt>");
                }
                Some(ExecInput::Stdin(keys)) => {
                    peer.output(Stream::Stdout, &keys.to_ascii_uppercase());
                }
                Some(ExecInput::Resize(WindowSize { rows, columns })) => {
                    peer.output(Stream::Stdout, format!("<{rows}x{columns}>").as_bytes());
                }
                Some(ExecInput::Signal(signal)) => {
                    return peer.send(&ExecOutput::Exited(ExitStatus::Signal(signal)));
                }
                Some(ExecInput::StdinClosed) => peer.output(Stream::Stdout, b"<end>"),
                None => return,
            }
        }
    })
}

fn size(rows: u16, columns: u16) -> ExecInput {
    ExecInput::Resize(WindowSize { rows, columns })
}

#[test]
fn a_terminal_is_detected_set_to_raw_mode_and_restored() {
    let mut terminal = Terminal::new(33, 101);
    let node = shell();
    let before = terminal.mode();
    let mut jiffy = node.jiffy();
    jiffy.arg("run");
    let mut child = terminal.spawn(&jiffy);
    // The size is sent again, because it may have changed since the request.
    terminal.shows("$<33x101>");
    eventually("raw mode", || terminal.is_raw());
    terminal.type_keys(b"ls\r");
    // The terminal itself does not echo, and the newline is passed on as typed.
    let screen = terminal.shows("LS\r");
    assert!(!screen.contains("ls"), "{screen:?}");
    terminal.type_keys(b"\x03");
    terminal.shows("<interrupt>");
    terminal.resize(40, 120);
    terminal.shows("<40x120>");
    terminal.type_keys(b"q");
    assert_eq!(child.wait().unwrap().code(), Some(5));
    assert_eq!(terminal.mode().local_modes, before.local_modes);
    assert_eq!(terminal.mode().input_modes, before.input_modes);
    assert_eq!(terminal.mode().output_modes, before.output_modes);

    let run: RunVm = node.session().json();
    let command = run.vm.command.unwrap();
    assert!(command.argv.is_empty(), "the image's own");
    assert_eq!(run.vm.no_command, NoCommand::Shell);
    assert_eq!(
        command.tty,
        Some(WindowSize {
            rows: 33,
            columns: 101
        })
    );
    assert!(command.stdin);
    assert_eq!(command.env, ["TERM=vt-test"]);
}

#[test]
fn a_captured_command_gets_the_size_of_the_terminal() {
    let terminal = Terminal::new(50, 200);
    let node = FakeNode::new(|request, peer| {
        if !is_session(request) {
            let mut snapshot = snapshot(Some(&["sh"]));
            snapshot.tty = true;
            return peer.json(200, &snapshot);
        }
        peer.upgrade();
        peer.send(&ExecOutput::Started { pid: 2 });
        assert_eq!(peer.receive(), Some(size(50, 200)));
        peer.exit(0);
    });
    let mut jiffy = node.jiffy();
    jiffy.args(["run", "--from", "ready"]);
    assert_eq!(terminal.spawn(&jiffy).wait().unwrap().code(), Some(0));
    let run: RunVm = node.session().json();
    assert!(run.vm.command.is_none(), "the request has a command");
}

#[test]
fn the_terminal_is_restored_on_a_signal() {
    for signal in [Signal::TERM, Signal::HUP, Signal::QUIT] {
        let mut terminal = Terminal::new(24, 80);
        let node = shell();
        let mut jiffy = node.jiffy();
        jiffy.args(["run", "-it", "--", "sh"]);
        let mut child = terminal.spawn(&jiffy);
        terminal.shows("$");
        eventually("raw mode", || terminal.is_raw());
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(128 + signal.as_raw()));
        assert!(!terminal.is_raw());
    }
}

#[test]
fn the_terminal_is_restored_when_the_connection_is_lost() {
    let mut terminal = Terminal::new(24, 80);
    let node = FakeNode::playing(|peer| {
        peer.output(Stream::Stdout, b"$");
        while matches!(peer.receive(), Some(ExecInput::Resize(_))) {}
    });
    let mut jiffy = node.jiffy();
    jiffy.args(["exec", "web", "sh"]);
    let mut child = terminal.spawn(&jiffy);
    terminal.shows("$");
    eventually("raw mode", || terminal.is_raw());
    terminal.type_keys(b"x");
    // The message is on a line of its own, from the first column.
    let screen = terminal.shows("was lost while the command ran\r\n");
    assert!(screen.contains("jiffy: the connection"), "{screen:?}");
    assert_eq!(child.wait().unwrap().code(), Some(125));
    assert!(!terminal.is_raw());
}

#[test]
fn the_detach_keys_leave_the_vm_running() {
    let mut terminal = Terminal::new(24, 80);
    let node = shell();
    let mut jiffy = node.jiffy();
    jiffy.arg("run");
    let mut child = terminal.spawn(&jiffy);
    terminal.shows("$");
    terminal.type_keys(b"\x10\x11");
    terminal.shows(&format!("left {VM_ID} running"));
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(!terminal.is_raw());
    // If the answer was slow, the place in the queue was asked for, too.
    let mut lines = node.lines();
    lines.retain(|line| !line.starts_with("GET /v1/queue/"));
    assert_eq!(lines, ["POST /v1/run"]);
}

#[test]
fn attach_is_raw_only_for_a_command_on_a_terminal() {
    for tty in [true, false] {
        let mut terminal = Terminal::new(24, 80);
        let node = FakeNode::new(move |request, peer| {
            if is_session(request) {
                peer.upgrade();
                peer.output(Stream::Stdout, b"$");
                if tty {
                    assert_eq!(peer.receive(), Some(size(24, 80)));
                }
                peer.receive::<ExecInput>();
                peer.exit(0);
            } else {
                let mut vm = vm();
                vm.tty = tty;
                peer.json(200, &vm);
            }
        });
        let mut jiffy = node.jiffy();
        jiffy.args(["attach", "web"]);
        let mut child = terminal.spawn(&jiffy);
        terminal.shows("$");
        assert_eq!(terminal.is_raw(), tty);
        terminal.type_keys(b"x\n");
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn no_tty_and_a_pipe_mean_no_terminal() {
    let mut terminal = Terminal::new(24, 80);
    let node = FakeNode::playing(|peer| peer.exit(0));
    let mut jiffy = node.jiffy();
    jiffy.args(["run", "-T", "date"]);
    assert_eq!(terminal.spawn(&jiffy).wait().unwrap().code(), Some(0));
    let run: RunVm = node.session().json();
    let command = run.vm.command.unwrap();
    assert!(command.tty.is_none());
    assert!(!command.stdin, "without -i, the terminal is not stdin");
    terminal.type_keys(b"x");
}

/// A node with a snapshot in which a command runs; `play` is the command after its prompt.
fn captured(tty: bool, play: impl Fn(&mut Peer) + Send + Sync + 'static) -> FakeNode {
    FakeNode::new(move |request, peer| {
        if !is_session(request) {
            let mut snapshot = snapshot(Some(&["sh"]));
            snapshot.tty = tty;
            return peer.json(200, &snapshot);
        }
        peer.upgrade();
        peer.output(Stream::Stdout, b"$");
        play(peer);
    })
}

#[test]
fn no_tty_keeps_a_captured_command_from_the_terminal() {
    let mut terminal = Terminal::new(24, 80);
    let node = captured(true, |peer| match peer.receive() {
        Some(ExecInput::Signal(signal)) => {
            peer.send(&ExecOutput::Exited(ExitStatus::Signal(signal)))
        }
        other => panic!("{other:?} came from the terminal"),
    });
    let mut jiffy = node.jiffy();
    jiffy.args(["run", "-T", "--from", "ready"]);
    let mut child = terminal.spawn(&jiffy);
    terminal.type_keys(b"x\n");
    terminal.shows("$");
    assert!(!terminal.is_raw());
    std::thread::sleep(Duration::from_millis(100));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn a_run_from_a_snapshot_in_the_background_is_not_stopped() {
    let mut terminal = Terminal::new(24, 80);
    let node = captured(false, |peer| {
        // Long enough for a read of the terminal, which would stop it.
        std::thread::sleep(Duration::from_millis(300));
        peer.exit(7);
    });
    terminal.type_keys(b"x\n");
    let jiffy = node.jiffy();
    let mut shell = Command::new("sh");
    let job = "set -m; \"$0\" run --from ready & wait $!";
    shell.args(["-c", job]).arg(jiffy.get_program());
    for (name, value) in jiffy.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let mut child = terminal.spawn(&shell);
    let mut ended = None;
    eventually("it ends", || {
        ended = child.try_wait().unwrap();
        ended.is_some()
    });
    assert_eq!(ended.unwrap().code(), Some(7));
}

/// A node whose `run` waits in the queue: at place 3, at place 1 after the first message, and is
/// served after the second.
fn busy(steps: mpsc::Receiver<()>) -> FakeNode {
    let steps = Mutex::new(steps);
    let (serve, served) = mpsc::channel();
    let (serve, served) = (Mutex::new(serve), Mutex::new(served));
    FakeNode::new(move |request, peer| {
        if is_session(request) {
            served.lock().unwrap().recv().unwrap();
            peer.upgrade();
            peer.output(Stream::Stdout, b"$");
            return peer.exit(0);
        }
        let steps = steps.lock().unwrap();
        peer.raw(b"HTTP/1.1 200 X\r\nconnection: close\r\n\r\n");
        for place in [3, 1] {
            let mut line = serde_json::to_vec(&queued(place)).unwrap();
            line.push(b'\n');
            peer.raw(&line);
            steps.recv().unwrap();
        }
        serve.lock().unwrap().send(()).unwrap();
    })
}

#[test]
fn a_waiting_run_shows_its_queue_place_until_it_starts() {
    let mut terminal = Terminal::new(24, 80);
    let (step, steps) = mpsc::channel();
    let node = busy(steps);
    let mut jiffy = node.jiffy();
    jiffy.args(["run", "-T", "--", "date"]);
    let mut child = terminal.spawn(&jiffy);
    terminal.shows("jiffy: waiting for memory or vCPUs: place 3 in the queue");
    step.send(()).unwrap();
    terminal.shows("place 1 in the queue");
    step.send(()).unwrap();
    // The line is cleared before the command's output.
    let screen = terminal.shows("$");
    assert!(screen.ends_with("\x1b[2K$"), "{screen:?}");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let run = node.session();
    assert_eq!(run.line, "POST /v1/run");
    let id = run.header("jiffy-request").unwrap();
    let follow = format!("GET /v1/queue/{id}");
    let mut others = node.requests();
    others.retain(|request| !is_session(request));
    // More than one, if the answer came later than a second after the last place.
    assert!(!others.is_empty());
    for other in others {
        assert_eq!(other.line, follow);
        assert_eq!(other.header("jiffy-request"), None);
    }
}

#[test]
fn a_quiet_or_non_terminal_run_does_not_query_its_queue_place() {
    // Longer than it takes until a place is shown.
    let pause = || std::thread::sleep(Duration::from_millis(700));
    let node = FakeNode::new(move |_, peer| {
        pause();
        peer.upgrade();
        peer.exit(0);
    });
    let terminal = Terminal::new(24, 80);
    let mut jiffy = node.jiffy();
    jiffy.args(["run", "-T", "-q", "--", "date"]);
    assert_eq!(terminal.spawn(&jiffy).wait().unwrap().code(), Some(0));
    let output = node.jiffy().args(["run", "--", "date"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(support::stderr(&output), "");
    assert_eq!(node.lines(), ["POST /v1/run", "POST /v1/run"]);
    // One that has been answered is not followed, however long its command takes. If the answer
    // itself came too late, the test is repeated.
    loop {
        let mut terminal = Terminal::new(24, 80);
        let node = FakeNode::playing(move |peer| {
            peer.output(Stream::Stdout, b"$");
            pause();
            peer.exit(0);
        });
        let mut jiffy = node.jiffy();
        jiffy.args(["run", "-T", "--", "date"]);
        let begun = Instant::now();
        let mut child = terminal.spawn(&jiffy);
        terminal.shows("$");
        let answered_in = begun.elapsed();
        assert_eq!(child.wait().unwrap().code(), Some(0));
        let lines = node.lines();
        if lines == ["POST /v1/run"] {
            break;
        }
        assert!(answered_in > Duration::from_millis(300), "{lines:?}");
    }
}

#[test]
fn a_timeline_on_a_terminal_is_coloured_unless_disabled() {
    for (no_color, coloured) in [(None, true), (Some("1"), false)] {
        let mut terminal = Terminal::new(24, 90);
        let node = FakeNode::new(|_, peer| {
            peer.json(
                200,
                &serde_json::json!({ "clock": "x", "spans": [
                    { "track": "kernel", "name": "kernel", "start_ns": 0, "end_ns": 9_000_000 }
                ] }),
            );
        });
        let mut jiffy = node.jiffy();
        jiffy.args(["timeline", "web"]);
        if let Some(value) = no_color {
            jiffy.env("NO_COLOR", value);
        }
        let mut child = terminal.spawn(&jiffy);
        let screen = terminal.shows("answer: 9.0 ms");
        assert!(child.wait().unwrap().success());
        assert_eq!(screen.contains("\x1b[33m"), coloured, "{screen:?}");
        let widest = screen.lines().map(|line| {
            let plain = line.replace("\x1b[33m", "").replace("\x1b[0m", "");
            plain.trim_end().chars().count()
        });
        assert!(widest.max().unwrap() <= 90, "{screen}");
    }
}
