//! A server, and a monitor that speaks vhost-user by hand (QEMU,
//! docs/interop/vhost-user.rst).

use jiffy_devices::GuestMemory;
use jiffy_devices::virtio::testing::DriverQueue;
use jiffy_sys::fds::send_with_fds;
use jiffy_sys::memfd::{self, Pages};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap};
use vmm_sys_util::eventfd::EventFd;

/// How long anything may take on a busy host.
const TIMEOUT: Duration = Duration::from_secs(300);

pub const GET_FEATURES: u32 = 1;
pub const SET_FEATURES: u32 = 2;
pub const SET_OWNER: u32 = 3;
pub const SET_MEM_TABLE: u32 = 5;
pub const SET_VRING_NUM: u32 = 8;
pub const SET_VRING_ADDR: u32 = 9;
pub const SET_VRING_BASE: u32 = 10;
pub const SET_VRING_KICK: u32 = 12;
pub const SET_VRING_CALL: u32 = 13;
pub const GET_PROTOCOL_FEATURES: u32 = 15;
pub const SET_PROTOCOL_FEATURES: u32 = 16;
pub const GET_QUEUE_NUM: u32 = 17;
pub const SET_VRING_ENABLE: u32 = 18;
pub const GET_CONFIG: u32 = 24;

const VERSION: u32 = 1;
const NEED_REPLY: u32 = 8;
pub const MULTIPLE_QUEUES: u64 = 1 << 0;
pub const REPLY_ACK: u64 = 1 << 3;
pub const CONFIG: u64 = 1 << 9;
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
pub const VERSION_1: u64 = 1 << 32;

/// The address at which monitors claim to have mapped their guests' memory.
pub const USER: u64 = 0x7f00_0000_0000;
pub const MEMORY: u64 = 1 << 20;
pub const RINGS: u64 = 0x1000;

/// A running `jiffy-disk`.
pub struct Server {
    pub folder: TempDir,
    process: Child,
}

impl Server {
    /// Serves a file of `sectors` sectors, each filled with its number.
    pub fn start(sectors: u64, arguments: &[&str]) -> Server {
        let folder = tempfile::tempdir().unwrap();
        let mut file = File::create(folder.path().join("disk.img")).unwrap();
        for sector in 0..sectors {
            file.write_all(&[sector as u8; 512]).unwrap();
        }
        let process = command(folder.path(), arguments).spawn().unwrap();
        let server = Server { folder, process };
        wait("the socket appears", || server.socket().exists());
        server
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("disk.sock")
    }

    pub fn disk(&self) -> Vec<u8> {
        std::fs::read(self.folder.path().join("disk.img")).unwrap()
    }

    pub fn connect(&self) -> Monitor {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Monitor { stream }
    }

    /// Bytes in memory of the server and of the processes that it has forked.
    pub fn memory(&self) -> u64 {
        let own = self.process.id();
        let children = std::fs::read_to_string(format!("/proc/{own}/task/{own}/children"));
        let children = children.unwrap_or_default();
        let children = children.split(' ').filter_map(|pid| pid.parse().ok());
        let pages = |pid: u32| {
            let statm = std::fs::read_to_string(format!("/proc/{pid}/statm"));
            let statm = statm.unwrap_or_default();
            statm.split(' ').nth(1).map_or(0, |it| it.parse().unwrap())
        };
        let pages: u64 = children.chain([own]).map(pages).sum();
        pages * 4096
    }

    /// Ends the server by a signal; true if it exited normally.
    pub fn terminate(&mut self) -> bool {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.process.wait().unwrap().success()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_jiffy-disk"));
    command
        .arg("serve")
        .arg(folder.join("disk.img"))
        .arg("--socket")
        .arg(folder.join("disk.sock"))
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::piped());
    command
}

pub fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "waited too long: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// One side of a connection.
pub struct Monitor {
    pub stream: UnixStream,
}

impl Monitor {
    pub fn send(&mut self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.try_send(request, flags, payload, fds).unwrap();
    }

    /// The call fails if the other side has closed by now.
    pub fn try_send(
        &mut self,
        request: u32,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let mut bytes = Vec::new();
        for word in [request, VERSION | flags, payload.len() as u32] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend_from_slice(payload);
        send_with_fds(&self.stream, &bytes, fds)
    }

    pub fn receive(&mut self) -> Vec<u8> {
        let mut header = [0; 12];
        self.stream.read_exact(&mut header).unwrap();
        let size = u32::from_le_bytes(header[8..].try_into().unwrap());
        let mut payload = vec![0; size as usize];
        self.stream.read_exact(&mut payload).unwrap();
        payload
    }

    pub fn ask(&mut self, request: u32, payload: &[u8]) -> Vec<u8> {
        self.send(request, 0, payload, &[]);
        self.receive()
    }

    pub fn ask_number(&mut self, request: u32) -> u64 {
        u64::from_le_bytes(self.ask(request, &[]).try_into().unwrap())
    }

    /// Sends what must be acknowledged with success.
    pub fn set(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send(request, NEED_REPLY, payload, fds);
        assert_eq!(self.receive(), [0; 8], "request {request}");
    }

    /// Waits until the other side closes; ignores what it still sends.
    pub fn expect_closed(&mut self) {
        let mut bytes = [0; 256];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return,
                // With a time limit, a read is not restarted after a signal.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Negotiates the protocol; returns the offered features.
    pub fn negotiate(&mut self) -> u64 {
        let features = self.ask_number(GET_FEATURES);
        self.send(SET_OWNER, 0, &[], &[]);
        let offered = self.ask_number(GET_PROTOCOL_FEATURES);
        assert_eq!(offered & (REPLY_ACK | CONFIG), REPLY_ACK | CONFIG);
        let accepted = REPLY_ACK | CONFIG | MULTIPLE_QUEUES;
        self.send(SET_PROTOCOL_FEATURES, 0, &accepted.to_le_bytes(), &[]);
        features
    }

    pub fn config(&mut self, offset: u32, size: u32) -> Vec<u8> {
        let mut payload = numbers32(&[offset, size, 0]);
        payload.resize(12 + size as usize, 0);
        self.ask(GET_CONFIG, &payload)[12..].to_vec()
    }
}

pub fn numbers32(numbers: &[u32]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}

pub fn numbers64(numbers: &[u64]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}

/// A guest whose memory is shared with the server.
pub struct Guest {
    pub monitor: Monitor,
    pub memory_file: File,
    pub driver: DriverQueue,
    kick: EventFd,
    _call: EventFd,
}

impl Guest {
    /// Sets up the first queue.
    pub fn over(mut monitor: Monitor) -> Guest {
        let features = monitor.negotiate();
        let memory_file = memfd::create("guest", MEMORY, Pages::Small).unwrap();
        let (kick, call) = (EventFd::new(0).unwrap(), EventFd::new(0).unwrap());
        let region = GuestRegionMmap::from_range(
            GuestAddress(0),
            MEMORY as usize,
            Some(FileOffset::new(memory_file.try_clone().unwrap(), 0)),
        )
        .unwrap();
        let memory = Arc::new(GuestMemory::from_regions(vec![region]).unwrap());
        let driver = DriverQueue::new(memory, RINGS, 64);

        // FLUSH, if it is offered, so that writes need not be synced.
        let accepted = features & (PROTOCOL_FEATURES | VERSION_1 | 1 << 9);
        monitor.set(SET_FEATURES, &accepted.to_le_bytes(), &[]);
        let mut table = numbers32(&[1, 0]);
        table.extend(numbers64(&[0, MEMORY, USER, 0]));
        monitor.set(SET_MEM_TABLE, &table, &[memory_file.as_fd()]);
        monitor.set(SET_VRING_NUM, &numbers32(&[0, 64]), &[]);
        monitor.set(SET_VRING_BASE, &numbers32(&[0, 0]), &[]);
        let mut rings = numbers32(&[0, 0]);
        let places = [driver.descriptors(), driver.used(), driver.avail()];
        rings.extend(numbers64(&places.map(|place| USER + place)));
        rings.extend(numbers64(&[0]));
        monitor.set(SET_VRING_ADDR, &rings, &[]);
        monitor.set(SET_VRING_CALL, &numbers64(&[0]), &[borrow(&call)]);
        monitor.set(SET_VRING_KICK, &numbers64(&[0]), &[borrow(&kick)]);
        monitor.set(SET_VRING_ENABLE, &numbers32(&[0, 1]), &[]);
        Guest {
            monitor,
            memory_file,
            driver,
            kick,
            _call: call,
        }
    }

    pub fn ring(&self) {
        self.kick.write(1).unwrap();
    }
}

#[allow(unsafe_code)] // `EventFd` has no safe way to lend its descriptor.
fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor is open as long as `event`.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}
