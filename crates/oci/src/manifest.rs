//! Manifests (OCI image specification, `manifest.md`), and how they differ from indexes.

use crate::descriptor::Descriptor;
use crate::index::Index;
use crate::media_type;
use crate::null::null_as_default;
use crate::text::one_line;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The largest manifest or index, bytes. The distribution specification asks registries to take
/// manifests up to this size, and clients need no more.
pub const MAX_MANIFEST: u64 = 4 << 20;

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
    #[serde(default, deserialize_with = "null_as_default")]
    pub layers: Vec<Descriptor>,
    /// Annotations.
    #[serde(
        default,
        deserialize_with = "null_as_default",
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

/// Why bytes are not a manifest or index that can be used. The middle of a sentence: what they are
/// comes before.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// Docker's schema 1.
    #[error(
        "it is in Docker's schema 1, which has no verifiable layers; push it again with a \
         current tool"
    )]
    Schema1,
    /// Another media type, shortened.
    #[error("it is {0:?}, neither an image nor an index")]
    OtherKind(String),
    /// Its own media type is not the one that it was announced with.
    #[error("its own type is {own:?}, but it was announced as {told:?}")]
    TwoKinds {
        /// Its own, shortened.
        own: String,
        /// The one in what names it, or in the registry's header.
        told: String,
    },
    /// It has the fields of both.
    #[error("it is both an image and an index")]
    Both,
    /// It is not JSON, or lacks a field, or a field is wrong.
    #[error("it is not a manifest")]
    Json(#[from] serde_json::Error),
}

/// Parses a manifest or index that was announced with this media type.
///
/// # Errors
///
/// If the media type is neither that of an image nor that of an index, or is Docker's schema 1; if
/// the bytes are not such JSON, name another type, or have the fields of both.
pub fn parse(bytes: &[u8], media_type: &str) -> Result<Content, ManifestError> {
    if media_type::DOCKER_SCHEMA_1.contains(&media_type) {
        return Err(ManifestError::Schema1);
    }
    let is_image = [media_type::OCI_MANIFEST, media_type::DOCKER_MANIFEST].contains(&media_type);
    let is_index = [media_type::OCI_INDEX, media_type::DOCKER_INDEX].contains(&media_type);
    if !is_image && !is_index {
        return Err(ManifestError::OtherKind(one_line(media_type)));
    }
    // A manifest that is an index as well, or whose own media type differs from the announced one,
    // is read differently by different clients: CVE-2021-41190.
    let shape: Shape = serde_json::from_slice(bytes)?;
    if shape.schema_version == Some(1) {
        return Err(ManifestError::Schema1);
    }
    if let Some(own) = &shape.media_type
        && own != media_type
    {
        return Err(ManifestError::TwoKinds {
            own: one_line(own),
            told: media_type.to_owned(),
        });
    }
    if is_image && shape.manifests.is_some()
        || is_index && (shape.layers.is_some() || shape.config.is_some())
    {
        return Err(ManifestError::Both);
    }
    if is_image {
        Ok(Content::Image(serde_json::from_slice(bytes)?))
    } else {
        Ok(Content::Index(serde_json::from_slice(bytes)?))
    }
}

/// The media type of a manifest that was announced with none: its own field, or a guess from its
/// fields.
pub fn guess_media_type(bytes: &[u8]) -> Option<String> {
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
            let Content::Image(image) = parse(IMAGE.as_bytes(), kind).unwrap() else {
                panic!("an image");
            };
            assert_eq!(image.config.size, 2);
        }
        let index = r#"{"schemaVersion":2,"manifests":[]}"#;
        for kind in [media_type::OCI_INDEX, media_type::DOCKER_INDEX] {
            assert!(matches!(
                parse(index.as_bytes(), kind),
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
            let error = parse(both.as_bytes(), kind).unwrap_err();
            assert!(matches!(error, ManifestError::Both), "{error}");
        }
        for (text, kind) in [
            (r#"{"schemaVersion":1}"#, media_type::OCI_MANIFEST),
            (IMAGE, media_type::DOCKER_SCHEMA_1[1]),
        ] {
            let error = parse(text.as_bytes(), kind).unwrap_err();
            assert!(matches!(error, ManifestError::Schema1), "{error}");
        }
        assert_eq!(
            parse(IMAGE.as_bytes(), "text/html\n")
                .unwrap_err()
                .to_string(),
            "it is \"text/html\", neither an image nor an index"
        );
        let lies = IMAGE.replacen(
            '{',
            r#"{"mediaType":"application/vnd.oci.image.index.v1+json","#,
            1,
        );
        let error = parse(lies.as_bytes(), media_type::OCI_MANIFEST).unwrap_err();
        assert!(matches!(error, ManifestError::TwoKinds { .. }), "{error}");
        let negative = IMAGE.replace("\"size\":2", "\"size\":-2");
        assert!(parse(negative.as_bytes(), media_type::OCI_MANIFEST).is_err());
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
            let _ = parse(&bytes, kind);
        }
    }
}
