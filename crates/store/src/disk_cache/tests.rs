use super::*;
use crate::samples::{CHUNK, Folder, contents, small};

fn cache_folder(folder: &Folder) -> PathBuf {
    folder.file("cache")
}

#[test]
fn a_cache_is_filled_and_zero_chunks_are_present_at_once() {
    let folder = Folder::new();
    let bytes = contents("n..tn.");
    let image = folder.image("image", &bytes, &small());
    let path = cache_folder(&folder);
    assert!(!is_full(&path));
    let cache = DiskCache::open(&path, &image).unwrap();
    assert_eq!((cache.chunks(), cache.length()), (6, bytes.len() as u64));
    let there: Vec<bool> = (0..6).map(|chunk| cache.has(chunk)).collect();
    assert_eq!(there, [false, true, true, false, false, true]);
    assert_eq!(cache.next_missing(0..6), Some(0..1));
    assert_eq!(cache.next_missing(1..6), Some(3..5));
    cache.put(3, &bytes[3 * CHUNK..5 * CHUNK]).unwrap();
    assert!(!cache.is_full() && !is_full(&path));
    cache.put(0, &bytes[..CHUNK]).unwrap();
    assert!(cache.is_full() && is_full(&path));
    assert_eq!(fs::read(path.join(CONTENTS)).unwrap(), bytes);
    assert_eq!(image_of(&path).unwrap(), image.id());
    assert_eq!(remove(&path).unwrap(), None, "it is in use");
    cache.close().unwrap();
    assert!(matches!(
        cache.put(0, &bytes[..CHUNK]),
        Err(CacheError::Closed(_))
    ));
    // A thread that waits for some of its chunks may still have it open.
    assert!(DiskCache::open(&path, &image).unwrap().is_full());
    drop(cache);
    assert!(is_full(&path));
    assert!(remove(&path).unwrap().is_some());
    assert!(!path.exists());
}

#[test]
fn the_last_chunk_is_cut_to_whole_blocks() {
    let folder = Folder::new();
    let mut bytes = contents("nnn");
    bytes.truncate(2 * CHUNK + 100);
    let options = crate::writer::WriteOptions {
        chunk_size: 64 << 10,
        ..small()
    };
    let image = folder.image("image", &bytes, &options);
    let path = cache_folder(&folder);
    let cache = DiskCache::open(&path, &image).unwrap();
    assert_eq!((cache.chunks(), cache.length()), (1, 3 * CHUNK as u64));
    let mut chunk = vec![0; 64 << 10];
    image.read_chunk(0, &mut chunk).unwrap();
    cache.put(0, &chunk).unwrap();
    assert!(is_full(&path));
    bytes.resize(3 * CHUNK, 0);
    assert_eq!(fs::read(path.join(CONTENTS)).unwrap(), bytes);
    // Bits after that of the last chunk have no meaning.
    let map = fs::OpenOptions::new().write(true).open(path.join(PRESENT));
    let map = map.unwrap();
    for (bits, expected) in [(0b11, true), (0b10, false)] {
        map.write_all_at(&[bits], MAP_HEADER as u64).unwrap();
        assert_eq!(is_full(&path), expected, "{bits:b}");
    }
}

#[test]
fn presence_bits_of_another_boot_are_ignored_unless_synced() {
    let folder = Folder::new();
    let bytes = contents("nn");
    let image = folder.image("image", &bytes, &small());
    let path = cache_folder(&folder);
    let fill = || {
        let cache = DiskCache::open(&path, &image).unwrap();
        cache.put(0, &bytes[..CHUNK]).unwrap();
        cache
    };
    let rewrite = |boot: [u8; 16]| {
        let map = PresenceMap::open(&path.join(PRESENT)).unwrap();
        map.bind(boot).unwrap();
    };
    // As after a killed process: the kernel has all that it wrote.
    drop(fill());
    assert!(DiskCache::open(&path, &image).unwrap().has(0));
    // As after a loss of power.
    rewrite([9; 16]);
    let cache = DiskCache::open(&path, &image).unwrap();
    assert!(!cache.has(0));
    assert_eq!(fs::read(path.join(CONTENTS)).unwrap(), vec![0; 2 * CHUNK]);
    drop(cache);
    // Closed in order, then another boot.
    fill().close().unwrap();
    let mut head = [0; MAP_HEADER];
    let file = File::open(path.join(PRESENT)).unwrap();
    file.read_exact_at(&mut head, 0).unwrap();
    let head = MapHeader::decode(&head, file.metadata().unwrap().len()).unwrap();
    assert_eq!(head.boot, [0; 16]);
    assert!(DiskCache::open(&path, &image).unwrap().has(0));
}

#[test]
fn a_snapshot_s_file_is_unlinked_from_a_reset_cache() {
    let folder = Folder::new();
    let (path, image, bytes) = full(&folder);
    let link = folder.file("root");
    fs::hard_link(path.join(CONTENTS), &link).unwrap();
    // The host lost its power, and a VM of the snapshot runs already.
    let map = PresenceMap::open(&path.join(PRESENT)).unwrap();
    map.bind([9; 16]).unwrap();
    drop(map);
    let vm = File::open(&link).unwrap();
    flock(&vm, FlockOperation::LockShared).unwrap();
    assert!(!check(&path, &image, &bytes).contains(&true));
    assert_eq!(fs::read(&link).unwrap(), bytes);
    drop(vm);
    let nlink = |path: &Path| fs::metadata(path).unwrap().nlink();
    assert_eq!((nlink(&link), nlink(&path.join(CONTENTS))), (1, 1));
    // A damaged map does not tell who uses the cache.
    fs::remove_file(&link).unwrap();
    fs::hard_link(path.join(CONTENTS), &link).unwrap();
    let cache = DiskCache::open(&path, &image).unwrap();
    cache.put(0, &bytes).unwrap();
    drop(cache);
    fs::write(path.join(PRESENT), b"no map").unwrap();
    let vm = File::open(&link).unwrap();
    flock(&vm, FlockOperation::LockShared).unwrap();
    let error = DiskCache::open(&path, &image).unwrap_err();
    assert!(error.to_string().contains("a VM uses it"), "{error}");
    drop(vm);
    assert!(!check(&path, &image, &bytes).contains(&true));
    assert_eq!(fs::read(&link).unwrap(), bytes);
}

#[test]
fn another_image_resets_a_cache_unless_a_vm_uses_it() {
    let folder = Folder::new();
    let one = folder.image("one", &contents("nt"), &small());
    let other = folder.image("other", &contents("tnn"), &small());
    let path = cache_folder(&folder);
    let cache = DiskCache::open(&path, &one).unwrap();
    cache.put(0, &contents("n")).unwrap();
    let busy = DiskCache::open(&path, &one).unwrap_err();
    assert!(busy.to_string().contains("filled by another process"));
    drop(cache);
    let vm = File::open(path.join(CONTENTS)).unwrap();
    flock(&vm, FlockOperation::LockShared).unwrap();
    let error = DiskCache::open(&path, &other).unwrap_err();
    assert!(error.to_string().contains("a VM uses it"), "{error}");
    assert_eq!(remove(&path).unwrap(), None);
    assert!(
        DiskCache::open(&path, &one).unwrap().has(0),
        "the VM still has the cache open"
    );
    drop(vm);
    let cache = DiskCache::open(&path, &other).unwrap();
    assert!(!cache.has(0) && cache.chunks() == 3);
    drop(cache);
    // A damaged map, and a missing one.
    for change in [
        |path: &Path| fs::write(path, b"no map").unwrap(),
        |path: &Path| {
            fs::remove_file(path).unwrap();
        },
    ] {
        let cache = DiskCache::open(&path, &other).unwrap();
        cache.put(1, &contents("n")).unwrap();
        drop(cache);
        change(&path.join(PRESENT));
        assert!(!is_full(&path));
        assert!(!DiskCache::open(&path, &other).unwrap().has(1));
    }
}

/// A full and closed cache of 2 MiB that does not compress, and its contents.
fn full(folder: &Folder) -> (PathBuf, ImageReader, Vec<u8>) {
    let bytes = contents(&"n".repeat((2 << 20) / CHUNK));
    let image = folder.image("image", &bytes, &small());
    let path = cache_folder(folder);
    let cache = DiskCache::open(&path, &image).unwrap();
    cache.put(0, &bytes).unwrap();
    cache.close().unwrap();
    (path, image, bytes)
}

/// Checks that chunks that are marked as present have the right bytes.
fn check(path: &Path, image: &ImageReader, bytes: &[u8]) -> Vec<bool> {
    let cache = DiskCache::open(path, image).unwrap();
    let contents = fs::read(path.join(CONTENTS)).unwrap();
    let there: Vec<bool> = (0..cache.chunks()).map(|chunk| cache.has(chunk)).collect();
    for (chunk, _) in there.iter().enumerate().filter(|(_, there)| **there) {
        let at = chunk * CHUNK..(chunk + 1) * CHUNK;
        assert_eq!(contents[at.clone()], bytes[at], "chunk {chunk}");
    }
    cache.close().unwrap();
    there
}

#[test]
fn trimmed_parts_are_filled_again() {
    let folder = Folder::new();
    let (path, image, bytes) = full(&folder);
    let blocks = || fs::metadata(path.join(CONTENTS)).unwrap().blocks();
    let before = blocks();
    let last = (bytes.len() / CHUNK - 1) as u32;
    let freed = trim(&path, Parts::Any, 600 << 10, &[0, last])
        .unwrap()
        .unwrap();
    assert!((600 << 10..=1 << 20).contains(&freed), "{freed}");
    assert_eq!((before - blocks()) * 512, freed);
    let there = check(&path, &image, &bytes);
    assert!(there[0] && there[last as usize] && there.contains(&false));
    // Any part may be dropped, and none is dropped twice.
    assert!(
        trim(&path, Parts::Any, u64::MAX, &[0, last])
            .unwrap()
            .unwrap()
            > 0
    );
    assert_eq!(
        trim(&path, Parts::Any, u64::MAX, &[0, last]).unwrap(),
        Some(0)
    );
    let there = check(&path, &image, &bytes);
    assert_eq!(
        there.iter().filter(|there| **there).count() * CHUNK,
        512 << 10
    );
    let cache = DiskCache::open(&path, &image).unwrap();
    cache.put(0, &bytes).unwrap();
    drop(cache);
    assert!(check(&path, &image, &bytes).iter().all(|there| *there));
}

#[test]
fn a_cache_in_use_by_a_vm_or_snapshot_is_not_trimmed() {
    let folder = Folder::new();
    let (path, image, bytes) = full(&folder);
    let vm = File::open(path.join(CONTENTS)).unwrap();
    flock(&vm, FlockOperation::LockShared).unwrap();
    assert_eq!(trim(&path, Parts::Any, u64::MAX, &[]).unwrap(), None);
    drop(vm);
    let filler = DiskCache::open(&path, &image).unwrap();
    assert_eq!(trim(&path, Parts::Any, u64::MAX, &[]).unwrap(), None);
    drop(filler);
    let link = folder.file("root");
    fs::hard_link(path.join(CONTENTS), &link).unwrap();
    assert_eq!(trim(&path, Parts::Any, u64::MAX, &[]).unwrap(), None);
    assert_eq!(fs::read(&link).unwrap(), bytes);
    fs::remove_file(&link).unwrap();
    assert!(check(&path, &image, &bytes).iter().all(|there| *there));
    assert_eq!(
        trim(&folder.file("none"), Parts::Any, 1, &[]).unwrap(),
        None
    );
}

#[test]
fn trimming_cold_parts_keeps_recently_read_ones() {
    use rustix::fs::{Advice, fadvise};
    let folder = Folder::new();
    let (path, image, bytes) = full(&folder);
    assert_eq!(
        trim(&path, Parts::Cold, u64::MAX, &[]).unwrap(),
        Some(0),
        "just written"
    );
    let file = File::open(path.join(CONTENTS)).unwrap();
    fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    fadvise(&file, 0, None, Advice::Random).unwrap();
    file.read_exact_at(&mut [0; 100], 1 << 20).unwrap();
    drop(file);
    let freed = trim(&path, Parts::Cold, u64::MAX, &[]).unwrap().unwrap();
    let there = check(&path, &image, &bytes);
    assert!(there[(1 << 20) / CHUNK]);
    // On file systems that keep files in memory, all of it stays.
    assert!(freed == 0 || there.contains(&false));
}

#[test]
fn trimming_removes_a_cache_whose_map_is_invalid() {
    let folder = Folder::new();
    let (path, _, _) = full(&folder);
    PresenceMap::open(&path.join(PRESENT))
        .unwrap()
        .bind([9; 16])
        .unwrap();
    assert!(trim(&path, Parts::Cold, 1, &[]).unwrap().is_some());
    assert!(!path.exists());
    let (path, _, _) = full(&folder);
    fs::write(path.join(PRESENT), b"no map").unwrap();
    assert!(trim(&path, Parts::Cold, 1, &[]).unwrap().is_some());
    assert!(!path.exists());
}

#[test]
fn a_size_limit_trims_parts_first_and_the_boot_set_last() {
    use crate::bounded::{Cached, evict_to_limit, usage};
    let folders: Vec<Folder> = (0..2).map(|_| Folder::new()).collect();
    let caches: Vec<_> = folders.iter().map(full).collect();
    for (age, (path, ..)) in [20, 10].into_iter().zip(&caches) {
        let map = OpenOptions::new()
            .write(true)
            .open(path.join(PRESENT))
            .unwrap();
        let used = std::time::SystemTime::now() - std::time::Duration::from_secs(age);
        map.set_modified(used).unwrap();
    }
    let known: Vec<Cached> = caches
        .iter()
        .map(|(path, ..)| Cached::Disk {
            folder: path.clone(),
            keep: vec![0],
        })
        .collect();
    let all = usage(&known);
    let kept = evict_to_limit(all - (1 << 20), &known).unwrap();
    assert_eq!(
        kept.dropped,
        [caches[0].0.clone()],
        "the one used longest ago"
    );
    assert!(kept.after <= all - (1 << 20) && usage(&known) == kept.after);
    let (path, image, bytes) = &caches[1];
    assert!(check(path, image, bytes).iter().all(|there| *there));
    evict_to_limit(600 << 10, &known).unwrap();
    for (path, image, bytes) in &caches {
        assert!(check(path, image, bytes)[0], "what a boot needs");
    }
    evict_to_limit(0, &known).unwrap();
    assert!(caches.iter().all(|(path, ..)| !path.exists()));
}

#[test]
fn a_cache_removed_while_it_opens_is_kept_or_recreated() {
    let folder = Folder::new();
    let image = folder.image("image", &contents("n..tn."), &small());
    let cache = cache_folder(&folder);
    let mut opened = 0;
    let over = std::sync::atomic::AtomicBool::new(false);
    let over = &over;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                let _ = remove(&cache);
            }
        });
        for _ in 0..400 {
            // The folder may be missing at that moment.
            let Ok(open) = DiskCache::open(&cache, &image) else {
                continue;
            };
            open.put(0, &[7; CHUNK]).unwrap();
            assert_eq!(remove(&cache).unwrap(), None, "it is in use");
            let mut byte = [0];
            let contents = fs::File::open(cache.join(CONTENTS)).unwrap();
            contents.read_exact_at(&mut byte, 0).unwrap();
            assert_eq!(
                byte,
                [7],
                "a reader of the file by name sees the written bytes"
            );
            assert!(cache.join(PRESENT).exists());
            opened += 1;
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(opened > 0);
}
