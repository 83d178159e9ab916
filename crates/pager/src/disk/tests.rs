use super::*;
use crate::io_pool::IoPool;
use jiffy_store::partial;
use jiffy_store::reader::Opening;
use jiffy_store::{
    Bytes, Codec, ImageId, ImageReader, Origin, OriginError, WriteOptions, write_image,
};
use std::fs;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

#[path = "../../tests/pager/small_disk.rs"]
mod small_disk;
use small_disk::SmallDisk;

const CHUNK: usize = 64 << 10;
const TIMEOUT: Duration = Duration::from_secs(300);

/// An origin that waits for its gate, and records the requests.
struct GatedOrigin {
    file: Vec<u8>,
    asked: Mutex<Vec<Range<u64>>>,
    notify: Mutex<Sender<()>>,
    gate: Mutex<Receiver<()>>,
    lies: AtomicBool,
    absent: AtomicBool,
}

impl Origin for GatedOrigin {
    fn name(&self) -> String {
        "the origin".into()
    }

    fn fetch(&self, range: Range<u64>, _: &Stop) -> Result<Bytes, OriginError> {
        lock(&self.asked).push(range.clone());
        let _ = lock(&self.notify).send(());
        // Open forever once the other end is dropped.
        let _ = lock(&self.gate).recv();
        if self.absent.load(Ordering::SeqCst) {
            return Err(OriginError::permanent("it is gone"));
        }
        let mut bytes = self.file[range.start as usize..range.end as usize].to_vec();
        if self.lies.load(Ordering::SeqCst) {
            bytes.iter_mut().for_each(|byte| *byte ^= 1);
        }
        Ok(Bytes::of(bytes))
    }
}

struct Bench {
    folder: tempfile::TempDir,
    bytes: Vec<u8>,
    whole: PathBuf,
    io_pool: Arc<IoPool>,
}

/// Chunks of noise; every fifth is zero.
fn contents(chunks: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let noise = |state: &mut u64| {
        *state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (*state >> 33) as u8
    };
    (0..chunks)
        .flat_map(|chunk| -> Vec<u8> {
            match chunk % 5 {
                4 => vec![0; CHUNK],
                _ => (0..CHUNK).map(|_| noise(&mut state)).collect(),
            }
        })
        .collect()
}

impl Bench {
    fn new(chunks: usize, working_set: Option<Vec<u32>>) -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let bytes = contents(chunks);
        let whole = folder.path().join("whole");
        let options = WriteOptions {
            chunk_size: CHUNK as u32,
            codec: Codec::Lz4,
            threads: 1,
            working_set,
            ..WriteOptions::default()
        };
        write_image(&whole, &bytes, &options).unwrap();
        Bench {
            folder,
            bytes,
            whole,
            io_pool: Arc::default(),
        }
    }

    fn open(&self, image: StoredImage, record: bool) -> Arc<Disk> {
        let cache = self.folder.path().join("cache");
        Arc::new(Disk::open("root", Arc::new(image), &cache, record).unwrap())
    }

    fn open_whole(&self, record: bool) -> Arc<Disk> {
        self.open(StoredImage::open(&self.whole).unwrap(), record)
    }

    /// The same image without chunks, its origin, the sender that opens the gate, and the receiver
    /// that reports each request.
    fn open_partial(&self) -> (Arc<Disk>, Arc<GatedOrigin>, Sender<()>, Receiver<()>) {
        let whole = ImageReader::open(&self.whole).unwrap();
        let file = fs::read(&self.whole).unwrap();
        let tail = file.len() + 64 - whole.metadata_bytes() as usize;
        let path = self.folder.path().join("partial");
        partial::create(&path, file.len() as u64, &file[tail..], whole.id()).unwrap();
        let (open, gate) = channel();
        let (notify, asked) = channel();
        let origin = Arc::new(GatedOrigin {
            file,
            asked: Mutex::default(),
            notify: Mutex::new(notify),
            gate: Mutex::new(gate),
            lies: AtomicBool::new(false),
            absent: AtomicBool::new(false),
        });
        let given: Arc<dyn Origin> = origin.clone();
        let origins = |_: &Path, _: ImageId| vec![given.clone()];
        let opening = Opening {
            origins: &origins,
            ..Opening::default()
        };
        let image = StoredImage::open_with(&path, &opening).unwrap();
        (self.open(image, false), origin, open, asked)
    }

    fn demand(&self, disk: &Arc<Disk>, offset: usize, length: usize) -> Result<(), Unavailable> {
        let outcome = self.demand_as(disk, offset, length, false)?;
        assert_eq!(outcome, DemandOutcome::Present);
        Ok(())
    }

    fn demand_as(
        &self,
        disk: &Arc<Disk>,
        offset: usize,
        length: usize,
        takes_bytes: bool,
    ) -> Result<DemandOutcome, Unavailable> {
        let (offset, length) = (offset as u64, length as u64);
        let mut scratch = Scratch::default();
        disk.demand(&self.io_pool, offset, length, takes_bytes, &mut scratch)
    }

    fn check(&self, disk: &Disk, range: Range<usize>) {
        let contents = fs::read(disk.cache().folder().join("contents")).unwrap();
        assert!(contents[range.clone()] == self.bytes[range]);
    }
}

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < TIMEOUT, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn requested_ranges_are_filled_and_marked_present() {
    let bench = Bench::new(40, None);
    let disk = bench.open_whole(false);
    assert!(disk.cache().has(4), "zero");
    assert!(!disk.cache().has(3));
    bench.demand(&disk, 3 * CHUNK + 100, 10).unwrap();
    bench.demand(&disk, 20 * CHUNK - 1, 2).unwrap();
    for chunk in [3, 19, 20] {
        assert!(disk.cache().has(chunk));
        bench.check(&disk, chunk as usize * CHUNK..(chunk as usize + 1) * CHUNK);
    }
    assert!(!disk.cache().has(0) && !disk.cache().has(30));
    let end = 40 * CHUNK;
    for (offset, length) in [
        (0, 0),
        (end, 1),
        (end - 1, 2),
        (usize::MAX, 1),
        (0, end + 1),
    ] {
        let error = bench.demand(&disk, offset, length).unwrap_err();
        assert_eq!(error.chunk, None);
        assert!(
            error.sentence.contains("is refused: it must be"),
            "{error:?}"
        );
    }
    assert_eq!(disk.stats().faults, 2, "those were no requests");
}

#[test]
fn a_disk_read_sequentially_is_filled_ahead() {
    let bench = Bench::new(200, None);
    let disk = bench.open_whole(false);
    bench.demand(&disk, 0, CHUNK).unwrap();
    assert!(!disk.cache().has(2), "one request is not a sequence");
    bench.demand(&disk, CHUNK, CHUNK).unwrap();
    eventually("nothing is filled ahead", || disk.cache().has_all(2..6));
    bench.check(&disk, 0..6 * CHUNK);
}

#[test]
fn a_recorded_boot_set_is_prefetched_in_few_reads() {
    let bench = Bench::new(100, None);
    let disk = bench.open_whole(true);
    for chunk in [50, 51, 52, 10, 50, 90, 11] {
        bench.demand(&disk, chunk * CHUNK, 4096).unwrap();
    }
    let recording = disk.recording(true).unwrap();
    assert_eq!(recording.chunks, [50, 51, 52, 10, 90, 11], "each once");
    bench.demand(&disk, 77 * CHUNK, 1).unwrap();
    assert_eq!(disk.recording(false).unwrap().chunks.len(), 6, "no more");
    let path = bench.folder.path().join("boot");
    recording.write(&path).unwrap();
    drop(disk);
    jiffy_store::disk_cache::remove(&bench.folder.path().join("cache")).unwrap();

    let (disk, origin, open, _) = bench.open_partial();
    drop(open);
    disk.prefetch(&bench.io_pool, Some(&path));
    eventually("the boot set is not there", || {
        recording
            .chunks
            .iter()
            .all(|chunk| disk.cache().has(*chunk))
    });
    assert!(!disk.cache().has(0) && !disk.cache().has(30));
    let asked = lock(&origin.asked).clone();
    assert!(asked.len() <= 3, "neighbours come together: {asked:?}");
    // They are counted once they are there.
    eventually("not all are counted", || {
        disk.stats().prefetched_chunks == 6
    });
}

#[test]
fn an_optimised_image_prefetches_its_working_set_in_few_reads() {
    let set: Vec<u32> = (0..100).filter(|chunk| chunk % 3 == 0).collect();
    let bench = Bench::new(100, Some(set.clone()));
    let (disk, origin, open, _) = bench.open_partial();
    drop(open);
    disk.prefetch(
        &bench.io_pool,
        Some(&bench.folder.path().join("no recording")),
    );
    eventually("the working set is not there", || {
        set.iter().all(|chunk| disk.cache().has(*chunk))
    });
    assert_eq!(lock(&origin.asked).len(), 1, "it is first in the file");
    assert!(!disk.cache().has(1));
}

#[test]
fn waiting_for_one_chunk_does_not_block_reads_of_others() {
    let bench = Bench::new(100, None);
    let (disk, origin, open, asked) = bench.open_partial();
    // Three threads need the same chunk: it is fetched once.
    let waiting: Vec<_> = (0..3)
        .map(|_| {
            let (disk, io_pool) = (disk.clone(), bench.io_pool.clone());
            thread::spawn(move || disk.demand(&io_pool, 0, 4096, false, &mut Scratch::default()))
        })
        .collect();
    asked.recv_timeout(TIMEOUT).unwrap();
    // Local chunks are served to others while the origin is blocked.
    bench.demand(&disk, 4 * CHUNK, CHUNK).unwrap();
    assert!(asked.try_recv().is_err() && waiting.iter().all(|thread| !thread.is_finished()));
    drop(open);
    for thread in waiting {
        thread.join().unwrap().unwrap();
    }
    bench.check(&disk, 0..CHUNK);
    assert_eq!(lock(&origin.asked).len(), 1);
}

#[test]
fn an_unavailable_chunk_is_named_and_can_be_read_later() {
    let bench = Bench::new(60, None);
    let (disk, origin, open, _) = bench.open_partial();
    drop(open);
    for (fault, why) in [
        (&origin.absent, "it is gone"),
        (&origin.lies, "do not match the image"),
    ] {
        fault.store(true, Ordering::SeqCst);
        let error = bench.demand(&disk, 33 * CHUNK, 4096).unwrap_err();
        assert_eq!(error.chunk, Some(33));
        for part in ["partial", "chunk 33 ", "the origin", why] {
            assert!(error.sentence.contains(part), "{}", error.sentence);
        }
        assert!(!disk.cache().has(33));
        fault.store(false, Ordering::SeqCst);
    }
    bench.demand(&disk, 33 * CHUNK, 4096).unwrap();
    bench.check(&disk, 33 * CHUNK..34 * CHUNK);
}

#[test]
fn complete_fills_everything_or_names_what_is_missing() {
    let bench = Bench::new(300, None);
    let (disk, origin, open, _) = bench.open_partial();
    drop(open);
    let complete = || {
        let (say, heard) = mpsc::channel();
        disk.complete(
            &bench.io_pool,
            Box::new(move |problem| say.send(problem).unwrap()),
        );
        heard.recv_timeout(TIMEOUT).unwrap()
    };
    origin.absent.store(true, Ordering::SeqCst);
    let problem = complete().expect("no chunk is available");
    assert!(problem.contains("it is gone"), "{problem}");
    origin.absent.store(false, Ordering::SeqCst);
    lock(&origin.asked).clear();
    assert_eq!(complete(), None);
    assert!(disk.cache().is_full());
    bench.check(&disk, 0..300 * CHUNK);
    let asked = lock(&origin.asked).len();
    assert!(asked <= 300 / 32, "large reads: {asked}");
    assert_eq!(complete(), None, "again");
}

#[test]
fn concurrent_random_readers_see_the_disk_s_bytes() {
    let bench = Bench::new(120, None);
    let (disk, _, open, _) = bench.open_partial();
    drop(open);
    thread::scope(|scope| {
        for thread in 0..6 {
            let (bench, disk) = (&bench, &disk);
            scope.spawn(move || {
                for step in 0..60 {
                    let chunk = (step * 37 + thread * 13) % 119;
                    bench.demand(disk, chunk * CHUNK + 5, CHUNK).unwrap();
                    bench.check(disk, chunk * CHUNK..(chunk + 2) * CHUNK);
                }
            });
        }
    });
}

#[test]
fn on_a_full_disk_caches_are_dropped_and_then_reads_wait() {
    let bench = Bench::new(40, None);
    let small = SmallDisk::mount(&bench.folder.path().join("disks"), 80 * CHUNK);
    let open = |name: &str| {
        let image = Arc::new(StoredImage::open(&bench.whole).unwrap());
        Arc::new(Disk::open(name, image, &small.0.join(name), false).unwrap())
    };
    // A complete cache that is not in use.
    let unused = open("unused");
    bench.demand(&unused, 0, 16 * CHUNK).unwrap();
    bench.demand(&unused, 16 * CHUNK, 16 * CHUNK).unwrap();
    unused.close().unwrap();
    drop(unused);
    let disk = open("disk");
    small.fill();
    bench.demand(&disk, 0, 4 * CHUNK).unwrap();
    bench.check(&disk, 0..4 * CHUNK);
    fs::remove_dir_all(small.0.join("unused")).unwrap();
    small.fill();
    thread::scope(|scope| {
        let read = scope.spawn(|| bench.demand(&disk, 20 * CHUNK, 4 * CHUNK));
        // Wait until the read has met the full disk.
        while lock(&disk.full_disk_logged).is_none() {
            thread::yield_now();
        }
        small.make_room();
        read.join().unwrap().unwrap();
    });
    bench.check(&disk, 20 * CHUNK..24 * CHUNK);
    // A read of an ended disk does not wait for space.
    small.fill();
    disk.end();
    bench.demand(&disk, 30 * CHUNK, CHUNK).unwrap_err();
}

#[test]
fn a_full_disk_serves_bytes_from_memory_until_there_is_room() {
    let bench = Bench::new(40, None);
    let small = SmallDisk::mount(&bench.folder.path().join("disks"), 80 * CHUNK);
    let image = Arc::new(StoredImage::open(&bench.whole).unwrap());
    let disk = Disk::open("disk", image, &small.0.join("disk"), false).unwrap();
    let disk = Arc::new(disk);
    bench.demand(&disk, 6 * CHUNK, CHUNK).unwrap();
    small.fill();
    let begun = Instant::now();
    // From the middle of a missing chunk, across a present one and a zero one.
    let (start, length) = (5 * CHUNK + 512, 7 * CHUNK - 1024);
    let mut at = start;
    while at < start + length {
        let outcome = bench
            .demand_as(&disk, at, start + length - at, true)
            .unwrap();
        let DemandOutcome::Bytes(bytes) = outcome else {
            panic!("there is no room");
        };
        assert!(!bytes.is_empty() && bytes.len() <= 256 << 10);
        assert!(bytes == bench.bytes[at..at + bytes.len()], "{at}");
        at += bytes.len();
    }
    assert!(!disk.cache().has(5));
    // A VMM that takes no bytes waits in vain, and does not block others.
    thread::scope(|scope| {
        let patient = scope.spawn(|| bench.demand(&disk, 20 * CHUNK, CHUNK));
        let outcome = bench.demand_as(&disk, 20 * CHUNK, CHUNK, true).unwrap();
        assert!(
            matches!(outcome, DemandOutcome::Bytes(bytes) if bytes == bench.bytes[20 * CHUNK..][..CHUNK])
        );
        assert!(begun.elapsed() < room::ROOM_TIMEOUT, "it waited");
        small.make_room();
        patient.join().unwrap().unwrap();
    });
    let outcome = bench.demand_as(&disk, start, length, true).unwrap();
    assert_eq!(outcome, DemandOutcome::Present);
    bench.check(&disk, 5 * CHUNK..12 * CHUNK);
}
