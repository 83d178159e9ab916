use super::*;
use crate::samples::{CHUNK, Folder, contents, small};

fn cache_folder(folder: &Folder) -> PathBuf {
    folder.file("cache")
}

#[test]
fn it_is_filled_and_what_is_zero_is_there_from_the_beginning() {
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
}

#[test]
fn bits_of_another_boot_mean_nothing_unless_all_was_synced() {
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
    // A process that was killed: the kernel has all it wrote.
    drop(fill());
    assert!(DiskCache::open(&path, &image).unwrap().has(0));
    // The host lost its power.
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
fn another_image_begins_anew_but_not_under_a_vm() {
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
        "beside the VM"
    );
    drop(vm);
    let cache = DiskCache::open(&path, &other).unwrap();
    assert!(!cache.has(0) && cache.chunks() == 3);
    drop(cache);
    // A map that is damaged, and none.
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
