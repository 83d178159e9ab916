//! The main function: boots a guest as PID 1, or serves as an agent.

use crate::agent::{Agent, End, Options, shutdown::Reason};
use crate::boot;
use crate::console::Console;
use crate::files;
use crate::freezer::Freezer;
use crate::fw_cfg::FwCfg;
use crate::power;
use crate::program::prepare::{DEFAULT_PATH, reason};
use crate::program::process;
use crate::report::{self, Report};
use crate::supervisor::link::{self, Identity, Link, Peer};
use crate::syscalls::{self, SignalSet, spawn::Strings, vsock::VsockAddress};
use crate::trace::Trace;
use alloc::{borrow::ToOwned, ffi::CString, format, string::String, vec::Vec};
use jiffy_wire::agent::AGENT_PORT;
use jiffy_wire::guest::GuestConfig;
use jiffy_wire::trace::MARK_PID1;
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Pid;
use syscalls::{stderr, stdout};

const USAGE: &str = "\
jiffy-init is PID 1 of a Jiffy guest. As an ordinary process it serves the agent protocol:

  jiffy-init agent --listen SOCKET [--supervisor SOCKET] [--config FILE]
      [--fw-cfg FOLDER] [--cgroup FOLDER]
  jiffy-init --version
";
/// As many as the vsock device passes on at once. Linux resets connections that do not fit.
const BACKLOG: i32 = 1024;

/// Runs the program and returns its exit status. As PID 1 it does not return.
pub fn start(arguments: Vec<Vec<u8>>) -> i32 {
    if rustix::process::getpid() == Pid::INIT {
        run_as_pid1()
    }
    let arguments: Vec<String> = arguments
        .iter()
        .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
        .collect();
    let arguments: Vec<&str> = arguments.iter().skip(1).map(String::as_str).collect();
    match arguments.as_slice() {
        ["--version"] => {
            write_to(
                stdout(),
                &format!("jiffy-init {}\n", env!("CARGO_PKG_VERSION")),
            );
            0
        }
        ["agent", options @ ..] => match run_as_process(options) {
            Ok(()) => 0,
            Err(message) => {
                write_to(stderr(), &format!("jiffy-init: {message}\n"));
                1
            }
        },
        _ => {
            write_to(stderr(), USAGE);
            2
        }
    }
}

/// Handles a panic of init: reports it to the kernel's log and the host. As PID 1 it then ends the
/// VM, because the kernel panics when PID 1 exits.
pub fn emergency(message: &str) {
    if rustix::process::getpid() == Pid::INIT {
        let message = format!("internal error: {message}");
        report::log(&message);
        link::report_panic(&message);
        power::emergency();
        // If the kernel refuses, sleep without using CPU time.
        loop {
            let hour = rustix::thread::Timespec {
                tv_sec: 3600,
                tv_nsec: 0,
            };
            let _ = rustix::thread::nanosleep(&hour);
        }
    }
    write_to(stderr(), &format!("jiffy-init: {message}\n"));
}

fn write_to(stream: BorrowedFd<'_>, text: &str) {
    let mut rest = text.as_bytes();
    while let Ok(count @ 1..) = rustix::io::write(stream, rest) {
        rest = &rest[count..];
        if rest.is_empty() {
            return;
        }
    }
}

fn run_as_pid1() -> ! {
    let trace = Trace::open();
    trace.mark(MARK_PID1);
    let pid1_ns = syscalls::monotonic_ns();
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let mut report = Report::default();
    let (config, fw_cfg) = boot::read_configuration(&mut report);
    // Connects early; the host answers during the rest of the boot.
    let identity = Identity {
        vm_id: config.vm_id.clone(),
        pid1_ns,
    };
    let mut link = Link::new(Peer::Host, identity);
    link.advance(pid1_ns);
    let teardown = boot::finish(&config, &mut report);
    boot::raise_limits();
    let beside_init = config
        .handover
        .as_deref()
        .is_some_and(|argv| exec_distribution_init(argv, &mut report));
    let options = Options {
        listener: listen_on_vsock(&mut report, &link),
        console: Console::open(),
        config,
        link,
        report,
        trace,
        fw_cfg,
        freezer: Freezer::of_guest(),
        teardown,
        owns_machine: true,
        beside_init,
    };
    let End { reason, teardown } = match Agent::start(options) {
        Ok(agent) => agent.run(),
        Err(message) => {
            report::log(&message);
            End {
                reason: Reason::PowerOff,
                teardown: boot::Teardown::default(),
            }
        }
    };
    if beside_init {
        power::shut_down_by_init(reason);
    }
    power::end(reason, teardown);
    emergency("the kernel refused to end the VM");
    syscalls::exit(1)
}

/// Forks: PID 1 executes the distribution's init, the child continues as the agent.
/// Returns true in the agent, or false in PID 1 if it could not hand over.
fn exec_distribution_init(argv: &[String], report: &mut Report) -> bool {
    let plan = init_program(argv);
    let (path, argv, envp) = match plan {
        Ok(plan) => plan,
        Err(message) => {
            report.warn("handover", &message);
            return false;
        }
    };
    process::note_start();
    match syscalls::fork() {
        Ok(None) => true,
        Ok(Some(_agent)) => {
            syscalls::block_only(SignalSet(0));
            boot::open_console();
            // Only the agent keeps the I/O ports.
            let error = syscalls::ports::drop_all()
                .err()
                .unwrap_or_else(|| syscalls::spawn::exec(&path, &argv, &envp));
            report::log(&format!(
                "{} cannot be executed: {}",
                path.to_string_lossy(),
                reason(error)
            ));
            reap_forever()
        }
        Err(error) => {
            report.warn(
                "handover",
                &format!("no second process could be created: {}", reason(error)),
            );
            false
        }
    }
}

fn init_program(argv: &[String]) -> Result<(CString, Strings, Strings), String> {
    let invalid = |_| String::from("the init's arguments contain a NUL byte");
    let program = argv.first().ok_or("no program is named")?;
    let path = CString::new(program.as_str()).map_err(invalid)?;
    rustix::fs::access(&path, rustix::fs::Access::EXEC_OK).map_err(|error| {
        format!(
            "{program} cannot be executed: {}; jiffy-init stays PID 1",
            reason(error)
        )
    })?;
    let strings = argv.iter().map(|argument| CString::new(argument.as_str()));
    let argv = Strings::new(strings.collect::<Result<_, _>>().map_err(invalid)?);
    let environment = [
        format!("PATH={DEFAULT_PATH}"),
        "HOME=/".into(),
        "TERM=linux".into(),
        "container=jiffy".into(),
    ];
    let strings = environment.into_iter().map(CString::new);
    let envp = Strings::new(strings.collect::<Result<_, _>>().map_err(invalid)?);
    Ok((path, argv, envp))
}

/// Runs in PID 1 if the distribution's init could not be executed: reaps orphans while the agent
/// serves the host.
fn reap_forever() -> ! {
    loop {
        let result = rustix::process::wait(rustix::process::WaitOptions::empty());
        if result.is_err() {
            let second = rustix::thread::Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            let _ = rustix::thread::nanosleep(&second);
        }
    }
}

fn listen_on_vsock(report: &mut Report, link: &Link) -> Option<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let result = net::socket_with(AddressFamily::VSOCK, SocketType::STREAM, flags, None).and_then(
        |socket| {
            net::bind(&socket, &VsockAddress::new(VsockAddress::ANY, AGENT_PORT))?;
            net::listen(&socket, BACKLOG)?;
            Ok(socket)
        },
    );
    match result {
        Ok(socket) => Some(socket),
        // A guest without a vsock device has no agent.
        Err(_) if link.is_absent() => None,
        Err(error) => {
            report.warn(
                "agent",
                &format!(
                    "cannot listen on vsock port {AGENT_PORT}: {}",
                    reason(error)
                ),
            );
            None
        }
    }
}

/// Runs the agent and its event loop as an ordinary process, over Unix sockets.
fn run_as_process(options: &[&str]) -> Result<(), String> {
    // Programs must not inherit stray descriptors.
    syscalls::close_from(3);
    let (mut listen, mut supervisor, mut config) = (None, None, GuestConfig::default());
    let (mut fw_cfg, mut cgroup) = ("/nonexistent", "/nonexistent");
    for pair in options.chunks(2) {
        match pair {
            ["--listen", path] => listen = Some(*path),
            ["--supervisor", path] => supervisor = Some((*path).to_owned()),
            ["--fw-cfg", path] => fw_cfg = path,
            ["--cgroup", path] => cgroup = path,
            ["--config", path] => {
                let bytes = files::read(*path, jiffy_wire::guest::MAX_CONFIG)
                    .map_err(|error| format!("{path} cannot be read: {}", reason(error)))?;
                config = boot::configuration::parse(&bytes)?;
            }
            other => return Err(format!("unexpected {other:?}\n{USAGE}")),
        }
    }
    let listener = listen.map(listen_on_unix).transpose()?;
    let peer = supervisor.map_or(Peer::None, Peer::Unix);
    let identity = Identity {
        vm_id: config.vm_id.clone(),
        pid1_ns: syscalls::monotonic_ns(),
    };
    // Makes this process reap orphans, as PID 1 does.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    let agent = Agent::start(Options {
        config,
        listener,
        link: Link::new(peer, identity),
        console: Console::on(rustix::io::fcntl_dupfd_cloexec(stdout(), 3).ok()),
        report: Report::default(),
        trace: Trace::default(),
        fw_cfg: FwCfg::folder(fw_cfg),
        freezer: Freezer::below(cgroup),
        teardown: boot::Teardown::default(),
        owns_machine: false,
        beside_init: false,
    })?;
    agent.run();
    Ok(())
}

fn listen_on_unix(path: &str) -> Result<OwnedFd, String> {
    let failed = |error| format!("cannot listen on {path}: {}", reason(error));
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket =
        net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    net::bind(&socket, &address).map_err(failed)?;
    net::listen(&socket, BACKLOG).map_err(failed)?;
    Ok(socket)
}
