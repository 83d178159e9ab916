use super::*;
use jiffy_devices::virtio::device::WorkerRole;
use jiffy_wire::lines;
use jiffy_wire::vmm;
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

const CHUNK: u64 = 64 << 10;
const CHUNKS: u64 = 130;

/// A cache's folder, and the pager of the test.
struct Fixture {
    folder: tempfile::TempDir,
    listener: Option<UnixListener>,
    told: Option<File>,
    events: Arc<Events>,
}

impl Fixture {
    fn new() -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let header = MapHeader {
            unit: CHUNK as u32,
            length: CHUNKS * CHUNK,
            tail: CHUNKS * CHUNK,
            image: [3; 16],
            boot: [0; 16],
        };
        let mut map = header.encode().to_vec();
        map.resize(header.file_bytes() as usize, 0);
        fs::write(folder.path().join("present"), map).unwrap();
        let (told, teller) = rustix::pipe::pipe().unwrap();
        Fixture {
            listener: Some(UnixListener::bind(folder.path().join("sock")).unwrap()),
            folder,
            told: Some(told.into()),
            events: Arc::new(Events::new(Some(File::from(teller))).unwrap()),
        }
    }

    fn disk(&self) -> vmm::Disk {
        vmm::Disk {
            path: self.folder.path().join("contents"),
            read_only: true,
            serial: Some("root".into()),
            residency: Some(vmm::Residency {
                present: self.folder.path().join("present"),
                pager_socket: self.folder.path().join("sock"),
            }),
            ..vmm::Disk::default()
        }
    }

    fn open(&self) -> DiskChunks {
        DiskChunks::open(&self.disk(), CHUNKS * CHUNK, &self.events)
            .unwrap()
            .expect("some chunks are missing")
    }

    /// Sets bits as a pager does.
    fn set(&self, chunks: Range<u64>) {
        set(&self.folder.path().join("present"), chunks);
    }

    fn told(&mut self) -> String {
        self.events = Arc::new(Events::new(None).unwrap());
        let mut lines = BufReader::new(self.told.take().unwrap()).lines();
        lines.next().unwrap().unwrap()
    }
}

fn set(map: &Path, chunks: Range<u64>) {
    let file = OpenOptions::new().read(true).write(true).open(map).unwrap();
    for chunk in chunks {
        let at = MAP_HEADER as u64 + chunk / 8;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] | 1 << (chunk % 8)], at)
            .unwrap();
    }
}

/// The next request. Before the first one, the client says that it takes bytes.
fn receive_request(mut stream: &UnixStream) -> Option<ChunkRequest> {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        stream.read_exact(&mut byte).ok()?;
        line.extend(byte);
    }
    match serde_json::from_slice(&line).ok()? {
        ChunkRequest::TAKES_BYTES => receive_request(stream),
        request => Some(request),
    }
}

fn send_bytes(mut stream: &UnixStream, id: u64, length: usize, bytes: &[u8]) {
    send_answer(stream, &ChunkAnswer::Bytes { id, length });
    stream.write_all(bytes).unwrap();
}

fn send_answer(mut stream: &UnixStream, answer: &ChunkAnswer) {
    let line = lines::encode(answer).unwrap();
    stream.write_all(&line).unwrap();
}

/// An event descriptor that is never signalled.
fn wakeup() -> OwnedFd {
    let flags = rustix::event::EventfdFlags::CLOEXEC;
    rustix::event::eventfd(0, flags).unwrap()
}

/// Asks for bytes and waits for the answer, as a disk's thread does.
fn fetch(chunks: &DiskChunks, wakeup: &OwnedFd, bytes: Range<u64>) -> io::Result<Fetched> {
    let id = chunks.ask(bytes);
    answer(chunks, wakeup, id)
}

fn answer(chunks: &DiskChunks, wakeup: &OwnedFd, id: u64) -> io::Result<Fetched> {
    loop {
        if let Some((number, outcome)) = chunks.answers().pop() {
            assert_eq!(number, id);
            return outcome;
        }
        assert!(!chunks.wait(wakeup.as_fd()).unwrap(), "it was not woken");
    }
}

#[test]
fn the_bitmap_tells_which_chunks_are_present() {
    let fixture = Fixture::new();
    let chunks = fixture.open();
    fixture.set(1..2);
    fixture.set(60..70);
    assert!(chunks.is_present(&(CHUNK..2 * CHUNK)));
    assert!(chunks.is_present(&(CHUNK + 7..CHUNK + 8)));
    assert!(!chunks.is_present(&(CHUNK..2 * CHUNK + 1)));
    assert!(!chunks.is_present(&(CHUNK - 1..CHUNK + 1)));
    assert!(chunks.is_present(&(60 * CHUNK..70 * CHUNK)));
    assert!(!chunks.is_present(&(60 * CHUNK..70 * CHUNK + 1)));
    assert!(!chunks.is_present(&(0..CHUNKS * CHUNK)));
    fixture.set(0..CHUNKS);
    assert!(chunks.is_present(&(0..CHUNKS * CHUNK)));
    let full = DiskChunks::open(&fixture.disk(), CHUNKS * CHUNK, &fixture.events);
    assert!(full.unwrap().is_none(), "it needs no pager");
}

#[test]
fn hostile_maps_are_refused() {
    let fixture = Fixture::new();
    let path = fixture.folder.path().join("present");
    let good = fs::read(&path).unwrap();
    let refused = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let opened = DiskChunks::open(&fixture.disk(), CHUNKS * CHUNK, &fixture.events);
        crate::error::sentence(&opened.unwrap_err())
    };
    for cut in [0, 7, MAP_HEADER - 1, MAP_HEADER, good.len() - 1] {
        assert!(refused(&good[..cut]).contains("present"), "{cut}");
    }
    for bit in 0..MAP_HEADER * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        refused(&bad);
    }
    fs::write(&path, &good).unwrap();
    let other = DiskChunks::open(&fixture.disk(), CHUNK, &fixture.events).unwrap_err();
    assert!(matches!(other, ResidencyError::Length { .. }), "{other}");
    let writable = vmm::Disk {
        read_only: false,
        ..fixture.disk()
    };
    let error = DiskChunks::open(&writable, CHUNKS * CHUNK, &fixture.events).unwrap_err();
    assert!(error.to_string().contains("must be read-only"));
}

#[test]
fn a_fetch_waits_for_the_pagers_answer() {
    let mut fixture = Fixture::new();
    let chunks = fixture.open();
    let listener = fixture.listener.take().unwrap();
    let map = fixture.folder.path().join("present");
    let pager = thread::spawn(move || {
        let stream = listener.accept().unwrap().0;
        let first = receive_request(&stream).unwrap();
        assert_eq!((first.offset, first.length), (5 * CHUNK, 4096));
        set(&map, 5..6);
        // Answers to requests that were given up are ignored.
        send_answer(&stream, &ChunkAnswer::Present { id: 77 });
        send_answer(&stream, &ChunkAnswer::Present { id: first.id });
        let second = receive_request(&stream).unwrap();
        send_answer(
            &stream,
            &ChunkAnswer::Unavailable {
                id: second.id,
                chunk: Some(9),
                sentence: "chunk 9 is at no origin".into(),
            },
        );
        let third = receive_request(&stream).unwrap();
        send_answer(&stream, &ChunkAnswer::Present { id: third.id });
        let fourth = receive_request(&stream).unwrap();
        assert!(fourth.id > third.id);
        (&stream).write_all(b"{\"failed\":\"what?\"}\n").unwrap();
    });
    let wakeup = wakeup();
    fetch(&chunks, &wakeup, 5 * CHUNK..5 * CHUNK + 4096).unwrap();
    let error = fetch(&chunks, &wakeup, 9 * CHUNK..10 * CHUNK).unwrap_err();
    assert_eq!(error.to_string(), "chunk 9 is at no origin");
    let error = fetch(&chunks, &wakeup, 11 * CHUNK..12 * CHUNK).unwrap_err();
    assert!(
        error.to_string().contains("the map does not"),
        "wrong answer: {error}"
    );
    let error = fetch(&chunks, &wakeup, 12 * CHUNK..13 * CHUNK).unwrap_err();
    assert!(error.to_string().contains("protocol"), "{error}");
    pager.join().unwrap();
    drop(chunks);
    let told = fixture.told();
    for part in [
        "disk.chunk_unavailable",
        "disk root",
        "chunk 9",
        "no origin",
    ] {
        assert!(told.contains(part), "{told}");
    }
}

#[test]
fn bytes_that_the_file_cannot_hold_come_with_the_answer() {
    let mut fixture = Fixture::new();
    let chunks = fixture.open();
    let listener = fixture.listener.take().unwrap();
    let pager = thread::spawn(move || {
        let stream = listener.accept().unwrap().0;
        let mut first = String::new();
        BufReader::with_capacity(1, &stream)
            .read_line(&mut first)
            .unwrap();
        assert_eq!(first, "{\"id\":0,\"offset\":0,\"length\":0}\n");
        let request = receive_request(&stream).unwrap();
        // The answer of a pager that cannot send bytes; bytes of a request that was given up;
        // then the requested bytes, with line ends in them.
        let unavailable = |id| ChunkAnswer::Unavailable {
            id,
            chunk: None,
            sentence: "0 bytes were asked for".into(),
        };
        send_answer(&stream, &unavailable(0));
        send_bytes(&stream, 77, 1024, &[b'\n'; 1024]);
        send_bytes(&stream, request.id, 256 << 10, &[b'\n'; 256 << 10]);
        let request = receive_request(&stream).unwrap();
        // The rest is requested on the same connection.
        assert_eq!(request.offset, 256 << 10);
        send_bytes(&stream, request.id, 512, &[7; 512]);
        let mut stream = stream;
        for (asked, length) in [(512, 1024), (512, 0), (512, 100), (1 << 20, 512 << 10)] {
            let request = receive_request(&stream).unwrap();
            assert_eq!(request.length, asked);
            let (id, line) = (request.id, vec![1; length]);
            send_answer(&stream, &ChunkAnswer::Bytes { id, length });
            let _ = (&stream).write_all(&line);
            assert!(receive_request(&stream).is_none(), "{length}");
            if length != 512 << 10 {
                stream = listener.accept().unwrap().0;
            }
        }
    });
    let wakeup = wakeup();
    let fetch = |bytes: Range<u64>| fetch(&chunks, &wakeup, bytes);
    let came = fetch(0..(256 << 10) + 512).unwrap();
    assert_eq!(came, Fetched::Bytes(vec![b'\n'; 256 << 10]));
    let came = fetch(256 << 10..(256 << 10) + 512).unwrap();
    assert_eq!(came, Fetched::Bytes(vec![7; 512]));
    for asked in [512, 512, 512, 1 << 20] {
        let error = fetch(0..asked).unwrap_err();
        assert!(error.to_string().contains("protocol"), "{error}");
    }
    drop(chunks);
    pager.join().unwrap();
}

#[test]
fn requests_are_sent_again_to_the_next_pager() {
    let mut fixture = Fixture::new();
    let chunks = fixture.open();
    let listener = fixture.listener.take().unwrap();
    let socket = fixture.folder.path().join("sock");
    let map = fixture.folder.path().join("present");
    let pagers = thread::spawn(move || {
        let stream = listener.accept().unwrap().0;
        receive_request(&stream).unwrap();
        // The pager is killed, and its socket is removed.
        fs::remove_file(&socket).unwrap();
        drop((listener, stream));
        let listener = UnixListener::bind(&socket).unwrap();
        let stream = listener.accept().unwrap().0;
        let request = receive_request(&stream).unwrap();
        assert_eq!(request.offset, CHUNK);
        set(&map, 1..2);
        send_answer(&stream, &ChunkAnswer::Present { id: request.id });
    });
    fetch(&chunks, &wakeup(), CHUNK..2 * CHUNK).unwrap();
    pagers.join().unwrap();
}

#[test]
fn only_missing_chunks_fail_without_a_pager() {
    let mut fixture = Fixture::new();
    fixture.listener = None;
    let chunks = fixture.open();
    fixture.set(0..1);
    assert!(chunks.is_present(&(0..CHUNK)));
    let error = fetch(&chunks, &wakeup(), CHUNK..2 * CHUNK).unwrap_err();
    assert!(error.to_string().contains("can't be reached"), "{error}");
}

#[test]
fn sixteen_requests_are_answered_in_any_order() {
    let mut fixture = Fixture::new();
    let chunks = fixture.open();
    let listener = fixture.listener.take().unwrap();
    let map = fixture.folder.path().join("present");
    let pager = thread::spawn(move || {
        let stream = listener.accept().unwrap().0;
        let mut requests: Vec<ChunkRequest> =
            (0..16).map(|_| receive_request(&stream).unwrap()).collect();
        requests.sort_by_key(|request| request.offset % (5 * CHUNK));
        for request in requests {
            let chunk = request.offset / CHUNK;
            match chunk {
                7 => send_answer(
                    &stream,
                    &ChunkAnswer::Unavailable {
                        id: request.id,
                        chunk: Some(7),
                        sentence: "chunk 7 is at no origin".into(),
                    },
                ),
                _ => {
                    set(&map, chunk..chunk + 1);
                    send_answer(&stream, &ChunkAnswer::Present { id: request.id });
                }
            }
        }
    });
    let chunk_of = |chunk: u64| chunk * CHUNK..(chunk + 1) * CHUNK;
    let mut waiting: BTreeMap<u64, u64> = (0..16)
        .map(|chunk| (chunks.ask(chunk_of(chunk)), chunk))
        .collect();
    let wakeup = wakeup();
    while !waiting.is_empty() {
        for (id, outcome) in chunks.answers() {
            match waiting.remove(&id).expect("it was requested exactly once") {
                7 => assert_eq!(outcome.unwrap_err().to_string(), "chunk 7 is at no origin"),
                chunk => {
                    assert_eq!(outcome.unwrap(), Fetched::Present);
                    assert!(chunks.is_present(&chunk_of(chunk)));
                }
            }
        }
        chunks.wait(wakeup.as_fd()).unwrap();
    }
    pager.join().unwrap();
}

#[test]
fn an_abandoned_request_is_sent_again_under_a_new_id() {
    let mut fixture = Fixture::new();
    let chunks = fixture.open();
    let listener = fixture.listener.take().unwrap();
    let wakeup = wakeup();
    let wake = wakeup.try_clone().unwrap();
    let pager = thread::spawn(move || {
        let stream = listener.accept().unwrap().0;
        let request = receive_request(&stream).unwrap();
        rustix::io::write(&wake, &1u64.to_ne_bytes()).unwrap();
        // The request is sent again later, on the same connection.
        let again = receive_request(&stream).unwrap();
        assert_eq!(
            (again.offset, again.length),
            (request.offset, request.length)
        );
        for (id, sentence) in [(request.id, "the old one"), (again.id, "the new one")] {
            send_answer(
                &stream,
                &ChunkAnswer::Unavailable {
                    id,
                    chunk: None,
                    sentence: sentence.into(),
                },
            );
        }
    });
    chunks.ask(0..4096);
    while !chunks.wait(wakeup.as_fd()).unwrap() {}
    chunks.give_up();
    let error = fetch(&chunks, &self::wakeup(), 0..4096).unwrap_err();
    assert_eq!(error.to_string(), "the new one");
    pager.join().unwrap();
}

/// Set in a child process that plays the scene below.
const CHILD_VARIABLE: &str = "JIFFY_DISK_CHUNKS_SCENE";

/// Everything that a disk's thread does about missing chunks, in its sandbox. Filters can't be
/// removed, so this runs in a process of its own.
#[test]
fn fetching_chunks_works_in_the_sandbox() {
    use crate::sandbox::{Role, Sandbox, violation};
    if std::env::var_os(CHILD_VARIABLE).is_none() {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "devices::disk_chunks::tests::fetching_chunks_works_in_the_sandbox",
                "--exact",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(CHILD_VARIABLE, "play")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("lived"),
            "{output:?}"
        );
        return;
    }
    let mut fixture = Fixture::new();
    let chunks = fixture.open();
    let listener = fixture.listener.take().unwrap();
    let map = fixture.folder.path().join("present");
    let mut pager = Some(thread::spawn(move || {
        // A pager that dies, then one that has one chunk and lacks another.
        receive_request(&listener.accept().unwrap().0).unwrap();
        let stream = listener.accept().unwrap().0;
        let request = receive_request(&stream).unwrap();
        set(&map, 1..2);
        send_answer(&stream, &ChunkAnswer::Present { id: request.id });
        let request = receive_request(&stream).unwrap();
        send_answer(
            &stream,
            &ChunkAnswer::Unavailable {
                id: request.id,
                chunk: Some(2),
                sentence: "x".repeat(1000),
            },
        );
        let request = receive_request(&stream).unwrap();
        send_bytes(&stream, request.id, 64 << 10, &[5; 64 << 10]);
        // The last request is never answered.
        receive_request(&stream).unwrap();
        stream
    }));
    Sandbox::On.prepare().unwrap();
    let wakeup = wakeup();
    let disk = thread::spawn(move || {
        Sandbox::On
            .enter(Role::Device(WorkerRole::BlockOnDemand))
            .unwrap();
        fetch(&chunks, &wakeup, CHUNK..2 * CHUNK).unwrap();
        fetch(&chunks, &wakeup, 2 * CHUNK..3 * CHUNK).unwrap_err();
        let came = fetch(&chunks, &wakeup, 2 * CHUNK..3 * CHUNK).unwrap();
        assert_eq!(came, Fetched::Bytes(vec![5; CHUNK as usize]));
        let given_up = chunks.ask(3 * CHUNK..4 * CHUNK);
        chunks.give_up();
        assert!(chunks.answers().iter().all(|(id, _)| *id != given_up));
        // It fails once the pager has disconnected and the search for another has timed out.
        fetch(&chunks, &wakeup, 4 * CHUNK..5 * CHUNK).unwrap_err();
        println!("lived");
    });
    // A thread that violated its filter is blocked forever.
    while !disk.is_finished() && violation::first().is_none() {
        thread::sleep(INTERVAL);
        if pager.as_ref().is_some_and(|pager| pager.is_finished()) {
            drop(pager.take().map(|pager| pager.join().unwrap()));
        }
    }
    assert_eq!(violation::first(), None);
    disk.join().unwrap();
}
