//! Plans are deterministic, and invalid manifests are refused.

use super::remote::RemoteFile;
use super::*;
use crate::client::Fetched;
use crate::{Client, ClientOptions, Digest, Reference, RegistryError, media_type};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn plan(files: &[FileToPush]) -> crate::error::Result<Artifact> {
    let config = Config {
        media_type: "application/vnd.jiffy.image.config.v1+json".into(),
        bytes: b"{}".to_vec(),
    };
    Artifact::plan(IMAGE_TYPE, config, BTreeMap::new(), files, &())
}

/// Opens a manifest without a registry and returns the error. A valid manifest fails because its
/// configuration can't be fetched.
fn open(manifest: &[u8]) -> RegistryError {
    let client = Client::new(ClientOptions {
        retries: crate::Retries {
            limit: 0,
            ..Default::default()
        },
        ..Default::default()
    })
    .unwrap();
    // No server listens on port 1.
    let reference = Reference::parse("127.0.0.1:1/a", None).unwrap();
    let fetched = Fetched {
        bytes: manifest.to_vec(),
        media_type: media_type::OCI_MANIFEST.into(),
        digest: Digest::of(manifest),
        content: jiffy_oci::parse(manifest, media_type::OCI_MANIFEST).unwrap(),
    };
    RemoteArtifact::of(&client, &reference, fetched, &()).unwrap_err()
}

#[test]
fn the_same_files_give_the_same_artifact() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, [7; 1000]).unwrap();
    let file = |name| {
        FileToPush::local(name, &path, "data")
            .cut(0, "boot")
            .cut(500, "tail")
    };
    let one = plan(&[file("a"), file("b")]).unwrap();
    assert_eq!(
        one.digest(),
        plan(&[file("a"), file("b")]).unwrap().digest()
    );
    assert_eq!(one.packs().count(), 4);
    // The four packs have the same bytes and so are one blob, in addition to the configuration.
    assert_eq!(one.size(), 502);
    for bad in ["", ".", "..", "a/b", "a\nb"] {
        assert!(plan(&[file(bad)]).is_err(), "{bad:?}");
    }
    assert!(plan(&[file("a"), file("a")]).is_err());
}

#[test]
fn packs_that_form_no_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, [7; 1000]).unwrap();
    let artifact = plan(&[FileToPush::local("a", &path, "data").cut(500, "tail")]).unwrap();
    let good = String::from_utf8(artifact.manifest().to_vec()).unwrap();
    // A valid manifest gets as far as the fetch of the configuration.
    assert!(matches!(
        open(good.as_bytes()),
        RegistryError::Unreachable { .. }
    ));
    for (from, to, said) in [
        (
            r#""dev.jiffy.file":"a""#,
            r#""dev.jiffy.file":"../a""#,
            "no valid file name",
        ),
        (r#""dev.jiffy.file":"a","#, "", "no valid file name"),
        (
            r#""dev.jiffy.role":"tail""#,
            r#""dev.jiffy.role":"""#,
            "has no role",
        ),
        (
            r#""dev.jiffy.offset":"500""#,
            r#""dev.jiffy.offset":"499""#,
            "begins at byte 499",
        ),
        (
            r#""dev.jiffy.offset":"500""#,
            r#""dev.jiffy.offset":"501""#,
            "begins at byte 501",
        ),
        (
            r#""dev.jiffy.offset":"500""#,
            r#""dev.jiffy.offset":"-1""#,
            "no valid offset",
        ),
        (
            r#""size":500"#,
            r#""size":18446744073709551615"#,
            "too large",
        ),
        (PACK_TYPE, "application/x", "is not a pack"),
        (
            IMAGE_TYPE,
            "application/vnd.jiffy.image.v9",
            "does not know",
        ),
    ] {
        let error = open(good.replacen(from, to, 1).as_bytes());
        assert!(error.to_string().contains(said), "{from} → {to}: {error}");
    }
}

#[test]
fn a_role_has_a_range_if_its_packs_are_adjacent() {
    let pack = |offset, role: &str| Pack {
        blob: crate::Descriptor::new(PACK_TYPE, Digest::of(b""), 10),
        offset,
        role: role.into(),
    };
    let file = RemoteFile::for_tests(vec![
        pack(0, "boot"),
        pack(10, "data"),
        pack(20, "data"),
        pack(30, "tail"),
        pack(40, "odd"),
        pack(50, "tail"),
    ]);
    assert_eq!(file.range_of("boot"), Some(0..10));
    assert_eq!(file.range_of("data"), Some(10..30));
    assert_eq!(file.range_of("tail"), None);
    assert_eq!(file.range_of("none"), None);
}

proptest! {
    #[test]
    fn any_annotations_are_refused_or_make_files_without_gaps(
        layers in proptest::collection::vec(
            ("[ab./]{0,2}", "[0-9-]{0,3}|18446744073709551615", "[a-z]{0,2}", prop_oneof![0u64..200, Just(u64::MAX), Just(i64::MAX as u64)]),
            0..6,
        )
    ) {
        // One client for all cases: a new client reads all certificates of the system.
        static CLIENT: std::sync::OnceLock<Client> = std::sync::OnceLock::new();
        let client = CLIENT.get_or_init(|| Client::new(ClientOptions::default()).unwrap());
        let reference = Reference::parse("127.0.0.1:1/a", None).unwrap();
        let layers: Vec<_> = layers.into_iter().map(|(file, offset, role, size)| {
            let mut layer = crate::Descriptor::new(PACK_TYPE, Digest::of(b""), size);
            layer.annotations = BTreeMap::from([
                (annotations::FILE.into(), file),
                (annotations::OFFSET.into(), offset),
                (annotations::ROLE.into(), role),
            ]);
            layer
        }).collect();
        if let Ok(files) = super::remote::files(client, &reference, &layers) {
            for file in files {
                let mut end = 0;
                for pack in file.packs() {
                    prop_assert_eq!(pack.offset, end);
                    end = pack.end();
                }
                prop_assert_eq!(end, file.size());
                prop_assert!(is_name(file.name()));
            }
        }
    }
}
