//! Origins that lie or never answer, other packings, full disks, and reads that are cancelled.

use super::*;
use rustix::mount::{MountFlags, UnmountFlags};
use std::ffi::CString;
use std::sync::mpsc::channel;

/// An origin that refuses every request.
fn absent(file: &[u8]) -> Arc<Scripted> {
    Scripted::new("the absent one", file.to_vec(), |_, _| {
        Err(OriginError::permanent("it has nothing"))
    })
}

/// The same contents, with other chunks first.
fn packed_otherwise(letters: &str) -> Pair {
    let options = WriteOptions {
        working_set: Some((10..90).rev().collect()),
        ..small()
    };
    Pair::new(letters, &options)
}

#[test]
fn a_lying_or_empty_origin_is_asked_last() {
    let pair = Pair::new(&many(400), &small());
    let (liar, absent) = (Scripted::lying(&pair.whole), absent(&pair.whole));
    let honest = Scripted::honest(&pair.whole);
    let origins = [liar.clone(), absent.clone(), honest.clone()];
    let image = pair.open(&origins).unwrap();
    assert_eq!(read_all(&image), pair.bytes);
    // A block has 16 chunks, and there are about 25. Each of the two is asked at most for the first
    // block and once more after its lie.
    assert!(liar.asked().len() <= 3, "{:?}", liar.asked());
    assert!(absent.asked().len() <= 2, "{:?}", absent.asked());
}

#[test]
fn chunks_missing_in_one_artifact_come_from_another_packing() {
    let letters = many(200);
    // An artifact with valid tables whose chunks no origin has.
    let hostile = Pair::new(&letters, &small());
    let other = packed_otherwise(&letters);
    assert_ne!(hostile.whole, other.whole);
    let none = absent(&hostile.whole);
    let image = hostile.open(std::slice::from_ref(&none)).unwrap();
    read(&image, 20).unwrap_err();
    let honest = Scripted::honest(&other.whole);
    let packing = Arc::new(other.open(std::slice::from_ref(&honest)).unwrap());
    assert_eq!(packing.id(), image.id());
    image.set_packings(vec![packing]);
    let before = none.asked().len();
    assert_eq!(read_all(&image), other.bytes);
    // It is asked once; afterwards the other packing is tried first.
    assert_eq!(none.asked().len(), before + 1);
    assert!(image.is_local(100).unwrap());
    image.complete().unwrap();
    assert!(is_partial(&hostile.path()) && !is_partial(&other.path()));
    // In the opposite order, and with a few large reads.
    shrink(&hostile.path()).unwrap();
    let honest = Scripted::honest(&hostile.whole);
    let packing = Arc::new(hostile_again(&hostile, image, &honest));
    let other = packed_otherwise(&letters);
    let image = other.open(&[absent(&other.whole)]).unwrap();
    image.set_packings(vec![packing]);
    let wanted: Vec<u32> = (50..150).collect();
    image.fetch_chunks(&mut Decoder::new(), &wanted).unwrap();
    assert_eq!(honest.asked().len(), 1);
}

/// Closes the file and opens it again with this origin.
fn hostile_again(pair: &Pair, image: ImageReader, origin: &Arc<Scripted>) -> ImageReader {
    drop(image);
    pair.open(std::slice::from_ref(origin)).unwrap()
}

#[test]
fn an_image_with_other_contents_is_not_a_packing() {
    let pair = Pair::new(&many(100), &small());
    let image = pair.open(&[]).unwrap();
    let another = Pair::new(&many(101), &small());
    let honest = Scripted::honest(&another.whole);
    image.set_packings(vec![Arc::new(another.open(&[honest]).unwrap())]);
    assert!(image.packings().is_empty());
    read(&image, 20).unwrap_err();
}

#[test]
fn a_peer_with_another_packing_is_not_asked_for_bytes() {
    let letters = many(100);
    let pair = Pair::new(&letters, &small());
    let peer = pair.folder.file("peer");
    fs::create_dir(&peer).unwrap();
    let id = ImageReader::open(&pair.folder.file("whole")).unwrap().id();
    let theirs = peer.join(PeerFolder::file_name(id));
    let says = || {
        let origin = PeerFolder::new(&peer, id, &pair.path());
        origin.fetch(64..128, &Stop::never())
    };
    fs::write(&theirs, &packed_otherwise(&letters).whole).unwrap();
    assert!(says().unwrap_err().why.contains("in another way"));
    fs::write(&theirs, &pair.whole).unwrap();
    assert_eq!(*says().unwrap(), pair.whole[64..128]);
    // A peer's file that is partial itself has holes.
    fs::write(map_path(&theirs), "").unwrap();
    assert!(says().unwrap_err().why.contains("only parts"));
}

/// A file system of its own; only root can mount it.
struct SmallDisk<'a>(&'a Path);

impl SmallDisk<'_> {
    /// No program does it: between fork and exec, a child holds the locks of any test that runs at
    /// the same time.
    fn mount(at: &Path, size: u64) -> SmallDisk<'_> {
        let options = CString::new(format!("size={size}")).unwrap();
        let flags = MountFlags::empty();
        rustix::mount::mount("tmpfs", at, "tmpfs", flags, Some(options.as_c_str()))
            .expect("mounting a tmpfs needs root");
        SmallDisk(at)
    }

    /// Writes until the disk is full.
    fn fill(&self) {
        use std::io::Write;
        let mut file = fs::File::create(self.0.join("filler")).unwrap();
        for size in [4096, 1] {
            while file.write_all(&vec![1; size]).is_ok() {}
        }
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0, UnmountFlags::DETACH);
    }
}

#[test]
fn on_a_full_disk_fetched_chunks_are_read_and_not_kept() {
    let folder = Folder::new();
    let bytes = contents(&many(400));
    let whole = folder.image("whole", &bytes, &small());
    let whole_bytes = fs::read(whole.path()).unwrap();
    let here = folder.file("here");
    fs::create_dir(&here).unwrap();
    let disk = SmallDisk::mount(&here, 1 << 20);
    let path = here.join("image.jimg");
    let tail = &whole_bytes[whole_bytes.len() - (whole.metadata_bytes() as usize - 64)..];
    create(&path, whole_bytes.len() as u64, tail, whole.id()).unwrap();
    let honest = Scripted::honest(&whole_bytes);
    let liar = Scripted::lying(&whole_bytes);
    let origins =
        |_: &Path, _: ImageId| -> Vec<Arc<dyn Origin>> { vec![liar.clone(), honest.clone()] };
    let opening = Opening {
        origins: &origins,
        ..Opening::default()
    };
    let image = ImageReader::open_with(&path, &opening).unwrap();
    // Some chunks fit, and are dropped when others are needed.
    let mut chunk = vec![0; CHUNK];
    for index in 0..200 {
        image.read_chunk(index, &mut chunk).unwrap();
        assert_eq!(chunk, &bytes[index as usize * CHUNK..][..CHUNK], "{index}");
    }
    image.drop_fetched();
    disk.fill();
    for index in 0..400 {
        image.read_chunk(index, &mut chunk).unwrap();
        assert_eq!(chunk, &bytes[index as usize * CHUNK..][..CHUNK], "{index}");
    }
    // The whole image does not fit, and the error says so.
    let error = image.complete().unwrap_err();
    assert!(
        sentence(&error).contains("cannot be stored on this node"),
        "{error}"
    );
    fs::remove_file(here.join("filler")).unwrap();
    assert_eq!(read(&image, 399).unwrap(), &bytes[399 * CHUNK..]);
    assert!(image.is_local(399).unwrap());
}

#[test]
fn an_abandoned_request_takes_nothing_from_other_waiters() {
    let pair = Pair::new(&many(100), &small());
    let (say, asked) = channel();
    let (release, held) = channel::<()>();
    let (say, held) = (Mutex::new(say), Mutex::new(held));
    let origin = Scripted::new("slow", pair.whole.clone(), move |_, bytes| {
        say.lock().unwrap().send(()).unwrap();
        let _ = held.lock().unwrap().recv();
        Ok(bytes)
    });
    let gives_up = Scripted::giving_up_with(origin);
    let image = pair.open(&[gives_up]).unwrap();
    let stop = Stop::new();
    thread::scope(|scope| {
        let first = scope.spawn(|| {
            let mut decoder = Decoder::new();
            decoder.stop = stop.clone();
            image.read_chunk_with(&mut decoder, 20, &mut [0; CHUNK])
        });
        asked.recv().unwrap();
        let second = scope.spawn(|| read(&image, 20));
        stop.cancel();
        release.send(()).unwrap();
        let error = first.join().unwrap().unwrap_err();
        assert!(sentence(&error).contains("cancelled"), "{error}");
        asked.recv().unwrap();
        release.send(()).unwrap();
        assert_eq!(second.join().unwrap().unwrap(), pair.chunk(20));
    });
}

#[test]
fn one_of_many_readers_replaces_a_wrong_chunk() {
    let pair = Pair::new(&many(100), &small());
    let origin = Scripted::honest(&pair.whole);
    let image = pair.open(std::slice::from_ref(&origin)).unwrap();
    assert_eq!(read(&image, 50).unwrap(), pair.chunk(50));
    let place = image.stored_range(50).unwrap().unwrap();
    let file = OpenOptions::new().write(true).open(pair.path()).unwrap();
    for round in 1..=20 {
        file.write_all_at(&[round; 64], place.start).unwrap();
        let before = origin.asked().len();
        let start = std::sync::Barrier::new(8);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    start.wait();
                    assert_eq!(read(&image, 50).unwrap(), pair.chunk(50));
                });
            }
        });
        assert_eq!(origin.asked().len(), before + 1, "round {round}");
    }
    // A wrong chunk does not invalidate the others of its block.
    let start = place.start;
    let liar = Scripted::new("the liar", pair.whole.clone(), move |range, mut bytes| {
        if range.contains(&start) {
            bytes[(start - range.start) as usize] ^= 1;
        }
        Ok(bytes)
    });
    drop((image, file));
    shrink(&pair.path()).unwrap().unwrap();
    let image = pair.open(&[liar]).unwrap();
    thread::scope(|scope| {
        for index in [50, 49, 51, 50, 52, 48, 50, 51] {
            let (image, pair) = (&image, &pair);
            scope.spawn(move || match index {
                50 => drop(read(image, 50).unwrap_err()),
                _ => assert_eq!(read(image, index as u32).unwrap(), pair.chunk(index)),
            });
        }
    });
}
