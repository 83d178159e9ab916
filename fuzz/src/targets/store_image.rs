//! Image and recording files with any bytes: as they are, or with checksums
//! made right so that what they protect is reached.

use crate::Target;
use crate::input::Input;
use crate::scratch;
use jiffy_store::{
    Backing, Codec, Decoder, ImageId, ImageReader, Kind, Recording, WriteOptions, inspect, testing,
    write_image, writer,
};
use jiffy_sys::memfd::{self, Pages};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

const AS_IT_IS: u8 = 0;
const RESEALED: u8 = 1;
const RECORDING: u8 = 2;

const CHUNK: usize = 4096;

/// The backing file of the seeds that have one.
static BACKING: LazyLock<Backing> = LazyLock::new(|| {
    let path = scratch::folder().join("root");
    std::fs::write(&path, contents(b"rs.t")).expect("the backing file is written");
    Backing::open(&path).expect("the backing file is read")
});

/// The parent of the seeds that have one.
static PARENT: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = scratch::folder().join("parent.image");
    write_image(&path, &contents(b"ab.c"), &options(Codec::Lz4)).expect("the parent is written");
    path
});

/// This target.
pub const TARGET: Target = Target {
    name: "store_image",
    covers: &[
        "crates/pager/src/image.rs",
        "crates/pager/src/pool",
        "crates/pager/src/replay",
        "crates/store/src/codec.rs",
        "crates/store/src/backing",
        "crates/store/src/format",
        "crates/store/src/outline.rs",
        "crates/store/src/reader",
        "crates/store/src/recording.rs",
    ],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    let mut input = Input(data);
    let kind = input.u8() % 3;
    let mut bytes = input.rest().to_vec();
    match kind {
        AS_IT_IS => image(&bytes),
        RESEALED => {
            testing::reseal(&mut bytes);
            image(&bytes);
        }
        _ => recording(&bytes),
    }
}

fn image(bytes: &[u8]) {
    let file = memfd::create("image", bytes.len() as u64, Pages::Small).expect("a memfd");
    file.write_all_at(bytes, 0).expect("memory");
    let resolve = |_: &Path, _: &_| Ok(PARENT.clone());
    LazyLock::force(&BACKING);
    let path = scratch::folder().join("fuzz");
    let Ok(image) = ImageReader::from_file(file, &path, &resolve) else {
        return;
    };
    let whole = image.verify();
    let _ = inspect::Summary::of(&image);
    let _ = inspect::map(&image, 40);
    let _ = inspect::png(&image);
    let hot = image.hot_range();
    assert!(hot.end <= bytes.len() as u64);
    for range in image.working_set().unwrap_or_default() {
        assert!(!range.is_empty() && range.end <= image.chunks());
    }
    let mut decoder = Decoder::new();
    let mut chunk = vec![0xee; image.chunk_size() as usize];
    for index in 0..image.chunks().min(200) {
        let read = image.read_chunk_with(&mut decoder, index, &mut chunk);
        let Ok(kind) = image.kind(index) else {
            assert!(read.is_err());
            continue;
        };
        if kind == Kind::Zero {
            assert!(read.is_ok() && chunk.iter().all(|byte| *byte == 0));
        }
        if let Ok(Some(range)) = image.stored_range(index) {
            let stored = &bytes[range.start as usize..range.end as usize];
            let mut again = vec![0xdd; chunk.len()];
            let decoded = image.decode(&mut decoder, index, stored, &mut again);
            assert_eq!(decoded.is_ok(), read.is_ok());
            assert!(read.is_err() || again == chunk);
        }
    }
    // A valid file is the same after it is decoded and encoded.
    if whole.is_ok() && image.size() <= 1 << 20 {
        let mut out = Vec::new();
        let options = WriteOptions {
            chunk_size: image.chunk_size(),
            ..options(Codec::Lz4)
        };
        let source = jiffy_store::optimise::Contents(&image);
        let written = writer::write_to(&mut out, &source, &options).expect("it is read again");
        // The bytes behind the contents' end are not part of them.
        if image.size() % u64::from(image.chunk_size()) == 0 {
            assert_eq!(written.id, image.id());
        }
    }
}

fn recording(bytes: &[u8]) {
    if let Ok(recording) = Recording::decode(bytes) {
        assert_eq!(recording.encode(), bytes);
    }
}

fn options(codec: Codec) -> WriteOptions {
    WriteOptions {
        chunk_size: CHUNK as u32,
        codec,
        threads: 1,
        ..WriteOptions::default()
    }
}

/// Chunks by letters; `.` is zero.
fn contents(letters: &[u8]) -> Vec<u8> {
    let chunk = |letter: &u8| match letter {
        b'.' => vec![0; CHUNK],
        letter => (0..CHUNK)
            .map(|at| letter.wrapping_add((at / 300) as u8))
            .collect(),
    };
    letters.iter().flat_map(chunk).collect()
}

/// Images of every codec, with and without parent, backing file and working set,
/// and a recording.
fn all_seeds() -> Vec<Vec<u8>> {
    let parent = ImageReader::open(&PARENT).expect("the parent opens");
    let with_parent = WriteOptions {
        parent: Some(Arc::new(parent)),
        working_set: Some(vec![3, 0]),
        ..options(Codec::Zstd(1))
    };
    let with_backing = WriteOptions {
        backing: Some(BACKING.clone()),
        working_set: Some(vec![3]),
        ..options(Codec::Lz4)
    };
    let images = [
        (&b"ab.b"[..], options(Codec::Lz4)),
        (b"xyz", options(Codec::Zstd(3))),
        (b"ab.dd", with_parent),
        (b"", options(Codec::Lz4)),
        (b"ar.st", with_backing),
    ];
    let mut seeds = Vec::new();
    for (letters, options) in images {
        let mut image = Vec::new();
        writer::write_to(&mut image, &contents(letters), &options).expect("a seed");
        for kind in [AS_IT_IS, RESEALED] {
            seeds.push([&[kind], &image[..]].concat());
        }
    }
    let recording = Recording {
        image: ImageId([1; 16]),
        chunk_size: 4096,
        chunks: vec![2, 0],
    };
    seeds.push([&[RECORDING], &recording.encode()[..]].concat());
    seeds
}
