use super::*;
use crate::codec::Decoder;
use crate::format::Kind;
use crate::reader::Place;
use crate::samples::{CHUNK, Folder, backing, contents, noise, read_all, small, text};
use proptest::prelude::*;
use std::fs;
use std::io;
use std::ops::Range;

fn kinds(image: &ImageReader) -> Vec<Kind> {
    (0..image.chunks())
        .map(|index| image.kind(index).unwrap())
        .collect()
}

#[test]
fn every_chunk_is_stored_the_cheapest_way() {
    use Kind::{Lz4, Raw, Zero, Zstd};
    let folder = Folder::new();
    let bytes = contents("t.nXtX");
    for (codec, packed) in [
        (Codec::None, Raw),
        (Codec::Lz4, Lz4),
        (Codec::Lz4High, Lz4),
        (Codec::Zstd(3), Zstd),
    ] {
        let options = WriteOptions { codec, ..small() };
        let written = write_image(&folder.file("a"), &bytes, &options).unwrap();
        let image = ImageReader::open(&folder.file("a")).unwrap();
        assert_eq!(kinds(&image), [packed, Zero, Raw, packed, packed, packed]);
        assert_eq!(image.place(3).unwrap(), image.place(5).unwrap());
        assert_eq!((written.zero, written.duplicates), (1, 1));
        assert_eq!(written.raw + written.compressed, 5);
        assert_eq!(written.file_bytes, image.file_bytes());
        assert_eq!(written.id, image.id());
        assert_eq!(read_all(&image), bytes);
        image.verify().unwrap();
        if codec == Codec::None {
            let Place::Entry(entry) = image.place(0).unwrap() else {
                panic!("the first chunk is not zero")
            };
            assert_eq!(entry.offset, 4096, "raw chunks can be mapped");
        }
    }
    assert_eq!(folder.names(), ["a"]);
}

#[test]
fn a_dictionary_makes_small_chunks_smaller_and_stays_in_the_image() {
    let folder = Folder::new();
    let bytes: Vec<u8> = (0..300).flat_map(text).collect();
    let write = |name, dictionary| {
        let options = WriteOptions {
            codec: Codec::Zstd(3),
            dictionary,
            ..small()
        };
        write_image(&folder.file(name), &bytes, &options).unwrap()
    };
    let plain = write("plain", false);
    let trained = write("trained", true);
    assert!(trained.stored_bytes < plain.stored_bytes);
    assert_eq!(trained.id, plain.id, "their contents are equal");
    let image = ImageReader::open(&folder.file("trained")).unwrap();
    assert_eq!(image.kind(0).unwrap(), Kind::ZstdDictionary);
    assert!(image.dictionary().is_some());
    assert_eq!(read_all(&image), bytes);
    image.verify().unwrap();
}

#[test]
fn chunks_equal_to_the_parent_s_are_not_stored_again() {
    use Kind::{Lz4, Parent, Raw, Zero};
    let folder = Folder::new();
    let base = contents("tnt.ttt");
    let grandparent = Arc::new(folder.image("base", &base, &small()));
    let child_bytes: Vec<u8> = [
        &base[..CHUNK * 2],
        &text(500)[..],
        &noise(501),
        &[0; CHUNK],
        &base[CHUNK * 4..CHUNK * 5],
        &base[CHUNK * 6..],
        &text(502),
    ]
    .concat();
    let options = WriteOptions {
        parent: Some(grandparent),
        ..small()
    };
    let child = folder.image("child", &child_bytes, &options);
    let expected = [Parent, Parent, Lz4, Raw, Zero, Lz4, Parent, Lz4];
    assert_eq!(kinds(&child), expected);
    assert_eq!(read_all(&child), child_bytes);
    child.verify().unwrap();
    let (reference, parent) = child.parent().unwrap();
    assert_eq!((&*reference.name, reference.id), ("base", parent.id()));

    // A child of the child finds its chunks through the child.
    let options = WriteOptions {
        parent: Some(Arc::new(child)),
        ..small()
    };
    let last = folder.image("last", &child_bytes, &options);
    assert!(
        kinds(&last)
            .iter()
            .all(|kind| matches!(kind, Zero | Parent))
    );
    assert_eq!(read_all(&last), child_bytes);
    last.verify().unwrap();
    assert!(last.file_bytes() < 64 + 256 + 16 + 7 * 40 + 100);
}

#[test]
fn the_working_set_comes_first_in_its_order_and_without_the_parent() {
    let folder = Folder::new();
    let bytes = contents("tnt.ttXX");
    let parent = Arc::new(folder.image("base", &bytes, &small()));
    let order = vec![6, 5, 3, 1, 7, 5, 2];
    let options = WriteOptions {
        parent: Some(parent),
        working_set: Some(order),
        ..small()
    };
    let image = folder.image("child", &bytes, &options);
    assert_eq!(read_all(&image), bytes);
    let ranges: Vec<Range<u32>> = vec![6..7, 5..6, 3..4, 1..2, 7..8, 2..3];
    assert_eq!(image.working_set().unwrap(), ranges);
    // Contiguous; 3 is zero, 7 is equal to 6.
    let hot = image.hot_range();
    let mut at = hot.start;
    for index in [6, 5, 1, 2] {
        let range = image.stored_range(index).unwrap().unwrap();
        assert_eq!(range.start, at);
        at = range.end;
    }
    assert_eq!(at, hot.end);
    assert_eq!(
        image.stored_range(7).unwrap(),
        image.stored_range(6).unwrap()
    );
    assert_eq!(image.kind(0).unwrap(), Kind::Parent);

    // One sequential read returns all of them.
    let mut read = vec![0; (hot.end - hot.start) as usize];
    image.read_stored(hot.start, &mut read).unwrap();
    let mut decoder = Decoder::new();
    let mut chunk = vec![0; CHUNK];
    for index in image.working_set().unwrap().into_iter().flatten() {
        let stored = image.stored_range(index).unwrap().map_or(&[][..], |range| {
            &read[(range.start - hot.start) as usize..(range.end - hot.start) as usize]
        });
        image
            .decode(&mut decoder, index, stored, &mut chunk)
            .unwrap();
        assert_eq!(chunk, bytes[index as usize * CHUNK..][..CHUNK]);
    }
}

#[test]
fn the_last_chunk_is_padded_and_an_empty_image_is_valid() {
    let folder = Folder::new();
    for length in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 65 * CHUNK + 9] {
        let mut bytes: Vec<u8> = text(1).into_iter().cycle().take(length).collect();
        let image = folder.image("a", &bytes, &small());
        assert_eq!(image.size(), length as u64);
        bytes.resize(length.next_multiple_of(CHUNK), 0);
        assert_eq!(read_all(&image), bytes);
        image.verify().unwrap();
    }
}

#[test]
fn invalid_options_are_refused_and_leave_no_file() {
    let folder = Folder::new();
    let parent = Arc::new(folder.image("base", &contents("t"), &small()));
    let mut nowhere = backing(&folder, "base", &fs::read(parent.path()).unwrap());
    nowhere.reference.name = "../base".into();
    let bad = [
        WriteOptions {
            chunk_size: 2048,
            ..small()
        },
        WriteOptions {
            chunk_size: 12288,
            ..small()
        },
        WriteOptions {
            chunk_size: 4 << 20,
            ..small()
        },
        WriteOptions {
            raw_above_percent: 101,
            ..small()
        },
        WriteOptions {
            codec: Codec::Zstd(0),
            ..small()
        },
        WriteOptions {
            codec: Codec::Zstd(23),
            ..small()
        },
        WriteOptions {
            working_set: Some(vec![0, 1]),
            ..small()
        },
        WriteOptions {
            chunk_size: 8192,
            parent: Some(parent.clone()),
            ..small()
        },
        WriteOptions {
            parent: Some(parent.clone()),
            parent_name: Some("../x".into()),
            ..small()
        },
        WriteOptions {
            parent: Some(parent),
            parent_name: Some(String::new()),
            ..small()
        },
        WriteOptions {
            backing: Some(nowhere),
            ..small()
        },
    ];
    for options in bad {
        let error = write_image(&folder.file("a"), &contents("t"), &options).unwrap_err();
        assert!(matches!(error, WriteError::Options(_)), "{error}");
        assert_eq!(folder.names(), ["base"]);
    }
}

#[test]
fn a_failing_source_reports_its_offset_and_keeps_the_old_file() {
    struct Failing;
    impl ChunkSource for Failing {
        fn size(&self) -> u64 {
            64 << 20
        }
        fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
            buffer.fill(1);
            match offset {
                0x200_0000.. => Err(io::Error::other("broken")),
                _ => Ok(()),
            }
        }
    }
    let folder = Folder::new();
    let before = folder.image("a", &contents("t"), &small()).id();
    let error = write_image(&folder.file("a"), &Failing, &small()).unwrap_err();
    let WriteError::Source { offset, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(offset, 0x200_0000);
    assert_eq!(folder.names(), ["a"]);
    assert_eq!(ImageReader::open(&folder.file("a")).unwrap().id(), before);
}

/// A disk that has room for some bytes.
struct Full(usize);

impl io::Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.0);
        self.0 -= count;
        match count {
            0 if !bytes.is_empty() => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(count),
        }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_disk_that_fills_up_at_any_byte_is_an_error() {
    let bytes = contents("tn.tXXn");
    let mut whole = Vec::new();
    write_to(&mut whole, &bytes, &small()).unwrap();
    for room in (0..whole.len()).step_by(13).chain([whole.len() - 1]) {
        let error = write_to(Full(room), &bytes, &small()).unwrap_err();
        let WriteError::Target { source, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(source.kind(), io::ErrorKind::StorageFull);
    }
    write_to(Full(whole.len()), &bytes, &small()).unwrap();
}

#[test]
fn the_file_does_not_depend_on_the_number_of_threads() {
    let letters: String = "tn..tXXtnY".repeat(200);
    let bytes = contents(&letters);
    let write = |threads| {
        let mut out = Vec::new();
        let options = WriteOptions { threads, ..small() };
        write_to(&mut out, &bytes, &options).unwrap();
        out
    };
    let one = write(1);
    assert!(one == write(2) && one == write(7));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_written_image_reads_back(
        letters in "[.ntABC]{0,150}",
        parent in prop::option::of("[.ntABC]{0,150}"),
        root in prop::option::of("[.ntABC]{0,150}"),
        codec in prop::sample::select(vec![Codec::None, Codec::Lz4, Codec::Zstd(1)]),
        size_shift in 12..15_u32,
        raw_above_percent in 0..=100_u8,
        working_set in prop::option::of(prop::collection::vec(any::<prop::sample::Index>(), 0..30)),
        cut in 0..CHUNK,
    ) {
        let folder = Folder::new();
        let chunk_size = 1 << size_shift;
        let mut bytes = contents(&letters);
        bytes.truncate(bytes.len().saturating_sub(cut));
        let chunks = bytes.len().div_ceil(chunk_size as usize);
        let base = WriteOptions { chunk_size, ..WriteOptions::default() };
        let parent = parent.map(|letters| Arc::new(folder.image("base", &contents(&letters), &base)));
        let working_set = working_set.filter(|_| chunks > 0).map(|set| {
            set.iter().map(|index| index.index(chunks) as u32).collect()
        });
        let root = root.map(|letters| backing(&folder, "root", &contents(&letters)));
        let options = WriteOptions {
            codec, raw_above_percent, working_set, parent, backing: root, threads: 2, ..base
        };
        let image = folder.image("a", &bytes, &options);
        bytes.resize(chunks * chunk_size as usize, 0);
        prop_assert!(read_all(&image) == bytes);
        image.verify().unwrap();
    }
}
