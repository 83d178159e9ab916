//! Pushes and pulls of images.

use crate::{bytes, client, reference, registry, skopeo};
use jiffy_registry::client::Source;
use jiffy_registry::{
    BlobFolder, Client, Content, Descriptor, Digest, ImageManifest, Index, Platform, Progress,
    Reference, RegistryError, Uploaded, media_type,
};
use std::collections::BTreeMap;
use std::fs;
use std::io::{Cursor, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pushes an image with these layers and returns its manifest.
fn push(client: &Client, to: &Reference, tars: &[Vec<u8>], architecture: &str) -> ImageManifest {
    let upload = |media_type: &str, bytes: &[u8]| {
        let blob = Descriptor::of(media_type, bytes);
        client
            .upload_blob(to, &blob, None, &mut Cursor::new(bytes), &())
            .unwrap();
        blob
    };
    let diff_ids: Vec<String> = tars.iter().map(|tar| Digest::of(tar).to_string()).collect();
    let config = serde_json::json!({
        "os": "linux", "architecture": architecture,
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
        "config": { "Cmd": ["/bin/sh"] },
    });
    let manifest = ImageManifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.into()),
        artifact_type: None,
        config: upload(media_type::OCI_CONFIG, config.to_string().as_bytes()),
        layers: tars
            .iter()
            .map(|tar| upload(media_type::OCI_LAYER_GZIP, &gzip(tar)))
            .collect(),
        annotations: BTreeMap::new(),
    };
    let bytes = serde_json::to_vec(&manifest).unwrap();
    client
        .put_manifest(to, media_type::OCI_MANIFEST, &bytes, &())
        .unwrap();
    manifest
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// A tar with one file.
fn tar(seed: u64) -> Vec<u8> {
    let content = bytes(seed, 100_000);
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    header.set_cksum();
    let mut archive = tar::Builder::new(Vec::new());
    archive.append_data(&mut header, "file", &*content).unwrap();
    archive.into_inner().unwrap()
}

#[test]
fn pushed_images_are_read_by_skopeo() {
    let registry = registry();
    let (client, to) = (client(), reference(&registry, "team/app:v1"));
    let layers = [tar(1), tar(2)];
    push(&client, &to, &layers, "amd64");

    let shown = skopeo::run(["inspect", "--tls-verify=false", &format!("docker://{to}")]);
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["Layers"].as_array().unwrap().len(), 2);
    assert_eq!(shown["Architecture"], "amd64");
    let there = client.digest(&to, &()).unwrap().unwrap();
    assert_eq!(shown["Digest"], there.to_string());

    let folder = tempfile::tempdir().unwrap();
    skopeo::copy(
        &format!("docker://{to}"),
        &skopeo::layout(folder.path(), "v1"),
    );
    for layer in layers.iter().map(|tar| gzip(tar)) {
        let hex = Digest::of(&layer).hex();
        let path = folder.path().join("blobs/sha256").join(hex);
        assert_eq!(fs::read(path).unwrap(), layer);
    }
}

#[test]
fn images_pushed_by_skopeo_are_read_in_both_formats() {
    let registry = registry();
    let client = client();
    let first = reference(&registry, "a:1");
    let layers = [tar(3), tar(4), tar(5)];
    push(&client, &first, &layers, "amd64");
    for format in ["oci", "v2s2"] {
        let to = reference(&registry, &format!("b/{format}:x"));
        skopeo::run([
            "--insecure-policy",
            "copy",
            "--src-tls-verify=false",
            "--dest-tls-verify=false",
            "--format",
            format,
            &format!("docker://{first}"),
            &format!("docker://{to}"),
        ]);
        let image = client.image(&to, &Platform::default(), &()).unwrap();
        let expected = match format {
            "oci" => media_type::OCI_MANIFEST,
            _ => media_type::DOCKER_MANIFEST,
        };
        assert_eq!(image.fetched.media_type, expected);
        assert_eq!(image.manifest.layers.len(), 3);
        let folder = tempfile::tempdir().unwrap();
        let folder = BlobFolder::open(folder.path()).unwrap();
        let repository = &image.reference;
        folder
            .fetch_all(&client, repository, &image.manifest.layers, &())
            .unwrap();
        for layer in &image.manifest.layers {
            let content = fs::read(folder.get(layer).unwrap()).unwrap();
            assert_eq!(Digest::of(&content), layer.digest);
        }
        let config = client
            .small_blob(repository, &image.manifest.config, 1 << 20, &())
            .unwrap();
        assert!(String::from_utf8(config).unwrap().contains("/bin/sh"));
        let error = client
            .small_blob(repository, &image.manifest.config, 10, &())
            .unwrap_err();
        assert!(matches!(error, RegistryError::Unsupported { .. }));
    }
}

#[test]
fn the_image_for_a_platform_is_taken_from_an_index() {
    let registry = registry();
    let client = client();
    let to = reference(&registry, "multi:1");
    let mut entries = Vec::new();
    for (n, architecture) in ["arm64", "amd64"].iter().enumerate() {
        let tagged = to.with_tag(architecture).unwrap();
        push(&client, &tagged, &[tar(10 + n as u64)], architecture);
        let fetched = client.manifest(&tagged, &()).unwrap();
        let mut entry = Descriptor::of(media_type::OCI_MANIFEST, &fetched.bytes);
        entry.platform = Some(format!("linux/{architecture}").parse().unwrap());
        entries.push(entry);
    }
    let index = Index {
        schema_version: 2,
        media_type: Some(media_type::OCI_INDEX.into()),
        manifests: entries.clone(),
        annotations: BTreeMap::new(),
    };
    let bytes = serde_json::to_vec(&index).unwrap();
    let digest = client
        .put_manifest(&to, media_type::OCI_INDEX, &bytes, &())
        .unwrap();

    let image = client.image(&to, &Platform::default(), &()).unwrap();
    assert_eq!(image.fetched.digest, entries[1].digest);
    assert_eq!(image.reference.digest(), Some(entries[1].digest));
    let fetched = image.index.unwrap();
    assert_eq!(fetched.digest, digest);
    assert!(matches!(fetched.content, Content::Index(_)));
    let pinned = to.with_digest(digest);
    assert!(
        client
            .image(&pinned, &"linux/arm64".parse().unwrap(), &())
            .is_ok()
    );
    let error = client
        .image(&to, &"linux/riscv64".parse().unwrap(), &())
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{to} has no image for linux/riscv64; it has linux/arm64, linux/amd64")
    );
    // skopeo copies the image to another repository.
    let copied = reference(&registry, "copy:1");
    skopeo::copy(&format!("docker://{to}"), &format!("docker://{copied}"));
    assert_eq!(client.digest(&copied, &()).unwrap(), Some(digest));
}

#[test]
fn a_missing_manifest_blob_or_repository_is_reported() {
    let registry = registry();
    let client = client();
    let nowhere = reference(&registry, "nowhere:1");
    let error = client.manifest(&nowhere, &()).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("manifest {nowhere} is not in the registry")
    );
    assert_eq!(client.digest(&nowhere, &()).unwrap(), None);
    assert!(
        !client
            .has_blob(&nowhere, &Descriptor::of("", b"x"), &())
            .unwrap()
    );
    let error = client.tags(&nowhere, &()).unwrap_err();
    assert!(matches!(error, RegistryError::NotFound { .. }), "{error}");
}

#[test]
fn blobs_are_sent_once_mounted_or_found() {
    let registry = registry();
    let client = client();
    let one = reference(&registry, "one:1");
    let two = reference(&registry, "two:1");
    let content = bytes(1, 3_000_000);
    let blob = Descriptor::of("application/octet-stream", &content);
    let source = || Box::new(Cursor::new(content.clone())) as Box<dyn Source>;
    let upload = |to: &Reference, from: Option<&str>| {
        client
            .upload_blob(to, &blob, from, &mut *source(), &())
            .unwrap()
    };
    assert_eq!(upload(&one, None), Uploaded::Sent);
    assert_eq!(upload(&one, None), Uploaded::Existed);
    assert_eq!(upload(&two, Some("one")), Uploaded::Mounted);
    assert_eq!(
        upload(&reference(&registry, "three:1"), Some("none")),
        Uploaded::Sent
    );
    assert!(client.has_blob(&two, &blob, &()).unwrap());

    // From the middle of a source, and an empty blob.
    let mut source = Cursor::new(content.clone());
    source.set_position(1_000_000);
    let rest = Descriptor::of("", &content[1_000_000..]);
    client
        .upload_blob(&one, &rest, None, &mut source, &())
        .unwrap();
    let nothing = Descriptor::of("", b"");
    client
        .upload_blob(&one, &nothing, None, &mut Cursor::new(b""), &())
        .unwrap();
    let mut into = Vec::new();
    client.blob(&one, &nothing, &mut into, &()).unwrap();
    client.blob(&one, &rest, &mut into, &()).unwrap();
    assert_eq!(into, content[1_000_000..]);

    // A source that is too short, and one with other bytes.
    let mut short = Cursor::new(&content[..10]);
    let missing = Descriptor::of("", &content[..20]);
    let error = client
        .upload_blob(&one, &missing, None, &mut short, &())
        .unwrap_err();
    assert!(matches!(error, RegistryError::Sink { .. }), "{error}");
    let mut wrong = Cursor::new(vec![0; 20]);
    let error = client
        .upload_blob(&one, &missing, None, &mut wrong, &())
        .unwrap_err();
    assert!(
        matches!(error, RegistryError::Refused { status: 400, .. }),
        "{error}"
    );
    assert!(!client.has_blob(&one, &missing, &()).unwrap());
}

#[test]
fn parts_of_blobs_are_read() {
    let registry = registry();
    let client = client();
    let to = reference(&registry, "parts:1");
    let content = bytes(2, 300_000);
    let blob = Descriptor::of("", &content);
    client
        .upload_blob(&to, &blob, None, &mut Cursor::new(&content), &())
        .unwrap();
    for range in [0..1, 0..300_000, 299_999..300_000, 1_000..200_000, 5..5] {
        let part = client.blob_range(&to, &blob, range.clone(), &()).unwrap();
        assert_eq!(part, content[range.start as usize..range.end as usize]);
    }
    assert!(client.blob_range(&to, &blob, 5..300_001, &()).is_err());
}

#[test]
fn tags_are_listed() {
    let registry = registry();
    let client = client();
    let to = reference(&registry, "tagged:0");
    push(&client, &to, &[tar(1)], "amd64");
    let fetched = client.manifest(&to, &()).unwrap();
    for n in 1..5 {
        let tag = to.with_tag(&n.to_string()).unwrap();
        client
            .put_manifest(&tag, &fetched.media_type, &fetched.bytes, &())
            .unwrap();
    }
    let mut tags = client.tags(&to, &()).unwrap();
    // This registry does not sort tags.
    tags.sort();
    assert_eq!(tags, ["0", "1", "2", "3", "4"]);
}

#[test]
fn a_partial_blob_is_completed_and_a_wrong_one_is_replaced() {
    struct Least(Mutex<u64>);
    impl Progress for Least {
        fn moved(&self, _: &Descriptor, done: u64) {
            let mut least = self.0.lock().unwrap();
            *least = (*least).min(done);
        }
    }
    let registry = registry();
    let client = client();
    let to = reference(&registry, "resumed:1");
    let content = bytes(3, 1_000_000);
    let blob = Descriptor::of("", &content);
    client
        .upload_blob(&to, &blob, None, &mut Cursor::new(&content), &())
        .unwrap();
    let fetch = |beginning: &[u8]| {
        let root = tempfile::tempdir().unwrap();
        let folder = BlobFolder::open(root.path()).unwrap();
        let partial = root.path().join("partial").join(blob.digest.hex());
        fs::write(&partial, beginning).unwrap();
        let least = Least(Mutex::new(u64::MAX));
        let path = folder.fetch(&client, &to, &blob, &least).unwrap();
        assert_eq!(fs::read(path).unwrap(), content);
        assert!(!partial.exists());
        least.0.into_inner().unwrap()
    };
    assert_eq!(fetch(&[]), 0);
    assert_eq!(fetch(&content[..700_000]), 700_000);
    assert_eq!(fetch(&content), 1_000_000);
    let mut wrong = content[..700_000].to_vec();
    wrong[5] ^= 1;
    assert_eq!(fetch(&wrong), 0);
    assert_eq!(fetch(&[1; 1_000_001]), 0);
}

#[test]
fn concurrent_fetches_of_one_blob_transfer_it_once() {
    struct Starts(AtomicU64);
    impl Progress for Starts {
        fn moved(&self, _: &Descriptor, done: u64) {
            // A thread that waits for another's fetch gets only the final progress.
            if done == 0 {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    let registry = registry();
    let client = client();
    let to = reference(&registry, "shared:1");
    let content = bytes(4, 2_000_000);
    let blob = Descriptor::of("", &content);
    client
        .upload_blob(&to, &blob, None, &mut Cursor::new(&content), &())
        .unwrap();
    let root = tempfile::tempdir().unwrap();
    let starts = Starts(AtomicU64::new(0));
    let paths: Vec<_> = std::thread::scope(|scope| {
        let fetch = || {
            let folder = BlobFolder::open(root.path()).unwrap();
            folder.fetch(&client, &to, &blob, &starts).unwrap()
        };
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(fetch)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert!(paths.iter().all(|path| path == &paths[0]));
    assert_eq!(fs::read(&paths[0]).unwrap(), content);
    assert_eq!(starts.0.into_inner(), 1);
    assert_eq!(left_over(root.path()), 0);
}

fn left_over(root: &Path) -> usize {
    fs::read_dir(root.join("partial")).unwrap().count()
}
