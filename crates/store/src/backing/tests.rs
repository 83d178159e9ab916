use super::*;
use crate::error::{BackingFault, Fault, ImageError, WriteError};
use crate::format::manifest::ENTRY_BYTES;
use crate::format::{Fields, Kind, footer};
use crate::reader::{ImageReader, Place};
use crate::recording::Recording;
use crate::samples::{CHUNK, Folder, backing, contents, read_all, small};
use crate::testing::reseal;
use crate::writer::{WriteOptions, write_image};
use crate::{optimise, partial};
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::FileExt;

fn kinds(image: &ImageReader) -> Vec<Kind> {
    (0..image.chunks())
        .map(|index| image.kind(index).unwrap())
        .collect()
}

/// An image beside a root `RXY.Z` and some bytes more. Its chunks 1, 3 and 4 are in the root; 5 is
/// too, but belongs to the working set.
fn image_of_a_root(folder: &Folder) -> (ImageReader, Vec<u8>) {
    let mut root = contents("RXY.Z");
    root.extend([7; 100]);
    let bytes = contents("tY.XXR");
    let options = WriteOptions {
        backing: Some(backing(folder, "root", &root)),
        working_set: Some(vec![5]),
        ..small()
    };
    (folder.image("ram", &bytes, &options), bytes)
}

fn fault(result: Result<ImageReader, ImageError>) -> Fault {
    *result.expect_err("it is refused").fault
}

#[test]
fn chunks_in_the_backing_file_are_referenced_and_not_stored() {
    use Kind::{Backing, Lz4, Zero};
    let folder = Folder::new();
    let (image, bytes) = image_of_a_root(&folder);
    let expected = [Lz4, Backing, Zero, Backing, Backing, Lz4];
    assert_eq!(kinds(&image), expected);
    assert_eq!(image.stored_range(1).unwrap(), None);
    assert!(read_all(&image) == bytes);
    image.verify().unwrap();
    let Place::Entry(entry) = image.place(1).unwrap() else {
        panic!("it is not zero")
    };
    assert_eq!((entry.offset, entry.length), (2 * CHUNK as u64, 0));
    let reference = image.backing().unwrap().reference();
    assert_eq!((&*reference.name, reference.size), ("root", 5 * 4096 + 100));

    // Its id depends on its contents alone.
    let whole = folder.image("whole", &bytes, &small());
    assert_eq!(image.id(), whole.id());
    // The file takes only the bytes of its own chunks.
    assert!(image.file_bytes() < whole.file_bytes() - 100);
    // The image stays readable when both files are removed.
    fs::remove_file(folder.file("root")).unwrap();
    fs::remove_file(folder.file("ram")).unwrap();
    assert!(read_all(&image) == bytes);
}

#[test]
fn an_image_that_shares_nothing_with_its_backing_is_version_1() {
    let folder = Folder::new();
    let bytes = contents("tn.");
    folder.image("without", &bytes, &small());
    let options = WriteOptions {
        backing: Some(backing(&folder, "root", &contents("RXY"))),
        ..small()
    };
    let written = write_image(&folder.file("with"), &bytes, &options).unwrap();
    assert_eq!(written.in_backing, 0);
    let [with, without] = ["with", "without"].map(|name| fs::read(folder.file(name)).unwrap());
    assert!(with == without);
}

#[test]
fn a_child_uses_its_parent_s_backing_file_and_more_of_it() {
    use Kind::{Backing, Parent};
    let folder = Folder::new();
    let (parent, _) = image_of_a_root(&folder);
    let bytes = contents("ZY.XXR");
    let options = WriteOptions {
        parent: Some(Arc::new(parent)),
        backing: Some(backing(
            &folder,
            "root",
            &fs::read(folder.file("root")).unwrap(),
        )),
        ..small()
    };
    let child = folder.image("child", &bytes, &options);
    assert_eq!(
        kinds(&child),
        [Backing, Parent, Kind::Zero, Parent, Parent, Parent]
    );
    assert!(read_all(&child) == bytes);
    child.verify().unwrap();
}

#[test]
fn an_optimised_image_stores_only_its_working_set_anew() {
    let folder = Folder::new();
    let (image, bytes) = image_of_a_root(&folder);
    let recording = Recording {
        image: image.id(),
        chunk_size: image.chunk_size(),
        chunks: vec![4, 0],
    };
    optimise(&image, &recording, &folder.file("ram")).unwrap();
    let better = ImageReader::open(&folder.file("ram")).unwrap();
    assert_eq!(better.id(), image.id());
    assert_eq!(better.kind(1).unwrap(), Kind::Backing);
    assert!(better.stored_range(4).unwrap().is_some());
    assert!(read_all(&better) == bytes);
    better.verify().unwrap();

    // An image without the backing file needs no other file.
    let options = WriteOptions {
        backing: None,
        ..optimise::options_of(&image).unwrap()
    };
    write_image(&folder.file("alone"), &optimise::Contents(&image), &options).unwrap();
    fs::remove_file(folder.file("root")).unwrap();
    let alone = ImageReader::open(&folder.file("alone")).unwrap();
    assert!(read_all(&alone) == bytes && alone.id() == image.id());
}

#[test]
fn a_wrong_backing_file_is_refused_by_size_or_at_the_read() {
    let folder = Folder::new();
    image_of_a_root(&folder);
    let (root, ram) = (folder.file("root"), folder.file("ram"));
    let good = fs::read(&root).unwrap();
    let why = || match fault(ImageReader::open(&ram)) {
        Fault::Backing {
            path,
            place: None,
            source,
        } => {
            assert_eq!(path, root);
            source
        }
        other => panic!("{other}"),
    };
    fs::write(&root, &good[1..]).unwrap();
    assert!(matches!(
        why(),
        BackingFault::OtherSize {
            found: 20579,
            wanted: 20580
        }
    ));
    fs::remove_file(&root).unwrap();
    assert!(matches!(why(), BackingFault::Open(_)));
    fs::write(folder.file("elsewhere"), &good).unwrap();
    std::os::unix::fs::symlink(folder.file("elsewhere"), &root).unwrap();
    assert!(matches!(why(), BackingFault::Open(_)), "a link");
    fs::remove_file(&root).unwrap();
    fs::create_dir(&root).unwrap();
    assert!(matches!(why(), BackingFault::NotAFile));
    fs::remove_dir(&root).unwrap();

    let mut other = good.clone();
    other[2 * CHUNK + 9] ^= 1;
    fs::write(&root, &other).unwrap();
    let image = ImageReader::open(&ram).unwrap();
    let mut chunk = vec![0; CHUNK];
    image.read_chunk(3, &mut chunk).unwrap();
    let error = image.read_chunk(1, &mut chunk).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "{}: chunk 1 cannot be read from byte 8192 of its backing file {}",
            ram.display(),
            root.display()
        )
    );
    image.verify().unwrap_err();
    // A change where the image has no chunks is not seen by reads, but changes the digest.
    fs::write(&root, &good).unwrap();
    image.verify().unwrap();
    let file = fs::OpenOptions::new().write(true).open(&root).unwrap();
    file.write_all_at(b"x", 5 * CHUNK as u64).unwrap();
    let found = *image.verify().unwrap_err().fault;
    assert!(
        matches!(
            found,
            Fault::Backing {
                place: None,
                source: BackingFault::OtherContents,
                ..
            }
        ),
        "{found}"
    );
    // The file becomes shorter while it is read.
    file.set_len(0).unwrap();
    let found = *image.read_chunk(3, &mut chunk).unwrap_err().fault;
    assert!(
        matches!(
            found,
            Fault::Backing {
                place: Some((3, 4096)),
                source: BackingFault::Read(_),
                ..
            }
        ),
        "{found}"
    );
}

/// A section's place in the file, by its number in the footer.
fn section(bytes: &[u8], number: usize) -> std::ops::Range<usize> {
    let at = bytes.len() - footer::BYTES + 56 + 24 * number;
    let mut fields = Fields(&bytes[at..]);
    let offset = fields.u64() as usize;
    offset..offset + fields.u64() as usize
}

#[test]
fn an_impossible_place_in_the_backing_file_is_refused() {
    let folder = Folder::new();
    image_of_a_root(&folder);
    let path = folder.file("ram");
    let good = fs::read(&path).unwrap();
    // The second entry is that of chunk 1: its length, and its offset.
    let entry = section(&good, 4).start + ENTRY_BYTES;
    let refused = |change: &dyn Fn(&mut Vec<u8>), word: &str| {
        let mut bad = good.clone();
        change(&mut bad);
        reseal(&mut bad);
        fs::write(&path, &bad).unwrap();
        let read = |image: ImageReader| image.read_chunk(1, &mut vec![0; CHUNK]);
        let error = ImageReader::open(&path).and_then(read).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(word), "{text}");
    };
    let offset = |bytes: &mut [u8], offset: u64| {
        bytes[entry + 8..entry + 14].copy_from_slice(&offset.to_le_bytes()[..6]);
    };
    refused(&|bytes| offset(bytes, 8193), "begin at a block");
    refused(&|bytes| offset(bytes, 512), "begin at a block");
    // The bytes behind the last whole block are not a chunk.
    refused(&|bytes| offset(bytes, 5 * 4096), "outside the backing");
    refused(
        &|bytes| offset(bytes, (1 << 48) - 4096),
        "outside the backing",
    );
    refused(&|bytes| bytes[entry + 4] = 1, "bytes in this one");
    // The backing file's entry in the table is damaged.
    let names = section(&good, 6);
    refused(&|bytes| bytes[names.start + 32] ^= 0xff, "cannot be used");
    refused(
        &|bytes| bytes[names.end - 4..names.end].copy_from_slice(b"../r"),
        "name",
    );
    let footer = good.len() - footer::BYTES;
    refused(&|bytes| bytes[footer + 8] = 1, "reserved bytes");
    refused(&|bytes| bytes[footer + 200 + 8] = 40, "reach the footer");
    refused(&|bytes| bytes[footer + 224] = 1, "reserved bytes");
    refused(
        &|bytes| {
            bytes[footer + 200 + 8..footer + 200 + 16].fill(0);
        },
        "without a backing file",
    );
    // Version 1 has no chunks in a backing file.
    refused(
        &|bytes| {
            bytes[footer + 8] = 1;
            bytes[footer + 200..footer + 224].fill(0);
            bytes.drain(names.clone());
        },
        "and there is none",
    );
}

#[test]
fn every_flipped_bit_is_reported_with_its_offset() {
    let folder = Folder::new();
    image_of_a_root(&folder);
    let path = folder.file("ram");
    let good = fs::read(&path).unwrap();
    for at in (0..64).chain(section(&good, 0).start..good.len()) {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        fs::write(&path, &bad).unwrap();
        let verified = ImageReader::open(&path).and_then(|image| image.verify());
        let error = verified.expect_err("a bit was flipped");
        assert!(error.to_string().contains("at byte "), "{at}: {error}");
    }
}

#[test]
fn a_partial_image_has_no_backing_file() {
    let folder = Folder::new();
    let (image, _) = image_of_a_root(&folder);
    let bytes = fs::read(folder.file("ram")).unwrap();
    let target = folder.file("partial");
    let tail = &bytes[bytes.len() - image.metadata_bytes() as usize + 64..];
    let error = partial::create(&target, bytes.len() as u64, tail, image.id()).unwrap_err();
    let WriteError::Image(error) = error else {
        panic!("{error}")
    };
    assert!(error.to_string().contains("backing file"), "{error}");
    assert!(!target.exists() && !partial::is_partial(&target));
    // An image that became partial is refused too.
    fs::write(partial::map_path(&folder.file("ram")), present(&image)).unwrap();
    let found = fault(ImageReader::open(&folder.file("ram")));
    assert!(matches!(found, Fault::Damaged { .. }), "{found}");
}

/// The map of a file whose blocks are all present.
fn present(image: &ImageReader) -> Vec<u8> {
    let folder = Folder::new();
    let header = jiffy_wire::disk::MapHeader {
        unit: partial::blocks::BLOCK,
        length: image.file_bytes(),
        tail: image.file_bytes() + 64 - image.metadata_bytes(),
        image: image.id().0,
        boot: [0; 16],
    };
    crate::presence::PresenceMap::create(&folder.file("map"), header).unwrap();
    fs::read(folder.file("map")).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_chunk_is_found_if_the_backing_file_has_it(
        root in "[.ABC]{0,40}",
        chunk in "[.ABC]{1,4}",
        tail in 0..CHUNK,
    ) {
        let folder = Folder::new();
        let mut bytes = contents(&root);
        bytes.extend(&contents("D")[..tail]);
        let backing = backing(&folder, "root", &bytes);
        let found = backing.find(0, &contents(&chunk));
        let expected = match chunk.starts_with('.') {
            true => None,
            false => root.find(&chunk).map(|block| (block * CHUNK) as u64),
        };
        prop_assert_eq!(found, expected);
    }
}

#[test]
fn a_backing_file_of_equal_blocks_is_searched_quickly() {
    let folder = Folder::new();
    let root = contents(&format!("{}B{}C", "A".repeat(500), "A".repeat(3000)));
    let backing = backing(&folder, "root", &root);
    let at = |letters: &str| backing.find(0, &contents(letters));
    assert_eq!(at("AB"), Some(499 * 4096));
    assert_eq!(at("BA"), Some(500 * 4096));
    assert_eq!(at("AC"), None, "beyond the searched candidates");
}
