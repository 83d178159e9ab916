//! Disks that are filled on demand.

use super::support::*;
use jiffy_store::disk_cache::is_full;
use jiffy_store::{ImageReader, Kind, PeerFolder, Recording, partial};
use jiffy_wire::disk::{ChunkAnswer, ChunkRequest, MAP_HEADER};
use jiffy_wire::pager::{OpenDisk, Origin, PagerRequest, PagerResponse, RegistryOrigin};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes of a chunk of the tests' images.
pub(super) const CHUNK: u64 = 8192;
pub(super) const SIZE: usize = 2 * MIB;
/// How long a registry has: then the pager gives up.
pub(super) const REGISTRY_TIME: Duration = Duration::from_secs(15);

/// A connection like that of a VMM's block device.
pub(super) struct Vmm {
    pub(super) stream: BufReader<UnixStream>,
    next: u64,
}

impl Vmm {
    pub(super) fn connect(socket: &Path) -> Vmm {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Vmm {
            stream: BufReader::new(stream),
            next: 1,
        }
    }

    pub(super) fn ask(&mut self, offset: u64, length: u64) -> u64 {
        let id = self.next;
        self.next += 1;
        let request = ChunkRequest { id, offset, length };
        let line = serde_json::to_string(&request).unwrap();
        self.send_line(&format!("{line}\n"));
        id
    }

    pub(super) fn send_line(&mut self, text: &str) {
        self.stream.get_mut().write_all(text.as_bytes()).unwrap();
    }

    pub(super) fn receive(&mut self) -> ChunkAnswer {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    pub(super) fn fill(&mut self, offset: u64, length: u64) -> ChunkAnswer {
        let id = self.ask(offset, length);
        let answer = self.receive();
        assert_eq!(answer.id(), id);
        answer
    }

    #[track_caller]
    pub(super) fn have(&mut self, offset: u64, length: u64) {
        let answer = self.fill(offset, length);
        assert!(matches!(answer, ChunkAnswer::Present { .. }), "{answer:?}");
    }

    pub(super) fn refused(&mut self, offset: u64, length: u64) -> (Option<u32>, String) {
        match self.fill(offset, length) {
            ChunkAnswer::Unavailable {
                chunk, sentence, ..
            } => (chunk, sentence),
            answer => panic!("{answer:?}"),
        }
    }

    pub(super) fn has_no_answer(&self) -> bool {
        is_waiting(self.stream.get_ref())
    }

    pub(super) fn ends(mut self) -> bool {
        let mut rest = Vec::new();
        let _ = self.stream.read_to_end(&mut rest);
        true
    }
}

pub(super) fn request(folder: &Path, image: &Path) -> OpenDisk {
    OpenDisk {
        name: "root".into(),
        socket: folder.join("root.sock"),
        cache: folder.join("cache"),
        image: image.into(),
        record: None,
        prefetch: None,
    }
}

/// A pager that takes this long to create a disk's cache, and a request for a disk.
fn start_slow_open(seconds: u32, folder: &Path, image: &Path) -> (Pager, OpenDisk) {
    let delay = format!("delay_enter={seconds}s:when=1");
    let pager = Pager::start_traced(folder, "ftruncate", &delay);
    eventually("it does not listen", || {
        UnixStream::connect(&pager.control).is_ok()
    });
    (pager, request(folder, image))
}

/// Whether there is no answer yet.
fn is_waiting(client: &UnixStream) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    recv(client, &mut [0_u8; 1][..], flags) == Err(Errno::AGAIN)
}

pub(super) fn open(pager: &Pager, request: &OpenDisk) -> Vmm {
    let answer = pager.ask(&PagerRequest::OpenDisk(request.clone()));
    assert_eq!(answer, PagerResponse::Ok);
    Vmm::connect(&request.socket)
}

#[track_caller]
pub(super) fn check(cache: &Path, offset: u64, length: u64) {
    let found = fs::read(cache.join("contents")).unwrap();
    let range = offset as usize..(offset + length) as usize;
    assert!(found[range.clone()] == contents(SIZE)[range]);
    let map = fs::read(cache.join("present")).unwrap();
    for chunk in offset / CHUNK..(offset + length).div_ceil(CHUNK) {
        let byte = map[MAP_HEADER + (chunk / 8) as usize];
        assert!(byte & 1 << (chunk % 8) != 0, "chunk {chunk} is not there");
    }
}

fn error(answer: PagerResponse) -> String {
    match answer {
        PagerResponse::Error(sentence) => sentence,
        other => panic!("{other:?}"),
    }
}

/// The same image without its chunks, in a folder of its own.
pub(super) fn without_chunks(image: &Path) -> PathBuf {
    let whole = ImageReader::open(image).unwrap();
    let bytes = fs::read(image).unwrap();
    let tail = bytes.len() + 64 - whole.metadata_bytes() as usize;
    let folder = image.with_file_name("partial");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("image.jimg");
    partial::create(&path, bytes.len() as u64, &bytes[tail..], whole.id()).unwrap();
    path
}

/// A peer's folder with these bytes as the image.
pub(super) fn peer(
    folder: &Path,
    name: &str,
    image: &Path,
    change: impl FnOnce(&mut Vec<u8>),
) -> Origin {
    let id = ImageReader::open(image).unwrap().id();
    let mut bytes = fs::read(image).unwrap();
    change(&mut bytes);
    let folder = folder.join(name);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join(PeerFolder::file_name(id)), bytes).unwrap();
    Origin::Folder { folder }
}

pub(super) fn set_origins(pager: &Pager, image: &Path, origins: Vec<Origin>) {
    let answer = pager.ask(&PagerRequest::Origins {
        image: image.into(),
        origins,
    });
    assert_eq!(answer, PagerResponse::Ok);
}

/// A sync would block other clients.
#[test]
fn a_cache_left_open_by_a_predecessor_is_opened_without_sync() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let request = request(folder.path(), &image);
    open(&pager, &request).have(0, CHUNK);
    pager.kill();
    let mut pager = Pager::start_killed_at(folder.path(), "fsync,fdatasync", 1);
    let answer = pager.try_ask(&PagerRequest::OpenDisk(request));
    assert_eq!(answer.unwrap(), PagerResponse::Ok);
}

/// Otherwise the next pager would trust a map whose bytes may not be on the disk.
#[test]
fn opening_a_cache_records_the_boot_without_waiting_for_sync() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let request = request(folder.path(), &image);
    open(&pager, &request).have(0, CHUNK);
    assert_eq!(pager.forget("root"), PagerResponse::Ok);
    pager.kill();
    let boot = || fs::read(request.cache.join("present")).unwrap()[48..64].to_vec();
    assert_eq!(boot(), [0; 16]);
    let mut pager = Pager::start_killed_at(folder.path(), "fsync,fdatasync", 1);
    let answer = pager.try_ask(&PagerRequest::OpenDisk(request.clone()));
    assert_eq!(answer.unwrap(), PagerResponse::Ok);
    assert_ne!(boot(), [0; 16]);
}

/// Creating the cache of a large disk takes a while.
#[test]
fn opening_a_disk_does_not_block_other_clients() {
    // On a busy host the first opening may be over too soon.
    let served = [3, 60]
        .into_iter()
        .any(others_are_served_while_a_disk_opens);
    assert!(served, "they waited for the disk");
}

/// False if the disk was open before all clients were served.
fn others_are_served_while_a_disk_opens(seconds: u32) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let (pager, request) = start_slow_open(seconds, folder.path(), &image);
    let line = serde_json::to_string(&PagerRequest::OpenDisk(request.clone())).unwrap();
    let [one, other] = [(); 2].map(|()| UnixStream::connect(&pager.control).unwrap());
    for mut client in [&one, &other] {
        writeln!(client, "{line}").unwrap();
    }
    eventually("it does not begin", || {
        request.cache.join("present").exists()
    });
    let memory = Memory::new(SIZE);
    let _connection = memory.connect(&pager.serve("vm", &image));
    assert_page(memory.read_page(3).bytes(), page(3));
    let taken = OpenDisk {
        name: "other".into(),
        ..request.clone()
    };
    let sentence = error(pager.ask(&PagerRequest::OpenDisk(taken)));
    assert!(sentence.contains("root.sock serves another"), "{sentence}");
    if !is_waiting(&one) {
        return false;
    }
    for client in [one, other] {
        let mut answer = String::new();
        BufReader::new(client).read_line(&mut answer).unwrap();
        let answer: PagerResponse = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer, PagerResponse::Ok);
    }
    Vmm::connect(&request.socket).have(0, CHUNK);
    true
}

/// Reading the tables of an image may be slow.
#[test]
fn opening_an_image_does_not_block_other_clients() {
    // On a busy host the first opening may be over too soon.
    let served = [3, 60]
        .into_iter()
        .any(others_are_served_while_an_image_opens);
    assert!(served, "they waited for the image");
}

/// False if the image was open before all clients were served.
fn others_are_served_while_an_image_opens(seconds: u32) -> bool {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let slow = image(folder.path(), SIZE, |_| {});
    let other = image(elsewhere.path(), SIZE, |_| {});
    let serve = |name: &str, image: &Path| PagerRequest::Serve {
        name: name.into(),
        socket: folder.path().join(format!("{name}.sock")),
        image: image.into(),
        record: None,
        prefetch: false,
    };
    let delay = format!("delay_enter={seconds}s:when=1");
    let pager = Pager::start_traced_at(folder.path(), &slow, "pread64", &delay);
    eventually("it does not listen", || {
        UnixStream::connect(&pager.control).is_ok()
    });
    let [mut of_memory, mut of_disk, mut of_all, mut of_origins] =
        [(); 4].map(|()| Control::connect(&pager.control));
    of_memory.begin(&serve("vm", &slow));
    of_disk.begin(&PagerRequest::OpenDisk(request(folder.path(), &slow)));
    of_all.begin(&PagerRequest::CompleteImage {
        image: slow.clone(),
    });
    of_origins.begin(&PagerRequest::Origins {
        image: other.clone(),
        origins: Vec::new(),
    });
    // Their requests were read before this one is answered.
    assert_eq!(pager.ask(&PagerRequest::Ping), PagerResponse::Ok);
    let sentence = error(pager.ask(&serve("vm", &other)));
    if !sentence.contains("is being opened with other") || !of_memory.has_no_answer() {
        return false;
    }
    for mut client in [of_memory, of_disk, of_all, of_origins] {
        assert_eq!(client.receive(), PagerResponse::Ok);
    }
    let memory = Memory::new(SIZE);
    let _connection = memory.connect(&folder.path().join("vm.sock"));
    assert_page(memory.read_page(3).bytes(), page(3));
    true
}

#[test]
fn a_disk_can_be_forgotten_and_reopened_while_it_opens() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let (pager, request) = start_slow_open(3, folder.path(), &image);
    let mut client = UnixStream::connect(&pager.control).unwrap();
    let line = serde_json::to_string(&PagerRequest::OpenDisk(request.clone())).unwrap();
    writeln!(client, "{line}").unwrap();
    eventually("it does not begin", || {
        request.cache.join("present").exists()
    });
    assert_eq!(pager.forget("root"), PagerResponse::Ok);
    let mut answer = String::new();
    BufReader::new(client).read_line(&mut answer).unwrap();
    // On a busy host the disk may have been open already.
    if let PagerResponse::Error(sentence) = serde_json::from_str(&answer).unwrap() {
        assert!(sentence.contains("was forgotten"), "{sentence}");
    }
    assert!(!request.socket.exists());
    // The cache is not in use, and a stale socket is replaced.
    drop(UnixListener::bind(&request.socket).unwrap());
    open(&pager, &request).have(0, CHUNK);
}

#[test]
fn vmms_share_a_cache_and_its_contents_outlive_the_pager() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let disk = request(folder.path(), &image);
    let mut one = open(&pager, &disk);
    let mut other = open(&pager, &disk);
    one.have(5 * CHUNK + 1, 1);
    other.have(100 * CHUNK, 3 * CHUNK);
    one.have(100 * CHUNK, 1);
    check(&disk.cache, 5 * CHUNK, CHUNK);
    check(&disk.cache, 100 * CHUNK, 3 * CHUNK);
    let stats = pager.stats("root");
    assert_eq!(stats.faults, 3);
    assert!(stats.bytes_read > 0 && stats.bytes_fetched == 0);
    // Several requests at once are all answered.
    let ids: Vec<u64> = (0..10).map(|n| one.ask(n * 10 * CHUNK, CHUNK)).collect();
    let mut answered: Vec<u64> = ids.iter().map(|_| one.receive().id()).collect();
    answered.sort();
    assert_eq!(answered, ids);
    // After a kill, the next pager continues with the present chunks.
    pager.kill();
    assert!(one.ends() && other.ends());
    let pager = Pager::start(folder.path(), &[]);
    let mut vmm = open(&pager, &disk);
    vmm.have(5 * CHUNK, CHUNK);
    let stats = pager.stats("root");
    assert_eq!(stats.bytes_filled, 0, "it was there");
    // A complete disk needs no pager.
    assert!(!is_full(&disk.cache));
    assert_eq!(pager.complete("root"), PagerResponse::Ok);
    assert!(is_full(&disk.cache));
    check(&disk.cache, 0, SIZE as u64);
    assert_eq!(pager.forget("root"), PagerResponse::Ok);
    assert!(vmm.ends() && !disk.socket.exists());
    assert!(is_full(&disk.cache));
    assert!(pager.terminate().success());
}

#[test]
fn chunks_read_at_boot_are_recorded_and_prefetched_next_time() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let record = folder.path().join("boot");
    let disk = OpenDisk {
        record: Some(record.clone()),
        ..request(folder.path(), &image)
    };
    let mut vmm = open(&pager, &disk);
    // Every fifth page is zero; chunks 9, 3, 4 and 60 are not.
    for chunk in [9, 3, 4, 60] {
        vmm.have(chunk * CHUNK, CHUNK);
    }
    let done = pager.ask(&PagerRequest::EndRecording {
        name: "root".into(),
    });
    assert_eq!(done, PagerResponse::Ok);
    let recording = Recording::read(&record).unwrap();
    assert_eq!(recording.chunks, [9, 3, 4, 60]);
    vmm.have(70 * CHUNK, CHUNK);
    drop(vmm);
    assert_eq!(pager.forget("root"), PagerResponse::Ok);
    assert_eq!(Recording::read(&record).unwrap(), recording, "no more");

    let next = OpenDisk {
        cache: folder.path().join("next"),
        prefetch: Some(record.clone()),
        ..request(folder.path(), &image)
    };
    let vmm = open(&pager, &next);
    eventually("the boot set is not there", || {
        pager.stats("root").prefetched_chunks == 4
    });
    check(&next.cache, 60 * CHUNK, CHUNK);
    check(&next.cache, 3 * CHUNK, 2 * CHUNK);
    assert_eq!(pager.stats("root").faults, 0);
    drop(vmm);
    assert_eq!(pager.forget("root"), PagerResponse::Ok);

    // Without a request, the recording is written when the last VMM goes, and at the end.
    let other = folder.path().join("other boot");
    let disk = OpenDisk {
        cache: folder.path().join("third"),
        record: Some(other.clone()),
        ..request(folder.path(), &image)
    };
    let mut vmm = open(&pager, &disk);
    vmm.have(7 * CHUNK, CHUNK);
    drop(vmm);
    eventually("nothing is written", || other.exists());
    let mut vmm = Vmm::connect(&disk.socket);
    vmm.have(8 * CHUNK, CHUNK);
    assert!(pager.terminate().success());
    assert_eq!(Recording::read(&other).unwrap().chunks, [7, 8]);
}

/// Its image was removed, so nothing would remove the recording.
#[test]
fn what_was_read_of_a_removed_cache_is_not_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let record = folder.path().join("boot");
    let disk = OpenDisk {
        record: Some(record.clone()),
        ..request(folder.path(), &image)
    };
    let mut vmm = open(&pager, &disk);
    vmm.have(7 * CHUNK, CHUNK);
    fs::remove_dir_all(&disk.cache).unwrap();
    drop(vmm);
    pager.forget("root");
    assert!(!record.exists());
}

#[test]
fn missing_blocks_come_from_peers_and_wrong_ones_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let partial = without_chunks(&image);
    let pager = Pager::start(folder.path(), &[]);
    let disk = request(folder.path(), &partial);
    let liar = peer(folder.path(), "liar", &image, |bytes| {
        // Its tables are the image's, or it would not be used.
        let chunks = bytes.len() - 256;
        bytes[..chunks].iter_mut().for_each(|byte| *byte ^= 1);
    });
    let empty = Origin::Folder {
        folder: folder.path().join("nothing"),
    };
    // No origin has the chunk.
    let mut vmm = open(&pager, &disk);
    let (chunk, sentence) = vmm.refused(20 * CHUNK, CHUNK);
    assert_eq!(chunk, Some(20));
    assert!(sentence.contains("no origin is known"), "{sentence}");
    drop(vmm);
    assert_eq!(pager.forget("root"), PagerResponse::Ok);
    // One origin lies, one has nothing.
    set_origins(&pager, &partial, vec![liar.clone(), empty.clone()]);
    let mut vmm = open(&pager, &disk);
    let mut other = Vmm::connect(&disk.socket);
    let (chunk, sentence) = vmm.refused(20 * CHUNK, CHUNK);
    assert_eq!(chunk, Some(20));
    for part in [
        "image.jimg",
        "chunk 20 ",
        "liar: it gave",
        "nothing: it does not have",
    ] {
        assert!(sentence.contains(part), "{sentence}");
    }
    // Zero chunks need no origin.
    let whole = ImageReader::open(&image).unwrap();
    let zero = (0..whole.chunks()).find(|chunk| whole.kind(*chunk).unwrap() == Kind::Zero);
    if let Some(zero) = zero {
        other.have(u64::from(zero) * CHUNK, CHUNK);
    }
    drop((vmm, other));
    assert_eq!(pager.forget("root"), PagerResponse::Ok);
    // A third origin is honest.
    let honest = peer(folder.path(), "honest", &image, |_| {});
    set_origins(&pager, &partial, vec![liar, empty, honest]);
    let mut vmm = open(&pager, &disk);
    vmm.have(0, 64 * CHUNK);
    check(&disk.cache, 0, 64 * CHUNK);
    assert!(pager.stats("root").bytes_fetched > 0);
    let whole = pager.ask(&PagerRequest::CompleteImage {
        image: partial.clone(),
    });
    assert_eq!(whole, PagerResponse::Ok);
    assert!(!partial::is_partial(&partial));
    assert_eq!(fs::read(&partial).unwrap(), fs::read(&image).unwrap());
    vmm.have(0, SIZE as u64);
    check(&disk.cache, 0, SIZE as u64);
}

#[test]
fn a_disk_opens_and_closes_while_a_registry_hangs() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let partial = without_chunks(&image);
    let pager = Pager::start(folder.path(), &[]);
    // Accepts connections but never answers.
    let deaf = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = deaf.local_addr().unwrap();
    let registry = Origin::Registry(RegistryOrigin {
        reference: format!("{address}/a@sha256:{}", "0".repeat(64)),
        file: "image.jimg".into(),
        docker_config: None,
        plain_http: true,
        authorities: Vec::new(),
    });
    set_origins(&pager, &partial, vec![registry]);
    let mut waiting = open(&pager, &request(folder.path(), &partial));
    let asked = Instant::now();
    // More requests than the lane has threads.
    for chunk in 0..12 {
        waiting.ask(chunk * 16 * CHUNK, CHUNK);
    }
    let other = OpenDisk {
        name: "other".into(),
        socket: folder.path().join("other.sock"),
        cache: folder.path().join("other"),
        ..request(folder.path(), &image)
    };
    open(&pager, &other);
    assert_eq!(pager.forget("other"), PagerResponse::Ok);
    let hangs = waiting.has_no_answer() || asked.elapsed() >= REGISTRY_TIME;
    assert!(hangs, "it was waited for");
}

#[test]
fn hostile_vmms_are_refused_and_others_do_not_notice() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let disk = request(folder.path(), &image);
    let mut good = open(&pager, &disk);
    // Its connection is included in the count.
    good.have(120 * CHUNK, CHUNK);
    let before = pager.count("fd");
    for (offset, length) in [
        (0, 0),
        (SIZE as u64, 1),
        (SIZE as u64 - 1, 2),
        (u64::MAX, u64::MAX),
        (0, u64::MAX),
        (1 << 40, 4096),
    ] {
        let (chunk, sentence) = good.refused(offset, length);
        assert_eq!(chunk, None);
        assert!(sentence.contains("is refused: it must be"), "{sentence}");
    }
    for text in [
        "nonsense\n".to_owned(),
        "{}\n".into(),
        "\n".into(),
        "{\"id\":1,\"offset\":-1,\"length\":1}\n".into(),
        "x".repeat(20_000),
    ] {
        let stream = UnixStream::connect(&disk.socket).unwrap();
        let _ = (&stream).write_all(text.as_bytes());
        let why = failure_message(&stream);
        assert!(why.contains("request"), "{why}");
    }
    // Disconnects in the middle of a line, and before the answers.
    for _ in 0..20 {
        let mut vmm = Vmm::connect(&disk.socket);
        for chunk in 0..30 {
            vmm.ask(chunk * CHUNK, CHUNK);
        }
        vmm.send_line("{\"id\":");
    }
    // A VMM that sends requests and reads no answers delays no other.
    let deaf = UnixStream::connect(&disk.socket).unwrap();
    deaf.set_nonblocking(true).unwrap();
    for id in 0..5000 {
        let line = format!("{{\"id\":{id},\"offset\":0,\"length\":1}}\n");
        if (&deaf).write(line.as_bytes()).is_err() {
            break;
        }
    }
    good.have(130 * CHUNK, CHUNK);
    check(&disk.cache, 130 * CHUNK, CHUNK);
    drop(deaf);
    eventually("descriptors stay open", || pager.count("fd") <= before);
    good.have(140 * CHUNK, CHUNK);
}

#[test]
fn invalid_disk_requests_are_answered_with_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let disk = request(folder.path(), &image);
    let ask = |change: &dyn Fn(&mut OpenDisk)| {
        let mut request = disk.clone();
        change(&mut request);
        pager.ask(&PagerRequest::OpenDisk(request))
    };
    let nobody = folder.path().join("nobody");
    assert!(error(ask(&|disk| disk.image = nobody.clone())).contains("nobody"));
    assert!(error(ask(&|disk| disk.cache = nobody.join("x"))).contains("cannot be used"));
    assert!(error(ask(&|disk| disk.socket = nobody.join("x"))).contains("listened on"));
    assert!(error(ask(&|disk| disk.socket = disk.image.clone())).contains("not a socket"));
    let origins = PagerRequest::Origins {
        image: nobody.clone(),
        origins: Vec::new(),
    };
    assert!(error(pager.ask(&origins)).contains("nobody"));
    let end = PagerRequest::EndRecording {
        name: "root".into(),
    };
    assert!(error(pager.ask(&end)).contains("no disk root"));

    assert_eq!(ask(&|_| {}), PagerResponse::Ok);
    assert_eq!(ask(&|_| {}), PagerResponse::Ok, "asked again");
    assert!(error(ask(&|disk| disk.record = Some("/x".into()))).contains("already"));
    assert!(error(ask(&|disk| disk.name = "b".into())).contains("serves another"));
    let socket = folder.path().join("b.sock");
    let second = |disk: &mut OpenDisk| {
        disk.name = "b".into();
        disk.socket = socket.clone();
    };
    assert!(error(ask(&second)).contains("is that of the disk root"));
    let serve = PagerRequest::Serve {
        name: "root".into(),
        socket: socket.clone(),
        image: image.clone(),
        record: None,
        prefetch: false,
    };
    assert!(error(pager.ask(&serve)).contains("is a disk"));
    pager.serve("vm", &image);
    assert!(error(ask(&|disk| disk.name = "vm".into())).contains("is a VM"));
    // Another process has the cache.
    let other = tempfile::tempdir().unwrap();
    let beside = folder.path().to_str().unwrap();
    let second = Pager::start(other.path(), &["--folder", beside]);
    let mut request = disk.clone();
    request.socket = other.path().join("sock");
    let busy = second.ask(&PagerRequest::OpenDisk(request));
    assert!(error(busy).contains("filled by another process"));
}
