//! For fuzzing: what is read of clients, registries and files, without a node.

use crate::api::parts;
use crate::images::artifact::ImageArtifact;
use crate::images::{config, name};
use crate::records;
use crate::snapshots::remote::SnapshotArtifact;
use crate::vm::log;
use crate::{names, roots, spec};
use axum::http::Uri;
use jiffy_wire::api::{self, CreateVm};
use serde::de::{DeserializeOwned, IgnoredAny};
use std::collections::HashMap;
use std::fmt::Debug;
use std::path::Path;

/// Reads a body of each request of the API, and checks what it asks for.
///
/// # Panics
///
/// If what was found good is not.
pub fn body(kind: u8, bytes: &[u8]) {
    match kind % 9 {
        0 => read::<CreateVm>(bytes, wanted),
        1 => read::<api::RunVm>(bytes, |run| wanted(run.vm)),
        2 => read::<api::ForkVm>(bytes, |_| {}),
        3 => read::<api::MakeSnapshot>(bytes, |_| {}),
        4 => read::<api::PullImage>(bytes, |_| {}),
        5 => read::<api::PushArtifact>(bytes, |_| {}),
        6 => read::<api::MakeVolume>(bytes, |_| {}),
        7 => read::<api::ResizeVolume>(bytes, |_| {}),
        _ => read::<api::CommitVm>(bytes, |_| {}),
    }
}

fn read<T: DeserializeOwned>(bytes: &[u8], then: impl FnOnce(T)) {
    if let Ok(body) = parts::object(bytes) {
        then(body);
    }
}

/// What is good for a VM is so for another one of the same.
fn wanted(wanted: CreateVm) {
    if let Some(root_disk) = &wanted.root_disk {
        let _ = roots::check(root_disk);
    }
    if let Ok(spec) = spec::check_of(wanted, "base", &api::ImageConfig::default()) {
        spec::check_volumes(&spec.disks).expect("its volumes were checked");
        if let Some(command) = &spec.command {
            spec::check_command(command).expect("its command was checked");
        }
        let _ = spec::golden(&spec);
    }
}

/// Reads a query as those of the API are.
pub fn query(text: &str) {
    if let Ok(uri) = text.parse::<Uri>() {
        let _ = parts::query::<HashMap<String, IgnoredAny>>(&uri);
        let _ = parts::query::<HashMap<String, u64>>(&uri);
        let _ = parts::query::<HashMap<String, bool>>(&uri);
    }
}

/// Reads the name of an image as clients give it.
///
/// # Panics
///
/// If it would lead out of the folder of images.
pub fn image_name(text: &str) {
    for registry in [None, Some("registry.example.com")] {
        for meaning in name::meanings(text, registry).unwrap_or_default() {
            let folder = name::folder(&meaning).expect("a meaning has a folder");
            assert!(!folder.contains('/') && ![".", "..", ""].contains(&&*folder));
            assert_eq!(name::of_folder(&folder), Some(meaning));
        }
    }
    if names::check("VM", text).is_ok() {
        assert!(!text.contains('/') && !text.starts_with('.') && !text.is_empty());
    }
}

/// Takes over an image's configuration into a command.
pub fn image_config(json: &[u8]) {
    let Ok(read) = serde_json::from_slice::<api::ImageConfig>(json) else {
        return;
    };
    if config::check(&read).is_ok() {
        let _ = config::stop_signal(&read);
        let _ = spec::check_of(CreateVm::default(), "a", &read);
    }
}

/// Reads the configuration of an artifact that a registry has.
///
/// # Panics
///
/// If what was read is not what is written.
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

/// Reads a record of a kind from a file in `folder`, with the checksum made right.
///
/// # Panics
///
/// If what is read can't be written and read again.
pub fn record(kind: u8, content: &str, folder: &Path) {
    let (file, format, version) = FORMATS[usize::from(kind) % FORMATS.len()];
    let path = folder.join(file);
    let sum = crc32c::crc32c(content.as_bytes());
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

/// Reads a VM's log that is `bytes`, then writes on.
///
/// # Panics
///
/// If what was written then is not read.
pub fn command_log(bytes: &[u8], folder: &Path) {
    std::fs::write(folder.join("command.log"), bytes).expect("the folder can be written");
    let mut reader = log::Reader::new(folder, 0);
    while let Ok(batch) = reader.batch(u64::MAX) {
        if batch.is_empty() {
            break;
        }
    }
    let _ = log::end_of(folder);
    let Ok(mut writer) = log::Writer::open(folder) else {
        return;
    };
    let before = writer.end();
    if writer.append(log::Kind::Note, b"on").is_ok() {
        let mut reader = log::Reader::new(folder, before);
        let batch = reader.batch(writer.end()).expect("what was written");
        assert_eq!(
            batch.last().map(|record| &record.data[..]),
            Some(&b"on"[..])
        );
    }
}
