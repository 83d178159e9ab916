//! Checks images with erofs-utils, which share no code with Jiffy's.

mod common;

use common::{Tar, unpack};
use jiffy_rootfs::{ImportError, Limits, import_tar};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

fn refusal(tar: &[u8]) -> String {
    let scratch = tempfile::tempdir().unwrap();
    let image = scratch.path().join("image.erofs");
    let error = import_tar(tar, &image, Limits::default()).unwrap_err();
    let left = fs::read_dir(scratch.path()).unwrap().count();
    assert_eq!(left, 0, "a refused archive leaves nothing behind");
    match std::error::Error::source(&error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

#[test]
fn files_of_edge_case_sizes_survive_a_round_trip() {
    let sizes = [
        0, 1, 4031, 4032, 4033, 4095, 4096, 4097, 8192, 131_071, 131_072, 400_001,
    ];
    let content = |size: usize| (0..size).map(|i| (i * 7 % 251) as u8).collect::<Vec<u8>>();
    let tar = sizes.iter().fold(Tar::new(), |tar, size| {
        tar.file(&format!("folder/{size}"), &content(*size))
    });
    let unpacked = unpack(&tar.bytes());
    for size in sizes {
        let file = unpacked.root.join(format!("folder/{size}"));
        assert!(fs::read(&file).unwrap() == content(size), "{size} bytes");
        let meta = fs::metadata(&file).unwrap();
        assert_eq!(
            (meta.mode() & 0o7777, meta.uid(), meta.gid(), meta.mtime()),
            (0o640, 1234, 70_000, 1_700_000_000)
        );
    }
}

#[test]
fn links_devices_and_folders_survive_a_round_trip() {
    let long_target = "t/".repeat(600);
    let tar = Tar::new()
        .folder("empty")
        .file("one", b"the same bytes")
        .link(tar::EntryType::Link, "two", "one")
        .link(tar::EntryType::Symlink, "relative", "../outside/of/it")
        .link(tar::EntryType::Symlink, "long", &long_target)
        .device("null", 1, 3)
        .device("far", 0x123, 0x45678)
        .bytes();
    let root = unpack(&tar).root.clone();
    let unpacked = unpack(&tar);
    assert!(!root.exists(), "scratch folders go");
    let root = &unpacked.root;
    assert_eq!(fs::metadata(root.join("empty")).unwrap().mode(), 0o042_755);
    assert_eq!(fs::read(root.join("two")).unwrap(), b"the same bytes");
    let target = |name: &str| fs::read_link(root.join(name)).unwrap();
    assert_eq!(target("relative"), Path::new("../outside/of/it"));
    assert_eq!(target("long"), Path::new(long_target.as_str()));
    for (name, major, minor) in [("null", 1, 3), ("far", 0x123, 0x45678)] {
        let meta = fs::metadata(root.join(name)).unwrap();
        assert!(meta.file_type().is_char_device());
        let device = meta.rdev();
        let found = (
            (device >> 8) & 0xfff,
            (device & 0xff) | ((device >> 12) & 0xf_ff00),
        );
        assert_eq!(found, (major, minor), "{name}");
    }
}

#[test]
fn fields_left_empty_are_zero() {
    let unpacked = unpack(&Tar::new().anonymous("f").bytes());
    let meta = fs::metadata(unpacked.root.join("f")).unwrap();
    assert_eq!((meta.uid(), meta.gid(), meta.mtime()), (0, 0, 0));
}

#[test]
fn a_folder_of_many_long_names_spans_blocks() {
    let names: Vec<String> = (0..900)
        .map(|i| format!("{i:04}-{}", "n".repeat(i % 200)))
        .collect();
    let tar = names.iter().fold(Tar::new(), |tar, name| {
        tar.file(&format!("many/{name}"), name.as_bytes())
    });
    let unpacked = unpack(&tar.bytes());
    for name in &names {
        let found = fs::read_to_string(unpacked.root.join("many").join(name)).unwrap();
        assert_eq!(&found, name);
    }
    let count = fs::read_dir(unpacked.root.join("many")).unwrap().count();
    assert_eq!(count, names.len());
}

#[test]
fn attributes_are_stored_or_refused() {
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let tar = Tar::new()
        .xattr("security.capability", &capability)
        .file("ping", &[7; 5000])
        .xattr("user.large", &[b'v'; 5000])
        .file("large", &[8; 4000])
        .bytes();
    let unpacked = unpack(&tar);
    assert_eq!(fs::read(unpacked.root.join("ping")).unwrap(), [7; 5000]);
    assert_eq!(fs::read(unpacked.root.join("large")).unwrap(), [8; 4000]);

    let long = "n".repeat(300);
    let tar = Tar::new()
        .xattr(&format!("user.{long}"), b"v")
        .file("f", b"");
    assert!(refusal(&tar.bytes()).contains(&long));

    // Attributes of other systems are left out and counted; those of overlayfs are left out.
    let scratch = tempfile::tempdir().unwrap();
    let strange = Tar::new()
        .xattr("btrfs.compression", b"zstd")
        .xattr("trusted.overlay.opaque", b"y")
        .file("f", b"")
        .bytes();
    let out = scratch.path().join("image");
    let imported = import_tar(strange.as_slice(), &out, Limits::default()).unwrap();
    assert_eq!(imported.dropped_xattrs, 1);
    let without = import_tar(
        Tar::new().file("f", b"").bytes().as_slice(),
        &out,
        Limits::default(),
    );
    assert_eq!(without.unwrap().digest, imported.digest);
}

#[test]
fn hostile_archives_are_refused_with_a_message() {
    let climbs = Tar::new().raw_path(b"../../etc/passwd").bytes();
    assert!(refusal(&climbs).contains("leaves the root folder"));

    let through_link = Tar::new()
        .link(tar::EntryType::Symlink, "etc", "/etc")
        .file("etc/passwd", b"root::0:0::/:/bin/sh")
        .bytes();
    assert!(refusal(&through_link).contains("not a folder"));

    let twice = Tar::new().file("a", b"1").file("a", b"2").bytes();
    assert!(refusal(&twice).contains("twice"));

    let dangling = Tar::new()
        .link(tar::EntryType::Link, "a", "nothing")
        .bytes();
    assert!(refusal(&dangling).contains("nothing"));

    assert!(refusal(b"").contains("truncated"));
    assert!(refusal(&[b'x'; 2048]).contains("checksum"));

    let mut cut = Tar::new().file("big", &[5; 10_000]).bytes();
    cut.truncate(6000);
    assert!(refusal(&cut).contains("truncated at byte 6000"));
}

#[test]
fn an_image_over_its_limit_is_refused_and_removed() {
    let scratch = tempfile::tempdir().unwrap();
    let tar = Tar::new().file("big", &[5; 100_000]).bytes();
    let limits = Limits {
        image_bytes: 64 * 1024,
        ..Limits::default()
    };
    let error = import_tar(tar.as_slice(), &scratch.path().join("i"), limits).unwrap_err();
    assert!(matches!(error, ImportError::Plan(_)), "{error}");
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
}

#[test]
fn the_same_archive_gives_the_same_digest() {
    let tar = Tar::new().folder("d").file("d/f", &[1; 9000]).bytes();
    let scratch = tempfile::tempdir().unwrap();
    let digests: Vec<String> = (0..2)
        .map(|i| {
            let out = scratch.path().join(format!("{i}.erofs"));
            import_tar(tar.as_slice(), &out, Limits::default())
                .unwrap()
                .digest
        })
        .collect();
    assert_eq!(digests[0], digests[1]);
    let bytes = fs::read(scratch.path().join("0.erofs")).unwrap();
    assert_eq!(digests[0], blake3::hash(&bytes).to_hex().to_string());
}

/// Inodes of 64 bytes: 64 of them fill a block.
#[test]
fn inodes_that_fill_their_block_are_read_back() {
    let tar = (0..64).fold(Tar::new(), |tar, number| {
        tar.file(&format!("{number}"), b"")
    });
    let unpacked = unpack(&tar.bytes());
    assert_eq!(fs::read_dir(&unpacked.root).unwrap().count(), 64);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_tree_survives_a_round_trip(
        files in proptest::collection::btree_map("[a-z]{1,3}(/[a-z]{4,40}){0,3}", 0usize..20_000, 1..60)
    ) {
        // A path that is also the parent of another is refused, so only leaves are kept.
        let leaves: BTreeMap<_, _> = files
            .iter()
            .filter(|(path, _)| !files.keys().any(|other| other.starts_with(&format!("{path}/"))))
            .collect();
        let tar = leaves.iter().fold(Tar::new(), |tar, (path, size)| {
            tar.file(path, &vec![(**size % 255) as u8; **size])
        });
        let unpacked = unpack(&tar.bytes());
        for (path, size) in leaves {
            let found = fs::read(unpacked.root.join(path)).unwrap();
            prop_assert!(found == vec![(*size % 255) as u8; *size], "{}", path);
        }
    }
}
