//! Reports readiness through a virtio-serial port, so that the host need not poll.

use crate::protocol::{READY_PORT, Ready};
use jiffy_wire::lines;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a service may take to accept connections.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The virtio-serial port to the host.
#[derive(Debug)]
pub struct Port(File);

impl Port {
    /// Opens the port. Waits for it to appear, at most 10 s.
    ///
    /// # Errors
    ///
    /// If it does not appear, or can't be opened.
    pub fn open() -> io::Result<Port> {
        let path = wait_for_port(READY_PORT)?;
        Ok(Port(OpenOptions::new().write(true).open(path)?))
    }

    /// Sends the state.
    ///
    /// # Errors
    ///
    /// If it can't be encoded, or `write` fails.
    pub fn push(&mut self, ready: &Ready) -> io::Result<()> {
        let line = lines::encode(ready)?;
        self.0.write_all(&line)
    }
}

/// The device of the virtio-serial port of this name. Waits for it to appear, at most 10 s.
///
/// # Errors
///
/// `NotFound` if it does not appear.
pub fn wait_for_port(name: &str) -> io::Result<PathBuf> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(path) = find(name) {
            return Ok(path);
        }
        if Instant::now() > deadline {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("there is no virtio-serial port {name}"),
            ));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn find(wanted: &str) -> Option<PathBuf> {
    let ports = std::fs::read_dir("/sys/class/virtio-ports").ok()?;
    ports.flatten().find_map(|port| {
        let name = std::fs::read_to_string(port.path().join("name")).ok()?;
        let device = Path::new("/dev").join(port.file_name());
        (name.trim_end() == wanted && device.exists()).then_some(device)
    })
}

/// Time since the kernel's start, milliseconds.
pub fn uptime_ms() -> u64 {
    jiffy_sys::clock::monotonic_ns() / 1_000_000
}

/// Waits until `service` accepts connections, at most 120 s; `mount`, if given, must be a mount
/// point.
///
/// # Errors
///
/// If nothing accepts connections in that time, or `mount` is not a mount point. The error is a
/// sentence.
pub fn wait_for(service: Option<SocketAddr>, mount: Option<&Path>) -> Result<(), String> {
    if let Some(mount) = mount
        && !is_mount_point(mount)
    {
        return Err(format!(
            "the machine's data disk could not be mounted on {}",
            mount.display()
        ));
    }
    let Some(service) = service else {
        return Ok(());
    };
    let deadline = Instant::now() + TIMEOUT;
    while TcpStream::connect_timeout(&service, Duration::from_secs(1)).is_err() {
        if Instant::now() > deadline {
            return Err(format!("nothing answers on {service} in the machine"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn is_mount_point(path: &Path) -> bool {
    let Ok(mounts) = std::fs::read_to_string("/proc/self/mounts") else {
        return false;
    };
    mounts
        .lines()
        .any(|line| line.split(' ').nth(1) == path.to_str())
}
