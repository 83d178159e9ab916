//! A `jiffyd` in its own folders.

use crate::client::{Answer, Frames, TIMEOUT, connect, request};
use jiffy_wire::agent::{Command, ExecOutput};
use jiffy_wire::api::{CreateVm, RunVm, Vm, VmState};
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A daemon; dropping it removes all its VMs and files.
pub struct Daemon {
    pub folder: TempDir,
    /// Its data folder; in `folder` unless a test chooses another place.
    pub data: PathBuf,
    /// Whether its VMs have jails, and a network in the network namespace of the test.
    pub isolates: bool,
    options: Vec<String>,
    process: Option<Child>,
}

impl Daemon {
    pub fn start() -> Daemon {
        Daemon::with(&[])
    }

    pub fn with(options: &[&str]) -> Daemon {
        let mut daemon = Daemon::prepared(options);
        daemon.up();
        daemon
    }

    /// Ends it, and starts another with these options on the same data.
    pub fn restart_with(&mut self, options: &[&str]) {
        self.shut_down();
        self.options = options.iter().map(|option| option.to_string()).collect();
        self.up();
    }

    /// Creates folders, but no process yet.
    pub fn prepared(options: &[&str]) -> Daemon {
        let folder = tempfile::Builder::new()
            .prefix("node-")
            .tempdir_in("/tmp")
            .unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["lib", "share/images", "share/kernels/base"] {
            fs::create_dir_all(path(name)).unwrap();
        }
        symlink(example("fake-vmm"), path("lib/jiffy-vmm")).unwrap();
        symlink(example("fake-pager"), path("lib/jiffy-pager")).unwrap();
        symlink(example("import"), path("lib/jiffy-import")).unwrap();
        fs::write(path("share/initramfs.cpio"), b"an initramfs").unwrap();
        fs::write(path("share/kernels/base/vmlinux"), b"a kernel").unwrap();
        fs::write(
            path("share/images/base.tar"),
            tar_of(&[("hello", b"world")]),
        )
        .unwrap();
        Daemon {
            data: path("data"),
            folder,
            isolates: false,
            options: options.iter().map(|option| option.to_string()).collect(),
            process: None,
        }
    }

    /// Runs with a base image that contains the first bytes of a VM's RAM.
    pub fn with_memory_in_its_root() -> Daemon {
        let mut daemon = Daemon::prepared(&[]);
        let mut chunk = vec![0; 8192];
        chunk[..4096].fill(0x55);
        fs::write(
            daemon.folder.path().join("share/images/base.tar"),
            tar_of(&[("chunk", &chunk)]),
        )
        .unwrap();
        daemon.up();
        daemon
    }

    pub fn command(&self) -> std::process::Command {
        let path = |name: &str| self.folder.path().join(name);
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_jiffyd"));
        command
            .arg("--data")
            .arg(&self.data)
            .arg("--run")
            .arg(path("run"))
            .arg("--lib")
            .arg(path("lib"))
            .arg("--share")
            .arg(path("share"))
            .args(&self.options)
            .env("RUST_LOG", "debug")
            // Memory that the pager serves is what can go wrong.
            .env("JIFFY_HIBERNATE_RAW", "0")
            .stdin(Stdio::null());
        if self.isolates {
            command.env("JIFFY_VM_NETWORK", "on");
        } else {
            // In a jail, the stand-in for a VMM can run no real programs.
            command.args(["--jail", "off"]);
            // Does not change the network of the host that runs the tests.
            command.env("JIFFY_VM_NETWORK", "off");
        }
        command
    }

    pub fn up(&mut self) {
        self.begin(self.command());
        self.answers();
    }

    /// Makes this the daemon's process.
    pub fn begin(&mut self, mut command: std::process::Command) {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.folder.path().join("jiffyd.log"))
            .unwrap();
        self.process = Some(command.stderr(log).spawn().unwrap());
    }

    pub fn answers(&self) {
        eventually("the daemon answers", || {
            connect(&self.socket())
                .and_then(|stream| request(stream, "GET /v1/info HTTP/1.1", b""))
                .is_ok()
        });
    }

    pub fn pid(&self) -> u32 {
        self.process.as_ref().unwrap().id()
    }

    /// Checks that it still runs.
    pub fn is_up(&mut self) -> bool {
        self.process.as_mut().unwrap().try_wait().unwrap().is_none()
    }

    /// Sends SIGKILL.
    pub fn killed(&mut self) {
        let mut process = self.process.take().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Shuts it down by SIGTERM.
    pub fn shut_down_by_signal(&mut self) {
        let pid = rustix::process::Pid::from_raw(self.pid() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let mut status = None;
        eventually("the daemon ends", || {
            status = self.process.as_mut().unwrap().try_wait().unwrap();
            status.is_some()
        });
        self.process = None;
        assert!(status.unwrap().success());
    }

    /// Shuts it down by the API.
    pub fn shut_down(&mut self) {
        assert_eq!(self.post("/v1/shutdown", b"").status, 204);
        let status = self.process.take().unwrap().wait().unwrap();
        assert!(status.success());
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("run/jiffyd.sock")
    }

    pub fn run_folder(&self, id: &str) -> PathBuf {
        self.folder.path().join("run/vms").join(id)
    }

    pub fn vm_folder(&self, id: &str) -> PathBuf {
        self.data.join("vms").join(id)
    }

    pub fn ask(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        let stream = connect(&self.socket()).unwrap();
        request(stream, &format!("{method} {path} HTTP/1.1"), body).unwrap()
    }

    pub fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, b"")
    }

    pub fn post(&self, path: &str, body: &[u8]) -> Answer {
        self.ask("POST", path, body)
    }

    pub fn delete(&self, path: &str) -> Answer {
        self.ask("DELETE", path, b"")
    }

    pub fn stream(&self, path: &str, body: &[u8]) -> Result<Frames, Answer> {
        Frames::open(connect(&self.socket()).unwrap(), path, body)
    }

    pub fn create(&self, vm: &CreateVm) -> Answer {
        self.post("/v1/vms", &serde_json::to_vec(vm).unwrap())
    }

    /// Makes and starts a VM with a first command, attached.
    pub fn run(&self, vm: CreateVm) -> Frames {
        self.try_run(vm).unwrap()
    }

    pub fn try_run(&self, vm: CreateVm) -> Result<Frames, Answer> {
        let body = serde_json::to_vec(&run_of(vm, false)).unwrap();
        self.stream("/v1/run", &body)
    }

    /// Makes and starts a VM, and waits until it is ready.
    pub fn run_detached(&self, vm: CreateVm) -> Answer {
        let body = serde_json::to_vec(&run_of(vm, true)).unwrap();
        self.post("/v1/run", &body)
    }

    /// Runs a VM `box` and makes a snapshot `ready` of it.
    pub fn run_captured(&self, vm: CreateVm) -> Frames {
        let frames = self.run(named("box", vm));
        self.when("box", VmState::Running);
        let made = self.post("/v1/vms/box/snapshots", br#"{"name":"ready"}"#);
        assert_eq!(made.status, 200, "{}", String::from_utf8_lossy(&made.body));
        frames
    }

    pub fn exec(&self, vm: &str, command: &Command) -> Result<Frames, Answer> {
        let body = serde_json::to_vec(command).unwrap();
        self.stream(&format!("/v1/vms/{vm}/exec"), &body)
    }

    pub fn vm(&self, vm: &str) -> Vm {
        self.get(&format!("/v1/vms/{vm}")).json()
    }

    pub fn when(&self, vm: &str, state: VmState) -> Vm {
        eventually(&format!("{vm} is {state:?}"), || self.vm(vm).state == state);
        self.vm(vm)
    }

    pub fn gone(&self, vm: &str) {
        eventually(&format!("{vm} is gone"), || {
            self.get(&format!("/v1/vms/{vm}")).status == 404
        });
    }

    /// The contents of the VM's log: stdout and stderr.
    pub fn logs(&self, vm: &str, query: &str) -> (String, String) {
        let answer = self.get(&format!("/v1/vms/{vm}/logs?{query}"));
        assert_eq!(
            answer.status,
            200,
            "{}",
            String::from_utf8_lossy(&answer.body)
        );
        let mut decoder = jiffy_wire::frame::Decoder::new();
        decoder.push(&answer.body);
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        while let Some(chunk) = decoder.next::<jiffy_wire::api::LogChunk>().unwrap() {
            match chunk.stream {
                jiffy_wire::agent::Stream::Stdout => stdout.extend(chunk.data),
                jiffy_wire::agent::Stream::Stderr => stderr.extend(chunk.data),
            }
        }
        assert_eq!(decoder.pending(), 0);
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        (text(stdout), text(stderr))
    }

    /// Checks that no process, folder or socket of any VM is left.
    pub fn assert_nothing_left(&self) {
        let left = |folder: &Path| -> Vec<_> {
            fs::read_dir(folder)
                .unwrap()
                .map(|entry| entry.unwrap().file_name())
                .collect()
        };
        eventually("nothing is left", || {
            left(&self.data.join("vms")).is_empty()
                && left(&self.folder.path().join("run/vms")).is_empty()
                && vmms(&self.data).is_empty()
        });
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = fs::read_to_string(self.folder.path().join("jiffyd.log"));
            eprintln!("---- jiffyd.log\n{}", log.unwrap_or_default());
            for entry in fs::read_dir(self.data.join("vms")).into_iter().flatten() {
                let path = entry.unwrap().path().join("vmm.log");
                let log = fs::read_to_string(&path).unwrap_or_default();
                eprintln!("---- {}\n{log}", path.display());
            }
        }
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
        // A child has the daemon's command line until it executes its program.
        let own = format!("--data\0{}\0", self.data.display());
        let until = Instant::now() + Duration::from_secs(10);
        while !processes(|line| line.contains(&own)).is_empty() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        // A spare may be just about to become a VM's.
        let marker = self.data.join("vms").display().to_string();
        for pid in processes(|line| line.contains("jiffy-vmm\0run\0") && line.contains(&marker)) {
            kill(pid);
        }
        for pid in pagers(self.folder.path()) {
            kill(pid);
        }
    }
}

/// The body of `POST /v1/run`.
pub fn run_of(vm: CreateVm, detach: bool) -> RunVm {
    RunVm {
        vm,
        detach,
        ..RunVm::default()
    }
}

/// Processes of pagers with their socket in this folder.
pub fn pagers(folder: &Path) -> Vec<u32> {
    let marker = format!("{}/", folder.display());
    processes(|line| line.contains("jiffy-pager\0serve\0") && line.contains(&marker))
}

/// Sends SIGKILL.
pub fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}

/// Does this process exist, and is it not a zombie?
pub fn is_alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap().starts_with(" Z"))
}

/// Processes of VMMs with their configuration in this data folder.
pub fn vmms(data: &Path) -> Vec<u32> {
    let marker = data.join("vms").display().to_string();
    let spare = spare_marker(data);
    processes(|line| {
        line.contains("jiffy-vmm\0run\0") && line.contains(&marker) && !line.contains(&spare)
    })
}

/// Processes of spare VMMs.
pub fn spares(data: &Path) -> Vec<u32> {
    let spare = spare_marker(data);
    processes(|line| line.contains(&spare))
}

fn spare_marker(data: &Path) -> String {
    data.join("vms/------------/").display().to_string()
}

/// Processes whose command line, with a zero after each word, fulfils this.
pub fn processes(holds: impl Fn(&str) -> bool) -> Vec<u32> {
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            holds(&String::from_utf8_lossy(&line)) && is_alive(*pid)
        })
        .collect()
}

/// Built by cargo beside this test.
pub fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test
        .parent()
        .unwrap()
        .parent()
        .unwrap()
        .join("examples")
        .join(name);
    assert!(path.exists(), "{} is not built", path.display());
    path
}

/// A tar of these files.
pub fn tar_of(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, contents) in files {
        let mut header = tar::Header::new_ustar();
        header.set_size(contents.len() as u64);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        builder.append_data(&mut header, name, *contents).unwrap();
    }
    builder.into_inner().unwrap()
}

/// A command.
pub fn command(argv: &[&str]) -> Command {
    Command {
        argv: argv.iter().map(|word| word.to_string()).collect(),
        ..Command::default()
    }
}

/// A script for the host's shell, which runs in place of the guest's.
pub fn shell(script: &str) -> Command {
    command(&["/bin/sh", "-c", script])
}

/// The same VM with a name.
pub fn named(name: &str, vm: CreateVm) -> CreateVm {
    CreateVm {
        name: Some(name.into()),
        ..vm
    }
}

/// A VM with a first command.
pub fn vm(command: Command) -> CreateVm {
    CreateVm {
        command: Some(command),
        ..CreateVm::default()
    }
}

/// A VM whose stand-in misbehaves.
pub fn bad_vm(how: &str, command: Option<Command>) -> CreateVm {
    CreateVm {
        command,
        kernel_args: Some(format!("fake={how}")),
        ..CreateVm::default()
    }
}

/// Releases a VM that was made to wait (`fake=held…`).
pub fn release_guest(vm_folder: &Path) {
    fs::write(vm_folder.join("go"), "").unwrap();
}

/// The id of the VM that `run` made.
pub fn id_of(frames: &Frames) -> String {
    let id = frames.head.split("jiffy-vm-id: ").nth(1).unwrap();
    id.split("\r\n").next().unwrap().to_owned()
}

pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < until, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits for `Started`.
pub fn started(frames: &mut Frames) {
    let first = frames.next::<ExecOutput>();
    assert!(
        matches!(first, Some(ExecOutput::Started { .. })),
        "{first:?}"
    );
}

/// A VM's record with this content, as the daemon writes it.
pub fn vm_record(content: &str) -> String {
    let sum = crc_fast::crc32_iscsi(content.as_bytes());
    format!(
        "{{\"format\":\"jiffy-vm\",\"version\":1,\"crc32c\":\"{sum:08x}\",\"content\":{content}}}"
    )
}

/// A number in a process's status (proc(5)), such as `VmRSS` (KiB).
pub fn status_of(pid: u32, name: &str) -> u64 {
    number_in(&format!("/proc/{pid}/status"), name)
}

/// The number after this name at the start of a line (proc(5): `status`, `meminfo`).
pub fn number_in(file: &str, name: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
