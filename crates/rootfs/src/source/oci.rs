//! OCI image layouts (image-spec `image-layout.md`, `manifest.md`,
//! `image-index.md`), and Docker's manifests of the same shape.

use super::bundle::Bundle;
use super::{Choice, LayerInput, SourceError, is_called};
use crate::config::{MAX_CONFIG, Platform, RawConfig};
use crate::layer::{Digest, Expected};
use serde::Deserialize;
use std::collections::BTreeMap;

/// The largest index or manifest, bytes (what registries allow).
const MAX_MANIFEST: u64 = 4 << 20;
/// Deepest nesting of indexes.
const MAX_DEPTH: usize = 4;
/// Most layers of one image.
pub(super) const MAX_LAYERS: usize = 1024;

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    platform: Option<Platform>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

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
    let index: Index = json(
        bundle,
        "index.json",
        &bundle.read("index.json", MAX_MANIFEST)?,
    )?;
    let named = by_name(index.manifests, choice)?;
    let manifest = choose(bundle, named, choice, MAX_DEPTH)?;
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
        .filter_map(|key| manifest.annotations.as_ref()?.get(*key).cloned())
        .collect()
    };
    let all: std::collections::BTreeSet<String> = manifests.iter().flat_map(names).collect();
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
    candidates: Vec<Descriptor>,
    choice: &Choice,
    depth: usize,
) -> Result<Manifest, SourceError> {
    if candidates.is_empty() {
        return Err(SourceError::NoImage);
    }
    let only = candidates.len() == 1;
    let available: Vec<String> = candidates
        .iter()
        .filter_map(|manifest| manifest.platform.as_ref())
        .filter(|platform| platform.os != "unknown")
        .map(ToString::to_string)
        .collect();
    let fits = |manifest: &Descriptor| match &manifest.platform {
        Some(platform) => choice.platform.runs(platform),
        None => true,
    };
    let Some(chosen) = candidates.iter().find(|manifest| fits(manifest)) else {
        return Err(SourceError::NoPlatform {
            wanted: choice.platform.to_string(),
            available: list(available),
        });
    };
    let bytes = blob(bundle, chosen, MAX_MANIFEST)?;
    let name = &chosen.digest;
    let value: serde_json::Value = json(bundle, name, &bytes)?;
    if value.get("manifests").is_some() {
        if depth == 0 {
            return Err(SourceError::TooDeep);
        }
        let index: Index = json(bundle, name, &bytes)?;
        return choose(bundle, index.manifests, choice, depth - 1);
    }
    if value.get("layers").is_none() || value.get("config").is_none() {
        let what = if only {
            "what it names"
        } else {
            "what it chose"
        };
        return Err(SourceError::NotAnImage {
            what: format!("{what} ({name})"),
            media_type: chosen.media_type.clone(),
        });
    }
    json(bundle, name, &bytes)
}

fn image(bundle: &Bundle, manifest: Manifest, choice: &Choice) -> Result<Found, SourceError> {
    let kind = manifest.config.media_type.as_str();
    let image_configs = [
        "application/vnd.oci.image.config.v1+json",
        "application/vnd.docker.container.image.v1+json",
        "",
    ];
    if !image_configs.contains(&kind) {
        return Err(SourceError::NotAnImage {
            what: "the manifest's configuration".into(),
            media_type: kind.into(),
        });
    }
    let config = RawConfig::from_json(&blob(bundle, &manifest.config, MAX_CONFIG)?)?;
    let layers = manifest
        .layers
        .into_iter()
        .map(|layer| {
            super::check_media_type(&layer.media_type)?;
            let digest = digest(&layer.digest)?;
            Ok(LayerInput {
                blob: bundle.blob(&place(&digest))?,
                name: layer.digest,
                expected: Expected {
                    digest: Some(digest),
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
    let expected = digest(&descriptor.digest)?;
    let bytes = bundle.read(&place(&expected), limit)?;
    let actual = Digest::of(&bytes);
    if bytes.len() as u64 != descriptor.size || actual != expected {
        return Err(SourceError::Digest { expected, actual });
    }
    Ok(bytes)
}

fn digest(text: &str) -> Result<Digest, SourceError> {
    text.parse().map_err(|what| SourceError::BadDigest {
        digest: text.chars().take(80).collect(),
        what,
    })
}

fn place(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
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
    let names: Vec<String> = names.into_iter().take(50).collect();
    if names.is_empty() {
        "no named image".into()
    } else {
        names.join(", ")
    }
}
