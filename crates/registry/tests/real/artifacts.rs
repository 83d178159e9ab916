//! Artifacts, and how other tools handle them.

use crate::{bytes, client, reference, registry, skopeo};
use jiffy_registry::artifact::{
    Artifact, Config, FileToPush, IMAGE_TYPE, MAX_PACK, RemoteArtifact, SNAPSHOT_TYPE,
};
use jiffy_registry::{Descriptor, Platform, Progress, Reference, RegistryError};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Mutex;

fn config() -> Config {
    Config {
        media_type: "application/vnd.jiffy.image.config.v1+json".into(),
        bytes: br#"{"id":"x"}"#.to_vec(),
    }
}

/// A file with a boot set, data and a tail; returns its content too.
fn image(folder: &Path, name: &str, seed: u64, size: usize) -> (FileToPush, Vec<u8>) {
    let path = folder.join(name);
    let content = bytes(seed, size);
    fs::write(&path, &content).unwrap();
    let file = FileToPush::local(name, path, "data")
        .cut(0, "boot")
        .cut(100_000, "data")
        .cut(size as u64 - 5_000, "tail")
        .read_in_parts();
    (file, content)
}

fn plan(files: &[FileToPush]) -> Artifact {
    let annotations = BTreeMap::from([("org.opencontainers.image.title".into(), "x".into())]);
    Artifact::plan(IMAGE_TYPE, config(), annotations, files, &()).unwrap()
}

/// Bytes moved per blob.
#[derive(Default)]
struct Moved(Mutex<BTreeMap<String, u64>>);

impl Progress for Moved {
    fn moved(&self, blob: &Descriptor, done: u64) {
        self.0.lock().unwrap().insert(blob.digest.to_string(), done);
    }
}

#[test]
fn pushed_files_are_read_back_unchanged() {
    let registry = registry();
    let client = client();
    let there = tempfile::tempdir().unwrap();
    let size = MAX_PACK as usize + 300_000;
    let (disk, disk_content) = image(there.path(), "disk.jimg", 1, size);
    fs::write(there.path().join("state"), b"state").unwrap();
    fs::write(there.path().join("empty"), b"").unwrap();
    let artifact = plan(&[
        disk,
        FileToPush::local("state", there.path().join("state"), "whole"),
        FileToPush::local("empty", there.path().join("empty"), "whole"),
    ]);
    let to = reference(&registry, "team/disk:1");
    let moved = Moved::default();
    let pushed = artifact.push(&client, &to, there.path(), &moved).unwrap();
    assert_eq!(pushed.digest, artifact.digest());
    assert_eq!(
        pushed.bytes_total,
        size as u64 + size.div_ceil(64 << 10) as u64 * 16 + 5 + config().bytes.len() as u64
    );
    assert_eq!(pushed.bytes_uploaded, pushed.bytes_total);
    let blobs: u64 = moved.0.lock().unwrap().values().sum();
    assert_eq!(blobs, pushed.bytes_total);
    let again = artifact.push(&client, &to, there.path(), &()).unwrap();
    assert_eq!(again.bytes_uploaded, 0);

    let remote = RemoteArtifact::open(&client, &to, &()).unwrap();
    assert!(RemoteArtifact::is_artifact(remote.manifest()));
    assert_eq!(remote.artifact_type(), IMAGE_TYPE);
    assert_eq!(remote.config(), config().bytes);
    assert_eq!(remote.reference().digest(), Some(pushed.digest));
    assert_eq!(remote.annotations()["org.opencontainers.image.title"], "x");
    let names: Vec<_> = remote.files().iter().map(|file| file.name()).collect();
    assert_eq!(names, ["disk.jimg", "state", "empty"]);
    let disk = remote.file("disk.jimg").unwrap();
    let size = size as u64;
    assert_eq!(disk.size(), size);
    assert_eq!(disk.range_of("boot"), Some(0..100_000));
    assert_eq!(disk.range_of("tail"), Some(size - 5_000..size));
    for range in [
        0..100_000,
        size - 5_000..size,
        99_990..100_010,
        size - 5_001..size - 4_999,
        0..0,
        40..size - 7,
    ] {
        let part = disk.read(range.clone(), &()).unwrap();
        assert!(
            part == disk_content[range.start as usize..range.end as usize],
            "{range:?}"
        );
    }
    assert!(disk.read(0..size + 1, &()).is_err());

    let back = tempfile::tempdir().unwrap();
    remote.fetch_all(back.path(), &()).unwrap();
    assert!(fs::read(back.path().join("disk.jimg")).unwrap() == disk_content);
    assert_eq!(fs::read(back.path().join("state")).unwrap(), b"state");
    assert_eq!(fs::read(back.path().join("empty")).unwrap(), b"");
    assert_eq!(fs::read_dir(back.path()).unwrap().count(), 3);
}

#[test]
fn a_file_without_hashes_of_blocks_is_read_by_whole_packs() {
    let registry = registry();
    let client = client();
    let there = tempfile::tempdir().unwrap();
    let content = bytes(7, 400_000);
    let path = there.path().join("disk");
    fs::write(&path, &content).unwrap();
    let file = FileToPush::local("disk", path, "data").cut(100_000, "data");
    let to = reference(&registry, "older:1");
    plan(&[file]).push(&client, &to, there.path(), &()).unwrap();
    let remote = RemoteArtifact::open(&client, &to, &()).unwrap();
    let file = remote.file("disk").unwrap();
    assert_eq!(file.bytes_to_read(&(5..10)), 100_000);
    assert_eq!(file.bytes_to_read(&(99_999..100_001)), 400_000);
    for range in [5..10, 20..99_999, 99_990..100_010, 250_000..400_000] {
        let moved = Moved::default();
        let part = file.read(range.clone(), &moved).unwrap();
        assert!(part == content[range.start as usize..range.end as usize]);
        // The pack that was read last is still in memory.
        let is_again = [20, 250_000].contains(&range.start);
        assert_eq!(moved.0.lock().unwrap().is_empty(), is_again, "{range:?}");
    }
}

#[test]
fn a_fetch_resumes_at_whole_packs_and_repairs_wrong_ones() {
    let registry = registry();
    let client = client();
    let there = tempfile::tempdir().unwrap();
    let (disk, content) = image(there.path(), "disk", 2, 400_000);
    let to = reference(&registry, "disk:1");
    plan(&[disk]).push(&client, &to, there.path(), &()).unwrap();
    let remote = RemoteArtifact::open(&client, &to, &()).unwrap();
    let file = remote.file("disk").unwrap();
    let back = tempfile::tempdir().unwrap();

    // The partial file holds only the boot set.
    let mut partial = content.clone();
    partial[100_000..].fill(0);
    fs::write(back.path().join(".disk.partial"), &partial).unwrap();
    let moved = Moved::default();
    let path = file.fetch(back.path(), &moved).unwrap();
    assert!(fs::read(&path).unwrap() == content);
    assert_eq!(moved.0.lock().unwrap().len(), 3);

    // The file on disk is damaged: it is fetched again.
    let mut damaged = content.clone();
    damaged[399_999] ^= 1;
    fs::write(&path, &damaged).unwrap();
    file.fetch(back.path(), &()).unwrap();
    assert!(fs::read(&path).unwrap() == content);
    assert_eq!(fs::read_dir(back.path()).unwrap().count(), 1);

    // Several threads fetch at once.
    let back = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| remote.fetch_all(back.path(), &()).unwrap());
        }
    });
    assert!(fs::read(back.path().join("disk")).unwrap() == content);
    assert_eq!(fs::read_dir(back.path()).unwrap().count(), 1);
}

#[test]
fn skopeo_carries_an_artifact_to_a_layout_and_to_another_registry() {
    let (registry, other) = (registry(), registry());
    let client = client();
    let there = tempfile::tempdir().unwrap();
    let (disk, content) = image(there.path(), "disk", 3, 500_000);
    let artifact = plan(&[disk]);
    let from = reference(&registry, "disk:1");
    artifact.push(&client, &from, there.path(), &()).unwrap();

    let layout = there.path().join("layout");
    skopeo::copy(&format!("docker://{from}"), &skopeo::layout(&layout, "one"));
    let named = layout.join("blobs/sha256").join(artifact.digest().hex());
    assert_eq!(fs::read(named).unwrap(), artifact.manifest());

    let to = reference(&other, "elsewhere/disk:2");
    skopeo::copy(&skopeo::layout(&layout, "one"), &format!("docker://{to}"));
    let remote = RemoteArtifact::open(&client, &to, &()).unwrap();
    assert_eq!(remote.reference().digest(), Some(artifact.digest()));
    let back = tempfile::tempdir().unwrap();
    remote.fetch_all(back.path(), &()).unwrap();
    assert!(fs::read(back.path().join("disk")).unwrap() == content);
}

#[test]
fn garbage_collection_keeps_only_an_artifacts_blobs() {
    let registry = registry();
    let client = client();
    let there = tempfile::tempdir().unwrap();
    let (disk, content) = image(there.path(), "disk", 4, 500_000);
    let to = reference(&registry, "disk:1");
    plan(&[disk]).push(&client, &to, there.path(), &()).unwrap();
    let unused = Descriptor::of("", b"unused");
    client
        .upload_blob(
            &to,
            &unused,
            None,
            &mut std::io::Cursor::new(b"unused"),
            &(),
        )
        .unwrap();
    registry.collect_garbage().unwrap();
    let blob = |hex: &str| {
        let path = format!("docker/registry/v2/blobs/sha256/{}/{hex}/data", &hex[..2]);
        registry.storage().join(path)
    };
    assert!(!blob(&unused.digest.hex()).exists());
    let remote = RemoteArtifact::open(&client, &to, &()).unwrap();
    for pack in remote.file("disk").unwrap().packs() {
        assert!(blob(&pack.blob.digest.hex()).exists());
    }
    assert!(remote.file("disk").unwrap().read(0..500_000, &()).unwrap() == content);
}

#[test]
fn a_push_uploads_only_new_data_and_needs_no_local_parent() {
    let (registry, other) = (registry(), registry());
    let client = client();
    let there = tempfile::tempdir().unwrap();
    let (parent, parent_content) = image(there.path(), "parent", 5, 600_000);
    let parent_at = reference(&registry, "parent:1");
    plan(&[parent])
        .push(&client, &parent_at, there.path(), &())
        .unwrap();
    fs::remove_file(there.path().join("parent")).unwrap();
    let remote = RemoteArtifact::open(&client, &parent_at, &()).unwrap();
    let remote = remote.file("parent").unwrap();

    let (child, child_content) = image(there.path(), "child", 6, 200_000);
    let artifact = plan(&[child, FileToPush::remote("parent", remote)]);
    // Four block hashes of the child and ten of the parent.
    let new = 200_000 + config().bytes.len() as u64 + 4 * 16;
    let check = |to: &Reference| {
        let remote = RemoteArtifact::open(&client, to, &()).unwrap();
        let read = |name: &str| {
            let file = remote.file(name).unwrap();
            file.read(0..file.size(), &()).unwrap()
        };
        assert!(read("child") == child_content);
        assert!(read("parent") == parent_content);
    };

    // In the parent's repository: all of the parent's blobs exist.
    let beside = parent_at.with_tag("child").unwrap();
    let pushed = artifact.push(&client, &beside, there.path(), &()).unwrap();
    assert_eq!(
        (pushed.bytes_uploaded, pushed.bytes_total),
        (new - config().bytes.len() as u64, new + 600_000 + 10 * 16)
    );
    check(&beside);
    // In another repository of the registry: they are mounted, and need no temporary files.
    let mounted = reference(&registry, "children/a:1");
    let nowhere = there.path().join("nowhere");
    let pushed = artifact.push(&client, &mounted, &nowhere, &()).unwrap();
    assert!(pushed.bytes_uploaded <= new, "{pushed:?}");
    check(&mounted);
    // In another registry: they are copied, by way of the folder for temporary files.
    let carried = reference(&other, "children/a:1");
    let failing = reference(&other, "children/b:1");
    artifact.push(&client, &failing, &nowhere, &()).unwrap_err();
    let pushed = artifact.push(&client, &carried, there.path(), &());
    let pushed = pushed.unwrap();
    assert_eq!(pushed.bytes_uploaded, pushed.bytes_total);
    check(&carried);
}

#[test]
fn a_container_image_is_not_an_artifact() {
    let registry = registry();
    let client = client();
    let to = reference(&registry, "plain:1");
    let there = tempfile::tempdir().unwrap();
    let (disk, _) = image(there.path(), "disk", 7, 200_000);
    let files = [disk];
    Artifact::plan(SNAPSHOT_TYPE, config(), BTreeMap::new(), &files, &())
        .unwrap()
        .push(&client, &to, there.path(), &())
        .unwrap();
    // Tools that only store it treat a snapshot as an image manifest.
    let image = client.image(&to, &Platform::default(), &()).unwrap();
    assert_eq!(image.manifest.layers.len(), 4);

    let strange = Artifact::plan(
        "application/vnd.example.v1",
        config(),
        BTreeMap::new(),
        &files,
        &(),
    )
    .unwrap();
    strange.push(&client, &to, there.path(), &()).unwrap();
    let error = RemoteArtifact::open(&client, &to, &()).unwrap_err();
    assert!(
        matches!(error, RegistryError::Unsupported { .. }),
        "{error}"
    );
}
