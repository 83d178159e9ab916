use super::*;
use crate::codec::Codec;
use crate::format::{MAX_DEPTH, footer};
use crate::samples::{CHUNK, Folder, contents, read_all, small, text};
use crate::writer::WriteOptions;
use std::error::Error;
use std::fs;
use std::os::unix::fs::FileExt;

fn fault(result: Result<ImageReader, ImageError>) -> Fault {
    *result.expect_err("it is refused").fault
}

/// Opens these bytes as if they were a file in the folder.
fn open_bytes(folder: &Folder, bytes: &[u8]) -> Result<ImageReader, ImageError> {
    use jiffy_sys::memfd::{Pages, create};
    let file = create("image", bytes.len() as u64, Pages::Small).unwrap();
    file.write_all_at(bytes, 0).unwrap();
    ImageReader::from_file(file, &folder.file("image"), &parents::in_folder)
}

/// A file with all kinds of chunks, a dictionary, a parent and a working set, and its parent.
fn rich(folder: &Folder) -> (Vec<u8>, Vec<u8>) {
    let base: Vec<u8> = (0..200).flat_map(text).collect();
    let parent = folder.image("base", &base, &small());
    let mut bytes = base;
    let new = contents("t.nXXt");
    bytes[..new.len()].copy_from_slice(&new);
    let options = WriteOptions {
        codec: Codec::Zstd(3),
        dictionary: true,
        parent: Some(Arc::new(parent)),
        working_set: Some(vec![5, 1, 0, 100]),
        ..small()
    };
    let image = folder.image("rich", &bytes, &options);
    image.verify().unwrap();
    let kinds: Vec<Kind> = (0..4).map(|index| image.kind(index).unwrap()).collect();
    assert_eq!(
        kinds,
        [
            Kind::ZstdDictionary,
            Kind::Zero,
            Kind::Raw,
            Kind::ZstdDictionary
        ]
    );
    assert_eq!(image.kind(150).unwrap(), Kind::Parent);
    (fs::read(folder.file("rich")).unwrap(), bytes)
}

#[test]
fn every_flipped_bit_is_reported_with_its_offset() {
    let folder = Folder::new();
    let (good, _) = rich(&folder);
    let manifest = open_bytes(&folder, &good).unwrap().footer.parent.offset;
    // All of header, manifest and footer; of chunks and dictionary a sample.
    let positions = (0..64)
        .chain((64..manifest).step_by(397))
        .chain(manifest..good.len() as u64);
    for at in positions {
        let mut bad = good.clone();
        bad[at as usize] ^= 1 << (at % 8);
        let verified = open_bytes(&folder, &bad).and_then(|image| image.verify());
        let error = verified.expect_err("a bit was flipped");
        assert!(error.to_string().contains("at byte "), "{at}: {error}");
    }
}

#[test]
fn every_prefix_is_refused_and_so_is_every_tail_of_zeros() {
    let folder = Folder::new();
    let (good, _) = rich(&folder);
    let near_the_end = good.len() - 3 * footer::BYTES..good.len();
    for length in (0..good.len())
        .step_by(211)
        .chain(near_the_end)
        .chain(0..130)
    {
        let found = fault(open_bytes(&folder, &good[..length]));
        if length >= 8 {
            assert!(
                matches!(found, Fault::Truncated { .. }),
                "{length}: {found}"
            );
        } else {
            assert!(matches!(found, Fault::NotAnImage), "{length}: {found}");
        }
        // The length reached the disk, the bytes did not.
        let mut zeros = good[..length].to_vec();
        zeros.resize(good.len(), 0);
        open_bytes(&folder, &zeros).unwrap_err();
        // A file that goes on with the beginning of another footer.
        let mut more = good.clone();
        more.extend(&good[..length]);
        if length > 0 {
            open_bytes(&folder, &more).unwrap_err();
        }
    }
}

#[test]
fn bytes_missing_in_the_middle_are_detected_when_read() {
    // Blocks reach a disk in any order: here a page of an image is zeros although the footer was
    // written.
    let folder = Folder::new();
    let (good, bytes) = rich(&folder);
    for start in (0..good.len()).step_by(4096) {
        let mut bad = good.clone();
        let end = good.len().min(start + 4096);
        bad[start..end].fill(0);
        let Ok(image) = open_bytes(&folder, &bad) else {
            continue;
        };
        image.verify().unwrap_err();
        let mut chunk = vec![0; CHUNK];
        for (index, expected) in (0..).zip(bytes.chunks(CHUNK)) {
            if image.read_chunk(index, &mut chunk).is_ok() {
                assert!(chunk == expected, "chunk {index}");
            }
        }
    }
}

#[test]
fn every_error_is_one_sentence_with_the_offset() {
    let folder = Folder::new();
    let path = folder.file("a");
    folder.image("a", &contents("tt"), &small());
    let good = fs::read(&path).unwrap();
    let message = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let error = ImageReader::open(&path)
            .and_then(|image| image.verify())
            .unwrap_err();
        let sentence = error.to_string();
        let prefix = format!("{}: ", path.display());
        sentence.strip_prefix(&prefix).expect("the path").to_owned()
    };
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    assert_eq!(
        message(b"#!/bin/sh, and some more bytes than a magic has"),
        "is not an image: there is no magic at byte 0"
    );
    assert_eq!(
        message(&with(8, 9)),
        "has format version 9 (at byte 8); this program reads versions 1 and 2"
    );
    let footer = good.len() - footer::BYTES;
    assert_eq!(
        message(&with(footer + 8, 3)),
        format!(
            "has format version 3 (at byte {}); this program reads versions 1 and 2",
            footer + 8
        )
    );
    assert_eq!(
        message(&good[..good.len() - 1]),
        format!(
            "is truncated: it has {} bytes and no footer at byte {}",
            good.len() - 1,
            footer - 1
        )
    );
    assert_eq!(
        message(&with(30, 1)),
        "is damaged at byte 0: the header's checksum is wrong"
    );
    let sentence = message(&with(70, good[70] ^ 0x20));
    assert!(
        sentence.starts_with("chunk 0 at byte 64 is damaged: "),
        "{sentence}"
    );
    fs::remove_file(&path).unwrap();
    let error = ImageReader::open(&path).unwrap_err();
    assert!(error.to_string().ends_with("a: cannot be opened"));
    assert!(error.source().is_some());
}

#[test]
fn a_parent_must_exist_and_be_unchanged() {
    let folder = Folder::new();
    rich(&folder);
    let child = folder.file("rich");
    let base = folder.file("base");
    let good = fs::read(&base).unwrap();
    let why = || match fault(ImageReader::open(&child)) {
        Fault::Parent { source, name } => {
            assert_eq!(name, "base");
            source
        }
        other => panic!("{other}"),
    };
    use crate::error::ParentFault::{Image, NotFound, OtherChunkSize, OtherContents, TooDeep};
    fs::remove_file(&base).unwrap();
    assert!(matches!(why(), Image(_)));
    folder.image("base", &contents("t"), &small());
    assert!(matches!(why(), OtherContents));
    folder.image("base", &contents("tt"), &WriteOptions::default());
    assert!(matches!(why(), OtherChunkSize));
    fs::write(&base, &good).unwrap();
    ImageReader::open(&child).unwrap();

    // The parent is in another place, which a function returns.
    fs::rename(&base, folder.file("elsewhere")).unwrap();
    let found = |_: &Path, parent: &ParentRef| {
        assert_eq!(parent.name, "base");
        Ok(folder.file("elsewhere"))
    };
    let image = ImageReader::open_with_parents(&child, &found).unwrap();
    image.verify().unwrap();
    let lost = |_: &Path, _: &ParentRef| Err(io::ErrorKind::NotFound.into());
    let Fault::Parent { source, .. } = fault(ImageReader::open_with_parents(&child, &lost)) else {
        panic!("its parent is missing")
    };
    assert!(matches!(source, NotFound(_)));

    // An image that is resolved as its own parent.
    let itself = |_: &Path, _: &ParentRef| Ok(child.clone());
    let mut found = fault(ImageReader::open_with_parents(&child, &itself));
    let mut depth = 0;
    loop {
        depth += 1;
        found = match found {
            Fault::Parent {
                source: Image(error),
                ..
            } => *error.fault,
            Fault::Parent { source, .. } => {
                assert!(matches!(source, TooDeep { .. }), "{source}");
                break;
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(depth, MAX_DEPTH + 1);
}

#[test]
fn a_chunk_of_a_swapped_parent_is_refused() {
    let folder = Folder::new();
    let bytes = contents("tttt");
    let parent = Arc::new(folder.image("base", &bytes, &small()));
    let options = WriteOptions {
        parent: Some(parent),
        ..small()
    };
    let path = folder.file("child");
    folder.image("child", &contents("tttX"), &options);
    // A parent with the id of the first, and other contents.
    let first = fs::read(folder.file("base")).unwrap();
    folder.image("base", &contents("AAAA"), &small());
    let mut forged = fs::read(folder.file("base")).unwrap();
    let (old, new) = (first.len() - footer::BYTES, forged.len() - footer::BYTES);
    let id = first[old + 24..old + 40].to_vec();
    forged[new + 24..new + 40].copy_from_slice(&id);
    crate::format::seal(&mut forged[new..]);
    fs::write(folder.file("base"), forged).unwrap();
    let image = ImageReader::open(&path).unwrap();
    let error = image.read_chunk(1, &mut vec![0; CHUNK]).unwrap_err();
    assert!(
        matches!(*error.fault, Fault::Chunk { index: 1, .. }),
        "{error}"
    );
    assert!(image.parent().unwrap().1.verify().is_err());
}

#[test]
fn there_is_no_chunk_behind_the_last() {
    let folder = Folder::new();
    let image = folder.image("a", &contents("ttt"), &small());
    for index in [3, 64, u32::MAX] {
        let error = image.read_chunk(index, &mut vec![0; CHUNK]).unwrap_err();
        assert!(matches!(*error.fault, Fault::NoSuchChunk { .. }), "{error}");
    }
}

#[test]
fn an_image_stays_readable_when_its_file_goes_or_is_replaced() {
    let folder = Folder::new();
    let bytes = contents(&"tXn.".repeat(100));
    let image = folder.image("a", &bytes, &small());
    folder.image("a", &contents("n"), &small());
    fs::remove_file(folder.file("a")).unwrap();
    assert!(read_all(&image) == bytes);
}

#[test]
fn an_image_that_is_replaced_all_the_time_can_be_opened() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let folder = Folder::new();
    let (path, one, next) = (folder.file("a"), folder.file("one"), folder.file("next"));
    folder.image("a", &contents("t"), &small());
    fs::copy(&path, &one).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                fs::copy(&one, &next).unwrap();
                fs::rename(&next, &path).unwrap();
            }
        });
        let failed = (0..5_000).find_map(|_| ImageReader::open(&path).err());
        over.store(true, Ordering::Relaxed);
        assert!(failed.is_none(), "{failed:?}");
    });
}

#[test]
fn threads_read_at_once_and_a_small_cache_is_enough() {
    let folder = Folder::new();
    // More groups than are cached.
    let chunks = 64 * 4200;
    let size = chunks * CHUNK as u64;
    let file = jiffy_sys::memfd::create("t", size, jiffy_sys::memfd::Pages::Small).unwrap();
    for index in (0..chunks).step_by(61) {
        file.write_all_at(&index.to_le_bytes(), index * CHUNK as u64 + 8)
            .unwrap();
    }
    crate::writer::write_image(&folder.file("a"), &file, &small()).unwrap();
    let image = ImageReader::open(&folder.file("a")).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let image = &image;
            scope.spawn(move || {
                let mut decoder = Decoder::new();
                let mut chunk = vec![0; CHUNK];
                for step in 0..20_000_u64 {
                    let index = (step * 7919 * (thread + 1)) % chunks;
                    image
                        .read_chunk_with(&mut decoder, index as u32, &mut chunk)
                        .unwrap();
                    let number = u64::from_le_bytes(chunk[8..16].try_into().unwrap());
                    assert_eq!(number, if index % 61 == 0 { index } else { 0 });
                }
            });
        }
    });
}
