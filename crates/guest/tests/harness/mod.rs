//! Runs `jiffy-init agent` as an ordinary process and speaks its protocol.
//!
//! It is the build that guests run, with profile `small` and without std; cargo updates it before
//! the first test. `JIFFY_INIT=FILE` tests another build.
#![allow(dead_code)] // Each test file uses its part.

use jiffy_wire::agent::{
    Command, ExecInput, ExecOutput, ExitStatus, FromGuest, Request, Stream, ToGuest, VERSION,
};
use jiffy_wire::frame::{self, Decoder};
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Time limit of all waits; none takes longer, even on a busy host.
pub const TIMEOUT: Duration = Duration::from_secs(300);

pub struct Agent {
    pub process: Child,
    pub folder: tempfile::TempDir,
}

impl Agent {
    pub fn start() -> Agent {
        Agent::with("{\"version\":1,\"vm_id\":\"test\"}", false)
    }

    /// Starts an agent with a configuration, and with or without a supervisor channel.
    pub fn with(config: &str, supervised: bool) -> Agent {
        Agent::in_groups(config, supervised, None)
    }

    /// Starts an agent in its own cgroup, below which its programs can be frozen.
    pub fn in_groups(config: &str, supervised: bool, groups: Option<&Groups>) -> Agent {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("config.json"), config).unwrap();
        // Descriptors that this test inherited are not passed to the agent.
        let mut script = String::from(
            "for n in 3 4 5 6 7 8 9; do eval \"exec $n>&-\"; done; exec \"$0\" \"$@\"",
        );
        if let Some(groups) = groups {
            let join = format!("echo $$ >{}/cgroup.procs && ", groups.path.display());
            script.insert_str(0, &join);
        }
        let mut command = std::process::Command::new("sh");
        command
            .arg("-c")
            .arg(script)
            .arg(jiffy_init())
            .arg("agent")
            .arg("--listen")
            .arg(path("agent"));
        command.arg("--config").arg(path("config.json"));
        std::fs::create_dir_all(path("fw_cfg/opt/jiffy")).unwrap();
        command.arg("--fw-cfg").arg(path("fw_cfg"));
        if let Some(groups) = groups {
            command.arg("--cgroup").arg(&groups.path);
        }
        if supervised {
            command.arg("--supervisor").arg(path("node"));
        }
        let output = std::fs::File::create(path("console")).unwrap();
        let process = command.stdin(Stdio::null()).stdout(output).spawn().unwrap();
        let agent = Agent { process, folder };
        let socket = agent.path("agent");
        wait_until("the agent listens", || UnixStream::connect(&socket).is_ok());
        agent
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn connect(&self) -> Connection {
        Connection::new(UnixStream::connect(self.path("agent")).unwrap())
    }

    pub fn exec(&self, command: Command) -> Connection {
        let mut connection = self.connect();
        connection.send(&Request::Exec {
            version: VERSION,
            command,
        });
        connection
    }

    /// Runs a shell script to its end.
    pub fn sh(&self, script: &str) -> Outcome {
        self.exec(shell(script)).finish()
    }

    pub fn children(&self) -> Vec<u32> {
        let path = format!("/proc/{0}/task/{0}/children", self.process.id());
        let list = std::fs::read_to_string(path).unwrap();
        list.split_whitespace()
            .map(|pid| pid.parse().unwrap())
            .collect()
    }

    /// Resident memory, bytes.
    pub fn memory(&self) -> u64 {
        let path = format!("/proc/{}/statm", self.process.id());
        let statm = std::fs::read_to_string(path).unwrap();
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    }

    pub fn console(&self) -> String {
        std::fs::read_to_string(self.path("console")).unwrap()
    }

    pub fn wait_for_end(&mut self) -> std::process::ExitStatus {
        let mut status = None;
        wait_until("the agent ends", || {
            status = self.process.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

/// The program that guests run, as `scripts/build` builds it.
fn jiffy_init() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        if let Some(given) = std::env::var_os("JIFFY_INIT") {
            return given.into();
        }
        let package = ["-p", "jiffy-guest", "--features", "freestanding"];
        build_small(&package, "jiffy-init")
    })
}

/// Builds a package with the profile of programs in guests; returns the path of its program.
pub fn build_small(package: &[&str], program: &str) -> PathBuf {
    // The path is TARGET/TRIPLE/PROFILE/deps/THIS.
    let this = std::env::current_exe().expect("this program has a path");
    let triple = this.ancestors().nth(3).expect("cargo's layout");
    let target = triple.parent().expect("cargo's layout");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = std::process::Command::new(cargo)
        .args(["build", "--quiet", "--profile", "small"])
        .args(package)
        .arg("--target-dir")
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("cargo starts");
    assert!(built.success(), "{program} can't be built: {built}");
    triple.join("small").join(program)
}

/// A cgroup for one test, with a freezer.
pub struct Groups {
    pub path: PathBuf,
}

impl Groups {
    /// `None` if this user may not create one, or the kernel has no cgroup v2.
    pub fn new() -> Option<Groups> {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let mount = mounts
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>())
            .find(|fields| fields[2] == "cgroup2")?[1]
            .to_owned();
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("jiffy-test-{}-{number}", std::process::id());
        let path = Path::new(&mount).join(name);
        std::fs::create_dir(&path).ok()?;
        let groups = Groups { path };
        groups.path.join("cgroup.freeze").exists().then_some(groups)
    }

    /// Content of a file in the cgroup or in one below it.
    pub fn read(&self, file: &str) -> String {
        std::fs::read_to_string(self.path.join(file)).unwrap()
    }

    pub fn write(&self, file: &str, content: &str) {
        std::fs::write(self.path.join(file), content).unwrap();
    }

    /// Paths of the cgroups below.
    pub fn below(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten();
        entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.is_dir())
            .collect()
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        let _ = std::fs::write(self.path.join("cgroup.kill"), "1");
        let start = Instant::now();
        let remove = || {
            self.below()
                .iter()
                .for_each(|group| drop(std::fs::remove_dir(group)));
            std::fs::remove_dir(&self.path)
        };
        while remove().is_err() && start.elapsed() < TIMEOUT {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Agent {
    /// Sets a file of the host for the guest, atomically.
    pub fn set_host_file(&self, name: &str, content: &str) {
        let path = self.path("fw_cfg").join(name);
        let new = path.with_extension("new");
        std::fs::write(&new, content).unwrap();
        std::fs::rename(new, path).unwrap();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let children = self.children_or_none();
        let _ = self.process.kill();
        let _ = self.process.wait();
        for child in children {
            // Programs that a test left running, with their groups, and orphans.
            let pid = rustix::process::Pid::from_raw(child as i32).unwrap();
            let kill = rustix::process::Signal::KILL;
            let _ = rustix::process::kill_process_group(pid, kill);
            let _ = rustix::process::kill_process(pid, kill);
        }
    }
}

impl Agent {
    fn children_or_none(&self) -> Vec<u32> {
        let path = format!("/proc/{0}/task/{0}/children", self.process.id());
        let list = std::fs::read_to_string(path).unwrap_or_default();
        list.split_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect()
    }
}

pub fn shell(script: &str) -> Command {
    program(&["sh", "-c", script])
}

pub fn program(argv: &[&str]) -> Command {
    Command {
        argv: argv.iter().map(|argument| argument.to_string()).collect(),
        ..Command::default()
    }
}

pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Output and exit status of a program that has ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub end: Option<ExitStatus>,
}

impl Outcome {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }
}

pub struct Connection {
    pub stream: UnixStream,
    decoder: Decoder,
}

impl Connection {
    pub fn new(stream: UnixStream) -> Connection {
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(TIMEOUT)).unwrap();
        Connection {
            stream,
            decoder: Decoder::new(),
        }
    }

    pub fn send<T: serde::Serialize>(&mut self, message: &T) {
        self.stream
            .write_all(&frame::to_vec(message).unwrap())
            .unwrap();
    }

    pub fn input(&mut self, bytes: &[u8]) {
        self.send(&ExecInput::Stdin(bytes.to_vec()));
    }

    /// The next message; `None` if the peer has closed.
    pub fn next<T: serde::de::DeserializeOwned>(&mut self) -> Option<T> {
        let mut buffer = [0; 65536];
        loop {
            if let Some(message) = self.decoder.next().expect("a valid frame") {
                return Some(message);
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(count) => self.decoder.push(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("no message: {error}"),
            }
        }
    }

    pub fn started(&mut self) -> u32 {
        match self.next::<ExecOutput>() {
            Some(ExecOutput::Started { pid }) => pid,
            other => panic!("not started: {other:?}"),
        }
    }

    /// Reads until the program has ended.
    pub fn finish(mut self) -> Outcome {
        let mut outcome = Outcome::default();
        loop {
            match self.next::<ExecOutput>() {
                Some(ExecOutput::Started { .. }) => {}
                Some(ExecOutput::Output {
                    stream: Stream::Stdout,
                    data,
                }) => outcome.stdout.extend(data),
                Some(ExecOutput::Output {
                    stream: Stream::Stderr,
                    data,
                }) => outcome.stderr.extend(data),
                Some(ExecOutput::Exited(status)) => {
                    outcome.end = Some(status);
                    assert_eq!(self.next::<ExecOutput>(), None, "nothing follows the end");
                    return outcome;
                }
                other => panic!("after {outcome:?}: {other:?}"),
            }
        }
    }

    /// Reads stdout until it contains `wanted`.
    pub fn read_until(&mut self, wanted: &str) -> String {
        let mut text = String::new();
        while !text.contains(wanted) {
            match self.next::<ExecOutput>() {
                Some(ExecOutput::Output { data, .. }) => {
                    text.push_str(&String::from_utf8_lossy(&data))
                }
                Some(ExecOutput::Started { .. }) => {}
                other => panic!("{other:?} after {text:?}, which lacks {wanted:?}"),
            }
        }
        text
    }

    pub fn is_closed(&mut self) -> bool {
        self.next::<ExecOutput>().is_none()
    }

    pub fn half_close(&self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }
}

/// A node: accepts the supervisor channel.
pub struct Node {
    listener: UnixListener,
}

impl Node {
    pub fn listen(path: &Path) -> Node {
        Node {
            listener: UnixListener::bind(path).unwrap(),
        }
    }

    /// Accepts the next connection and its hello.
    pub fn accept(&self) -> (Connection, u32) {
        let (connection, vm_id, attempt) = self.accept_any();
        assert_eq!(vm_id, "test");
        (connection, attempt)
    }

    /// Accepts the next connection with any VM id in its hello.
    pub fn accept_any(&self) -> (Connection, String, u32) {
        let (stream, _) = self.listener.accept().unwrap();
        let mut connection = Connection::new(stream);
        match connection.next::<FromGuest>() {
            Some(FromGuest::Hello {
                version: VERSION,
                vm_id,
                attempt,
                ..
            }) => (connection, vm_id, attempt),
            other => panic!("no hello: {other:?}"),
        }
    }

    /// Like [`Self::accept`], and sends the welcome.
    pub fn welcome(&self, stdout_offset: u64, stderr_offset: u64) -> Connection {
        let (mut connection, _) = self.accept();
        connection.send(&ToGuest::Welcome {
            version: VERSION,
            stdout_offset,
            stderr_offset,
        });
        connection
    }
}

/// What a node has received.
#[derive(Debug, Default)]
pub struct Received {
    pub ready: bool,
    pub pid: Option<u32>,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub end: Option<ExitStatus>,
    pub spans: Vec<String>,
    pub warnings: Vec<String>,
    pub log: Vec<String>,
    /// Announced room for input, bytes in all.
    pub input_room: u64,
}

impl Received {
    /// Handles one message. Asserts that the offset of output continues the output so far.
    pub fn take(&mut self, message: FromGuest) {
        match message {
            FromGuest::Ready => self.ready = true,
            FromGuest::MainStarted { pid } => self.pid = Some(pid),
            FromGuest::MainOutput {
                stream,
                offset,
                data,
            } => {
                let whole = match stream {
                    Stream::Stdout => &mut self.stdout,
                    Stream::Stderr => &mut self.stderr,
                };
                assert!(offset as usize <= whole.len(), "a gap before {offset}");
                whole.truncate(offset as usize);
                whole.extend(data);
            }
            FromGuest::MainExited(status) => self.end = Some(status),
            FromGuest::Spans(spans) => self.spans.extend(spans.into_iter().map(|span| span.name)),
            FromGuest::Warning { step, message } => {
                self.warnings.push(format!("{step}: {message}"))
            }
            FromGuest::MainInputRoom { bytes } => {
                assert!(self.pid.is_some() || bytes as usize >= frame::MAX_DATA);
                self.input_room += u64::from(bytes);
            }
            FromGuest::ServiceLog { name, line } => {
                self.log
                    .push(format!("{name}: {}", String::from_utf8_lossy(&line)));
            }
            other => panic!("unexpected {other:?}"),
        }
    }

    pub fn listen_until(&mut self, from: &mut Connection, done: impl Fn(&Received) -> bool) {
        while !done(self) {
            let message = from.next::<FromGuest>();
            self.take(message.unwrap_or_else(|| panic!("the channel closed after {self:?}")));
        }
    }
}
