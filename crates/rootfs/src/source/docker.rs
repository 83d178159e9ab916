//! `docker save` archives: `manifest.json` and one tar per layer (Docker image specification v1.2,
//! "Combined Image JSON + Filesystem Changeset").

use super::bundle::{Bundle, DOCKER_MANIFEST};
use super::oci::{Found, MAX_LAYERS, json, list};
use super::{Choice, LayerInput, SourceError, is_called};
use crate::config::{MAX_CONFIG, RawConfig};
use crate::layer::Expected;
use jiffy_oci::Digest;
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Image {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// Finds the wanted image in the archive.
pub(super) fn open(bundle: &Bundle, choice: &Choice) -> Result<Found, SourceError> {
    let images: Vec<Image> = json(
        bundle,
        DOCKER_MANIFEST,
        &bundle.read(DOCKER_MANIFEST, MAX_CONFIG)?,
    )?;
    let available = || {
        let tags = images
            .iter()
            .flat_map(|image| image.repo_tags.iter().flatten());
        list(tags.cloned())
    };
    let image = match &choice.reference {
        Some(wanted) => images
            .iter()
            .find(|image| {
                let mut tags = image.repo_tags.iter().flatten();
                tags.any(|tag| is_called(tag, wanted))
            })
            .ok_or_else(|| SourceError::NoSuchImage {
                wanted: wanted.clone(),
                available: available(),
            })?,
        None => match &images[..] {
            [] => return Err(SourceError::NoImage),
            [image] => image,
            _ => return Err(SourceError::WhichImage(available())),
        },
    };
    let bytes = bundle.read(&image.config, MAX_CONFIG)?;
    // The configuration's name is its digest.
    let stem = image.config.rsplit('/').next().unwrap_or_default();
    let stem = stem.strip_suffix(".json").unwrap_or(stem);
    if let Ok(expected) = format!("sha256:{stem}").parse::<Digest>() {
        let actual = Digest::of(&bytes);
        if actual != expected {
            return Err(SourceError::Digest { expected, actual });
        }
    }
    let config = RawConfig::from_json(&bytes)?;
    super::check_platform(&config.platform(), choice)?;
    if image.layers.len() > MAX_LAYERS {
        return Err(SourceError::TooManyLayers(image.layers.len()));
    }
    let layers = image
        .layers
        .iter()
        .map(|name| {
            Ok(LayerInput {
                blob: bundle.blob(name)?,
                name: name.clone(),
                expected: Expected::default(),
            })
        })
        .collect::<Result<Vec<_>, SourceError>>()?;
    Ok(Found { config, layers })
}
