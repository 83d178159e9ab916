//! A fake node whose answers a test chooses, and a `jiffy` that uses it.

#![allow(dead_code)] // Every test program uses its own part of this.

use jiffy_wire::agent::{ExecInput, ExecOutput, ExitStatus, Stream};
use jiffy_wire::api::{ApiError, ErrorKind, MemoryForm, Priority, Purpose, Queued, Snapshot, Vm};
use jiffy_wire::frame::{Decoder, to_vec};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Anything that takes longer is considered to hang; no test depends on this host's speed.
pub const TIMEOUT: Duration = Duration::from_secs(300);

pub const VM_ID: &str = "0123456789ab";

/// A node in a run folder of its own; each connection has a thread.
pub struct FakeNode {
    pub folder: tempfile::TempDir,
    requests: Arc<Mutex<Vec<Request>>>,
}

#[derive(Debug, Clone)]
pub struct Request {
    /// The request line, such as `POST /v1/run`.
    pub line: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    /// The value of the header of this name, which is in small letters.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(header, _)| header == name);
        found.map(|(_, value)| value.as_str())
    }

    pub fn json<T: DeserializeOwned>(&self) -> T {
        serde_json::from_slice(&self.body).unwrap()
    }
}

impl FakeNode {
    pub fn new(answer: impl Fn(&Request, &mut Peer) + Send + Sync + 'static) -> FakeNode {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        fs::create_dir(&run).unwrap();
        fs::set_permissions(&run, fs::Permissions::from_mode(0o700)).unwrap();
        let listener = UnixListener::bind(run.join("jiffyd.sock")).unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (answer, seen) = (Arc::new(answer), requests.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (answer, seen) = (answer.clone(), seen.clone());
                std::thread::spawn(move || {
                    let mut peer = Peer::new(stream.unwrap());
                    if let Some(request) = peer.request() {
                        seen.lock().unwrap().push(request.clone());
                        answer(&request, &mut peer);
                    }
                });
            }
        });
        FakeNode { folder, requests }
    }

    /// Answers every `run`, `exec` and `attach` by playing `command`.
    pub fn playing(command: impl Fn(&mut Peer) + Send + Sync + 'static) -> FakeNode {
        FakeNode::new(move |request, peer| {
            if is_session(request) {
                peer.upgrade();
                command(peer);
            } else {
                peer.json(200, &vm());
            }
        })
    }

    pub fn jiffy(&self) -> Command {
        let mut jiffy = jiffy_in(self.folder.path());
        jiffy.stdin(Stdio::null());
        jiffy
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// The request of the first session. On a terminal it may not be the only one: `jiffy` asks for
    /// the place in the queue of a request that is not answered within 300 ms.
    pub fn session(&self) -> Request {
        let found = self.requests().into_iter().find(is_session);
        found.expect("no session was requested")
    }

    /// All requests, as `METHOD path`.
    pub fn lines(&self) -> Vec<String> {
        self.requests()
            .into_iter()
            .map(|request| request.line)
            .collect()
    }
}

pub fn is_session(request: &Request) -> bool {
    let path = request.line.split('?').next().unwrap();
    path == "POST /v1/run" || path.ends_with("/exec") || path.ends_with("/attach")
}

/// `jiffy` with all its folders below `root`, and no machine.
pub fn jiffy_in(root: &Path) -> Command {
    let mut jiffy = Command::new(env!("CARGO_BIN_EXE_jiffy"));
    jiffy
        .env("JIFFY_RUN", root.join("run"))
        .env("JIFFY_DATA", root.join("data"))
        .env("JIFFY_LIB", root.join("lib"))
        .env("JIFFY_SHARE", root.join("share"))
        .env("JIFFY_MACHINE", "never")
        .env_remove("NO_COLOR");
    jiffy
}

/// One connection, on the node's side.
pub struct Peer {
    stream: UnixStream,
    decoder: Decoder,
}

impl Peer {
    fn new(stream: UnixStream) -> Peer {
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Peer {
            stream,
            decoder: Decoder::new(),
        }
    }

    /// Waits until there are unread bytes, which stay unread.
    pub fn waits_for_input(&self) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let timeout = Timespec {
            tv_sec: TIMEOUT.as_secs() as i64,
            tv_nsec: 0,
        };
        let mut sent = [PollFd::new(&self.stream, PollFlags::IN)];
        assert_eq!(poll(&mut sent, Some(&timeout)), Ok(1), "nothing was sent");
    }

    fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.stream.read_exact(&mut byte)?;
        Ok(byte[0])
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            line.push(self.byte()?);
        }
        Ok(String::from_utf8(line).unwrap().trim_end().to_owned())
    }

    fn request(&mut self) -> Option<Request> {
        let first = self.line().ok()?;
        let line = first.trim_end_matches(" HTTP/1.1").to_owned();
        let mut headers = Vec::new();
        loop {
            let line = self.line().ok()?;
            match line.split_once(": ") {
                Some((name, value)) => headers.push((name.to_lowercase(), value.to_owned())),
                None => break,
            }
        }
        let header = |name: &str| {
            let found = headers.iter().find(|(header, _)| header == name);
            found.map(|(_, value)| value.clone())
        };
        let mut body = Vec::new();
        if let Some(length) = header("content-length") {
            body = vec![0; length.parse().unwrap()];
            self.stream.read_exact(&mut body).ok()?;
        } else if header("transfer-encoding").as_deref() == Some("chunked") {
            loop {
                let length = usize::from_str_radix(&self.line().ok()?, 16).unwrap();
                let begin = body.len();
                body.resize(begin + length, 0);
                self.stream.read_exact(&mut body[begin..]).ok()?;
                self.line().ok()?;
                if length == 0 {
                    break;
                }
            }
        }
        Some(Request {
            line,
            headers,
            body,
        })
    }

    pub fn raw(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    pub fn json(&mut self, status: u16, value: &impl Serialize) {
        let body = serde_json::to_vec(value).unwrap();
        let head = format!(
            "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.raw(head.as_bytes());
        self.raw(&body);
    }

    pub fn error(&mut self, kind: ErrorKind, message: &str, hint: Option<&str>) {
        let error = ApiError {
            kind,
            message: message.to_owned(),
            hint: hint.map(str::to_owned),
            retry_after_s: None,
            exit_code: None,
        };
        self.json(kind.status(), &error);
    }

    pub fn upgrade(&mut self) {
        let head = format!(
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\n\
             upgrade: jiffy-frames\r\njiffy-vm-id: {VM_ID}\r\n\r\n"
        );
        self.raw(head.as_bytes());
    }

    pub fn send(&mut self, message: &impl Serialize) {
        let bytes = to_vec(message).unwrap();
        self.raw(&bytes);
    }

    pub fn output(&mut self, stream: Stream, data: &[u8]) {
        for data in data.chunks(64 * 1024) {
            self.send(&ExecOutput::Output {
                stream,
                data: data.to_vec(),
            });
        }
    }

    /// Sends output; whether the client is still there.
    pub fn try_output(&mut self, data: &[u8]) -> bool {
        let output = ExecOutput::Output {
            stream: Stream::Stdout,
            data: data.to_vec(),
        };
        self.stream.write_all(&to_vec(&output).unwrap()).is_ok()
    }

    pub fn exit(&mut self, code: i32) {
        self.send(&ExecOutput::Exited(ExitStatus::Code(code)));
    }

    /// The next message; `None` at the end of the connection.
    pub fn receive<T: DeserializeOwned>(&mut self) -> Option<T> {
        self.try_receive().expect("jiffy sent nothing in time")
    }

    fn try_receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        loop {
            if let Some(message) = self.decoder.next().unwrap() {
                return Ok(Some(message));
            }
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Ok(None),
                Ok(count) => self.decoder.push(&buffer[..count]),
                // With a time limit, reads are not restarted after a signal.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// All bytes of stdin until it is closed.
    pub fn stdin(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            match self.receive().expect("stdin was not closed") {
                ExecInput::Stdin(data) => all.extend(data),
                ExecInput::StdinClosed => return all,
                other => panic!("unexpected {other:?}"),
            }
        }
    }

    /// The next signal; other messages are ignored.
    pub fn signal(&mut self) -> i32 {
        loop {
            match self.receive() {
                Some(ExecInput::Signal(signal)) => return signal,
                Some(_) => {}
                None => panic!("no signal came"),
            }
        }
    }

    /// The next signal; `again` is called repeatedly until it comes.
    pub fn signal_while(&mut self, mut again: impl FnMut(&mut Peer)) -> i32 {
        let pause = Duration::from_millis(20);
        self.stream.set_read_timeout(Some(pause)).unwrap();
        let begun = Instant::now();
        let signal = loop {
            again(self);
            match self.try_receive() {
                Ok(Some(ExecInput::Signal(signal))) => break signal,
                Ok(Some(_)) => {}
                Ok(None) => panic!("no signal came"),
                Err(_) => assert!(begun.elapsed() < TIMEOUT, "jiffy sent nothing in time"),
            }
        };
        self.stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        signal
    }
}

/// A snapshot of the VM `box` in which this command runs, without a terminal.
pub fn snapshot(command: Option<&[&str]>) -> Snapshot {
    Snapshot {
        name: "one".into(),
        golden: false,
        created: 100,
        vm: "box".into(),
        parent: None,
        image: "base".into(),
        image_digest: "0123456789abcdef".into(),
        kernel: "base".into(),
        kernel_digest: "fedcba9876543210".into(),
        initramfs_digest: "00".into(),
        cpus: 1,
        memory_mib: 128,
        command: command.map(|argv| argv.iter().map(|word| word.to_string()).collect()),
        tty: false,
        volumes: Vec::new(),
        cpu_features: vec!["fpu".into()],
        memory: MemoryForm::Image,
        memory_bytes: 4 << 20,
        other_bytes: 1 << 20,
        optimised: false,
        used_by: Vec::new(),
        shared_bytes: 0,
        children: Vec::new(),
        error: None,
    }
}

pub fn vm() -> Vm {
    serde_json::from_value(serde_json::json!({
        "id": VM_ID, "name": "web", "state": "running", "image": "base", "kernel": "base",
        "cpus": 2, "memory_mib": 256, "command": ["sleep", "1000"], "disks": [],
        "created": 100, "started": 100, "ended": null, "pid": 42, "cid": 3,
        "exit": null, "error": null, "remove": false
    }))
    .unwrap()
}

/// A run that waits at this place.
pub fn queued(place: u32) -> Queued {
    Queued {
        place,
        id: VM_ID.into(),
        name: "web".into(),
        purpose: Purpose::Start,
        owner: "team-a".into(),
        priority: Priority::High,
        vms: 1,
        memory_mib: 256,
        cpus: 2,
        since: 100,
        until: 130,
    }
}

/// Installs a script in place of one of Jiffy's programs.
pub fn install(root: &Path, program: &str, script: &str) -> PathBuf {
    let lib = root.join("lib");
    fs::create_dir_all(&lib).unwrap();
    let path = lib.join(program);
    jiffy_sys::testing::write_program(&path, &format!("#!/bin/sh\n{script}\n"));
    path
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn stderr(output: &Output) -> String {
    text(&output.stderr)
}

pub fn stdout(output: &Output) -> String {
    text(&output.stdout)
}

/// Waits until `done` is true, for actions of another process.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !done() {
        assert!(Instant::now() < until, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
