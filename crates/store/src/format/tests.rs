//! Pins the format: these files were written by versions 1 and 2. Every later release must read
//! them, and write the same bytes as long as these are its versions.

use super::*;
use crate::codec::Codec;
use crate::reader::ImageReader;
use crate::samples::{Folder, backing, contents, read_all, small};
use crate::writer::{WriteOptions, write_image};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// `.` zero, `n` noise, `t` text, `X` the same text each time.
const BASE: &str = "t.nX.X";
const CHILD: &str = "t..X.nt";
/// The letters of the root, and of `RAM`, whose backing file it is.
const ROOT: &str = "RX.Y";
const RAM: &str = "tXY.YRn";
const FILES: [&str; 4] = [
    "base-v1.image",
    "child-v1.image",
    "ram-v2.image",
    "root-v2.backing",
];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("golden")
        .join(name)
}

fn write(folder: &Folder) {
    let base = folder.image("base-v1.image", &contents(BASE), &small());
    let options = WriteOptions {
        codec: Codec::Zstd(3),
        parent: Some(Arc::new(base)),
        working_set: Some(vec![6, 0, 1]),
        ..small()
    };
    folder.image("child-v1.image", &contents(CHILD), &options);
    let options = WriteOptions {
        backing: Some(backing(folder, "root-v2.backing", &contents(ROOT))),
        working_set: Some(vec![5]),
        ..small()
    };
    folder.image("ram-v2.image", &contents(RAM), &options);
}

#[test]
fn golden_files_are_read() {
    for (name, letters) in [
        ("base-v1.image", BASE),
        ("child-v1.image", CHILD),
        ("ram-v2.image", RAM),
    ] {
        let image = ImageReader::open(&golden(name)).unwrap();
        image.verify().unwrap();
        assert!(read_all(&image) == contents(letters), "{name}");
    }
    let child = ImageReader::open(&golden("child-v1.image")).unwrap();
    assert_eq!(child.working_set().unwrap(), [6..7, 0..2]);
    assert_eq!(child.kind(3).unwrap(), Kind::Parent);
    let ram = ImageReader::open(&golden("ram-v2.image")).unwrap();
    assert_eq!(ram.kind(4).unwrap(), Kind::Backing);
}

/// A changed layout fails here until version, golden files and document agree. A new release of a
/// compressor may compress a chunk differently, which does not matter to readers.
/// `JIFFY_WRITE_GOLDEN=1` writes the files.
#[test]
fn the_writer_reproduces_the_golden_files() {
    let folder = Folder::new();
    write(&folder);
    for name in FILES {
        let now = fs::read(folder.file(name)).unwrap();
        if std::env::var_os("JIFFY_WRITE_GOLDEN").is_some() {
            fs::create_dir_all(golden("")).unwrap();
            fs::write(golden(name), &now).unwrap();
        }
        let then = fs::read(golden(name)).unwrap();
        let differs = now.iter().zip(&then).position(|(now, then)| now != then);
        assert_eq!((differs, now.len()), (None, then.len()), "{name}");
    }
}

#[test]
fn parent_names_never_leave_the_folder() {
    for name in [
        "",
        ".",
        "..",
        "a/b",
        "/etc/passwd",
        "a\0b",
        &"x".repeat(256),
    ] {
        assert!(!is_name(name), "{name}");
    }
    for name in ["a", "base.image", "...", "ä b", &"x".repeat(255)] {
        assert!(is_name(name), "{name}");
    }
}

#[test]
fn only_equal_contents_have_equal_ids() {
    let folder = Folder::new();
    let id = |letters: &str, options: &WriteOptions| {
        write_image(&folder.file("a"), &contents(letters), options)
            .unwrap()
            .id
    };
    let base = id("t.nX", &small());
    let zstd = WriteOptions {
        codec: Codec::Zstd(1),
        working_set: Some(vec![3]),
        ..small()
    };
    assert_eq!(id("t.nX", &zstd), base);
    let others = [
        id("t.nX", &WriteOptions::default()),
        id("t.nX.", &small()),
        id("t.nY", &small()),
        id("tn.X", &small()),
        id(".tnX", &small()),
    ];
    for (number, other) in others.iter().enumerate() {
        assert_ne!(*other, base);
        assert!(!others[..number].contains(other));
    }
}
