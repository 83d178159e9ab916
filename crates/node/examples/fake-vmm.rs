//! A stand-in for `jiffy-vmm` and the guest in it, for the node's tests on
//! hosts without KVM.
//!
//! It keeps both contracts: events, control socket and exit record of the
//! VMM; supervisor channel and agent of the guest. The "guest's" programs are
//! real programs on the host. Words `fake=…` of the kernel's command line
//! make it misbehave; see [`Script`].

use jiffy_sys::fds::send_with_fds;
use jiffy_wire::agent::{
    AGENT_PORT, Command, CopyDone, CopyFrame, Done, ExecInput, ExecOutput, ExitStatus, FromGuest,
    GuestSpan, MAIN_OUTPUT_WINDOW, Request, SUPERVISOR_PORT, StartError, StartFailure, Stat,
    Stream, ToGuest, VERSION,
};
use jiffy_wire::frame::{self, Decoder, MAX_DATA};
use jiffy_wire::guest::GuestConfig;
use jiffy_wire::timeline::names;
use jiffy_wire::trace;
use jiffy_wire::vmm::{
    BalloonStatus, ControlRequest, ControlResponse, ExitReason, ExitRecord, Extent, FwCfgContents,
    MemoryLayout, SavedMemory, Source, VmmConfig, VmmEvent,
};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Most input kept for a program that doesn't read.
const INPUT_WINDOW: usize = 128 * 1024;

/// How it misbehaves.
#[derive(Debug, Default)]
struct Script {
    /// The VMM can't build the VM.
    start_failed: bool,
    /// The guest never says anything.
    mute: bool,
    /// Neither the agent nor the control socket takes anything.
    deaf: bool,
    /// Other programs in the guest send nonsense to the supervisor port.
    garbage: bool,
    /// The agent answers `exec` with nonsense.
    exec_garbage: bool,
    /// The guest crashes once its command runs.
    crash: bool,
    /// The VMM dies by SIGKILL in the middle of a message of `exec`.
    die_in_message: bool,
    /// Init warns, and a service writes a line.
    warn: bool,
    /// The guest writes marks without end.
    flood: bool,
    /// The guest powers off before its command has ended.
    early_off: bool,
    /// The VMM can't capture the VM.
    capture_fails: bool,
    /// A capture makes the file `capturing` in the VM's folder, waits until
    /// there is one called `go`, and makes `captured` at its end.
    held_capture: bool,
    /// The guest says nothing until there is a file `go` in the VM's folder.
    held: bool,
}

/// What a captured "VM" is: the contents of its state file.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Saved {
    id: String,
    hostname: String,
    /// The first command, if it ran.
    main: Option<Command>,
    /// How often it was captured, with those it came from.
    depth: u32,
}

impl Script {
    fn parse(command_line: &str) -> Script {
        let mut script = Script::default();
        for word in command_line.split(' ') {
            match word.strip_prefix("fake=") {
                Some("start-failed") => script.start_failed = true,
                Some("mute") => script.mute = true,
                Some("deaf") => script.deaf = true,
                Some("garbage") => script.garbage = true,
                Some("exec-garbage") => script.exec_garbage = true,
                Some("crash") => script.crash = true,
                Some("die-in-message") => script.die_in_message = true,
                Some("warn") => script.warn = true,
                Some("flood") => script.flood = true,
                Some("early-off") => script.early_off = true,
                Some("capture-fails") => script.capture_fails = true,
                Some("held-capture") => script.held_capture = true,
                Some("held") => script.held = true,
                Some(other) => panic!("fake={other}"),
                None => {}
            }
        }
        script
    }
}

struct Vm {
    config: VmmConfig,
    guest: GuestConfig,
    script: Script,
    events: Mutex<File>,
    begun: Instant,
    main: Mutex<Main>,
    changed: Condvar,
    /// What it was restored from.
    saved: Option<Saved>,
    paused: Mutex<bool>,
    /// Layers of RAM so far.
    layers: Mutex<Vec<File>>,
    balloon: Mutex<u32>,
    copied: Mutex<HashMap<String, Vec<CopyFrame>>>,
}

#[derive(Default)]
struct Main {
    program: Option<Arc<Program>>,
    /// Input for the program, on its way to a thread that may wait for it.
    input: Option<mpsc::Sender<ExecInput>>,
    /// Bytes of input the program has taken since the node was last told.
    taken: u32,
    /// What the node was told of these, and the hearing thread was not.
    told_taken: u32,
    output: [Window; 2],
    exit: Option<ExitStatus>,
    failed: Option<StartError>,
    end_stored: bool,
    broken: bool,
    powering_off: bool,
}

/// A stream's bytes that the host has not stored.
#[derive(Default)]
struct Window {
    base: u64,
    sent: u64,
    bytes: Vec<u8>,
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ["run", "--config", config, "--events-fd", "3"] = words[1..] else {
        eprintln!("fake-vmm: run --config FILE --events-fd 3");
        std::process::exit(2);
    };
    let file = config;
    let (config, guest) = read_config(file);
    let mut needed: Vec<&PathBuf> = config.disks.iter().map(|disk| &disk.path).collect();
    if config.restore.is_none() {
        needed.extend([&config.boot.kernel, config.boot.initrd.as_ref().unwrap()]);
    }
    for file in needed {
        assert!(file.exists(), "{} is missing", file.display());
    }
    // SAFETY: the node passes the pipe as descriptor 3, and nothing else here
    // has it.
    #[allow(unsafe_code)]
    let events = unsafe { File::from_raw_fd(3) };
    eprintln!("fake-vmm: VM {}", config.id);
    let mut vm = Vm {
        saved: None,
        paused: Mutex::default(),
        layers: Mutex::default(),
        balloon: Mutex::default(),
        script: Script::parse(&config.boot.command_line),
        events: Mutex::new(events),
        begun: Instant::now(),
        main: Mutex::default(),
        changed: Condvar::new(),
        copied: Mutex::default(),
        config,
        guest,
    };
    vm.span("VMM main", 0);
    vm.restore();
    let control = UnixListener::bind(vm.config.control.as_ref().unwrap()).unwrap();
    if vm
        .config
        .restore
        .as_ref()
        .is_some_and(|restore| restore.hold)
    {
        wait_to_begin(&control);
        (vm.config, vm.guest) = read_config(file);
    }
    let vm = Arc::new(vm);
    if vm.script.start_failed {
        vm.finish(ExitReason::StartFailed, "The kernel /x is not bootable.");
    }
    spawn(&vm, move |vm| serve(&control, vm, Vm::control));
    let vsock = UnixListener::bind(&vm.config.vsock.as_ref().unwrap().path).unwrap();
    spawn(&vm, move |vm| serve(&vsock, vm, Vm::vsock));
    let steps: &[&str] = match vm.saved {
        Some(_) => &[names::STATE_LOADED, names::MEMORY_ATTACHED],
        None => &[
            names::KVM_VM_CREATED,
            names::MEMORY,
            names::VCPUS,
            names::DEVICES,
            names::KERNEL_LOADED,
        ],
    };
    for name in steps {
        vm.span(name, 1000);
    }
    let last = match vm.saved {
        Some(_) => names::VCPUS_RESUMED,
        None => names::FIRST_KVM_RUN,
    };
    vm.span(last, 0);
    vm.guest();
}

fn read_config(file: &str) -> (VmmConfig, GuestConfig) {
    let config: VmmConfig = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let FwCfgContents::Text(guest) = &config.fw_cfg[0].contents else {
        panic!("the guest's configuration is text");
    };
    let guest: GuestConfig = serde_json::from_str(guest).unwrap();
    assert_eq!(guest.vm_id, config.id);
    (config, guest)
}

/// Held until it is told to begin.
fn wait_to_begin(control: &UnixListener) {
    for stream in control.incoming() {
        let mut line = String::new();
        let _ = BufReader::new(stream.unwrap()).read_line(&mut line);
        match serde_json::from_str(&line) {
            Ok(ControlRequest::Begin) => return,
            Ok(ControlRequest::Stop) => std::process::exit(0),
            _ => {}
        }
    }
}

fn spawn(vm: &Arc<Vm>, work: impl FnOnce(&Arc<Vm>) + Send + 'static) {
    let vm = Arc::clone(vm);
    thread::spawn(move || work(&vm));
}

fn serve(
    listener: &UnixListener,
    vm: &Arc<Vm>,
    handle: fn(&Arc<Vm>, UnixStream) -> io::Result<()>,
) {
    for stream in listener.incoming() {
        let stream = stream.unwrap();
        spawn(vm, move |vm| drop(handle(vm, stream)));
    }
}

/// The working directory is the VM's folder.
fn until_let_go() {
    while !Path::new("go").exists() {
        thread::sleep(Duration::from_millis(2));
    }
}

fn now_ns() -> u64 {
    jiffy_sys::clock::monotonic_ns()
}

impl Vm {
    // ---- the VMM ---------------------------------------------------------

    fn event(&self, event: &VmmEvent) {
        let mut line = serde_json::to_vec(event).unwrap();
        line.push(b'\n');
        // The daemon may be gone; the VM is not.
        let _ = self.events.lock().unwrap().write_all(&line);
    }

    fn span(&self, name: &str, length: u64) {
        let end_ns = now_ns();
        self.event(&VmmEvent::Span {
            name: name.into(),
            start_ns: end_ns - length,
            end_ns,
            detail: None,
        });
    }

    fn mark(&self, value: u8) {
        let at_ns = now_ns();
        self.event(&VmmEvent::Mark { value, at_ns });
    }

    fn finish(&self, reason: ExitReason, message: &str) -> ! {
        let record = ExitRecord {
            reason,
            message: message.into(),
            hint: (reason == ExitReason::StartFailed).then(|| "Give another.".into()),
        };
        let path = self.config.exit_record.as_ref().unwrap();
        let _ = fs::write(path, serde_json::to_vec(&record).unwrap());
        self.event(&VmmEvent::Exited(record));
        std::process::exit(i32::from(reason != ExitReason::Shutdown));
    }

    fn control(self: &Arc<Vm>, mut stream: UnixStream) -> io::Result<()> {
        let mut line = String::new();
        BufReader::new(stream.try_clone()?).read_line(&mut line)?;
        if self.script.deaf {
            thread::park();
        }
        let request: ControlRequest = serde_json::from_str(&line)?;
        let response = match request {
            ControlRequest::Status => ControlResponse::Status {
                id: self.config.id.clone(),
                pid: std::process::id(),
                paused: *self.paused.lock().unwrap(),
            },
            ControlRequest::Capture { resume } => return self.capture(&mut stream, resume),
            ControlRequest::Pause => self.pause(true),
            ControlRequest::Resume => self.pause(false),
            ControlRequest::SetBalloon { target_mib } => {
                *self.balloon.lock().unwrap() = target_mib;
                self.balloon()
            }
            ControlRequest::Balloon => self.balloon(),
            ControlRequest::Written => ControlResponse::Written(vec![Extent {
                offset: 1 << 20,
                length: 4096,
            }]),
            _ => ControlResponse::Ok,
        };
        let mut answer = serde_json::to_vec(&response)?;
        answer.push(b'\n');
        stream.write_all(&answer)?;
        if request == ControlRequest::Stop {
            self.kill_main(Signal::KILL);
            self.finish(ExitReason::Stopped, "Stopped.");
        }
        Ok(())
    }

    fn balloon(&self) -> ControlResponse {
        let target = *self.balloon.lock().unwrap();
        ControlResponse::Balloon(BalloonStatus {
            target_mib: target,
            actual_mib: target,
            ..BalloonStatus::default()
        })
    }

    /// The programs stand for the vCPUs.
    fn pause(&self, paused: bool) -> ControlResponse {
        *self.paused.lock().unwrap() = paused;
        self.kill_main(match paused {
            true => Signal::STOP,
            false => Signal::CONT,
        });
        ControlResponse::Ok
    }

    // ---- captured and restored -------------------------------------------

    fn ram_bytes(&self) -> u64 {
        u64::from(self.config.memory.size_mib) << 20
    }

    fn capture(&self, stream: &mut UnixStream, resume: bool) -> io::Result<()> {
        if self.script.held_capture {
            File::create("capturing")?;
            until_let_go();
        }
        if self.script.capture_fails {
            let refusal = ControlResponse::Error("The disk is on fire.".into());
            let mut answer = serde_json::to_vec(&refusal)?;
            answer.push(b'\n');
            return stream.write_all(&answer);
        }
        let depth = self.saved.as_ref().map_or(0, |saved| saved.depth) + 1;
        let main = self.main.lock().unwrap();
        let runs = main.program.is_some() && main.exit.is_none();
        let state = Saved {
            id: self.config.id.clone(),
            hostname: self.guest.hostname.clone().unwrap_or_default(),
            main: self.guest.main.clone().filter(|_| runs),
            depth,
        };
        drop(main);
        let state_file = memfd(&serde_json::to_vec(&state)?)?;
        let mut layers = self.layers.lock().unwrap();
        let first = layers.is_empty();
        // A page at the start, and one that tells the layers apart.
        let layer = memfd(&[])?;
        layer.set_len(self.ram_bytes())?;
        layer.write_all_at(&[0x55; 4096], if first { 0 } else { 1 << 20 })?;
        layer.write_all_at(self.config.id.as_bytes(), 1 << 20)?;
        layers.push(layer);
        let covers = layers[1..].iter().map(|_| {
            vec![Extent {
                offset: 1 << 20,
                length: 4096,
            }]
        });
        let layout = MemoryLayout {
            size: self.ram_bytes(),
            covers: covers.collect(),
        };
        let layout_file = memfd(&serde_json::to_vec(&layout)?)?;
        self.pause(!resume);
        if self.script.held_capture {
            File::create("captured")?;
        }
        let mut answer = serde_json::to_vec(&ControlResponse::Captured {
            layers: layers.len() as u32,
            pause_ns: 1_000_000,
            copied_bytes: 4096,
        })?;
        answer.push(b'\n');
        let mut files = vec![state_file.as_fd(), layout_file.as_fd()];
        files.extend(layers.iter().map(AsFd::as_fd));
        send_with_fds(&stream, &answer, &files)
    }

    fn restore(&mut self) {
        let Some(restore) = self.config.restore.clone() else {
            return;
        };
        let state = match open(&restore.state).and_then(|mut file| {
            // A pipe of a test's has no beginning.
            let _ = file.rewind();
            let mut text = Vec::new();
            file.read_to_end(&mut text)?;
            Ok(serde_json::from_slice::<Saved>(&text)?)
        }) {
            Ok(state) => state,
            Err(error) => {
                let message = format!("The state can't be read: {error}.");
                self.finish(ExitReason::StartFailed, &message)
            }
        };
        // As it answers when it is asked what it has written.
        for extent in &restore.prefault {
            assert_eq!((extent.offset, extent.length), (1 << 20, 4096));
            eprintln!("fake-vmm: prefault");
        }
        match &restore.memory {
            SavedMemory::Mapped { layers, layout } => {
                let layers: Vec<File> = layers.iter().map(|layer| open(layer).unwrap()).collect();
                let mut layout_text = String::new();
                if let Some(layout) = layout {
                    let mut file = open(layout).unwrap();
                    file.rewind().unwrap();
                    file.read_to_string(&mut layout_text).unwrap();
                    let layout: MemoryLayout = serde_json::from_str(&layout_text).unwrap();
                    assert_eq!(layout.covers.len() + 1, layers.len());
                }
                for layer in &layers {
                    assert_eq!(layer.metadata().unwrap().len(), self.ram_bytes());
                }
                let mut id = [0; 12];
                layers
                    .last()
                    .unwrap()
                    .read_exact_at(&mut id, 1 << 20)
                    .unwrap();
                assert_eq!(id, state.id.as_bytes(), "the memory is the state's");
                *self.layers.lock().unwrap() = layers;
            }
            SavedMemory::Paged { socket } => {
                let stream = UnixStream::connect(socket).unwrap();
                std::mem::forget(stream);
            }
        }
        self.saved = Some(state);
    }

    /// The clone gate.
    fn enter(self: &Arc<Self>) {
        let generation = self.config.restore.as_ref().unwrap().generation.clone();
        let generation = generation.unwrap();
        assert_eq!(generation.id.len(), 36);
        self.mark(trace::MARK_GATE_ENTERED);
        self.mark(trace::MARK_GATE_PASSED);
        let main = match generation.start_main {
            true => Some(self.guest.main.clone().expect("a command to start")),
            false => self.saved.as_ref().unwrap().main.clone(),
        };
        if let Some(mut main) = main {
            let depth = self.saved.as_ref().unwrap().depth;
            main.env.push(format!("RESTORED={depth}"));
            main.env.push(format!("GENERATION={}", generation.id));
            let hostname = self.guest.hostname.clone().unwrap_or_default();
            main.env.push(format!("HOSTNAME={hostname}"));
            self.start_main(&main);
        }
    }

    /// Programs are held still until the connection ends.
    fn quiesce(&self, mut stream: UnixStream, mut reader: Messages) -> io::Result<()> {
        self.kill_main(Signal::STOP);
        // What was written is delivered first.
        thread::sleep(Duration::from_millis(20));
        let until = Instant::now() + Duration::from_secs(5);
        loop {
            let main = self.main.lock().unwrap();
            if main.output.iter().all(|window| window.bytes.is_empty()) {
                break;
            }
            drop(main);
            assert!(Instant::now() < until, "the output is never acknowledged");
            thread::sleep(Duration::from_millis(2));
        }
        send(&mut stream, &Done::Ok)?;
        let _ = reader.next::<Request>();
        if !*self.paused.lock().unwrap() {
            self.kill_main(Signal::CONT);
        }
        Ok(())
    }

    // ---- the guest -------------------------------------------------------

    fn guest(self: &Arc<Vm>) {
        if self.script.mute || self.script.deaf && self.guest.main.is_none() {
            loop {
                thread::park();
            }
        }
        if self.script.held {
            until_let_go();
        }
        if self.saved.is_some() {
            self.enter();
        } else {
            self.mark(trace::MARK_KERNEL_ENTRY);
            self.mark(trace::MARK_PID1);
        }
        if self.script.flood {
            spawn(self, |vm| {
                loop {
                    vm.mark(0x80);
                }
            });
        }
        if self.script.garbage {
            self.garbage();
        }
        if let Some(command) = &self.guest.main
            && self.saved.is_none()
        {
            self.start_main(command);
        }
        self.mark(trace::MARK_AGENT_READY);
        let mut attempt = 0;
        loop {
            if let Ok(stream) = UnixStream::connect(self.supervisor()) {
                let _ = self.supervise(stream, attempt);
                attempt += 1;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn supervisor(&self) -> PathBuf {
        let vsock = &self.config.vsock.as_ref().unwrap().path;
        PathBuf::from(format!("{}_{SUPERVISOR_PORT}", vsock.display()))
    }

    /// What a hostile program in the guest might send.
    fn garbage(&self) {
        let hello = |vm_id: &str, version| {
            frame::to_vec(&FromGuest::Hello {
                version,
                vm_id: vm_id.into(),
                pid1_ns: 0,
                attempt: 0,
            })
            .unwrap()
        };
        for bytes in [
            vec![0xff; 4096],
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            hello("ffffffffffff", VERSION),
            hello(&self.config.id, VERSION + 1),
            frame::to_vec(&FromGuest::MainExited(ExitStatus::Code(99))).unwrap(),
        ] {
            let mut stream = UnixStream::connect(self.supervisor()).unwrap();
            let _ = stream.write_all(&bytes);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    }

    fn start_main(self: &Arc<Vm>, command: &Command) {
        match start(command) {
            Ok(mut child) => {
                self.mark(trace::MARK_COMMAND_STARTED);
                let streams: [Box<dyn Read + Send>; 2] = [
                    Box::new(child.stdout.take().unwrap()),
                    Box::new(child.stderr.take().unwrap()),
                ];
                let mut main = self.main.lock().unwrap();
                let program = Program::of(&child);
                main.program = Some(Arc::clone(&program));
                let (input, queue) = mpsc::channel();
                main.input = Some(input);
                drop(main);
                let mut stdin = child.stdin.take();
                let waited = Arc::clone(&program);
                spawn(self, move |vm| {
                    for message in queue {
                        let bytes = match &message {
                            ExecInput::Stdin(bytes) => bytes.len() as u32,
                            _ => 0,
                        };
                        feed(message, &program, &mut stdin);
                        vm.main.lock().unwrap().taken += bytes;
                        vm.changed.notify_all();
                    }
                });
                let readers: Vec<_> = streams
                    .into_iter()
                    .enumerate()
                    .map(|(index, stream)| {
                        let vm = Arc::clone(self);
                        thread::spawn(move || vm.read_main(index, stream))
                    })
                    .collect();
                spawn(self, move |vm| {
                    for reader in readers {
                        reader.join().unwrap();
                    }
                    let status = waited.wait(&mut child);
                    vm.mark(trace::MARK_COMMAND_DONE);
                    vm.main.lock().unwrap().exit = Some(status);
                    vm.changed.notify_all();
                });
            }
            Err(error) => self.main.lock().unwrap().failed = Some(error),
        }
    }

    fn read_main(&self, index: usize, mut stream: Box<dyn Read + Send>) {
        let mut buffer = vec![0; MAX_DATA];
        loop {
            let mut main = self.main.lock().unwrap();
            while main.output[index].bytes.len() >= MAIN_OUTPUT_WINDOW {
                main = self.changed.wait(main).unwrap();
            }
            let room = MAIN_OUTPUT_WINDOW - main.output[index].bytes.len();
            drop(main);
            let limit = room.min(buffer.len());
            match stream.read(&mut buffer[..limit]) {
                Ok(0) | Err(_) => return,
                Ok(got) => {
                    let mut main = self.main.lock().unwrap();
                    main.output[index].bytes.extend_from_slice(&buffer[..got]);
                    self.changed.notify_all();
                }
            }
        }
    }

    fn supervise(self: &Arc<Vm>, mut stream: UnixStream, attempt: u32) -> io::Result<()> {
        send(
            &mut stream,
            &FromGuest::Hello {
                version: VERSION,
                vm_id: self.config.id.clone(),
                pid1_ns: 5_000_000,
                attempt,
            },
        )?;
        let mut reader = Messages::new(stream.try_clone()?);
        let Some(ToGuest::Welcome {
            stdout_offset,
            stderr_offset,
            ..
        }) = reader.next()?
        else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let mut main = self.main.lock().unwrap();
        main.broken = false;
        for (window, offset) in main.output.iter_mut().zip([stdout_offset, stderr_offset]) {
            window.forget(offset);
            window.sent = window.base;
        }
        drop(main);
        spawn(self, move |vm| vm.hear(reader));
        send(
            &mut stream,
            &FromGuest::Spans(vec![GuestSpan {
                kernel: false,
                name: "mount root".into(),
                start_ns: 6_000_000,
                end_ns: 7_000_000,
                error: None,
            }]),
        )?;
        if self.script.warn && attempt == 0 {
            send(
                &mut stream,
                &FromGuest::Warning {
                    step: "hostname".into(),
                    message: "it would not stick".into(),
                },
            )?;
            send(
                &mut stream,
                &FromGuest::ServiceLog {
                    name: "crond".into(),
                    line: b"tick".to_vec(),
                },
            )?;
        }
        send(&mut stream, &FromGuest::Ready)?;
        self.report_main(&mut stream)
    }

    /// Tells all about the first command until the connection breaks.
    fn report_main(&self, stream: &mut UnixStream) -> io::Result<()> {
        let mut main = self.main.lock().unwrap();
        let mut told_start = false;
        main.taken = 0;
        main.told_taken = 0;
        send(
            stream,
            &FromGuest::MainInputRoom {
                bytes: INPUT_WINDOW as u32,
            },
        )?;
        let mut told_end = false;
        loop {
            if main.broken {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if main.taken > 0 {
                let bytes = std::mem::take(&mut main.taken);
                main.told_taken += bytes;
                send(stream, &FromGuest::MainInputRoom { bytes })?;
            }
            if !told_start && let Some(pid) = main.program.as_ref().map(|program| program.pid) {
                told_start = true;
                send(stream, &FromGuest::MainStarted { pid })?;
                if self.script.crash {
                    self.finish(ExitReason::GuestFault, "The guest crashed: triple fault.");
                }
                if self.script.early_off {
                    self.finish(ExitReason::Shutdown, "The guest powered off.");
                }
            }
            if !told_end && let Some(error) = main.failed.clone() {
                told_end = true;
                send(stream, &FromGuest::MainFailed(error))?;
            }
            let mut all_sent = true;
            for (window, name) in main.output.iter_mut().zip([Stream::Stdout, Stream::Stderr]) {
                if let Some((offset, data)) = window.next() {
                    send(
                        stream,
                        &FromGuest::MainOutput {
                            stream: name,
                            offset,
                            data,
                        },
                    )?;
                    all_sent = false;
                }
            }
            if !all_sent {
                continue;
            }
            if !told_end && let Some(status) = main.exit {
                told_end = true;
                send(stream, &FromGuest::MainExited(status))?;
            }
            let over = main.end_stored && self.guest.power_off_after_main;
            if over || main.powering_off && (main.exit.is_none() || told_end) {
                send(stream, &FromGuest::PoweringOff)?;
                thread::sleep(Duration::from_millis(5));
                self.finish(ExitReason::Shutdown, "The guest powered off.");
            }
            main = self.changed.wait(main).unwrap();
        }
    }

    /// Hears the node on a supervisor connection.
    fn hear(&self, mut reader: Messages) {
        let mut waiting = 0usize;
        while let Ok(Some(message)) = reader.next::<ToGuest>() {
            let mut main = self.main.lock().unwrap();
            waiting -= std::mem::take(&mut main.told_taken) as usize;
            match message {
                ToGuest::Welcome { .. } => panic!("one welcome is enough"),
                ToGuest::MainOutputStored {
                    stdout_offset,
                    stderr_offset,
                } => {
                    main.output[0].forget(stdout_offset);
                    main.output[1].forget(stderr_offset);
                }
                ToGuest::MainInput(message) => {
                    if let ExecInput::Stdin(bytes) = &message {
                        waiting += bytes.len();
                        assert!(waiting <= INPUT_WINDOW, "more input than there is room for");
                    }
                    // Signals overtake input that waits.
                    match (&message, &main.program) {
                        (ExecInput::Signal(_), Some(program)) => feed(message, program, &mut None),
                        _ => drop(main.input.as_ref().map(|input| input.send(message))),
                    }
                }
                ToGuest::MainEndStored => main.end_stored = true,
            }
            self.changed.notify_all();
        }
        self.main.lock().unwrap().broken = true;
        self.changed.notify_all();
    }

    fn kill_main(&self, signal: Signal) {
        let main = self.main.lock().unwrap();
        if let Some(program) = &main.program {
            program.signal(signal);
        }
    }

    // ---- the agent -------------------------------------------------------

    fn vsock(self: &Arc<Vm>, mut stream: UnixStream) -> io::Result<()> {
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            line.push(byte[0]);
        }
        if self.script.deaf {
            return Ok(());
        }
        assert_eq!(line, format!("CONNECT {AGENT_PORT}\n").as_bytes());
        stream.write_all(b"OK 4000\n")?;
        let mut reader = Messages::new(stream.try_clone()?);
        let Some(request) = reader.next::<Request>()? else {
            return Ok(());
        };
        assert_eq!(request.version(), VERSION);
        match request {
            Request::Exec { command, .. } => self.exec(stream, reader, &command),
            Request::Stat { .. } => send(
                &mut stream,
                &Stat {
                    memory_total: u64::from(self.config.memory.size_mib) << 20,
                    uptime_ns: self.begun.elapsed().as_nanos() as u64,
                    ..Stat::default()
                },
            ),
            Request::SignalMain { signal, .. } => {
                self.kill_main(Signal::from_named_raw(signal).unwrap());
                send(&mut stream, &Done::Ok)
            }
            Request::Quiesce { .. } => self.quiesce(stream, reader),
            Request::Shutdown { grace_ms, .. } => {
                send(&mut stream, &Done::Ok)?;
                self.kill_main(Signal::TERM);
                let until = Instant::now() + Duration::from_millis(grace_ms.into());
                let runs = || {
                    let main = self.main.lock().unwrap();
                    main.program.is_some() && main.exit.is_none()
                };
                while runs() && Instant::now() < until {
                    thread::sleep(Duration::from_millis(5));
                }
                self.kill_main(Signal::KILL);
                while runs() {
                    thread::sleep(Duration::from_millis(5));
                }
                self.main.lock().unwrap().powering_off = true;
                self.changed.notify_all();
                Ok(())
            }
            Request::CopyIn { path, .. } => {
                let mut frames = Vec::new();
                loop {
                    match reader.next::<CopyFrame>()? {
                        Some(CopyFrame::End) => break,
                        Some(frame) => frames.push(frame),
                        None => return Ok(()),
                    }
                }
                let entries = frames.len() as u64;
                self.copied.lock().unwrap().insert(path, frames);
                send(
                    &mut stream,
                    &CopyDone {
                        entries,
                        error: None,
                    },
                )
            }
            Request::Changes { .. } => {
                let mut tar = tar::Builder::new(Vec::new());
                let mut header = tar::Header::new_ustar();
                header.set_size(7);
                header.set_mode(0o644);
                header.set_uid(0);
                header.set_gid(0);
                header.set_mtime(0);
                tar.append_data(&mut header, "changed", &b"by a VM"[..])
                    .unwrap();
                let tar = tar.into_inner().unwrap();
                send(&mut stream, &CopyFrame::Data(tar))?;
                send(&mut stream, &CopyFrame::End)
            }
            Request::CopyOut { path, .. } => {
                let frames = self.copied.lock().unwrap().get(&path).cloned();
                let Some(frames) = frames else {
                    let message = format!("{path} does not exist");
                    return send(&mut stream, &CopyFrame::Failed { message });
                };
                for frame in &frames {
                    send(&mut stream, frame)?;
                }
                send(&mut stream, &CopyFrame::End)
            }
        }
    }

    fn exec(&self, stream: UnixStream, mut input: Messages, command: &Command) -> io::Result<()> {
        let mut to_host = stream.try_clone()?;
        if self.script.exec_garbage {
            to_host.write_all(&[0xee; 300])?;
            return Ok(());
        }
        let mut child = match start(command) {
            Ok(child) => child,
            Err(error) => return send(&mut to_host, &ExecOutput::Failed(error)),
        };
        let program = Program::of(&child);
        let pid = program.pid;
        send(&mut to_host, &ExecOutput::Started { pid })?;
        if self.script.die_in_message {
            let whole = frame::to_vec(&ExecOutput::Output {
                stream: Stream::Stdout,
                data: vec![b'x'; 5000],
            })
            .unwrap();
            to_host.write_all(&whole[..3000])?;
            thread::sleep(Duration::from_millis(50));
            program.signal(Signal::KILL);
            let me = Pid::from_raw(std::process::id() as i32).unwrap();
            let _ = kill_process(me, Signal::KILL);
        }
        let shared = Arc::new(Mutex::new(to_host));
        let streams: [(Stream, Box<dyn Read + Send>); 2] = [
            (Stream::Stdout, Box::new(child.stdout.take().unwrap())),
            (Stream::Stderr, Box::new(child.stderr.take().unwrap())),
        ];
        let readers: Vec<_> = streams
            .into_iter()
            .map(|(name, mut from)| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let mut buffer = vec![0; MAX_DATA];
                    while let Ok(got @ 1..) = from.read(&mut buffer) {
                        let message = ExecOutput::Output {
                            stream: name,
                            data: buffer[..got].to_vec(),
                        };
                        if send(&mut shared.lock().unwrap(), &message).is_err() {
                            return;
                        }
                    }
                })
            })
            .collect();
        let mut stdin = child.stdin.take();
        let fed = Arc::clone(&program);
        thread::spawn(move || {
            while let Ok(Some(message)) = input.next::<ExecInput>() {
                feed(message, &fed, &mut stdin);
            }
            fed.signal(Signal::HUP);
        });
        for reader in readers {
            reader.join().unwrap();
        }
        let status = program.wait(&mut child);
        send(&mut shared.lock().unwrap(), &ExecOutput::Exited(status))?;
        stream.shutdown(Shutdown::Both)
    }
}

impl Window {
    fn forget(&mut self, until: u64) {
        let count = until.saturating_sub(self.base) as usize;
        self.bytes.drain(..count);
        self.base += count as u64;
        self.sent = self.sent.max(self.base);
    }

    fn next(&mut self) -> Option<(u64, Vec<u8>)> {
        let from = (self.sent - self.base) as usize;
        let data: Vec<u8> = self.bytes[from..].iter().take(MAX_DATA).copied().collect();
        let offset = self.sent;
        self.sent += data.len() as u64;
        (!data.is_empty()).then_some((offset, data))
    }
}

fn memfd(contents: &[u8]) -> io::Result<File> {
    let mut file = jiffy_sys::memfd::create("fake", 0, jiffy_sys::memfd::Pages::Small)?;
    file.write_all(contents)?;
    Ok(file)
}

fn open(source: &Source) -> io::Result<File> {
    match source {
        Source::Path(path) => File::open(path),
        Source::Fd(number) => jiffy_sys::fds::inherited(*number).map(File::from),
    }
}

fn start(command: &Command) -> Result<Child, StartError> {
    let mut process = std::process::Command::new(&command.argv[0]);
    process
        .args(&command.argv[1..])
        .envs(command.env.iter().filter_map(|entry| entry.split_once('=')))
        .current_dir(command.cwd.as_deref().unwrap_or("/"))
        .stdin(match command.stdin {
            true => Stdio::piped(),
            false => Stdio::null(),
        })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    process.spawn().map_err(|error| StartError {
        kind: match error.kind() {
            io::ErrorKind::NotFound => StartFailure::NotFound,
            io::ErrorKind::PermissionDenied => StartFailure::NotExecutable,
            _ => StartFailure::Other,
        },
        message: format!("{} can't be started: {error}", command.argv[0]),
    })
}

fn feed(input: ExecInput, program: &Program, stdin: &mut Option<ChildStdin>) {
    match input {
        ExecInput::Stdin(bytes) => {
            if let Some(to) = stdin
                && to.write_all(&bytes).is_err()
            {
                *stdin = None;
            }
        }
        ExecInput::StdinClosed => *stdin = None,
        ExecInput::Signal(signal) => {
            if let Some(signal) = Signal::from_named_raw(signal) {
                program.signal(signal);
            }
        }
        ExecInput::Resize(_) => {}
    }
}

/// A program's process group, which is signalled only while its leader has
/// not been reaped: afterwards the number may be somebody else's.
#[derive(Debug)]
struct Program {
    pid: u32,
    reaped: Mutex<bool>,
}

impl Program {
    fn of(child: &Child) -> Arc<Program> {
        Arc::new(Program {
            pid: child.id(),
            reaped: Mutex::new(false),
        })
    }

    fn signal(&self, signal: Signal) {
        let reaped = self.reaped.lock().unwrap();
        if !*reaped {
            let pid = Pid::from_raw(self.pid as i32).unwrap();
            let _ = rustix::process::kill_process_group(pid, signal);
        }
    }

    fn wait(&self, child: &mut Child) -> ExitStatus {
        let pid = Pid::from_raw(self.pid as i32).unwrap();
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while waitid(WaitId::Pid(pid), options).is_err() {}
        let mut reaped = self.reaped.lock().unwrap();
        *reaped = true;
        status(child.wait().unwrap())
    }
}

fn status(status: std::process::ExitStatus) -> ExitStatus {
    match status.signal() {
        Some(signal) => ExitStatus::Signal(signal),
        None => ExitStatus::Code(status.code().unwrap_or(0)),
    }
}

fn send<T: serde::Serialize>(stream: &mut UnixStream, message: &T) -> io::Result<()> {
    stream.write_all(&frame::to_vec(message).map_err(io::Error::other)?)
}

struct Messages {
    stream: UnixStream,
    decoder: Decoder,
}

impl Messages {
    fn new(stream: UnixStream) -> Messages {
        Messages {
            stream,
            decoder: Decoder::new(),
        }
    }

    fn next<T: serde::de::DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let mut buffer = [0; 16 * 1024];
        loop {
            if let Some(message) = self.decoder.next().map_err(io::Error::other)? {
                return Ok(Some(message));
            }
            match self.stream.read(&mut buffer)? {
                0 => return Ok(None),
                got => self.decoder.push(&buffer[..got]),
            }
        }
    }
}
