//! A stand-in for `jiffy-vmm` and its guest, for the node's tests on hosts without KVM.
//!
//! It implements both protocols: events, control socket and exit record of the VMM; supervisor
//! channel and agent of the guest. The "guest's" programs are real programs on the host, except in
//! a jail ([`jailed`]). Words `fake=…` of the kernel's command line make it misbehave; see
//! [`Script`].

mod agent;
mod capture;
mod channel;
mod control;
mod guest;
mod jailed;
mod packets;
mod program;
mod script;
mod storm;

use crate::capture::Saved;
use crate::guest::Main;
use crate::script::Script;
use jiffy_sys::dial::Dialer;
use jiffy_sys::handed;
use jiffy_sys::spare::{self, Argument};
use jiffy_wire::agent::CopyFrame;
use jiffy_wire::cpu::Host;
use jiffy_wire::cpu::testing::processor;
use jiffy_wire::guest::GuestConfig;
use jiffy_wire::lines;
use jiffy_wire::timeline::names;
use jiffy_wire::vmm::{
    Activity, ControlRequest, ExitReason, ExitRecord, FwCfgContents, MemoryStatus, TakeSpare,
    VmmConfig, VmmEvent,
};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

struct Vm {
    config: VmmConfig,
    guest: GuestConfig,
    script: Script,
    events: Mutex<File>,
    begun: Instant,
    main: Mutex<Main>,
    changed: Condvar,
    /// The state that it was restored from.
    saved: Option<Saved>,
    paused: Mutex<bool>,
    /// How often it still refuses to resume.
    refused: AtomicU32,
    /// Number of RAM layers so far.
    layers: Mutex<Vec<File>>,
    balloon: Mutex<u32>,
    memory: Mutex<MemoryStatus>,
    copied: Mutex<HashMap<String, Vec<CopyFrame>>>,
    /// Connects to the node, once the guest has.
    dialer: Mutex<Option<Dialer>>,
}
/// The processor of all guests; an earlier release showed them IA32_ARCH_CAPABILITIES.
fn host() -> Host {
    let with = |leaf_7_edx| {
        let leaves = [
            (1, 0, [0, 0, 1 << 31, 1 << 26]),
            (7, 0, [0, 0, 0, leaf_7_edx]),
        ];
        processor("GenuineIntel", 7, &leaves)
    };
    let (shown, restorable) = (with(1 << 10), with(1 << 10 | 1 << 29));
    Host { shown, restorable }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if jailed::run_program(&arguments) {
        return;
    }
    let arguments = jailed::take_descriptors(arguments);
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (file, events, sources) = match words[1..] {
        ["run", "--config", config, "--events-fd", "3"] => {
            wait_to_read();
            (config.into(), third(), None)
        }
        ["run", "--config", config, "--spare-fd", "3"] => {
            let (config, events, sources) = wait_as_spare(Path::new(config));
            (config, events, Some(sources))
        }
        ["cpu"] => {
            println!("{}", serde_json::to_string(&host()).unwrap());
            return;
        }
        _ => {
            eprintln!("fake-vmm: run --config FILE [--events-fd 3 | --spare-fd 3]");
            std::process::exit(2);
        }
    };
    let (mut config, guest) = read_config(&file);
    if let (Some(sources), Some(restore)) = (&sources, &mut config.restore) {
        for number in restore.descriptors() {
            *number = sources[(*number - TakeSpare::FIRST_SOURCE) as usize].as_raw_fd();
        }
    }
    let mut needed: Vec<&PathBuf> = config.disks.iter().map(|disk| &disk.path).collect();
    if config.restore.is_none() {
        needed.extend([&config.boot.kernel, config.boot.initrd.as_ref().unwrap()]);
    }
    for file in needed {
        assert!(jailed::exists(file), "{} is missing", file.display());
    }
    eprintln!("fake-vmm: VM {}", config.id);
    let has_mib = config.usable_memory_mib.unwrap_or(config.memory.size_mib);
    let mut vm = Vm {
        saved: None,
        paused: Mutex::default(),
        refused: AtomicU32::new(0),
        layers: Mutex::default(),
        balloon: Mutex::default(),
        memory: Mutex::new(MemoryStatus {
            usable_mib: has_mib,
            used_mib: has_mib,
        }),
        script: Script::parse(&config.boot.command_line),
        events: Mutex::new(events),
        begun: Instant::now(),
        main: Mutex::default(),
        changed: Condvar::new(),
        copied: Mutex::default(),
        dialer: Mutex::default(),
        config,
        guest,
    };
    if vm.script.busy {
        thread::spawn(|| {
            loop {
                std::hint::spin_loop();
            }
        });
    }
    if vm.script.moves_data {
        thread::spawn(|| {
            let mut null = File::create("/dev/null").unwrap();
            loop {
                null.write_all(&[1; 64 << 10]).unwrap();
                thread::sleep(Duration::from_millis(100));
            }
        });
    }
    let _used = vm.script.uses_memory.then(|| vec![1u8; 96 << 20]);
    vm.restore();
    let control = jailed::listener(vm.config.control.as_ref().unwrap());
    vm.span("VMM main", 0);
    if vm
        .config
        .restore
        .as_ref()
        .is_some_and(|restore| restore.hold)
    {
        eprintln!("fake-vmm: held");
        wait_to_begin(&control);
        (vm.config, vm.guest) = read_config(&file);
    }
    let vm = Arc::new(vm);
    if vm.script.start_failed {
        vm.finish(ExitReason::StartFailed, "The kernel /x is not bootable.");
    }
    if vm.script.grows {
        spawn(&vm, Vm::grow);
    }
    spawn(&vm, move |vm| serve(&control, vm, Vm::control));
    let vsock = jailed::listener(&vm.config.vsock.as_ref().unwrap().path);
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

/// The descriptor that the node passes.
fn third() -> File {
    // SAFETY: the node leaves it open for us, and nothing else here owns it.
    #[allow(unsafe_code)]
    unsafe {
        File::from_raw_fd(3)
    }
}

/// Waits for its VM: configuration, events, and descriptors.
fn wait_as_spare(placeholder: &Path) -> (PathBuf, File, Vec<OwnedFd>) {
    let argument = Argument::find(placeholder.as_os_str()).unwrap();
    let socket = third();
    let Some((message, mut fds)) = spare::wait(socket.as_fd()).unwrap() else {
        std::process::exit(0);
    };
    let sources = fds.split_off(2);
    let events = fds.pop().unwrap();
    spare::write_to(fds[0].as_fd()).unwrap();
    let TakeSpare { config, .. } = serde_json::from_slice(&message).unwrap();
    argument.replace(config.as_os_str()).unwrap();
    std::env::set_current_dir(config.parent().unwrap()).unwrap();
    (config, events.into(), sources)
}

fn read_config(file: &Path) -> (VmmConfig, GuestConfig) {
    let text = io::read_to_string(handed::open(file).unwrap()).unwrap();
    let config: VmmConfig = serde_json::from_str(&text).unwrap();
    for inherited in &config.handed {
        handed::add_inherited(inherited.name.clone(), inherited.fd).unwrap();
    }
    let FwCfgContents::Text(guest) = &config.fw_cfg[0].contents else {
        panic!("the guest's configuration is text");
    };
    let guest: GuestConfig = serde_json::from_str(guest).unwrap();
    assert_eq!(guest.vm_id, config.id);
    (config, guest)
}

/// Held until the node lets it start.
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
fn wait_for_release() {
    while !Path::new("go").exists() {
        thread::sleep(Duration::from_millis(2));
    }
}

/// A VMM that was spawned does not read its configuration while there is a file `unread` in the
/// data folder.
fn wait_to_read() {
    while Path::new("../../unread").exists() {
        thread::sleep(Duration::from_millis(2));
    }
}

fn now_ns() -> u64 {
    jiffy_sys::clock::monotonic_ns()
}

impl Vm {
    /// Uses 128 KiB more every 50 ms while it has vCPUs.
    fn grow(self: &Arc<Vm>) {
        let mut used = Vec::new();
        while !Path::new("enough").exists() {
            if !*self.paused.lock().unwrap() {
                used.push(vec![1u8; 128 << 10]);
            }
            thread::sleep(Duration::from_millis(50));
        }
        loop {
            thread::park();
        }
    }

    fn event(&self, event: &VmmEvent) {
        let line = lines::encode(event).unwrap();
        // The daemon may have ended; the VM runs on.
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
        let _ = jailed::write(path, &serde_json::to_vec(&record).unwrap());
        if self.config.record_activity {
            self.event(&VmmEvent::Activity(Activity {
                thread: "vcpu 0".into(),
                names: vec!["exit: MMIO write".into(), "exits".into()],
                // The last index is not valid.
                spans: vec![(0, now_ns(), 5), (7, 1, 1)],
                counts: vec![(1, now_ns(), 3), (7, 1, 1)],
                dropped: 2,
                ..Activity::default()
            }));
        }
        self.event(&VmmEvent::Exited(record));
        std::process::exit(i32::from(reason != ExitReason::Shutdown));
    }
}
