//! Tests of child images.

mod common;

use common::{Tar, extract};
use jiffy_rootfs::{
    Child, Choice, Layer, Limits, Source, child, child_over, import, import_tar, rebuild,
};
use proptest::prelude::*;
use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn layers(tars: &[&[u8]], scratch: &Path) -> Source {
    let layers: Vec<Layer> = (0..)
        .zip(tars)
        .map(|(number, tar)| {
            let path = scratch.join(format!("layer{number}"));
            fs::write(&path, tar).unwrap();
            Layer {
                path,
                ..Layer::default()
            }
        })
        .collect();
    Source::layers(b"{}", &layers, &Choice::new(scratch)).unwrap()
}

/// Applies changes to a parent: returns the files and the child, after a check that it has the same
/// tree as both layers imported together.
fn grow(base: &[u8], changes: &[u8], scratch: &Path) -> (PathBuf, PathBuf, Child) {
    let path = |name: &str| scratch.join(name);
    let mut watch = |_| ControlFlow::Continue(());
    let limits = Limits::default();
    let parent = path("parent");
    import(layers(&[base], scratch), &parent, &limits, &mut watch).unwrap();
    let out = path("child");
    let source = layers(&[changes], scratch);
    let made = child(&parent, source, &out, &limits, &mut watch).unwrap();
    let source = layers(&[base, changes], scratch);
    let flat = import(source, &path("flat"), &limits, &mut watch).unwrap();
    let again = rebuild(&out, &path("again"), &limits, &mut watch).unwrap();
    assert_eq!(again.digest, flat.digest);
    let bytes = fs::read(&out).unwrap();
    assert_eq!(made.image.digest, blake3::hash(&bytes).to_hex().to_string());
    if !made.rebuilt {
        let before = fs::read(&parent).unwrap();
        assert_eq!(made.shared, before.len() as u64);
        assert!(bytes[4096..before.len()] == before[4096..]);
    }
    (parent, out, made)
}

fn tree_of(files: usize) -> Tar {
    (0..files).fold(Tar::new(), |tar, index| {
        tar.file(
            &format!("usr/{}/{index}", index % 7),
            &vec![index as u8; 100 * index],
        )
    })
}

#[test]
fn a_small_change_is_a_small_child() {
    let scratch = tempfile::tempdir().unwrap();
    let base = tree_of(300).file("etc/hosts", b"one").bytes();
    let changes = Tar::new()
        .file("etc/hosts", b"two")
        .file("root/.history", b"ls")
        .file("usr/0/.wh.7", b"")
        .bytes();
    let (parent, out, made) = grow(&base, &changes, scratch.path());
    assert!(!made.rebuilt);
    let grown = made.image.size - fs::metadata(&parent).unwrap().len();
    assert!(grown <= 3 * 4096, "{grown} bytes for three files");
    let unpacked = extract(&out);
    assert_eq!(fs::read(unpacked.root.join("etc/hosts")).unwrap(), b"two");
    assert_eq!(
        fs::read(unpacked.root.join("root/.history")).unwrap(),
        b"ls"
    );
    assert!(!unpacked.root.join("usr/0/7").exists());
    assert_eq!(
        fs::read(unpacked.root.join("usr/0/14")).unwrap(),
        [14; 1400]
    );
}

#[test]
fn a_child_of_a_remote_parent_holds_only_new_data() {
    let scratch = tempfile::tempdir().unwrap();
    let base = tree_of(100).bytes();
    let changes = Tar::new().file("usr/0/7", b"other").bytes();
    let (parent, whole, _) = grow(&base, &changes, scratch.path());
    let out = scratch.path().join("new");
    let source = layers(&[&changes], scratch.path());
    let parent = Arc::new(fs::File::open(parent).unwrap());
    let limits = Limits::default();
    let mut watch = |_| ControlFlow::Continue(());
    let made = child_over(parent, source, &out, &limits, &mut watch).unwrap();
    let (whole, new) = (fs::read(whole).unwrap(), fs::read(out).unwrap());
    let shared = made.shared as usize;
    assert!(new[..4096] == whole[..4096] && new[shared..] == whole[shared..]);
    assert!(new[4096..shared].iter().all(|byte| *byte == 0));
}

#[test]
fn whiteouts_of_an_overlay_upper_folder_are_applied() {
    let scratch = tempfile::tempdir().unwrap();
    let base = Tar::new()
        .file("a/x", b"1")
        .file("a/y", b"2")
        .file("a/w", b"5")
        .file("b/z", b"3")
        .bytes();
    let changes = Tar::new()
        .device("a/x", 0, 0)
        // As guests of older releases send a second whiteout.
        .link(tar::EntryType::Link, "a/w", "a/x")
        .xattr("trusted.overlay.opaque", b"y")
        .folder("b")
        .xattr("trusted.overlay.origin", b"whatever")
        .file("b/new", b"4")
        .bytes();
    let (_, out, _) = grow_overlay(&base, &changes, scratch.path());
    let root = extract(&out);
    assert!(!root.root.join("a/x").exists() && root.root.join("a/y").exists());
    assert!(!root.root.join("a/w").exists());
    assert!(!root.root.join("b/z").exists() && root.root.join("b/new").exists());

    let moved = Tar::new()
        .xattr("trusted.overlay.redirect", b"/a")
        .folder("c")
        .bytes();
    let source = layers(&[&moved], scratch.path());
    let mut watch = |_| ControlFlow::Continue(());
    let error = child(
        &out,
        source,
        &scratch.path().join("n"),
        &Limits::default(),
        &mut watch,
    );
    let error = common::sentence(&error.unwrap_err());
    assert!(error.contains("redirect_dir=off"), "{error}");
}

/// Imports a parent and applies changes with an overlay's whiteouts, which are not allowed in the
/// parent itself.
fn grow_overlay(base: &[u8], changes: &[u8], scratch: &Path) -> (PathBuf, PathBuf, Child) {
    let parent = scratch.join("parent");
    let out = scratch.join("child");
    import_tar(base, &parent, Limits::default()).unwrap();
    let mut watch = |_| ControlFlow::Continue(());
    let source = layers(&[changes], scratch);
    let made = child(&parent, source, &out, &Limits::default(), &mut watch).unwrap();
    (parent, out, made)
}

#[test]
fn a_file_that_is_copied_up_shares_its_bytes() {
    let scratch = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7 / 3) as u8).collect();
    let mut edited = bytes.clone();
    edited[1_500_000] ^= 1;
    edited.extend_from_slice(b"and an end");
    let base = Tar::new()
        .file("same", &bytes)
        .file("edited", &bytes)
        .file("other", b"")
        .bytes();
    let changes = Tar::new()
        .xattr("user.new", b"attribute")
        .file("same", &bytes)
        .file("edited", &edited)
        .bytes();
    let (parent, out, made) = grow(&base, &changes, scratch.path());
    let grown = made.image.size - fs::metadata(&parent).unwrap().len();
    assert!(!made.rebuilt && grown < 32 * 1024, "{grown} bytes");
    let unpacked = extract(&out);
    assert!(fs::read(unpacked.root.join("same")).unwrap() == bytes);
    assert!(fs::read(unpacked.root.join("edited")).unwrap() == edited);
}

#[test]
fn a_child_is_rebuilt_when_most_of_it_is_garbage() {
    let scratch = tempfile::tempdir().unwrap();
    let mut parent = scratch.path().join("0");
    let base = Tar::new().file("base", &[1; 50_000]).bytes();
    import_tar(base.as_slice(), &parent, Limits::default()).unwrap();
    let mut watch = |_| ControlFlow::Continue(());
    let (mut rebuilt, mut largest) = (0, 0);
    for generation in 1..12u8 {
        let changes = Tar::new()
            .file("changing", &vec![generation; 40_000])
            .bytes();
        let source = layers(&[&changes], scratch.path());
        let out = scratch.path().join(generation.to_string());
        let made = child(&parent, source, &out, &Limits::default(), &mut watch).unwrap();
        rebuilt += u32::from(made.rebuilt);
        assert!(made.garbage * 2 <= made.image.size);
        largest = largest.max(made.image.size);
        parent = out;
    }
    assert!(rebuilt > 0);
    assert!(largest < 4 * 100_000, "{largest} bytes for 90,000");
    let unpacked = extract(&parent);
    assert_eq!(
        fs::read(unpacked.root.join("changing")).unwrap(),
        [11; 40_000]
    );
    assert_eq!(fs::read(unpacked.root.join("base")).unwrap(), [1; 50_000]);
}

#[test]
fn hard_links_are_preserved() {
    let scratch = tempfile::tempdir().unwrap();
    let hard = tar::EntryType::Link;
    let base = Tar::new()
        .file("a", b"one")
        .link(hard, "d/b", "a")
        .file("other", &[5; 9000]);
    let changes = Tar::new().link(hard, "d/c", "d/b").file(".wh.a", b"");
    let (_, out, _) = grow(&base.bytes(), &changes.bytes(), scratch.path());
    let unpacked = extract(&out);
    let meta = |name: &str| fs::metadata(unpacked.root.join(name)).unwrap();
    assert_eq!(fs::read(unpacked.root.join("d/c")).unwrap(), b"one");
    assert!(meta("d/b").size() == 3 && !unpacked.root.join("a").exists());
}

#[test]
fn damaged_and_foreign_parents_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    let parent = scratch.path().join("parent");
    let refused = |bytes: &[u8]| {
        fs::write(&parent, bytes).unwrap();
        let mut watch = |_| ControlFlow::Continue(());
        let error = rebuild(&parent, &out, &Limits::default(), &mut watch).unwrap_err();
        common::sentence(&error)
    };
    assert!(refused(b"").contains("it is too small"));
    assert!(refused(&[0; 8192]).contains("it is not an EROFS image"));
    import_tar(tree_of(20).bytes().as_slice(), &parent, Limits::default()).unwrap();
    let good = fs::read(&parent).unwrap();
    assert!(refused(&good[..good.len() - 4096]).contains("it is truncated"));
    let mut bad = good.clone();
    bad[1024 + 36] ^= 1;
    assert!(refused(&bad).contains("checksum is wrong"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_change_gives_the_same_tree_as_both_layers(
        base in proptest::collection::btree_map("[a-d](/[a-d]{1,3}){0,3}", 0usize..12_000, 1..40),
        changes in proptest::collection::btree_map("[a-d](/[a-d]{1,3}){0,3}", (0usize..12_000, 0..4u8), 0..10)
    ) {
        let clash = |path: &str, mut all: Box<dyn Iterator<Item = &String> + '_>| {
            all.any(|other| other.starts_with(&format!("{path}/")))
        };
        let lower = base.iter().filter(|(path, _)| !clash(path, Box::new(base.keys())));
        let lower = lower.fold(Tar::new(), |tar, (path, size)| tar.file(path, &vec![*size as u8; *size]));
        let upper = changes.iter().filter(|(path, _)| !clash(path, Box::new(changes.keys())));
        let upper = upper.fold(Tar::new().folder_of_mode("e", 0o700), |tar, (path, (size, kind))| {
            let (folder, name) = path.rsplit_once('/').unwrap_or((".", path));
            match kind {
                0 | 1 => tar.file(path, &vec![*size as u8; *size]),
                2 => tar.file(&format!("{folder}/.wh.{name}"), b""),
                _ => tar.folder_of_mode(path, 0o711).file(&format!("{path}/.wh..wh..opq"), b""),
            }
        });
        let scratch = tempfile::tempdir().unwrap();
        let (_, out, _) = grow(&lower.bytes(), &upper.bytes(), scratch.path());
        extract(&out);
    }

    #[test]
    fn any_damage_is_refused_or_harmless(at in 0usize..24_576, value: u8, len in 1usize..9) {
        let scratch = tempfile::tempdir().unwrap();
        let parent = scratch.path().join("parent");
        let bytes = Tar::new().xattr("user.a", b"b").file("d/a", &[1; 5000]).folder("d/e")
            .link(tar::EntryType::Symlink, "d/l", "target").device("n", 1, 3).bytes();
        import_tar(bytes.as_slice(), &parent, Limits::default()).unwrap();
        let mut bytes = fs::read(&parent).unwrap();
        let at = at % bytes.len();
        let end = (at + len).min(bytes.len());
        bytes[at..end].fill(value);
        let sum = !crc_fast::crc32_iscsi(&[&bytes[1024..1028], &[0; 4], &bytes[1032..4096]].concat());
        bytes[1028..1032].copy_from_slice(&sum.to_le_bytes());
        fs::write(&parent, &bytes).unwrap();
        let mut watch = |_| ControlFlow::Continue(());
        let limits = Limits { image_bytes: 1 << 30, ..Limits::default() };
        let _ = rebuild(&parent, &scratch.path().join("out"), &limits, &mut watch);
    }
}
