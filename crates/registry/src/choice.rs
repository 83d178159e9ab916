//! Chooses an image of an index.

use crate::error::{Result, one_line};
use crate::{Descriptor, Index, Platform, RegistryError};

impl Platform {
    /// Chooses the manifest for this platform. `what` is the index's name in errors.
    ///
    /// Without a variant the most general manifest is chosen: one without a variant, else the first
    /// generation, else the first in the index.
    pub fn choose<'a>(&self, index: &'a Index, what: &str) -> Result<&'a Descriptor> {
        let fits = |entry: &&Descriptor| {
            entry.platform.as_ref().is_some_and(|platform| {
                platform.os == self.os && platform.architecture == self.architecture
            })
        };
        let variant = |entry: &Descriptor| -> Option<String> {
            let variant = entry.platform.as_ref()?.variant.clone()?;
            (!variant.is_empty()).then_some(variant)
        };
        let candidates: Vec<&Descriptor> = index.manifests.iter().filter(fits).collect();
        let chosen = match &self.variant {
            Some(wanted) => candidates
                .iter()
                .find(|entry| variant(entry).as_ref() == Some(wanted)),
            None => candidates
                .iter()
                .find(|entry| variant(entry).is_none())
                .or_else(|| {
                    candidates
                        .iter()
                        .find(|entry| variant(entry).as_deref() == Some("v1"))
                })
                .or_else(|| candidates.first()),
        };
        if let Some(chosen) = chosen {
            return Ok(chosen);
        }
        // The single manifest of an index often has no platform.
        if let [only] = index.manifests.as_slice()
            && only.platform.is_none()
        {
            return Ok(only);
        }
        Err(RegistryError::NoPlatform {
            what: what.to_owned(),
            wanted: self.to_string(),
            available: available(index),
        })
    }
}

/// The platforms of an index, for a message.
fn available(index: &Index) -> String {
    let mut names: Vec<String> = Vec::new();
    for entry in &index.manifests {
        // BuildKit's attestations have the platform unknown/unknown.
        let name = match &entry.platform {
            Some(platform) if platform.os == "unknown" => continue,
            Some(platform) => one_line(&platform.to_string()),
            None => "one without a platform".to_owned(),
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let more = names.len().saturating_sub(20);
    names.truncate(20);
    if names.is_empty() {
        return "none".to_owned();
    }
    if more > 0 {
        names.push(format!("{more} more"));
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(platforms: &[&str]) -> Index {
        let entry = |text: &&str| Descriptor {
            platform: (!text.is_empty()).then(|| text.parse().unwrap()),
            ..Descriptor::of("m", text.as_bytes())
        };
        Index {
            schema_version: 2,
            media_type: None,
            manifests: platforms.iter().map(entry).collect(),
            annotations: Default::default(),
        }
    }

    #[test]
    fn the_most_general_variant_is_taken_unless_one_is_asked_for() {
        let chosen = |wanted: &str, there: &[&str]| {
            let index = index(there);
            let platform: Platform = wanted.parse().unwrap();
            platform.choose(&index, "x").map(|d| {
                d.platform
                    .as_ref()
                    .map(|p| p.to_string())
                    .unwrap_or_default()
            })
        };
        let there = [
            "linux/arm64/v8",
            "linux/amd64/v3",
            "linux/amd64",
            "unknown/unknown",
        ];
        assert_eq!(chosen("linux/amd64", &there).unwrap(), "linux/amd64");
        assert_eq!(chosen("linux/amd64/v3", &there).unwrap(), "linux/amd64/v3");
        assert_eq!(chosen("linux/arm64", &there).unwrap(), "linux/arm64/v8");
        assert_eq!(
            chosen("linux/arm", &["linux/arm/v7", "linux/arm/v1"]).unwrap(),
            "linux/arm/v1"
        );
        assert_eq!(chosen("linux/amd64", &[""]).unwrap(), "");
        assert_eq!(
            chosen("linux/s390x", &there).unwrap_err().to_string(),
            "x has no image for linux/s390x; it has linux/arm64/v8, linux/amd64/v3, linux/amd64"
        );
        assert!(chosen("linux/amd64/v4", &there).is_err());
        assert!(chosen("linux/amd64", &["", ""]).is_err());
        assert!("linux".parse::<Platform>().is_err());
        assert!("linux//x".parse::<Platform>().is_err());
    }
}
