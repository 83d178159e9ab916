//! A server, and a guest's kernel that speaks FUSE by hand (`linux/fuse.h`).

use jiffy_files::protocol::opcode::*;
use jiffy_wire::files::{DATA_MAX, MESSAGE_MAX, OWN, RESTORE, SAVE};
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send};
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long anything may take on a busy host.
pub const TIMEOUT: Duration = Duration::from_secs(300);
/// Number of the shared folder.
pub const ROOT: u64 = 1;
/// The guest's user in most tests.
pub const USER: u32 = 0;

/// Descriptors that a server inherits must not be inherited by another one.
static STARTING: Mutex<()> = Mutex::new(());

/// A running `jiffy-files`.
pub struct Server {
    pub process: Child,
}

/// A server's folder, which is in a folder with other things.
pub struct Place {
    pub above: TempDir,
}

impl Place {
    pub fn new() -> Place {
        let above = tempfile::tempdir().unwrap();
        std::fs::create_dir(above.path().join("shared")).unwrap();
        std::fs::write(above.path().join("secret"), "secret").unwrap();
        Place { above }
    }

    pub fn shared(&self) -> PathBuf {
        self.above.path().join("shared")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.shared().join(name)
    }
}

/// Whether this process is root. Tests of other users need that.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Says why a part of the tests is left out, past their captured output.
pub fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// Arguments with which a server can serve for the user of this test.
pub fn usual() -> &'static [&'static str] {
    if is_root() { &[] } else { &["--squash"] }
}

/// Starts a server of this folder, and connects to it.
pub fn serve(folder: &Path, arguments: &[&str]) -> (Server, Client) {
    let program = Path::new(env!("CARGO_BIN_EXE_jiffy-files"));
    serve_by(Command::new(program), folder, arguments)
}

/// Starts a server by this command.
pub fn serve_by(command: Command, folder: &Path, arguments: &[&str]) -> (Server, Client) {
    serve_on(SocketType::SEQPACKET, command, folder, arguments)
}

/// Starts a server with a stream, not with packets.
pub fn serve_stream(folder: &Path, arguments: &[&str]) -> (Server, Client) {
    let program = Command::new(env!("CARGO_BIN_EXE_jiffy-files"));
    serve_on(SocketType::STREAM, program, folder, arguments)
}

/// Starts a server by this command, on a socket of this type.
pub fn serve_on(
    kind: SocketType,
    mut command: Command,
    folder: &Path,
    arguments: &[&str],
) -> (Server, Client) {
    let _only = STARTING.lock().unwrap();
    let none = SocketFlags::empty();
    let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, kind, none, None).unwrap();
    // As the daemon may pass it.
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty()).unwrap();
    let inherited = rustix::io::FdFlags::empty();
    rustix::io::fcntl_setfd(&ours, rustix::io::FdFlags::CLOEXEC).unwrap();
    rustix::io::fcntl_setfd(&folder, inherited).unwrap();
    let process = command
        .args(["--socket-fd", &theirs.as_raw_fd().to_string()])
        .args(["--folder-fd", &folder.as_raw_fd().to_string()])
        .args(arguments)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let client = Client {
        socket: ours,
        unique: 0,
        user: (USER, 0),
        sent: AtomicU64::new(0),
    };
    (Server { process }, client)
}

/// A command that runs the server as this user, for a test that is root.
pub fn as_user(folder: &Path, user: u32) -> Command {
    // The original may be where only root can read.
    let program = folder.join("jiffy-files");
    // Another process writes it: one that is open for writing, even in a child that another test
    // forks meanwhile, can't be executed.
    let mut install = Command::new("install");
    let copied = install.args(["-m", "755", env!("CARGO_BIN_EXE_jiffy-files")]);
    assert!(copied.arg(&program).status().unwrap().success());
    let everyone = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o755);
    std::fs::set_permissions(folder, everyone).unwrap();
    let mut command = Command::new(program);
    command.uid(user).gid(user);
    command
}

impl Server {
    /// Waits until the server ends.
    pub fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < TIMEOUT, "the server does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The other side of a server's socket.
pub struct Client {
    pub socket: OwnedFd,
    pub unique: u64,
    pub user: (u32, u32),
    /// Messages that were sent.
    sent: AtomicU64,
}

/// A payload, or an errno.
pub type Answered = Result<Vec<u8>, i32>;

impl Client {
    /// The bytes of a request.
    pub fn message(&self, opcode: u32, node: u64, arguments: &[u8]) -> Vec<u8> {
        let length = 40 + arguments.len() as u32;
        let (user, group) = self.user;
        [
            &Bytes::new()
                .u32(length)
                .u32(opcode)
                .u64(self.unique)
                .u64(node)
                .0[..],
            &Bytes::new().u32(user).u32(group).u32(1).u32(0).0,
            arguments,
        ]
        .concat()
    }

    pub fn send(&self, message: &[u8]) {
        send(&self.socket, message, SendFlags::NOSIGNAL).unwrap();
        self.sent.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until the server has executed everything that was sent. A request without an answer may
    /// be executed after the next one.
    pub fn settle(&mut self) {
        let start = Instant::now();
        loop {
            let arguments = Bytes::new().u64(0).u64(self.sent.load(Ordering::Relaxed));
            match self.ask_as_vmm(SAVE, &arguments.0) {
                // It waits some seconds itself.
                Err(libc::EBUSY) if start.elapsed() < TIMEOUT => {}
                answer => {
                    answer.unwrap();
                    return;
                }
            }
        }
    }

    /// The next answer: its number, and what it says.
    pub fn receive(&self) -> (u64, Answered) {
        let mut buffer = vec![0; MESSAGE_MAX + 1];
        let (length, _) = recv(&self.socket, &mut buffer[..], RecvFlags::empty()).unwrap();
        assert!(length >= 16, "{length} bytes");
        let mut fields = Fields(&buffer[..length]);
        let (claimed, error, unique) = (fields.u32(), fields.u32() as i32, fields.u64());
        assert_eq!(claimed as usize, length, "the header's length");
        let answered = match error {
            0 => Ok(fields.0.to_vec()),
            _ => Err(-error),
        };
        (unique, answered)
    }

    /// Sends a request and waits for its answer.
    pub fn ask(&mut self, opcode: u32, node: u64, arguments: &[u8]) -> Answered {
        self.unique += 1;
        self.send(&self.message(opcode, node, arguments));
        let (unique, answered) = self.receive();
        assert_eq!(unique, self.unique);
        answered
    }

    /// Sends a request of the VMM itself and waits for its answer.
    fn ask_as_vmm(&mut self, opcode: u32, arguments: &[u8]) -> Answered {
        let guests = std::mem::replace(&mut self.unique, OWN);
        self.send(&self.message(opcode, 0, arguments));
        self.unique = guests;
        let (unique, answered) = self.receive();
        assert_eq!(unique, OWN);
        answered
    }

    /// The whole session, once the server has executed this many messages.
    pub fn save(&mut self, sent: u64) -> Answered {
        let mut session = Vec::new();
        loop {
            let arguments = Bytes::new().u64(session.len() as u64).u64(sent);
            let answer = self.ask_as_vmm(SAVE, &arguments.0)?;
            let mut fields = Fields(&answer);
            let length = fields.u64() as usize;
            session.extend(fields.0);
            assert!(session.len() <= length && !fields.0.is_empty());
            if session.len() == length {
                return Ok(session);
            }
        }
    }

    /// Gives the server a session.
    pub fn restore(&mut self, session: &[u8]) -> Answered {
        let mut answer = Ok(Vec::new());
        for (number, part) in session.chunks(DATA_MAX).enumerate() {
            let offset = (number * DATA_MAX) as u64;
            let arguments = Bytes::new().u64(session.len() as u64).u64(offset);
            answer = self.ask_as_vmm(RESTORE, &arguments.bytes(part).0);
        }
        answer
    }

    pub fn init(&mut self) -> Vec<u8> {
        // All flags of the kernel.
        let arguments = Bytes::new().u32(7).u32(41).u32(1 << 20).u32(u32::MAX);
        self.ask(INIT, 0, &arguments.zeros(48).0).unwrap()
    }

    /// `LOOKUP`: number and attributes.
    pub fn look_up(&mut self, parent: u64, name: &str) -> Result<(u64, Attributes), i32> {
        let answer = self.ask(LOOKUP, parent, &Bytes::new().name(name).0)?;
        Ok(entry(&answer))
    }

    pub fn getattr(&mut self, node: u64) -> Result<Attributes, i32> {
        let answer = self.ask(GETATTR, node, &[0; 16])?;
        assert_eq!(answer.len(), 104);
        Ok(Attributes::of(&answer[16..]))
    }

    pub fn mkdir(&mut self, parent: u64, name: &str) -> Result<(u64, Attributes), i32> {
        let arguments = Bytes::new().u32(0o755).u32(0).name(name);
        self.ask(MKDIR, parent, &arguments.0).map(|it| entry(&it))
    }

    /// `CREATE`: number, attributes and handle.
    pub fn create(
        &mut self,
        parent: u64,
        name: &str,
        flags: i32,
    ) -> Result<(u64, Attributes, u64), i32> {
        let arguments = Bytes::new().u32(flags as u32).u32(0o100_644).u32(0).u32(0);
        let answer = self.ask(CREATE, parent, &arguments.name(name).0)?;
        let (node, attributes) = entry(&answer[..128]);
        Ok((node, attributes, Fields(&answer[128..]).u64()))
    }

    pub fn open(&mut self, node: u64, flags: i32) -> Result<u64, i32> {
        let answer = self.ask(OPEN, node, &Bytes::new().u32(flags as u32).u32(0).0)?;
        assert_eq!(answer.len(), 16);
        Ok(Fields(&answer).u64())
    }

    pub fn read(&mut self, node: u64, handle: u64, offset: u64, size: u32) -> Answered {
        let arguments = Bytes::new().u64(handle).u64(offset).u32(size).zeros(20);
        self.ask(READ, node, &arguments.0)
    }

    pub fn write(&mut self, node: u64, handle: u64, offset: u64, data: &[u8]) -> Result<u32, i32> {
        let arguments = Bytes::new().u64(handle).u64(offset).u32(data.len() as u32);
        let answer = self.ask(WRITE, node, &arguments.zeros(20).bytes(data).0)?;
        assert_eq!(answer.len(), 8);
        Ok(Fields(&answer).u32())
    }

    pub fn release(&mut self, node: u64, handle: u64) -> Answered {
        self.ask(RELEASE, node, &Bytes::new().u64(handle).zeros(16).0)
    }

    /// `SETATTR` with these bits; the other fields as given.
    pub fn setattr(&mut self, node: u64, change: &Change) -> Result<Attributes, i32> {
        let arguments = Bytes::new()
            .u32(change.valid)
            .u32(0)
            .u64(change.handle)
            .u64(change.size)
            .u64(0)
            .u64(change.accessed)
            .u64(change.modified)
            .u64(0)
            .u32(0)
            .u32(0)
            .u32(0)
            .u32(change.mode)
            .u32(0)
            .u32(change.user)
            .u32(change.group)
            .u32(0);
        let answer = self.ask(SETATTR, node, &arguments.0)?;
        Ok(Attributes::of(&answer[16..]))
    }

    /// All names in a folder, by `READDIR`.
    pub fn names(&mut self, node: u64) -> Vec<String> {
        let handle = Fields(&self.ask(OPENDIR, node, &[0; 8]).unwrap()).u64();
        let (mut names, mut offset) = (Vec::new(), 0);
        loop {
            let arguments = Bytes::new().u64(handle).u64(offset).u32(512).zeros(20);
            let answer = self.ask(READDIR, node, &arguments.0).unwrap();
            if answer.is_empty() {
                break;
            }
            let mut fields = Fields(&answer);
            while !fields.0.is_empty() {
                let (name, next, _) = fields.entry();
                names.push(name);
                offset = next;
            }
        }
        let arguments = Bytes::new().u64(handle).zeros(16);
        self.ask(RELEASEDIR, node, &arguments.0).unwrap();
        names.retain(|name| name != "." && name != "..");
        names.sort();
        names
    }
}

/// `fuse_setattr_in`.
#[derive(Default)]
pub struct Change {
    pub valid: u32,
    pub handle: u64,
    pub size: u64,
    pub accessed: u64,
    pub modified: u64,
    pub mode: u32,
    pub user: u32,
    pub group: u32,
}

/// `fuse_attr`.
#[derive(Debug, PartialEq, Eq)]
pub struct Attributes {
    pub inode: u64,
    pub size: u64,
    pub modified: u64,
    pub mode: u32,
    pub links: u32,
    pub user: u32,
    pub group: u32,
}

impl Attributes {
    pub fn of(bytes: &[u8]) -> Attributes {
        assert_eq!(bytes.len(), 88);
        let mut fields = Fields(bytes);
        let (inode, size, _blocks) = (fields.u64(), fields.u64(), fields.u64());
        let (_accessed, modified, _changed) = (fields.u64(), fields.u64(), fields.u64());
        fields.0 = &fields.0[12..];
        Attributes {
            inode,
            size,
            modified,
            mode: fields.u32(),
            links: fields.u32(),
            user: fields.u32(),
            group: fields.u32(),
        }
    }
}

/// `fuse_entry_out`: number and attributes.
pub fn entry(bytes: &[u8]) -> (u64, Attributes) {
    assert_eq!(bytes.len(), 128);
    (Fields(bytes).u64(), Attributes::of(&bytes[40..]))
}

/// Arguments of a request.
pub struct Bytes(pub Vec<u8>);

impl Bytes {
    pub fn new() -> Bytes {
        Bytes(Vec::new())
    }

    pub fn bytes(mut self, bytes: &[u8]) -> Bytes {
        self.0.extend(bytes);
        self
    }

    pub fn u32(self, number: u32) -> Bytes {
        self.bytes(&number.to_ne_bytes())
    }

    pub fn u64(self, number: u64) -> Bytes {
        self.bytes(&number.to_ne_bytes())
    }

    pub fn zeros(self, count: usize) -> Bytes {
        self.bytes(&vec![0; count])
    }

    pub fn name(self, name: &str) -> Bytes {
        self.bytes(name.as_bytes()).bytes(&[0])
    }
}

/// Fields of an answer.
pub struct Fields<'a>(pub &'a [u8]);

impl Fields<'_> {
    pub fn u32(&mut self) -> u32 {
        let (number, rest) = self.0.split_first_chunk().unwrap();
        self.0 = rest;
        u32::from_ne_bytes(*number)
    }

    pub fn u64(&mut self) -> u64 {
        let (number, rest) = self.0.split_first_chunk().unwrap();
        self.0 = rest;
        u64::from_ne_bytes(*number)
    }

    /// `fuse_dirent`: name, next offset, and inode number.
    pub fn entry(&mut self) -> (String, u64, u64) {
        let (inode, next) = (self.u64(), self.u64());
        let (length, _kind) = (self.u32() as usize, self.u32());
        let name = String::from_utf8(self.0[..length].to_vec()).unwrap();
        self.0 = &self.0[length.next_multiple_of(8)..];
        (name, next, inode)
    }
}
