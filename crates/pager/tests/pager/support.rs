//! A pager process, a client of its control socket, and a VMM as Firecracker's
//! document on page faults describes it.

use jiffy_store::{Codec, WriteOptions, write_image};
use jiffy_sys::userfaultfd::{Arena, Features, Userfaultfd};
use jiffy_wire::lines;
use jiffy_wire::pager::{PagerRequest, PagerResponse, PagerStats};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

pub const PAGE: usize = 4096;
pub const MIB: usize = 1 << 20;
pub const TIMEOUT: Duration = Duration::from_secs(300);

/// The contents of page `page` of every test image: every fifth is zero, every seventh noise, the
/// others compress.
pub fn page(page: usize) -> Vec<u8> {
    if page.is_multiple_of(5) {
        return vec![0; PAGE];
    }
    if page % 7 != 1 {
        let lines = (0..PAGE / 64).map(|line| [(page + line) as u8 | 1; 64]);
        return lines.collect::<Vec<_>>().concat();
    }
    let mut state = (page as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = (0..PAGE / 8).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_ne_bytes()
    });
    words.collect::<Vec<_>>().concat()
}

pub fn contents(bytes: usize) -> Vec<u8> {
    (0..bytes / PAGE).flat_map(page).collect()
}

/// Writes an image of [`contents`].
pub fn image(folder: &Path, bytes: usize, change: impl FnOnce(&mut WriteOptions)) -> PathBuf {
    let mut options = WriteOptions {
        codec: Codec::Lz4,
        threads: 1,
        ..WriteOptions::default()
    };
    change(&mut options);
    let path = folder.join("ram.img");
    write_image(&path, &contents(bytes), &options).unwrap();
    path
}

pub struct Pager {
    child: Child,
    pub control: PathBuf,
}

impl Pager {
    /// A pager that may access this folder.
    pub fn start(folder: &Path, arguments: &[&str]) -> Pager {
        Pager::start_with_path(folder, arguments, &std::env::var_os("PATH").unwrap())
    }

    /// The same, with programs in these folders.
    pub fn start_with_path(folder: &Path, arguments: &[&str], path: &OsStr) -> Pager {
        Pager::start_with(folder, arguments, path, Stdio::inherit())
    }

    /// A pager with its log in `FOLDER/log`.
    pub fn start_with_log(folder: &Path) -> Pager {
        let log = fs::File::create(folder.join("log")).unwrap();
        Pager::start_with(folder, &[], &std::env::var_os("PATH").unwrap(), log.into())
    }

    fn start_with(folder: &Path, arguments: &[&str], path: &OsStr, log: Stdio) -> Pager {
        let control = folder.join("control");
        let child = Command::new(env!("CARGO_BIN_EXE_jiffy-pager"))
            .args(["serve", "--control"])
            .arg(&control)
            .arg("--folder")
            .arg(folder)
            .args(arguments)
            .env("PATH", path)
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let pager = Pager { child, control };
        let begun = Instant::now();
        while UnixStream::connect(&pager.control).is_err() {
            assert!(begun.elapsed() < TIMEOUT, "the pager does not listen");
            thread::sleep(Duration::from_millis(2));
        }
        pager
    }

    /// A pager with access to all folders, as an earlier release's daemon starts it. strace(1)
    /// kills it at a thread's `nth` system call of this name, maybe before it listens.
    pub fn start_killed_at(folder: &Path, call: &str, nth: u32) -> Pager {
        Pager::start_traced(folder, call, &format!("signal=KILL:when={nth}"))
    }

    /// A pager with this strace(1) injection into its system calls of this name.
    pub fn start_traced(folder: &Path, call: &str, what: &str) -> Pager {
        Pager::start_traced_with(folder, &[], call, what)
    }

    /// The same for calls on this existing file.
    pub fn start_traced_at(folder: &Path, file: &Path, call: &str, what: &str) -> Pager {
        let file = file.to_str().expect("a path in UTF-8");
        Pager::start_traced_with(folder, &["-P", file], call, what)
    }

    fn start_traced_with(folder: &Path, options: &[&str], call: &str, what: &str) -> Pager {
        let control = folder.join("control");
        let child = Command::new("strace")
            // -D makes the pager, not strace, our child.
            .args(["-D", "-f", "-qq", "-o", "/dev/null"])
            .args(options)
            .arg("-e")
            .arg(format!("trace={call}"))
            .arg("-e")
            .arg(format!("inject={call}:{what}"))
            .arg(env!("CARGO_BIN_EXE_jiffy-pager"))
            .args(["serve", "--control"])
            .arg(&control)
            .stdin(Stdio::null())
            .spawn()
            .expect("strace is installed");
        Pager { child, control }
    }

    /// The answer to a request; an error if the pager dies.
    pub fn try_ask(&mut self, request: &PagerRequest) -> io::Result<PagerResponse> {
        let stream = loop {
            match UnixStream::connect(&self.control) {
                Ok(stream) => break stream,
                Err(error) if self.has_ended() => return Err(error),
                Err(_) => thread::sleep(Duration::from_millis(2)),
            }
        };
        let line = lines::encode(request)?;
        (&stream).write_all(&line)?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer)?;
        Ok(serde_json::from_str(&answer)?)
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub fn ask(&self, request: &PagerRequest) -> PagerResponse {
        Control::connect(&self.control).ask(request)
    }

    /// Serves `image` on `NAME.sock` beside it.
    pub fn serve(&self, name: &str, image: &Path) -> PathBuf {
        self.serve_as(name, image, None, false)
    }

    pub fn serve_as(
        &self,
        name: &str,
        image: &Path,
        record: Option<PathBuf>,
        prefetch: bool,
    ) -> PathBuf {
        let socket = image.with_file_name(format!("{name}.sock"));
        let answer = self.ask(&PagerRequest::Serve {
            name: name.into(),
            socket: socket.clone(),
            image: image.into(),
            record,
            prefetch,
        });
        assert_eq!(answer, PagerResponse::Ok);
        socket
    }

    pub fn stats(&self, name: &str) -> PagerStats {
        match self.ask(&PagerRequest::Stats { name: name.into() }) {
            PagerResponse::Stats(stats) => stats,
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the counters satisfy `counted`: a page is present, and its faulting thread runs,
    /// slightly before it is counted.
    pub fn stats_once(&self, name: &str, counted: impl Fn(&PagerStats) -> bool) -> PagerStats {
        let mut stats = self.stats(name);
        let begun = Instant::now();
        while !counted(&stats) {
            assert!(begun.elapsed() < TIMEOUT, "{stats:?}");
            thread::sleep(Duration::from_millis(2));
            stats = self.stats(name);
        }
        stats
    }

    /// Waits until this many bytes are filled.
    pub fn filled(&self, name: &str, bytes: usize) -> PagerStats {
        self.stats_once(name, |stats| stats.bytes_filled >= bytes as u64)
    }

    pub fn forget(&self, name: &str) -> PagerResponse {
        self.ask(&PagerRequest::Forget { name: name.into() })
    }

    pub fn complete(&self, name: &str) -> PagerResponse {
        self.ask(&PagerRequest::Complete { name: name.into() })
    }

    /// Waits until the VMM of this memory is served; page 0 is present then.
    pub fn wait_for(&self, memory: &Memory) {
        assert_page(memory.read_page(0).bytes(), page(0));
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Number of entries in a folder of the process in /proc.
    pub fn count(&self, what: &str) -> usize {
        fs::read_dir(format!("/proc/{}/{what}", self.child.id()))
            .unwrap()
            .count()
    }

    /// SIGKILL.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM.
    pub fn terminate(mut self) -> ExitStatus {
        let pid = Pid::from_raw(self.child.id() as i32).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < TIMEOUT, "the pager does not end");
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub struct Control(BufReader<UnixStream>);

impl Control {
    pub fn connect(path: &Path) -> Control {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Control(BufReader::new(stream))
    }

    pub fn ask(&mut self, request: &PagerRequest) -> PagerResponse {
        let line = serde_json::to_string(request).unwrap();
        self.send_line(&format!("{line}\n"))
    }

    /// Sends a request and does not wait for the answer.
    pub fn begin(&mut self, request: &PagerRequest) {
        let line = serde_json::to_string(request).unwrap();
        let stream = self.0.get_mut();
        stream.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// Whether there is no answer yet.
    pub fn has_no_answer(&mut self) -> bool {
        let stream = self.0.get_ref();
        stream.set_nonblocking(true).unwrap();
        let read = self.0.fill_buf().map(drop);
        self.0.get_ref().set_nonblocking(false).unwrap();
        read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    pub fn send_line(&mut self, line: &str) -> PagerResponse {
        self.0.get_mut().write_all(line.as_bytes()).unwrap();
        self.receive()
    }

    pub fn receive(&mut self) -> PagerResponse {
        let mut answer = String::new();
        self.0.read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    }

    pub fn is_closed(&mut self) -> bool {
        // An error (reset) if the pager has not read everything.
        self.0.read(&mut [0; 1]).unwrap_or(0) == 0
    }
}

/// Guest RAM and its userfaultfd. It outlives connections.
#[derive(Clone)]
pub struct Memory {
    pub arena: Arc<Arena>,
    uffd: Arc<Userfaultfd>,
}

impl Memory {
    pub fn new(bytes: usize) -> Memory {
        Memory::over(Arena::anonymous(bytes).unwrap())
    }

    pub fn over(arena: Arena) -> Memory {
        let uffd = Userfaultfd::create(Features::GUEST_MEMORY).unwrap();
        arena.register(&uffd).unwrap();
        Memory {
            arena: Arc::new(arena),
            uffd: Arc::new(uffd),
        }
    }

    /// The JSON of Firecracker's protocol, for one region.
    pub fn mapping(&self) -> String {
        format!(
            r#"{{"base_host_virt_addr":{},"size":{},"offset":0,"page_size":4096,"page_size_kib":4096}}"#,
            self.arena.address(),
            self.arena.length()
        )
    }

    /// Connects and sends the handshake: one message with the descriptor.
    pub fn connect(&self, socket: &Path) -> UnixStream {
        self.try_connect(socket).unwrap()
    }

    /// As [`Memory::connect`], with a line before the handshake.
    pub fn connect_after(&self, socket: &Path, first_line: &str) -> UnixStream {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.write_all(first_line.as_bytes()).unwrap();
        let regions = format!("[{}]", self.mapping());
        try_greet(&stream, &regions, &[self.uffd.as_fd()]).unwrap();
        stream
    }

    pub fn try_connect(&self, socket: &Path) -> io::Result<UnixStream> {
        let stream = UnixStream::connect(socket)?;
        let regions = format!("[{}]", self.mapping());
        try_greet(&stream, &regions, &[self.uffd.as_fd()])?;
        Ok(stream)
    }

    pub fn uffd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }

    /// Whether the kernel supports non-blocking reads of events (RWF_NOWAIT).
    pub fn supports_nowait(&self) -> bool {
        let (at_the_cursor, mut bytes) = (u64::MAX, [0; 32]);
        let mut room = [IoSliceMut::new(&mut bytes)];
        let flags = ReadWriteFlags::NOWAIT;
        // There is no event yet.
        preadv2(self.uffd(), &mut room, at_the_cursor, flags) != Err(Errno::OPNOTSUPP)
    }

    /// Reads a page in a separate thread, because the fault may never be served.
    pub fn read_page(&self, number: usize) -> Reading {
        let arena = self.arena.clone();
        Reading(thread::spawn(move || {
            let mut bytes = vec![0; PAGE];
            arena.read_into(number * PAGE, &mut bytes);
            bytes
        }))
    }

    /// Compares all pages with [`page`], in an order of this seed.
    pub fn check(&self, seed: usize) -> JoinHandle<()> {
        let arena = self.arena.clone();
        thread::spawn(move || {
            let pages = arena.length() / PAGE;
            let mut bytes = vec![0; PAGE];
            for step in 0..pages {
                // 40503 is prime to every power of two.
                let number = (step * 40503 + seed * 7919) % pages;
                arena.read_into(number * PAGE, &mut bytes);
                assert!(bytes == page(number), "page {number}");
            }
        })
    }
}

/// A page that a thread reads.
pub struct Reading(JoinHandle<Vec<u8>>);

impl Reading {
    pub fn bytes(self) -> Vec<u8> {
        join(self.0)
    }

    pub fn is_over(&self) -> bool {
        self.0.is_finished()
    }

    /// Whether the fault is not served.
    pub fn is_stuck(&self) -> bool {
        thread::sleep(Duration::from_millis(100));
        !self.0.is_finished()
    }
}

#[track_caller]
pub fn assert_page(found: impl AsRef<[u8]>, expected: impl AsRef<[u8]>) {
    let (found, expected) = (found.as_ref(), expected.as_ref());
    assert!(
        found == expected,
        "a page begins with {:?} instead of {:?}",
        &found[..8],
        &expected[..8]
    );
}

pub fn join<T>(handle: JoinHandle<T>) -> T {
    let begun = Instant::now();
    while !handle.is_finished() {
        assert!(begun.elapsed() < TIMEOUT, "a fault is not served");
        thread::sleep(Duration::from_millis(1));
    }
    handle.join().unwrap()
}

pub fn greet(stream: &UnixStream, text: &str, fds: &[BorrowedFd<'_>]) {
    try_greet(stream, text, fds).unwrap();
}

fn try_greet(stream: &UnixStream, text: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    sendmsg(
        stream,
        &[IoSlice::new(text.as_bytes())],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// The message that the pager sends before it disconnects.
pub fn failure_message(stream: &UnixStream) -> String {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut text = String::new();
    let mut reader = BufReader::new(stream);
    reader.read_line(&mut text).unwrap();
    // An error (reset) if the pager has not read everything.
    assert_eq!(reader.read(&mut [0; 1]).unwrap_or(0), 0);
    let value: serde_json::Value = serde_json::from_str(text.trim_end()).unwrap();
    value["failed"].as_str().unwrap().to_owned()
}

/// Waits until a condition is true.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < TIMEOUT, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}
