//! Starts one QEMU, waits for readiness and ends it. Both the user's machine and the test harness's
//! are instances.

use crate::client::AgentAddress;
use crate::error::MachineError;
use crate::listeners;
use crate::options::Accelerator;
use crate::protocol::{
    AGENT_PORT, API_PORT, AUTHORITIES_PATH, DATA_MOUNT, GUEST, HOST, NAME_SERVER, Ready, TOKEN_PATH,
};
use crate::qemu::{self, Setup};
use crate::qmp::Control;
use crate::shares::Share;
use jiffy_wire::agent::Command as GuestCommand;
use jiffy_wire::guest::{self, DiskMount, GuestConfig, Interface, Restart, Service};
use rustix::process::{Flock, FlockOffsetType, FlockType, Pid, Signal};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The longest path of a Unix socket, bytes.
const MAX_SOCKET_PATH: usize = 107;

/// 256 random bits as hexadecimal digits.
///
/// # Errors
///
/// If `getrandom` fails.
pub fn new_token() -> Result<String, MachineError> {
    let mut bytes = [0u8; 32];
    getrandom::fill(&mut bytes)
        .map_err(|error| MachineError::Control(format!("no random numbers: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Configuration of PID 1 in the machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Role<'a> {
    /// Mount `/dev/vda` at [`DATA_MOUNT`].
    pub disk: bool,
    /// Run `jiffyd` and be ready only when it answers.
    pub node: bool,
    /// Let `jiffyd` start `jiffy-sched`.
    pub scheduler: bool,
    /// Load `kvm-intel` too, which the module list leaves out.
    pub intel: bool,
    /// Mount debugfs, where KVM keeps its counters.
    pub debugfs: bool,
    /// Interrupt each CPU once a second: see [`heartbeat`](crate::agent::heartbeat).
    pub heartbeat: bool,
    /// Mount these folders of the host, in the order of their ports.
    pub shares: &'a [Share],
}

/// The machine's configuration.
pub fn guest_config(role: Role<'_>) -> GuestConfig {
    let mut agent = vec!["/lib/jiffy/jiffy-machine-agent".to_owned()];
    let mut services = Vec::new();
    let mut disks = Vec::new();
    if role.disk {
        agent.extend(["--mount".into(), DATA_MOUNT.into()]);
        disks.push(DiskMount {
            device: "/dev/vda".into(),
            fstype: "xfs".into(),
            mount_point: DATA_MOUNT.into(),
            read_only: false,
        });
    }
    if role.intel {
        let argv = ["/bin/busybox", "insmod", "/lib/modules/kvm-intel.ko"];
        services.push(service(
            "kvm-intel",
            argv.map(String::from).into(),
            Restart::Never,
        ));
    }
    if role.debugfs {
        let argv = [
            "/bin/busybox",
            "mount",
            "-t",
            "debugfs",
            "debugfs",
            "/sys/kernel/debug",
        ];
        services.push(service(
            "debugfs",
            argv.map(String::from).into(),
            Restart::Never,
        ));
    }
    if role.node {
        agent.extend(["--wait-for".into(), format!("{GUEST}:{API_PORT}")]);
        services.push(node(&role));
    }
    if role.heartbeat {
        agent.push("--heartbeat".into());
    }
    for share in role.shares {
        agent.extend(["--share".into(), share.to_string()]);
    }
    services.push(service("agent", agent, Restart::OnFailure));
    GuestConfig {
        version: guest::VERSION,
        vm_id: "machine".into(),
        hostname: Some("jiffy-machine".into()),
        disks,
        interfaces: vec![Interface {
            name: "eth0".into(),
            addresses: vec![format!("{GUEST}/24")],
            gateways: vec![HOST.into()],
            ..Interface::default()
        }],
        name_servers: vec![NAME_SERVER.into()],
        services,
        ..GuestConfig::default()
    }
}

fn node(role: &Role<'_>) -> Service {
    let mut argv = vec![
        "/lib/jiffy/jiffyd".into(),
        "--listen".into(),
        format!("tcp:{GUEST}:{API_PORT}"),
        "--token-file".into(),
        TOKEN_PATH.into(),
        // The machine is small, and its user's alone; docs/room.md.
        "--memory-limit".into(),
        "none".into(),
    ];
    if role.scheduler {
        argv.extend(["--scheduler".into(), "sched-ext".into()]);
    }
    let mut node = service("jiffyd", argv, Restart::Always);
    // `localhost` in the user's requests means the host.
    node.command.env.push(format!("JIFFY_LOOPBACK={HOST}"));
    if qemu::authorities().is_some() {
        let file = format!("SSL_CERT_FILE={AUTHORITIES_PATH}");
        node.command.env.push(file);
    }
    node
}

fn service(name: &str, argv: Vec<String>, restart: Restart) -> Service {
    Service {
        name: name.into(),
        command: GuestCommand {
            argv,
            ..GuestCommand::default()
        },
        restart,
    }
}

/// Whether the host's processor is Intel's, with VMX instead of SVM.
pub fn host_is_intel() -> bool {
    std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("GenuineIntel"))
}

/// Checks that all files for a start exist; returns the path of QEMU.
///
/// # Errors
///
/// If QEMU is not on `PATH`, the kernel or the initramfs does not exist, or the path of a socket is
/// longer than 107 bytes.
pub fn check(setup: &Setup) -> Result<PathBuf, MachineError> {
    let qemu = qemu::find()?;
    for (what, path) in [("kernel", &setup.kernel), ("initramfs", &setup.initramfs)] {
        if !path.is_file() {
            return Err(MachineError::NoImage {
                what,
                path: path.clone(),
            });
        }
    }
    for socket in [setup.control_socket(), setup.ready_socket()] {
        if socket.as_os_str().len() > MAX_SOCKET_PATH {
            return Err(MachineError::LongPath { path: socket });
        }
    }
    Ok(qemu)
}

/// Writes everything that QEMU reads, then starts it. With `setup.daemonize` QEMU outlives this
/// process and the result is `None`; otherwise QEMU is a child and ends when the calling thread
/// does. QEMU inherits `shares`, sockets of the servers of the shared folders in `config`.
///
/// # Errors
///
/// If a file is missing (see [`check`]), can't be written or removed, or QEMU does not start.
/// Without `setup.daemonize`, only [`wait_until_ready`] sees that QEMU has ended.
pub fn launch(
    setup: &Setup,
    config: &GuestConfig,
    token: &str,
    shares: &[OwnedFd],
) -> Result<Option<Child>, MachineError> {
    let qemu = check(setup)?;
    private_folder(&setup.run)?;
    for socket in [setup.control_socket(), setup.ready_socket()] {
        remove(&socket)?;
    }
    let json = serde_json::to_vec(config)
        .map_err(|error| MachineError::file(&setup.config_file(), error.into()))?;
    write_private(&setup.config_file(), &json)?;
    write_private(&setup.token_file(), token.as_bytes())?;
    // QEMU truncates the console; creating it here checks that it is writable.
    write_private(&setup.console, b"")?;

    let numbers: Vec<RawFd> = shares.iter().map(AsRawFd::as_raw_fd).collect();
    let mut command = Command::new(qemu);
    command
        .args(setup.arguments(&numbers))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    inherit(&mut command, numbers);
    if setup.daemonize {
        let output = command.output().map_err(|_| MachineError::NoQemu)?;
        if !output.status.success() {
            return Err(MachineError::QemuRefused {
                message: last_stderr_line(&output.stderr),
            });
        }
        return Ok(None);
    }
    end_with_parent(&mut command);
    let child = command.spawn().map_err(|_| MachineError::NoQemu)?;
    Ok(Some(child))
}

/// Makes the child end with the thread that starts it (PR_SET_PDEATHSIG).
#[allow(unsafe_code)]
pub fn end_with_parent(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: between fork and exec only prctl and getppid are called; both
    // are async-signal-safe and touch no memory of this process.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) < 0 {
                return Err(io::Error::last_os_error());
            }
            // The parent may have ended before the prctl.
            if libc::getppid() as u32 != parent {
                return Err(io::Error::other("the parent has ended"));
            }
            Ok(())
        });
    }
}

/// Makes the child inherit these descriptors, and no other child of this process.
#[allow(unsafe_code)]
fn inherit(command: &mut Command, numbers: Vec<RawFd>) {
    // SAFETY: between fork and exec only fcntl is called, which is async-signal-safe and touches no
    // memory of this process.
    unsafe {
        command.pre_exec(move || {
            for number in &numbers {
                if libc::fcntl(*number, libc::F_SETFD, 0) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
}

/// QEMU's error: the last line of its standard error without its name.
fn last_stderr_line(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let line = text
        .lines()
        .rfind(|line| !line.trim().is_empty())
        .unwrap_or("it printed no error message");
    line.strip_prefix("qemu-system-x86_64: ")
        .unwrap_or(line)
        .into()
}

/// Waits until the machine is ready; `progress` is called at each stage.
///
/// # Errors
///
/// If it is not ready within `limit`, a service in it does not start, or QEMU ends.
pub fn wait_until_ready(
    setup: &Setup,
    mut child: Option<&mut Child>,
    limit: Duration,
    mut progress: impl FnMut(&Ready),
) -> Result<(), MachineError> {
    let deadline = Instant::now() + limit;
    let slow = || MachineError::Slow {
        seconds: limit.as_secs(),
        console: setup.console.clone(),
    };
    let stream = loop {
        match UnixStream::connect(setup.ready_socket()) {
            Ok(stream) => break stream,
            Err(_) if Instant::now() > deadline => return Err(slow()),
            Err(error) => {
                // QEMU creates the socket within milliseconds; until then it may have failed.
                if let Some(child) = child.as_deref_mut() {
                    if let Ok(Some(_)) = child.try_wait() {
                        let mut words = Vec::new();
                        if let Some(stderr) = &mut child.stderr {
                            let _ = io::Read::read_to_end(stderr, &mut words);
                        }
                        return Err(MachineError::QemuRefused {
                            message: last_stderr_line(&words),
                        });
                    }
                } else if running_pid(&setup.pid_file()).is_none() {
                    tracing::debug!("the readiness socket: {error}");
                    return Err(died(&setup.console));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    };
    let mut lines = BufReader::new(stream);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(slow());
        }
        lines
            .get_ref()
            .set_read_timeout(Some(left))
            .map_err(|error| MachineError::file(&setup.ready_socket(), error))?;
        let mut line = String::new();
        match lines.read_line(&mut line) {
            Ok(0) => return Err(died(&setup.console)),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(slow()),
            Err(_) => return Err(died(&setup.console)),
        }
        let Ok(ready) = serde_json::from_str::<Ready>(&line) else {
            tracing::debug!("not a message of the agent: {line}");
            continue;
        };
        progress(&ready);
        match ready {
            Ready::Agent { .. } => {}
            Ready::Services { .. } => {
                if let Some(qemu) = running_pid(&setup.pid_file()) {
                    listeners::enlarge_backlogs(qemu);
                }
                return Ok(());
            }
            Ready::Failed { message } => {
                return Err(MachineError::NotReady {
                    message,
                    console: setup.console.clone(),
                });
            }
        }
    }
}

fn died(console: &Path) -> MachineError {
    MachineError::Died {
        last_console_line: last_console_line(console),
        console: console.into(),
    }
}

/// The last line of the console that has text.
pub fn last_console_line(console: &Path) -> String {
    let Ok(bytes) = std::fs::read(console) else {
        return String::new();
    };
    let text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(4096)..]).into_owned();
    let line = text.lines().rfind(|line| !line.trim().is_empty());
    line.unwrap_or_default().trim().chars().take(200).collect()
}

/// The process that locks QEMU's pid file, if there is one. Unlike the number in the file, it can't
/// be another program that reuses the id.
pub fn running_pid(pid_file: &Path) -> Option<Pid> {
    let pid = foreign_lock(pid_file)?.pid?;
    // An open-file-description lock has the owner -1, and kill(2) with -1 signals every process.
    (pid.as_raw_nonzero().get() > 1).then_some(pid)
}

/// Whether another process has a lock on a file, as QEMU has on its disk.
pub fn is_locked(path: &Path) -> bool {
    foreign_lock(path).is_some()
}

fn foreign_lock(path: &Path) -> Option<Flock> {
    let file = File::open(path).ok()?;
    let whole = Flock {
        start: 0,
        length: 0,
        pid: None,
        typ: FlockType::WriteLock,
        offset_type: FlockOffsetType::Set,
    };
    rustix::process::fcntl_getlk(&file, &whole).ok()?
}

/// Kills QEMU and waits until it has ended.
///
/// # Errors
///
/// If it has not ended after 60 s.
pub fn kill(pid_file: &Path) -> Result<(), MachineError> {
    let Some(pid) = running_pid(pid_file) else {
        return Ok(());
    };
    let _ = rustix::process::kill_process(pid, Signal::KILL);
    if wait_for_end(pid_file, Duration::from_secs(60)) {
        Ok(())
    } else {
        Err(MachineError::WillNotStop {
            pid: pid.as_raw_nonzero().get(),
        })
    }
}

/// Waits until QEMU has ended; false if it has not at the limit.
pub fn wait_for_end(pid_file: &Path, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    while running_pid(pid_file).is_some() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// The host's ports for the API and the agent.
///
/// # Errors
///
/// If the control socket fails, or QEMU does not forward these ports.
pub fn forwarded_addresses(setup: &Setup) -> Result<(SocketAddr, SocketAddr), MachineError> {
    let mut control = Control::connect(&setup.control_socket())?;
    let api = control.forwarded_port(API_PORT)?;
    let agent = control.forwarded_port(AGENT_PORT)?;
    let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    Ok((loopback(api), loopback(agent)))
}

/// The agent's address in a running instance.
///
/// # Errors
///
/// If [`forwarded_addresses`] fails.
pub fn agent(setup: &Setup, token: &str) -> Result<AgentAddress, MachineError> {
    let (_, address) = forwarded_addresses(setup)?;
    Ok(AgentAddress {
        address,
        token: token.into(),
    })
}

/// Whether the accelerator is TCG, which emulates an AMD processor.
pub fn is_software(accelerator: Accelerator) -> bool {
    accelerator != Accelerator::Kvm
}

/// Creates a folder that only its owner can enter.
///
/// # Errors
///
/// If it can't be created, or belongs to another user.
pub fn private_folder(path: &Path) -> Result<(), MachineError> {
    use std::os::unix::fs::MetadataExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|error| MachineError::file(path, error))?;
    let owner = std::fs::metadata(path)
        .map_err(|error| MachineError::file(path, error))?
        .uid();
    if owner != rustix::process::geteuid().as_raw() {
        let error = io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it belongs to another user",
        );
        return Err(MachineError::file(path, error));
    }
    Ok(())
}

fn write_private(path: &Path, contents: &[u8]) -> Result<(), MachineError> {
    let write = || -> io::Result<()> {
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path)?
            .write_all(contents)
    };
    write().map_err(|error| MachineError::file(path, error))
}

/// Removes a file, if it exists.
pub(crate) fn remove(path: &Path) -> Result<(), MachineError> {
    jiffy_sys::durable::remove(path).map_err(|error| MachineError::file(path, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_gets_the_shares_in_order() {
        let shares = ["rw:/a", "ro:/b c"].map(|text| text.parse().unwrap());
        let config = guest_config(Role {
            shares: &shares,
            ..Role::default()
        });
        let agent = config.services.iter().find(|one| one.name == "agent");
        let argv = &agent.unwrap().command.argv;
        assert_eq!(argv[1..], ["--share", "rw:/a", "--share", "ro:/b c"]);
    }

    #[test]
    fn qemu_inherits_the_given_descriptors_only() {
        use std::os::unix::net::UnixStream;
        let (given, other) = UnixStream::pair().unwrap();
        let given = OwnedFd::from(given);
        let mut command = Command::new("sh");
        let script = "for fd in \"$@\"; do test -e /proc/self/fd/$fd && echo $fd; done; true";
        let numbers = [given.as_raw_fd(), other.as_raw_fd()].map(|number| number.to_string());
        command.args(["-c", script, "sh"]).args(&numbers);
        inherit(&mut command, vec![given.as_raw_fd()]);
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(said.trim(), numbers[0]);
    }

    #[test]
    fn the_api_listens_only_on_the_host_facing_address() {
        let config = guest_config(Role {
            node: true,
            ..Role::default()
        });
        let own = format!("{GUEST}/24");
        assert!(
            config
                .interfaces
                .iter()
                .any(|one| one.addresses.contains(&own))
        );
        let node = config.services.iter().find(|one| one.name == "jiffyd");
        let argv = &node.unwrap().command.argv;
        let at = argv.iter().position(|word| word == "--listen").unwrap();
        assert_eq!(argv[at + 1], format!("tcp:{GUEST}:{API_PORT}"));
    }
}
