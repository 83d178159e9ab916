//! Entry points for fuzzing: parsers of what registries and files hold.

use crate::images::name;
use crate::model::artifact::{ImageArtifact, SnapshotArtifact};
use crate::{names, records};
use std::fmt::Debug;
use std::path::Path;

/// Reads the name of an image as clients give it.
///
/// # Panics
///
/// If it would lead out of the folder of images.
pub fn image_name(text: &str) {
    for registry in [None, Some("registry.example.com")] {
        for candidate in name::candidates(text, registry).unwrap_or_default() {
            let folder = name::folder(&candidate).expect("a meaning has a folder");
            assert!(!folder.contains('/') && ![".", "..", ""].contains(&&*folder));
            assert_eq!(name::of_folder(&folder), Some(candidate));
        }
    }
    if names::check("VM", text).is_ok() {
        assert!(!text.contains('/') && !text.starts_with('.') && !text.is_empty());
    }
}

/// Reads the configuration of an artifact that a registry has.
///
/// # Panics
///
/// If an artifact can not be written and read back unchanged.
pub fn artifact(bytes: &[u8]) {
    if let Ok(image) = ImageArtifact::read(bytes) {
        let blob = image.blob().expect("it is written");
        assert_eq!(ImageArtifact::read(&blob.bytes).ok(), Some(image));
    }
    if let Ok(snapshot) = SnapshotArtifact::read(bytes) {
        let blob = snapshot.blob().expect("it is written");
        assert_eq!(SnapshotArtifact::read(&blob.bytes).ok(), Some(snapshot));
    }
}

/// Reads a record of this kind from a file in `folder`, written with a correct checksum.
///
/// # Panics
///
/// If what is read can't be written and read again.
pub fn record(kind: u8, content: &str, folder: &Path) {
    let (file, format, version) = FORMATS[usize::from(kind) % FORMATS.len()];
    let path = folder.join(file);
    let sum = crc_fast::crc32_iscsi(content.as_bytes());
    let text = format!(
        r#"{{"format":"{format}","version":{version},"crc32c":"{sum:08x}","content":{content}}}"#
    );
    std::fs::write(&path, text).expect("the folder can be written");
    let vm = |path: &Path| records::vm::load(path.parent().expect("a folder"));
    let snapshot = |path: &Path| records::snapshot::load(path.parent().expect("a folder"));
    match kind as usize % FORMATS.len() {
        0 => again(&path, vm, |_, record| {
            records::vm::save(folder, record, false)
        }),
        1 => again(&path, snapshot, |_, record| {
            records::snapshot::save(folder, record)
        }),
        2 | 3 => again(&path, records::image::load, records::image::save),
        4 => again(&path, records::boot_set::load, records::boot_set::save),
        5 => again(&path, records::origins::load, |path, origins| {
            records::origins::save(path, &origins)
        }),
        6 => again(&path, records::prefault::load, |path, ranges| {
            records::prefault::save(path, &ranges)
        }),
        _ => again(&path, records::timeline::load, records::timeline::save),
    }
    let _ = records::vm::name_in_any(folder);
}

/// File, format and version of each kind.
const FORMATS: [(&str, &str, u32); 8] = [
    ("vm.json", "jiffy-vm", 1),
    ("snapshot.json", "jiffy-snapshot", 1),
    ("image.json", "jiffy-image", 1),
    ("image.json", "jiffy-image", 2),
    ("boot.json", "jiffy-boot-set", 1),
    ("origins.json", "jiffy-origins", 1),
    ("prefault.json", "jiffy-prefault", 1),
    ("timeline.json", "jiffy-timeline", 1),
];

fn again<T: Debug + Clone, E: Debug>(
    path: &Path,
    load: impl Fn(&Path) -> Result<T, E>,
    save: impl Fn(&Path, T) -> std::io::Result<()>,
) {
    if let Ok(record) = load(path) {
        save(path, record.clone()).expect("it is written");
        let again = load(path).expect("what was written is read");
        assert_eq!(format!("{again:?}"), format!("{record:?}"));
    }
}
