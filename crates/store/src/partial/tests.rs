mod availability;

use super::*;
use crate::codec::Decoder;
use crate::error::{Fault, ImageError, WriteError};
use crate::format::{IdHasher, Kind, Section, footer};
use crate::reader::{ImageReader, Opening};
use crate::recording::Recording;
use crate::samples::{CHUNK, Folder, contents, read_all, small};
use crate::stop::Stop;
use crate::writer::{WriteOptions, write_image};
use proptest::prelude::*;
use std::fs::{self, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// How an origin of a test changes its answer.
type Habit = Box<dyn Fn(Range<u64>, Vec<u8>) -> Result<Vec<u8>, OriginError> + Send + Sync>;

struct Scripted {
    name: &'static str,
    file: Vec<u8>,
    habit: Habit,
    asked: Mutex<Vec<Range<u64>>>,
    /// Returns an error once the read was cancelled.
    gives_up: bool,
}

impl Scripted {
    fn new(
        name: &'static str,
        file: Vec<u8>,
        habit: impl Fn(Range<u64>, Vec<u8>) -> Result<Vec<u8>, OriginError> + Send + Sync + 'static,
    ) -> Arc<Scripted> {
        Arc::new(Scripted {
            name,
            file,
            habit: Box::new(habit),
            asked: Mutex::default(),
            gives_up: false,
        })
    }

    fn giving_up_with(origin: Arc<Scripted>) -> Arc<Scripted> {
        let mut origin = Arc::into_inner(origin).unwrap();
        origin.gives_up = true;
        Arc::new(origin)
    }

    fn honest(file: &[u8]) -> Arc<Scripted> {
        Scripted::new("the honest one", file.to_vec(), |_, bytes| Ok(bytes))
    }

    fn lying(file: &[u8]) -> Arc<Scripted> {
        Scripted::new("the liar", file.to_vec(), |_, mut bytes| {
            bytes.iter_mut().for_each(|byte| *byte ^= 0x55);
            Ok(bytes)
        })
    }

    fn asked(&self) -> Vec<Range<u64>> {
        self.asked.lock().unwrap().clone()
    }
}

impl Origin for Scripted {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn fetch(&self, range: Range<u64>, stop: &Stop) -> Result<Bytes, OriginError> {
        self.asked.lock().unwrap().push(range.clone());
        let bytes = self.file[range.start as usize..range.end as usize].to_vec();
        let given = (self.habit)(range, bytes);
        match self.gives_up && stop.is_cancelled() {
            true => Err(OriginError::permanent("it was cancelled")),
            false => given.map(Bytes::of),
        }
    }
}

/// A whole image, and the same image as a partial one in another folder.
struct Pair {
    folder: Folder,
    whole: Vec<u8>,
    bytes: Vec<u8>,
}

impl Pair {
    fn new(letters: &str, options: &WriteOptions) -> Pair {
        let folder = Folder::new();
        fs::create_dir(folder.file("here")).unwrap();
        let bytes = contents(letters);
        let image = folder.image("whole", &bytes, options);
        let whole = fs::read(image.path()).unwrap();
        let pair = Pair {
            folder,
            whole,
            bytes,
        };
        pair.begin();
        pair
    }

    fn begin(&self) {
        let image = ImageReader::open(&self.folder.file("whole")).unwrap();
        let tail = image.metadata_bytes() as usize - 64;
        let tail = &self.whole[self.whole.len() - tail..];
        create(&self.path(), self.whole.len() as u64, tail, image.id()).unwrap();
    }

    fn path(&self) -> PathBuf {
        self.folder.file("here").join("image.jimg")
    }

    fn open(&self, origins: &[Arc<Scripted>]) -> Result<ImageReader, ImageError> {
        let dynamic = |_: &Path, _: ImageId| {
            let dynamic = |origin: &Arc<Scripted>| Arc::clone(origin) as Arc<dyn Origin>;
            origins.iter().map(dynamic).collect()
        };
        ImageReader::open_with(
            &self.path(),
            &Opening {
                origins: &dynamic,
                ..Opening::default()
            },
        )
    }

    fn chunk(&self, index: usize) -> &[u8] {
        &self.bytes[index * CHUNK..(index + 1) * CHUNK]
    }
}

/// Chunks that do not compress: several blocks of 64 KiB.
fn many(chunks: usize) -> String {
    "nntn.".chars().cycle().take(chunks).collect()
}

fn read(image: &ImageReader, index: u32) -> Result<Vec<u8>, ImageError> {
    let mut chunk = vec![0xee; CHUNK];
    image.read_chunk(index, &mut chunk).map(|()| chunk)
}

fn sentence(error: &ImageError) -> String {
    error.to_string()
}

#[test]
fn chunks_are_fetched_when_read_and_kept() {
    let pair = Pair::new(&many(200), &small());
    let origin = Scripted::honest(&pair.whole);
    let image = pair.open(std::slice::from_ref(&origin)).unwrap();
    assert!(image.is_partial() && image.missing_bytes() > 500 << 10);
    assert!(
        !image.is_local(0).unwrap() && image.is_local(4).unwrap(),
        "zero"
    );
    assert_eq!(read(&image, 100).unwrap(), pair.chunk(100));
    let asked = origin.asked();
    assert!(!asked.is_empty() && asked.len() <= 2, "{asked:?}");
    assert_eq!(read(&image, 100).unwrap(), pair.chunk(100));
    assert_eq!(origin.asked(), asked, "nothing comes twice");
    assert!(image.is_local(100).unwrap());
    drop(image);
    // Without an origin, fetched chunks stay readable.
    let image = pair.open(&[]).unwrap();
    assert_eq!(read(&image, 100).unwrap(), pair.chunk(100));
    let error = read(&image, 0).unwrap_err();
    assert!(sentence(&error).contains("chunk 0 at byte 64 is not available"));
    assert!(sentence(&error).contains("no origin is known"), "{error}");
    drop(image);
    let image = pair.open(&[origin]).unwrap();
    assert_eq!(read_all(&image), pair.bytes);
    assert_eq!(image.missing_bytes(), 0);
}

#[test]
fn a_wrong_chunk_is_reported_with_its_origin_and_not_kept() {
    let pair = Pair::new(&many(100), &small());
    let liar = Scripted::lying(&pair.whole);
    let image = pair.open(std::slice::from_ref(&liar)).unwrap();
    let before = fs::read(pair.path()).unwrap();
    let error = read(&image, 30).unwrap_err();
    for part in ["image.jimg", "chunk 30 at byte", "the liar: it gave bytes"] {
        assert!(sentence(&error).contains(part), "{error}");
    }
    assert_eq!(fs::read(pair.path()).unwrap(), before, "it is not kept");
    assert!(!image.is_local(30).unwrap());
    drop(image);
    // A second origin gives the right bytes, although the liar is asked first.
    let honest = Scripted::honest(&pair.whole);
    let image = pair.open(&[liar.clone(), honest.clone()]).unwrap();
    assert_eq!(read_all(&image), pair.bytes);
    assert!(!honest.asked().is_empty());
    image.verify().unwrap();
}

#[test]
fn origins_that_fail_are_named_with_their_reasons_and_later_ones_help() {
    let pair = Pair::new(&many(60), &small());
    let tries = Arc::new(AtomicUsize::new(0));
    let count = tries.clone();
    let busy = Scripted::new("the busy one", pair.whole.clone(), move |_, bytes| {
        // It answers the third time.
        match count.fetch_add(1, Ordering::SeqCst) {
            0 | 1 => Err(OriginError::transient("too many requests")),
            _ => Ok(bytes),
        }
    });
    let absent = Scripted::new("the absent one", pair.whole.clone(), |_, _| {
        Err(OriginError::permanent("it does not have this image"))
    });
    let short = Scripted::new("the short one", pair.whole.clone(), |_, mut bytes| {
        bytes.pop();
        Ok(bytes)
    });
    let image = pair.open(&[absent.clone(), busy]).unwrap();
    assert_eq!(read(&image, 7).unwrap(), pair.chunk(7));
    assert_eq!(absent.asked().len(), 1, "asked once and no more");
    assert_eq!(tries.load(Ordering::SeqCst), 3);
    drop(image);
    let image = pair.open(&[absent, short.clone()]).unwrap();
    let error = read(&image, 59 - 1).unwrap_err();
    let text = sentence(&error);
    assert!(text.contains("the absent one: it does not have"), "{text}");
    assert!(text.contains("the short one: it gave"), "{text}");
    assert_eq!(short.asked().len(), 3, "bounded");
    assert!(matches!(
        *error.fault,
        Fault::Unavailable {
            chunk: Some(58),
            ..
        }
    ));
}

#[test]
fn a_chunk_torn_by_a_crash_is_fetched_again() {
    let pair = Pair::new(&many(100), &small());
    let origin = Scripted::honest(&pair.whole);
    let image = pair.open(std::slice::from_ref(&origin)).unwrap();
    assert_eq!(read(&image, 50).unwrap(), pair.chunk(50));
    let place = image.stored_range(50).unwrap().unwrap();
    drop(image);
    // The bit has reached the disk, the bytes have not.
    let file = OpenOptions::new().write(true).open(pair.path()).unwrap();
    file.write_all_at(&vec![0; CHUNK / 2], place.start).unwrap();
    let image = pair.open(&[origin]).unwrap();
    assert!(image.is_local(50).unwrap(), "its bit is set");
    assert_eq!(read(&image, 50).unwrap(), pair.chunk(50));
}

#[test]
fn complete_makes_an_ordinary_image_byte_for_byte() {
    let pair = Pair::new(&many(300), &small());
    let (liar, honest) = (Scripted::lying(&pair.whole), Scripted::honest(&pair.whole));
    let image = pair.open(std::slice::from_ref(&liar)).unwrap();
    let error = image.complete().unwrap_err();
    assert!(sentence(&error).contains("the liar"), "{error}");
    assert!(is_partial(&pair.path()));
    drop(image);
    // Each wrong chunk is replaced when it is read; they are dropped here for the count below.
    shrink(&pair.path()).unwrap().unwrap();
    let image = pair.open(std::slice::from_ref(&honest)).unwrap();
    image.complete().unwrap();
    assert!(!is_partial(&pair.path()));
    assert_eq!(fs::read(pair.path()).unwrap(), pair.whole);
    assert_eq!(read_all(&image), pair.bytes, "the open reader continues");
    image.complete().unwrap();
    let again = ImageReader::open(&pair.path()).unwrap();
    assert!(!again.is_partial());
    again.verify().unwrap();
    // Large reads: 300 chunks are not asked for one by one.
    let most = pair.whole.len() / (4 << 20) + 1;
    assert!(honest.asked().len() <= most, "{:?}", honest.asked());
}

#[test]
fn completing_leaves_the_map_of_an_image_that_took_the_name() {
    let pair = Pair::new(&many(300), &small());
    let image = pair.open(&[Scripted::honest(&pair.whole)]).unwrap();
    let here = pair.folder.file("here");
    fs::rename(&here, pair.folder.file("gone")).unwrap();
    fs::create_dir(&here).unwrap();
    pair.begin();
    image.complete().unwrap();
    assert_eq!(read_all(&image), pair.bytes);
    assert!(is_partial(&pair.path()));
    let other = pair.open(&[Scripted::honest(&pair.whole)]).unwrap();
    assert_eq!(read_all(&other), pair.bytes, "no hole is taken for zeros");
    // The image is whole, so the origin's folder is not needed any more.
    fs::remove_dir_all(&here).unwrap();
    other.complete().unwrap();
}

#[test]
fn optimising_a_partial_image_in_place_completes_it_first() {
    let pair = Pair::new(&many(300), &small());
    let optimise = |image: &ImageReader| {
        let recording = Recording {
            image: image.id(),
            chunk_size: image.chunk_size(),
            chunks: vec![200, 100],
        };
        crate::optimise(image, &recording, &pair.path())
    };
    let before = fs::read(pair.path()).unwrap();
    optimise(&pair.open(&[]).unwrap()).unwrap_err();
    assert_eq!(fs::read(pair.path()).unwrap(), before);
    // The image is still partial: its map exists, and its chunks are fetched.
    let image = pair.open(&[Scripted::honest(&pair.whole)]).unwrap();
    assert_eq!(read_all(&image), pair.bytes);
    drop(image);
    assert!(is_partial(&pair.path()));
    optimise(&pair.open(&[]).unwrap()).unwrap();
    assert!(!is_partial(&pair.path()));
    let image = pair.open(&[]).unwrap();
    assert_eq!(image.working_set().unwrap(), [200..201, 100..101]);
    assert_eq!(read_all(&image), pair.bytes);
}

#[test]
fn no_block_is_fetched_twice_at_the_same_time() {
    let pair = Pair::new(&many(400), &small());
    let origin = Scripted::new("slow", pair.whole.clone(), |_, bytes| {
        thread::sleep(Duration::from_millis(5));
        Ok(bytes)
    });
    let image = pair.open(std::slice::from_ref(&origin)).unwrap();
    thread::scope(|scope| {
        for thread in 0..8 {
            let (image, pair) = (&image, &pair);
            scope.spawn(move || {
                for step in 0..400 {
                    let index = (step * 7 + thread * 50) % 400;
                    assert_eq!(read(image, index as u32).unwrap(), pair.chunk(index));
                }
            });
        }
    });
    let mut asked = origin.asked();
    asked.sort_by_key(|range| range.start);
    for pair in asked.windows(2) {
        assert!(pair[0].end <= pair[1].start, "{pair:?} came twice");
    }
}

#[test]
fn concurrent_readers_of_a_lying_origin_get_the_right_bytes() {
    let pair = Pair::new(&many(120), &small());
    let count = AtomicUsize::new(0);
    let moody = Scripted::new("moody", pair.whole.clone(), move |_, mut bytes| {
        if count.fetch_add(1, Ordering::SeqCst).is_multiple_of(3) {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        }
        Ok(bytes)
    });
    let honest = Scripted::honest(&pair.whole);
    let image = pair.open(&[moody, honest]).unwrap();
    thread::scope(|scope| {
        for thread in 0..4 {
            let (image, pair) = (&image, &pair);
            scope.spawn(move || {
                for step in 0..120 {
                    let index = (step * 11 + thread * 30) % 120;
                    assert_eq!(read(image, index as u32).unwrap(), pair.chunk(index));
                }
            });
        }
    });
    image.verify().unwrap();
}

/// Fetching a block again for one chunk may damage other chunks of the block.
#[test]
fn chunks_fetched_with_a_replaced_chunk_are_checked_too() {
    let pair = Pair::new(&many(120), &small());
    let whole = ImageReader::open(&pair.folder.file("whole")).unwrap();
    let place = |index| whole.stored_range(index).unwrap().unwrap();
    let (one, other) = (place(0), place(1));
    let count = AtomicUsize::new(0);
    let origin = Scripted::new("changeable", pair.whole.clone(), move |range, mut bytes| {
        let wrong = match count.fetch_add(1, Ordering::SeqCst) {
            0 => &other,
            1 => &one,
            _ => return Ok(bytes),
        };
        bytes[(wrong.start - range.start) as usize] ^= 1;
        Ok(bytes)
    });
    let image = pair.open(std::slice::from_ref(&origin)).unwrap();
    image.complete().unwrap();
    assert!(origin.asked().len() > 2, "both were found");
    assert_eq!(fs::read(pair.path()).unwrap(), pair.whole);
}

#[test]
fn wrong_chunks_that_come_with_the_tables_are_refused() {
    let pair = Pair::new(&many(120), &small());
    let whole = ImageReader::open(&pair.folder.file("whole")).unwrap();
    let last = (0..whole.chunks())
        .filter_map(|index| Some((index, whole.stored_range(index).unwrap()?)))
        .max_by_key(|(_, place)| place.start);
    let (last, place) = last.unwrap();
    // All of the chunk, or only its end.
    for start in [place.start, place.start + 1] {
        let mut tail = pair.whole[start as usize..].to_vec();
        tail[(place.end - start) as usize - 1] ^= 1;
        let path = pair.path().with_extension(start.to_string());
        create(&path, pair.whole.len() as u64, &tail, whole.id()).unwrap();
        let honest = Scripted::honest(&pair.whole) as Arc<dyn Origin>;
        let image = ImageReader::open_with(
            &path,
            &Opening {
                origins: &|_, _| vec![honest.clone()],
                ..Opening::default()
            },
        )
        .unwrap();
        let error = read(&image, last).unwrap_err();
        assert!(sentence(&error).contains("tables"), "{error}");
    }
}

/// Chunks cross blocks: an origin that gave one block wrong may give the next one right.
#[test]
fn a_chunk_across_blocks_of_two_origins_is_found() {
    let options = WriteOptions {
        chunk_size: 4 * CHUNK as u32,
        ..small()
    };
    let pair = Pair::new(&many(120), &options);
    let (liar, honest) = (Scripted::lying(&pair.whole), Scripted::honest(&pair.whole));
    for origins in [[liar.clone(), honest.clone()], [honest, liar]] {
        let image = pair.open(&origins).unwrap();
        for index in (0..image.chunks()).rev().chain(0..image.chunks()) {
            let mut chunk = vec![0; 4 * CHUNK];
            image.read_chunk(index, &mut chunk).unwrap();
            let start = index as usize * 4 * CHUNK;
            assert_eq!(chunk, pair.bytes[start..start + 4 * CHUNK]);
        }
        drop(image);
        shrink(&pair.path()).unwrap().unwrap();
    }
}

#[test]
fn one_process_fills_an_image_and_others_are_refused() {
    let pair = Pair::new(&many(20), &small());
    let image = pair.open(&[]).unwrap();
    let error = pair.open(&[]).unwrap_err();
    assert!(
        sentence(&error).contains("another process fills"),
        "{error}"
    );
    drop(image);
    pair.open(&[]).unwrap();
}

#[test]
fn a_manifest_of_another_image_is_refused_and_leaves_nothing() {
    let pair = Pair::new(&many(20), &small());
    let image = ImageReader::open(&pair.folder.file("whole")).unwrap();
    let (length, id) = (pair.whole.len() as u64, image.id());
    let start = pair.whole.len() - image.metadata_bytes() as usize + 64;
    let tail = &pair.whole[start..];
    let target = pair.folder.file("other");
    let refused = |tail: &[u8], length: u64, id: ImageId| {
        let before = pair.folder.names();
        let error = create(&target, length, tail, id).unwrap_err();
        assert_eq!(pair.folder.names(), before, "{error}");
        error.to_string()
    };
    refused(tail, length, ImageId([7; 16]));
    refused(&tail[1..], length, id);
    refused(tail, length + 1, id);
    refused(tail, length - 1, id);
    refused(tail, 0, id);
    refused(&[], length, id);
    refused(&tail[..tail.len() - 1], length, id);
    // One hash is changed, and all checksums are right.
    let mut forged = tail.to_vec();
    let hash = forged.len() - 256 - 8;
    forged[hash] ^= 1;
    refused(&forged, length, id);
    create(&target, length, &pair.whole, id).unwrap();
    let whole = ImageReader::open(&target).unwrap();
    assert_eq!(read_all(&whole), pair.bytes, "all of it was in the tail");
}

/// The tail of a file of one chunk that claims to be `length` bytes long and is otherwise valid.
fn claiming(length: u64) -> (Vec<u8>, ImageId) {
    let (group, entry, hash) = ([1; 16], [0; 16], [3; 16]);
    let chunk_size = CHUNK as u32;
    let tables: Vec<u8> = [group, entry, hash].concat();
    let start = length - (tables.len() + footer::BYTES) as u64;
    let mut id = IdHasher::new(1, chunk_size);
    id.bitmap(u64::from_le_bytes([1; 8]));
    id.chunk(&hash);
    let section = |index: u64, length| Section {
        offset: start + index * 16,
        length,
        checksum: 0,
    };
    let footer = Footer {
        chunk_size,
        size: 1,
        id: id.finish(),
        hot: 0..0,
        dictionary: section(0, 0),
        parent: section(0, 0),
        working_set: section(0, 0),
        groups: section(0, 16),
        entries: section(1, 16),
        hashes: section(2, 16),
        backing: section(3, 0),
    };
    ([&tables[..], &footer.encode()].concat(), footer.id)
}

#[test]
fn a_length_beyond_the_tables_chunks_is_refused() {
    let folder = Folder::new();
    let path = folder.file("image");
    let refused = |made: Result<(), WriteError>| match made.unwrap_err() {
        WriteError::Image(error) => error.to_string(),
        other => other.to_string(),
    };
    let room = 4096 + CHUNK as u64 + (3 * 16 + footer::BYTES) as u64;
    for length in [1 << 62, 1 << 40, room + 1] {
        let (tail, id) = claiming(length);
        let error = refused(create(&path, length, &tail, id));
        assert!(error.contains("than its chunks can fill"), "{error}");
        assert_eq!(folder.names(), [""; 0], "{length}");
    }
    let (tail, id) = claiming(room);
    create(&path, room, &tail, id).unwrap();
    // No size can be computed from this tail.
    let (mut tail, id) = claiming(room);
    let footer: &mut [u8; footer::BYTES] = tail.last_chunk_mut().unwrap();
    footer[12..16].fill(0);
    crate::format::seal(footer);
    let error = refused(create(&folder.file("other"), room, &tail, id));
    assert!(error.contains("power of two"), "{error}");
}

#[test]
fn damaged_maps_are_errors_that_name_them() {
    let pair = Pair::new(&many(20), &small());
    let map = map_path(&pair.path());
    let good = fs::read(&map).unwrap();
    for bit in (0..good.len().min(128) * 8).step_by(3) {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        fs::write(&map, &bad).unwrap();
        let error = pair.open(&[]).unwrap_err();
        assert!(sentence(&error).contains(".image.jimg.present"), "{error}");
    }
    // A valid map of another image.
    let other = Pair::new(&many(25), &small());
    fs::copy(map_path(&other.path()), &map).unwrap();
    let error = pair.open(&[]).unwrap_err();
    assert!(sentence(&error).contains("of another file"), "{error}");
    // Bits that are set for missing blocks do no harm.
    let mut bits = good.clone();
    bits[128..].fill(0xff);
    fs::write(&map, &bits).unwrap();
    let image = pair.open(&[Scripted::honest(&pair.whole)]).unwrap();
    assert_eq!(read_all(&image), pair.bytes);
}

#[test]
fn children_read_their_chunks_from_partial_parents() {
    let parent = Pair::new(&many(80), &small());
    let mut bytes = parent.bytes.clone();
    bytes[5 * CHUNK..6 * CHUNK].fill(9);
    // Made from the whole image, and stored in the folder of the partial one.
    let options = WriteOptions {
        parent: Some(Arc::new(
            ImageReader::open(&parent.folder.file("whole")).unwrap(),
        )),
        parent_name: Some("image.jimg".into()),
        ..small()
    };
    let path = parent.folder.file("here").join("child.jimg");
    write_image(&path, &bytes, &options).unwrap();
    let origin = Scripted::honest(&parent.whole);
    let given: Arc<dyn Origin> = origin.clone();
    let origins = move |path: &Path, _: ImageId| {
        assert!(path.ends_with("image.jimg"), "{path:?}");
        vec![given.clone()]
    };
    let child = ImageReader::open_with(
        &path,
        &Opening {
            origins: &origins,
            ..Opening::default()
        },
    )
    .unwrap();
    assert_eq!(child.kind(0).unwrap(), Kind::Parent);
    assert!(!child.is_local(0).unwrap() && child.is_local(5).unwrap());
    assert_eq!(read_all(&child), bytes);
    assert!(child.fetched_bytes() > 0);
}

#[test]
fn chunks_fetched_together_need_few_large_reads() {
    let pair = Pair::new(&many(400), &small());
    let origin = Scripted::honest(&pair.whole);
    let image = pair.open(std::slice::from_ref(&origin)).unwrap();
    let wanted: Vec<u32> = (100..300).collect();
    image.fetch_chunks(&mut Decoder::new(), &wanted).unwrap();
    assert_eq!(origin.asked().len(), 1);
    assert!(wanted.iter().all(|index| image.is_local(*index).unwrap()));
    assert_eq!(image.runs_of(&wanted).unwrap(), []);
    assert!(!image.is_local(0).unwrap());
}

#[test]
fn unused_images_are_trimmed_least_recently_used_first() {
    use crate::bounded::{Cached, evict_one, evict_to_limit};
    let pairs: Vec<Pair> = (0..3).map(|_| Pair::new(&many(100), &small())).collect();
    let mut open = None;
    for pair in &pairs {
        let image = pair.open(&[Scripted::honest(&pair.whole)]).unwrap();
        assert_eq!(read_all(&image), pair.bytes);
        // The first one stays open.
        open = open.or(Some(image));
    }
    // Sets times of last use explicitly, so that the test need not wait.
    for (age, pair) in [(30, &pairs[0]), (10, &pairs[1]), (20, &pairs[2])] {
        let map = OpenOptions::new()
            .write(true)
            .open(map_path(&pair.path()))
            .unwrap();
        let used = std::time::SystemTime::now() - Duration::from_secs(age);
        map.set_modified(used).unwrap();
    }
    let caches: Vec<Cached> = pairs
        .iter()
        .map(|pair| Cached::Image(pair.path()))
        .collect();
    let all = evict_to_limit(u64::MAX, &caches).unwrap();
    assert_eq!((all.before, all.dropped.len()), (all.after, 0));
    let kept = evict_to_limit(all.before - 1, &caches).unwrap();
    assert_eq!(kept.dropped, [pairs[2].path()], "the open one stays");
    assert!(kept.after < kept.before);
    let one = evict_one(0, &caches).unwrap();
    assert_eq!(one.dropped, [pairs[1].path()], "the other one is in use");
    assert!(one.after < one.before);
    let kept = evict_to_limit(0, &caches).unwrap();
    assert_eq!(kept.dropped, <[PathBuf; 0]>::default());
    assert_eq!(read_all(open.as_ref().unwrap()), pairs[0].bytes);
    // Dropped chunks are fetched again.
    let pair = &pairs[2];
    let image = pair.open(&[Scripted::honest(&pair.whole)]).unwrap();
    assert_eq!(read_all(&image), pair.bytes);
}

#[test]
fn a_peer_s_folder_has_images_by_their_ids() {
    let pair = Pair::new(&many(50), &small());
    let peer = pair.folder.file("peer");
    fs::create_dir(&peer).unwrap();
    let id = ImageReader::open(&pair.folder.file("whole")).unwrap().id();
    let open = || {
        let origins = |_: &Path, id: ImageId| -> Vec<Arc<dyn Origin>> {
            vec![Arc::new(PeerFolder::new(&peer, id, &pair.path()))]
        };
        ImageReader::open_with(
            &pair.path(),
            &Opening {
                origins: &origins,
                ..Opening::default()
            },
        )
        .unwrap()
    };
    let error = read(&open(), 3).unwrap_err();
    assert!(
        sentence(&error).contains("does not have this image"),
        "{error}"
    );
    let file = peer.join(PeerFolder::file_name(id));
    std::os::unix::fs::symlink(pair.folder.file("whole"), &file).unwrap();
    read(&open(), 3).unwrap_err();
    fs::remove_file(&file).unwrap();
    fs::write(&file, &pair.whole[..pair.whole.len() / 2]).unwrap();
    read(&open(), 48).unwrap_err();
    fs::write(&file, &pair.whole).unwrap();
    assert_eq!(read_all(&open()), pair.bytes);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Reads in any order, from any origins one of which is honest, return the contents of the
    /// whole image.
    #[test]
    fn random_reads_match_the_whole_image(
        letters in "[.ntAB]{1,80}",
        large in any::<bool>(),
        habits in prop::collection::vec(0u8..4, 0..3),
        reads in prop::collection::vec((0usize..80, 1usize..6, any::<bool>()), 1..30),
    ) {
        let options = WriteOptions {
            chunk_size: if large { 4 * CHUNK as u32 } else { CHUNK as u32 },
            working_set: Some(vec![0]),
            ..small()
        };
        let pair = Pair::new(&letters, &options);
        let whole = ImageReader::open(&pair.folder.file("whole")).unwrap();
        let mut origins: Vec<Arc<Scripted>> = habits
            .iter()
            .map(|habit| match habit {
                0 => Scripted::lying(&pair.whole),
                1 => Scripted::new("absent", pair.whole.clone(), |_, _| Err(OriginError::permanent("no"))),
                2 => Scripted::new("short", pair.whole.clone(), |_, _| Ok(Vec::new())),
                _ => Scripted::new("half", pair.whole.clone(), |range, mut bytes| {
                    // Every second block is wrong.
                    if range.start / 65536 % 2 == 0 { bytes[0] ^= 1; }
                    Ok(bytes)
                }),
            })
            .collect();
        origins.push(Scripted::honest(&pair.whole));
        let size = whole.chunk_size() as usize;
        let mut image = pair.open(&origins).unwrap();
        for (first, count, reopen) in reads {
            if reopen {
                drop(image);
                image = pair.open(&origins).unwrap();
            }
            for index in first..first + count {
                let index = index as u32 % whole.chunks();
                let (mut found, mut expected) = (vec![1; size], vec![2; size]);
                image.read_chunk(index, &mut found).unwrap();
                whole.read_chunk(index, &mut expected).unwrap();
                prop_assert!(found == expected, "chunk {}", index);
            }
        }
        image.complete().unwrap();
        prop_assert_eq!(fs::read(pair.path()).unwrap(), pair.whole);
    }
}
