//! Indexes (OCI image specification, `image-index.md`), and the choice of one image.

use crate::descriptor::Descriptor;
use crate::null::null_as_default;
use crate::platform::Platform;
use crate::text::one_line;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Most platforms that a message names.
const MAX_NAMED: usize = 20;

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
    #[serde(default, deserialize_with = "null_as_default")]
    pub manifests: Vec<Descriptor>,
    /// Annotations.
    #[serde(
        default,
        deserialize_with = "null_as_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub annotations: BTreeMap<String, String>,
}

impl Index {
    /// Chooses the manifest for this platform, if there is one.
    ///
    /// Without a variant the most general manifest is chosen: one without a variant, else the first
    /// generation, else the first in the index.
    pub fn choose(&self, wanted: &Platform) -> Option<&Descriptor> {
        let candidates: Vec<(&Descriptor, &str)> = self
            .manifests
            .iter()
            .filter_map(|entry| {
                let platform = entry.platform.as_ref()?;
                let fits = wanted.runs(platform);
                fits.then_some((entry, platform.variant.as_str()))
            })
            .collect();
        let of = |variant: &str| candidates.iter().find(|(_, is)| *is == variant);
        if let Some((chosen, _)) = of("").or_else(|| of("v1")).or(candidates.first()) {
            return Some(*chosen);
        }
        // The single manifest of an index often has no platform.
        match self.manifests.as_slice() {
            [only] if only.platform.is_none() => Some(only),
            _ => None,
        }
    }

    /// Its platforms, for a message: at most 20, each once.
    pub fn platforms(&self) -> String {
        let mut names: Vec<String> = Vec::new();
        for entry in &self.manifests {
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
        let more = names.len().saturating_sub(MAX_NAMED);
        names.truncate(MAX_NAMED);
        if names.is_empty() {
            return "none".to_owned();
        }
        if more > 0 {
            names.push(format!("{more} more"));
        }
        names.join(", ")
    }
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
            let chosen = index.choose(&wanted.parse().unwrap())?;
            let platform = chosen.platform.as_ref();
            Some(platform.map(|p| p.to_string()).unwrap_or_default())
        };
        let there = [
            "linux/arm64/v8",
            "linux/amd64/v3",
            "linux/amd64",
            "unknown/unknown",
        ];
        for (wanted, there, expected) in [
            ("linux/amd64", &there[..], Some("linux/amd64")),
            ("linux/amd64/v3", &there, Some("linux/amd64/v3")),
            ("linux/arm64", &there, Some("linux/arm64/v8")),
            (
                "linux/arm",
                &["linux/arm/v7", "linux/arm/v1"],
                Some("linux/arm/v1"),
            ),
            ("linux/amd64", &[""], Some("")),
            ("linux/s390x", &there, None),
            ("linux/amd64/v4", &there, None),
            ("linux/amd64", &["", ""], None),
            ("linux/amd64", &[], None),
        ] {
            assert_eq!(chosen(wanted, there).as_deref(), expected, "{wanted}");
        }
    }

    #[test]
    fn platforms_are_named_for_a_message() {
        let named = |there: &[&str]| index(there).platforms();
        assert_eq!(
            named(&[
                "linux/arm64/v8",
                "linux/amd64",
                "unknown/unknown",
                "linux/amd64",
                ""
            ]),
            "linux/arm64/v8, linux/amd64, one without a platform"
        );
        assert_eq!(named(&[]), "none");
        let many: Vec<String> = (0..30).map(|n| format!("os/{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(named(&many).ends_with("os/19, 10 more"), "{}", named(&many));
        let mut hostile = index(&["a/b"]);
        hostile.manifests[0].platform.as_mut().unwrap().os = format!("\u{1b}\n{}", "x".repeat(999));
        let shown = hostile.platforms();
        assert!(
            !shown.contains(char::is_control) && shown.len() <= 300,
            "{shown}"
        );
    }
}
