//! OCI image layouts (image-spec `image-layout.md`, `manifest.md`,
//! `image-index.md`), and Docker's manifests of the same shape.

use super::bundle::Bundle;
use super::{Choice, LayerInput, SourceError, is_called};
use crate::config::{MAX_CONFIG, RawConfig};
use crate::layer::Expected;
use jiffy_oci::{
    Content, Descriptor, Digest, ImageManifest, Index, MAX_MANIFEST, ManifestError,
    guess_media_type, media_type, one_line,
};
use serde::Deserialize;
use std::collections::BTreeSet;

/// Deepest nesting of indexes.
const MAX_DEPTH: usize = 4;
/// Most layers of one image.
pub(super) const MAX_LAYERS: usize = 1024;
/// Most names that a message lists.
const MAX_LISTED: usize = 50;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Version {
    image_layout_version: String,
}

/// An image's configuration and layers.
pub(super) struct Found {
    pub config: RawConfig,
    pub layers: Vec<LayerInput>,
}

/// Whether the bundle is an OCI layout.
pub(super) fn is_layout(bundle: &Bundle) -> bool {
    bundle.has("oci-layout") && bundle.has("index.json")
}

/// Finds the wanted image in the layout.
pub(super) fn open(bundle: &Bundle, choice: &Choice) -> Result<Found, SourceError> {
    let version: Version = json(bundle, "oci-layout", &bundle.read("oci-layout", 4096)?)?;
    if !version.image_layout_version.starts_with("1.") {
        return Err(SourceError::Layout(version.image_layout_version));
    }
    let bytes = bundle.read("index.json", MAX_MANIFEST)?;
    let Content::Index(mut index) = parse(bundle, "index.json", &bytes, media_type::OCI_INDEX)?
    else {
        return Err(SourceError::NoImage);
    };
    index.manifests = by_name(index.manifests, choice)?;
    let manifest = choose(bundle, &index, choice, MAX_DEPTH)?;
    image(bundle, manifest, choice)
}

/// The manifests with the wanted name; all of them if no name is wanted.
fn by_name(manifests: Vec<Descriptor>, choice: &Choice) -> Result<Vec<Descriptor>, SourceError> {
    let names = |manifest: &Descriptor| -> Vec<String> {
        [
            "org.opencontainers.image.ref.name",
            "io.containerd.image.name",
        ]
        .iter()
        .filter_map(|key| manifest.annotations.get(*key).cloned())
        .collect()
    };
    let all: BTreeSet<String> = manifests.iter().flat_map(names).collect();
    match &choice.reference {
        Some(wanted) => {
            let (found, _): (Vec<_>, Vec<_>) = manifests
                .into_iter()
                .partition(|manifest| names(manifest).iter().any(|name| is_called(name, wanted)));
            if found.is_empty() {
                return Err(SourceError::NoSuchImage {
                    wanted: wanted.clone(),
                    available: list(all),
                });
            }
            Ok(found)
        }
        None => {
            let first = manifests.first().map(names);
            // Several manifests with one name are one image for several platforms.
            if manifests
                .iter()
                .any(|manifest| Some(names(manifest)) != first)
            {
                return Err(SourceError::WhichImage(list(all)));
            }
            Ok(manifests)
        }
    }
}

/// Chooses the manifest for the wanted platform.
fn choose(
    bundle: &Bundle,
    index: &Index,
    choice: &Choice,
    depth: usize,
) -> Result<ImageManifest, SourceError> {
    if index.manifests.is_empty() {
        return Err(SourceError::NoImage);
    }
    // Many writers of layouts name no platform; then the configuration's is checked.
    let unnamed = || index.manifests.iter().find(|one| one.platform.is_none());
    let chosen = index.choose(&choice.platform).or_else(unnamed);
    let chosen = chosen.ok_or_else(|| SourceError::NoPlatform {
        wanted: choice.platform.to_string(),
        available: index.platforms(),
    })?;
    let bytes = blob(bundle, chosen, MAX_MANIFEST)?;
    // Some writers give no media type either.
    let told = match chosen.media_type.as_str() {
        "" => guess_media_type(&bytes).unwrap_or_default(),
        told => told.to_owned(),
    };
    match parse(bundle, &place(&chosen.digest), &bytes, &told) {
        Ok(Content::Image(manifest)) => Ok(manifest),
        Ok(Content::Index(_)) if depth == 0 => Err(SourceError::TooDeep),
        Ok(Content::Index(inner)) => choose(bundle, &inner, choice, depth - 1),
        Err(SourceError::Manifest {
            source: ManifestError::OtherKind(media_type),
            ..
        }) => {
            let verb = match index.manifests.len() {
                1 => "names",
                _ => "chose",
            };
            Err(SourceError::NotAnImage {
                what: format!("what it {verb} ({})", chosen.digest),
                media_type,
            })
        }
        Err(error) => Err(error),
    }
}

fn image(bundle: &Bundle, manifest: ImageManifest, choice: &Choice) -> Result<Found, SourceError> {
    let kind = manifest.config.media_type.as_str();
    if !kind.is_empty() && !media_type::is_config(kind) {
        return Err(SourceError::NotAnImage {
            what: "the manifest's configuration".into(),
            media_type: one_line(kind),
        });
    }
    let config = RawConfig::from_json(&blob(bundle, &manifest.config, MAX_CONFIG)?)?;
    let layers = manifest
        .layers
        .into_iter()
        .map(|layer| {
            super::check_media_type(&layer.media_type)?;
            Ok(LayerInput {
                blob: bundle.blob(&place(&layer.digest))?,
                name: layer.digest.to_string(),
                expected: Expected {
                    digest: Some(layer.digest),
                    diff_id: None,
                    size: Some(layer.size),
                },
            })
        })
        .collect::<Result<Vec<_>, SourceError>>()?;
    super::check_platform(&config.platform(), choice)?;
    Ok(Found { config, layers })
}

/// Reads a small blob and checks its size and digest.
fn blob(bundle: &Bundle, descriptor: &Descriptor, limit: u64) -> Result<Vec<u8>, SourceError> {
    let expected = descriptor.digest;
    let bytes = bundle.read(&place(&expected), limit)?;
    let actual = Digest::of(&bytes);
    if bytes.len() as u64 != descriptor.size || actual != expected {
        return Err(SourceError::Digest { expected, actual });
    }
    Ok(bytes)
}

fn place(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// Parses the manifest or index in the file of that name, which was announced with this type.
fn parse(
    bundle: &Bundle,
    name: &str,
    bytes: &[u8],
    media_type: &str,
) -> Result<Content, SourceError> {
    jiffy_oci::parse(bytes, media_type).map_err(|source| SourceError::Manifest {
        path: bundle.place(name),
        source,
    })
}

pub(super) fn json<T: serde::de::DeserializeOwned>(
    bundle: &Bundle,
    name: &str,
    bytes: &[u8],
) -> Result<T, SourceError> {
    serde_json::from_slice(bytes).map_err(|source| SourceError::Json {
        path: bundle.place(name),
        source,
    })
}

/// `a, b, c`, or a text that says there is none.
pub(super) fn list(names: impl IntoIterator<Item = String>) -> String {
    let names = names.into_iter().take(MAX_LISTED);
    let names: Vec<String> = names.map(|name| one_line(&name)).collect();
    if names.is_empty() {
        "no named image".into()
    } else {
        names.join(", ")
    }
}
