//! Manifests and indexes.
//!
//! OCI image specification 1.1, and Docker's schema 2, which differs only in its media types.
//! Unknown fields are ignored, as the specification requires.

use crate::error::{Result, one_line};
use crate::{Digest, Platform, RegistryError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Media types.
pub mod media_type {
    /// An image or artifact.
    pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
    /// An index: manifests by platform.
    pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
    /// An image's configuration.
    pub const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
    /// An empty configuration: `{}`.
    pub const OCI_EMPTY: &str = "application/vnd.oci.empty.v1+json";
    /// A layer: a tar.
    pub const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
    /// A layer: a tar compressed with gzip.
    pub const OCI_LAYER_GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
    /// A layer: a tar compressed with zstd.
    pub const OCI_LAYER_ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
    /// Docker's manifest.
    pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
    /// Docker's index.
    pub const DOCKER_INDEX: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
    /// Docker's configuration.
    pub const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
    /// Docker's layer: a tar compressed with gzip.
    pub const DOCKER_LAYER_GZIP: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";
    /// Docker's schema 1, signed and unsigned. Not supported.
    pub const DOCKER_SCHEMA_1: &[&str] = &[
        "application/vnd.docker.distribution.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v1+prettyjws",
    ];
}

/// Type, digest and size of a blob or manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Media type of the bytes.
    pub media_type: String,
    /// SHA-256, which identifies and verifies the bytes.
    pub digest: Digest,
    /// Size, bytes.
    pub size: u64,
    /// Annotations.
    #[serde(
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub annotations: BTreeMap<String, String>,
    /// In an index: the platform of the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// In an index: the artifact type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
}

impl Descriptor {
    /// The descriptor of these bytes.
    pub fn of(media_type: &str, bytes: &[u8]) -> Self {
        Self::new(media_type, Digest::of(bytes), bytes.len() as u64)
    }

    /// A descriptor without annotations.
    pub fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        Self {
            media_type: media_type.to_owned(),
            digest,
            size,
            annotations: BTreeMap::new(),
            platform: None,
            artifact_type: None,
        }
    }
}

/// An image or artifact: a configuration and layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageManifest {
    /// Always 2.
    pub schema_version: u32,
    /// The manifest's own media type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// The artifact type, if it is not a container image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// The configuration blob.
    pub config: Descriptor,
    /// The layers, the lowest first.
    #[serde(default, deserialize_with = "or_default")]
    pub layers: Vec<Descriptor>,
    /// Annotations.
    #[serde(
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub annotations: BTreeMap<String, String>,
}

/// Manifests by platform.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    /// Always 2.
    pub schema_version: u32,
    /// The index's own media type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// The manifests.
    #[serde(default, deserialize_with = "or_default")]
    pub manifests: Vec<Descriptor>,
    /// Annotations.
    #[serde(
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub annotations: BTreeMap<String, String>,
}

/// A manifest or an index.
// Only one exists at a time, so its size does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// An image or artifact.
    Image(ImageManifest),
    /// Manifests by platform.
    Index(Index),
}

/// Parses a manifest or index of the given media type. `what` is its name in errors.
pub fn parse(bytes: &[u8], media_type: &str, what: &str) -> Result<Content> {
    if media_type::DOCKER_SCHEMA_1.contains(&media_type) {
        return Err(schema_1(what));
    }
    let is_image = [media_type::OCI_MANIFEST, media_type::DOCKER_MANIFEST].contains(&media_type);
    let is_index = [media_type::OCI_INDEX, media_type::DOCKER_INDEX].contains(&media_type);
    if !is_image && !is_index {
        return Err(RegistryError::Unsupported {
            what: what.to_owned(),
            reason: format!(
                "it is {:?}, neither an image nor an index",
                one_line(media_type)
            ),
        });
    }
    // A manifest that is an index as well, or whose own media type differs from the registry's, is
    // read differently by different clients: CVE-2021-41190.
    let shape: Shape = from_json(bytes, what)?;
    if shape.schema_version == Some(1) {
        return Err(schema_1(what));
    }
    if let Some(own) = &shape.media_type
        && own != media_type
    {
        return Err(RegistryError::damaged(
            what,
            format!("its own type is {own:?}, the registry says {media_type:?}"),
        ));
    }
    if is_image && shape.manifests.is_some()
        || is_index && (shape.layers.is_some() || shape.config.is_some())
    {
        let reason = "it is both an image and an index";
        return Err(RegistryError::damaged(what, reason));
    }
    if is_image {
        Ok(Content::Image(from_json(bytes, what)?))
    } else {
        Ok(Content::Index(from_json(bytes, what)?))
    }
}

/// The media type of a manifest whose HTTP header has none: its own field, or a guess from its
/// fields.
pub(crate) fn guess_media_type(bytes: &[u8]) -> Option<String> {
    let shape: Shape = serde_json::from_slice(bytes).ok()?;
    if shape.media_type.is_some() {
        return shape.media_type;
    }
    let guess = if shape.manifests.is_some() {
        media_type::OCI_INDEX
    } else if shape.config.is_some() {
        media_type::OCI_MANIFEST
    } else {
        return None;
    };
    Some(guess.to_owned())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Shape {
    schema_version: Option<u64>,
    media_type: Option<String>,
    config: Option<serde::de::IgnoredAny>,
    layers: Option<serde::de::IgnoredAny>,
    manifests: Option<serde::de::IgnoredAny>,
}

fn from_json<T: serde::de::DeserializeOwned>(bytes: &[u8], what: &str) -> Result<T> {
    serde_json::from_slice(bytes)
        .map_err(|error| RegistryError::damaged(what, format!("it is not a manifest: {error}")))
}

/// Reads `null`, which Go writes for empty lists and maps, as the empty value.
fn or_default<'de, D, T>(deserializer: D) -> std::result::Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

fn schema_1(what: &str) -> RegistryError {
    RegistryError::Unsupported {
        what: what.to_owned(),
        reason: "it is in Docker's schema 1, which has no verifiable layers; push it again with \
                 a current tool"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    const IMAGE: &str = r#"{"schemaVersion":2,"config":{"mediaType":"c","size":2,
        "digest":"sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        "layers":[],"unknown":{"a":1}}"#;

    #[test]
    fn images_and_indexes_are_read_in_both_dialects() {
        for kind in [media_type::OCI_MANIFEST, media_type::DOCKER_MANIFEST] {
            let Content::Image(image) = parse(IMAGE.as_bytes(), kind, "m").unwrap() else {
                panic!("an image");
            };
            assert_eq!(image.config.size, 2);
        }
        let index = r#"{"schemaVersion":2,"manifests":[]}"#;
        for kind in [media_type::OCI_INDEX, media_type::DOCKER_INDEX] {
            assert!(matches!(
                parse(index.as_bytes(), kind, "m"),
                Ok(Content::Index(_))
            ));
        }
        assert_eq!(
            guess_media_type(index.as_bytes()).as_deref(),
            Some(media_type::OCI_INDEX)
        );
        assert_eq!(
            guess_media_type(IMAGE.as_bytes()).as_deref(),
            Some(media_type::OCI_MANIFEST)
        );
    }

    #[test]
    fn schema_1_and_ambiguous_manifests_are_refused() {
        let both = IMAGE.replace("\"layers\"", "\"manifests\":[],\"layers\"");
        for kind in [media_type::OCI_MANIFEST, media_type::OCI_INDEX] {
            let error = parse(both.as_bytes(), kind, "m").unwrap_err();
            assert!(matches!(error, RegistryError::Damaged { .. }), "{error}");
        }
        for (text, kind) in [
            (r#"{"schemaVersion":1}"#, media_type::OCI_MANIFEST),
            (IMAGE, media_type::DOCKER_SCHEMA_1[1]),
            (IMAGE, "text/html"),
        ] {
            let error = parse(text.as_bytes(), kind, "m").unwrap_err();
            assert!(
                matches!(error, RegistryError::Unsupported { .. }),
                "{error}"
            );
        }
        let lies = IMAGE.replacen(
            '{',
            r#"{"mediaType":"application/vnd.oci.image.index.v1+json","#,
            1,
        );
        assert!(parse(lies.as_bytes(), media_type::OCI_MANIFEST, "m").is_err());
        let negative = IMAGE.replace("\"size\":2", "\"size\":-2");
        assert!(parse(negative.as_bytes(), media_type::OCI_MANIFEST, "m").is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_a_manifest(
            at in 0usize..220,
            with in proptest::collection::vec(any::<u8>(), 0..6),
            kind in prop_oneof![Just(media_type::OCI_MANIFEST), Just(media_type::DOCKER_INDEX)],
        ) {
            let mut bytes = IMAGE.as_bytes().to_vec();
            let at = at.min(bytes.len());
            let end = (at + with.len()).min(bytes.len());
            bytes.splice(at..end, with);
            guess_media_type(&bytes);
            let _ = parse(&bytes, kind, "m");
        }
    }
}
