//! Captures and restores the guest, and checks its output.

use super::{CHECK, DISK_BYTES, PORT, Result, line, next_sum};
use jiffy_sys::mutex::{lock, unpoisoned};
use jiffy_testkit::monitor;
use jiffy_wire::vmm::{Boot, Disk, Memory, PageSize, Serial, VERSION, VmmConfig, Vsock};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

const VMM: &str = "/lib/jiffy/jiffy-vmm";
/// The control socket, relative to the folder of a run.
const CONTROL: &str = "control.sock";
const KERNEL: &str = "/share/jiffy/kernels/base/vmlinux";
/// Lines that must arrive after a restore before the next capture.
const PROGRESS: u64 = 5;
/// Time limit of a wait. It says nothing about the expected speed.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Data received from the guest.
#[derive(Default)]
struct Received {
    last: u64,
    sum: u32,
    connections: u64,
    /// The last line before the current connection.
    last_before: u64,
    /// The current connection.
    stream: Option<UnixStream>,
    /// The guest's answer to a check.
    said: Option<String>,
    wrong: Option<String>,
}

#[derive(Clone, Default)]
struct SharedState(Arc<(Mutex<Received>, Condvar)>);

impl SharedState {
    fn lock(&self) -> MutexGuard<'_, Received> {
        lock(&self.0.0)
    }

    fn change(&self, change: impl FnOnce(&mut Received)) {
        change(&mut self.lock());
        self.0.1.notify_all();
    }

    /// Waits until a condition holds; fails on a wrong line or the VMM's exit.
    fn until(
        &self,
        what: &str,
        vmm: &mut Running,
        holds: impl Fn(&Received) -> bool,
    ) -> Result<()> {
        let until = Instant::now() + TIMEOUT;
        let mut received = self.lock();
        loop {
            if let Some(wrong) = &received.wrong {
                return Err(wrong.as_str().into());
            }
            if holds(&received) {
                return Ok(());
            }
            if let Some(status) = vmm.0.try_wait()? {
                return Err(format!("the VMM ended: {status}").into());
            }
            if Instant::now() > until {
                return Err(
                    format!("waited in vain for {what} after line {}", received.last).into(),
                );
            }
            let waited = self.0.1.wait_timeout(received, Duration::from_millis(200));
            received = unpoisoned(waited).0;
        }
    }
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn host(cycles: &str, memory_mib: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    run(cycles.parse()?, memory_mib.parse()?, folder.path()).map_err(|error| {
        let console = fs::read(folder.path().join("console")).unwrap_or_default();
        let end = &console[console.len().saturating_sub(1000)..];
        format!("{error}\n{}", String::from_utf8_lossy(end)).into()
    })
}

fn run(cycles: u64, size_mib: u32, folder: &Path) -> Result<()> {
    let path = |name: &str| folder.join(name);
    File::create(path("disk"))?.set_len(DISK_BYTES)?;
    let shared = SharedState::default();
    shared.lock().sum = 1;
    let listener = UnixListener::bind(path(&format!("vsock.sock_{PORT}")))?;
    let receiver = shared.clone();
    std::thread::spawn(move || receive(&listener, &receiver));
    let mut config = config(size_mib, folder);
    let begun = Instant::now();
    let mut vmm = start(&config, &path("vmm.json"))?;
    let mut connections = 0;
    let has_progressed = |received: &Received, connections| {
        received.connections > connections && received.last >= received.last_before + PROGRESS
    };
    for cycle in 0..cycles {
        shared
            .until("the guest's lines", &mut vmm, |received| {
                has_progressed(received, connections)
            })
            .map_err(|error| format!("after {cycle} restores: {error}"))?;
        let captured = monitor::capture(&folder.join(CONTROL), false)?;
        drop(vmm);
        config.restore = Some(captured.for_child()?);
        connections = shared.lock().connections;
        vmm = start(&config, &path("vmm.json"))?;
    }
    shared.until("the last lines", &mut vmm, |received| {
        has_progressed(received, connections)
    })?;
    if let Some(stream) = &mut shared.lock().stream {
        stream.write_all(&[CHECK])?;
    }
    shared.until("the guest's check", &mut vmm, |received| {
        received.said.is_some()
    })?;
    let received = shared.lock();
    println!(
        "{cycles} restores, {} connections, {} lines in {:.1} s: {}",
        received.connections,
        received.last,
        begun.elapsed().as_secs_f64(),
        received.said.as_deref().unwrap_or_default()
    );
    Ok(())
}

/// A VM with every device, whose files are all in this folder.
fn config(size_mib: u32, folder: &Path) -> VmmConfig {
    VmmConfig {
        version: VERSION,
        id: "endurance".into(),
        vcpus: 1,
        memory: Memory {
            size_mib,
            pages: PageSize::Small,
            prefault: false,
        },
        boot: Boot {
            kernel: KERNEL.into(),
            initrd: Some("/tests/endurance.cpio".into()),
            command_line: jiffy_kernel::command_line::console_command_line(),
        },
        disks: vec![Disk {
            path: folder.join("disk"),
            read_only: false,
            direct: false,
            serial: None,
            ..Disk::default()
        }],
        vsock: Some(Vsock {
            cid: 3,
            path: folder.join("vsock.sock"),
        }),
        rng: true,
        serial: Some(Serial::File(folder.join("console"))),
        fw_cfg: Vec::new(),
        control: Some(folder.join(CONTROL)),
        exit_record: None,
        handed: Vec::new(),
        balloon: true,
        usable_memory_mib: None,
        nets: Vec::new(),
        folders: Vec::new(),
        cpu_profile: None,
        record_activity: false,
        restore: None,
    }
}

/// Accepts connections and tells each guest the number of the line to begin with.
fn receive(listener: &UnixListener, shared: &SharedState) {
    for stream in listener.incoming().flatten() {
        if let Err(error) = read_lines(stream, shared) {
            return shared.change(|received| received.wrong = Some(error.to_string()));
        }
    }
}

fn read_lines(mut stream: UnixStream, shared: &SharedState) -> Result<()> {
    let wanted = shared.lock().last + 1;
    if stream.write_all(&wanted.to_le_bytes()).is_err() {
        return Ok(());
    }
    let kept = stream.try_clone()?;
    shared.change(|received| {
        received.connections += 1;
        received.last_before = received.last;
        received.stream = Some(kept);
    });
    let mut reader = BufReader::new(stream);
    let mut text = Vec::new();
    loop {
        text.clear();
        // A line that was cut off with its VMM is sent again.
        if reader.read_until(b'\n', &mut text).is_err() || text.last() != Some(&b'\n') {
            return Ok(());
        }
        let mut received = shared.lock();
        let number = received.last + 1;
        let sum = next_sum(received.sum, number);
        if text == line(number, sum) {
            (received.last, received.sum) = (number, sum);
        } else if text.starts_with(b"all ") {
            received.said = Some(String::from_utf8_lossy(&text).trim().to_owned());
        } else {
            let found = String::from_utf8_lossy(&text).trim().to_owned();
            return Err(format!("expected line {number}, got {found:?}").into());
        }
        drop(received);
        shared.0.1.notify_all();
    }
}

fn start(config: &VmmConfig, path: &Path) -> Result<Running> {
    let vsock = config.vsock.as_ref().map(|vsock| &vsock.path);
    for socket in config.control.iter().chain(vsock) {
        let _ = fs::remove_file(socket);
    }
    fs::write(path, serde_json::to_vec(config)?)?;
    let mut command = Command::new(VMM);
    command.arg("run").arg("--config").arg(path);
    Ok(Running(command.stdin(Stdio::null()).spawn()?))
}
