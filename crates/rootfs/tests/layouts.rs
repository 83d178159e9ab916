//! Tests of OCI layouts whose manifests and indexes are unusual or hostile.

mod common;

use common::{Layout, Tar, digest, sentence};
use jiffy_rootfs::{Choice, Source, SourceKind};
use serde_json::{Value, json};
use std::fs;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// An image whose command is `name`, as a manifest; its blobs are in the layout.
fn manifest(layout: &Layout, name: &str) -> Value {
    let tar = Tar::new().file(name, b"").bytes();
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": {"Cmd": [name]},
        "rootfs": {"type": "layers", "diff_ids": [digest(&tar)]},
    });
    json!({
        "schemaVersion": 2,
        "config": layout.blob("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes()),
        "layers": [layout.blob("application/vnd.oci.image.layer.v1.tar", &tar)],
    })
}

fn blob(layout: &Layout, media_type: &str, value: &Value) -> Value {
    layout.blob(media_type, value.to_string().as_bytes())
}

/// The command of the image that a layout with these manifests has, or why it has none.
fn command_of(layout: &Layout, manifests: Vec<Value>) -> Result<String, String> {
    open(layout, &json!({"schemaVersion": 2, "manifests": manifests}))
}

fn open(layout: &Layout, index: &Value) -> Result<String, String> {
    fs::write(layout.folder.join("index.json"), index.to_string()).unwrap();
    let source = Source::open(&layout.folder, &Choice::new(&layout.folder));
    let source = source.map_err(|error| sentence(&error))?;
    Ok(source.config().cmd[0].clone())
}

#[test]
fn the_most_general_variant_is_imported() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::new(folder.path());
    let entry = |name: &str, platform: Value| {
        let mut entry = blob(&layout, MANIFEST, &manifest(&layout, name));
        entry["platform"] = platform;
        entry
    };
    let v3 = json!({"os": "linux", "architecture": "amd64", "variant": "v3"});
    let plain = json!({"os": "linux", "architecture": "amd64"});
    let empty = json!({"os": "linux", "architecture": "amd64", "variant": ""});
    let arm = json!({"os": "linux", "architecture": "arm64", "variant": null});
    for general in [plain, empty] {
        let manifests = vec![entry("v3", v3.clone()), entry("general", general)];
        assert_eq!(command_of(&layout, manifests).unwrap(), "general");
    }
    // One without a platform is what it says it is: the configuration is checked.
    let manifests = vec![entry("arm", arm), entry("unnamed", Value::Null)];
    assert_eq!(command_of(&layout, manifests).unwrap(), "unnamed");
    assert_eq!(
        command_of(&layout, vec![entry("v3", v3)]).unwrap(),
        "v3",
        "there is no other"
    );
}

#[test]
fn fields_that_writers_leave_out_or_null_are_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::new(folder.path());
    let mut image = manifest(&layout, "sh");
    image["annotations"] = Value::Null;
    let untyped = blob(&layout, "", &image);
    assert_eq!(
        command_of(&layout, vec![untyped.clone()]).unwrap(),
        "sh",
        "an empty media type"
    );
    let mut inner = json!({"schemaVersion": 2, "manifests": [untyped], "unknown": 1});
    let nested = blob(&layout, "", &inner);
    assert_eq!(command_of(&layout, vec![nested]).unwrap(), "sh");
    inner["mediaType"] = INDEX.into();
    assert_eq!(open(&layout, &inner).unwrap(), "sh");
    image["mediaType"] = "application/vnd.docker.distribution.manifest.v2+json".into();
    let docker = blob(&layout, image["mediaType"].as_str().unwrap(), &image);
    assert_eq!(command_of(&layout, vec![docker]).unwrap(), "sh");
}

#[test]
fn manifests_that_clients_would_read_differently_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::new(folder.path());
    let refused = |value: &Value, media_type: &str, what: &str| {
        let error = command_of(&layout, vec![blob(&layout, media_type, value)]).unwrap_err();
        assert!(error.contains(what), "{error}");
        assert!(!error.contains(char::is_control), "{error}");
    };
    let image = manifest(&layout, "sh");
    let mut both = image.clone();
    both["manifests"] = json!([]);
    for media_type in [MANIFEST, INDEX] {
        refused(&both, media_type, "it is both an image and an index");
    }
    refused(&image, INDEX, "it is both an image and an index");
    let mut typed = image.clone();
    typed["mediaType"] = INDEX.into();
    refused(&typed, MANIFEST, "but it was announced as");
    refused(&json!({"schemaVersion": 1}), MANIFEST, "schema 1");
    refused(
        &image,
        "text/\u{1b}[31m",
        "is not a container image but \"text/ [31m\"",
    );
    refused(
        &json!({"schemaVersion": 2}),
        MANIFEST,
        "missing field `config`",
    );
    let mut damaged = image;
    damaged["layers"][0]["digest"] = "sha512:00".into();
    refused(&damaged, MANIFEST, "is not one of SHA-256");
    damaged["layers"][0]["digest"] = "sha256:../../etc/passwd".into();
    refused(&damaged, MANIFEST, "is not a digest");
    damaged["layers"][0]["size"] = json!(-1);
    refused(&damaged, MANIFEST, "is not valid");

    let error = open(
        &layout,
        &json!({"schemaVersion": 2, "manifests": [], "layers": []}),
    );
    assert!(error.unwrap_err().contains("both an image and an index"));
    assert_eq!(
        command_of(&layout, vec![]).unwrap_err(),
        "it contains no image"
    );
}

#[test]
fn a_malformed_digest_in_a_configuration_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::new(folder.path());
    let config = json!({"rootfs": {"diff_ids": ["md5:00"]}});
    let mut image = manifest(&layout, "sh");
    image["config"] = blob(&layout, "application/vnd.oci.image.config.v1+json", &config);
    assert_eq!(
        command_of(&layout, vec![blob(&layout, MANIFEST, &image)]).unwrap_err(),
        "the digest \"md5:00\" is not one of SHA-256, the only kind that is supported"
    );
}

#[test]
fn indexes_that_are_nested_too_deep_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::new(folder.path());
    let mut entry = blob(&layout, MANIFEST, &manifest(&layout, "sh"));
    for _ in 0..4 {
        entry = blob(
            &layout,
            INDEX,
            &json!({"schemaVersion": 2, "manifests": [entry]}),
        );
    }
    assert_eq!(command_of(&layout, vec![entry.clone()]).unwrap(), "sh");
    entry = blob(
        &layout,
        INDEX,
        &json!({"schemaVersion": 2, "manifests": [entry]}),
    );
    let error = command_of(&layout, vec![entry]).unwrap_err();
    assert!(error.contains("too deep"), "{error}");
}

#[test]
fn an_archive_that_was_not_copied_to_its_end_is_truncated() {
    let folder = tempfile::tempdir().unwrap();
    let whole = Tar::new()
        .file("oci-layout", b"{}")
        .file("index.json", b"{}")
        .file("blobs/sha256/0", &[0; 4096])
        .bytes();
    let path = folder.path().join("image.tar");
    fs::write(&path, &whole[..4000]).unwrap();
    let choices = [None, Some(SourceKind::Oci), Some(SourceKind::DockerArchive)];
    for format in choices {
        let choice = Choice {
            format,
            ..Choice::new(folder.path())
        };
        let said = sentence(&Source::open(&path, &choice).unwrap_err());
        assert!(
            said.contains("image.tar can't be read: the archive is truncated"),
            "{said}"
        );
    }
}
