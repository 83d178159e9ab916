//! Platforms of images (OCI image specification, `image-index.md`).

use crate::null::null_as_default;
use crate::text::one_line;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The platform of an image: `linux/amd64`, `linux/arm/v7`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    /// Operating system, by Go's name.
    pub os: String,
    /// Processor architecture, by Go's name.
    pub architecture: String,
    /// Variant of the architecture: `v7`, `v8`; empty if not given.
    #[serde(
        default,
        deserialize_with = "null_as_default",
        skip_serializing_if = "String::is_empty"
    )]
    pub variant: String,
}

/// Why a text is not a platform.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a platform: write OS/ARCHITECTURE[/VARIANT], such as linux/amd64")]
pub struct PlatformError(String);

impl Default for Platform {
    /// `linux/amd64`, the platform of VMs.
    fn default() -> Self {
        Self {
            os: "linux".to_owned(),
            architecture: "amd64".to_owned(),
            variant: String::new(),
        }
    }
}

impl Platform {
    /// Whether an image for `other` runs on this platform. The variant is compared only if this
    /// platform names one.
    pub fn runs(&self, other: &Platform) -> bool {
        self.os == other.os
            && self.architecture == other.architecture
            && (self.variant.is_empty() || self.variant == other.variant)
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        if self.variant.is_empty() {
            return Ok(());
        }
        write!(f, "/{}", self.variant)
    }
}

impl FromStr for Platform {
    type Err = PlatformError;

    fn from_str(text: &str) -> Result<Self, PlatformError> {
        let parts: Vec<&str> = text.split('/').collect();
        let word = |part: &&str| {
            !part.is_empty()
                && part.len() <= 64
                && part
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b))
        };
        if !(2..=3).contains(&parts.len()) || !parts.iter().all(word) {
            return Err(PlatformError(one_line(text)));
        }
        Ok(Self {
            os: parts[0].to_owned(),
            architecture: parts[1].to_owned(),
            variant: parts.get(2).copied().unwrap_or_default().to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_platform_survives_a_round_trip() {
        for text in ["linux/amd64", "linux/arm/v7"] {
            let platform: Platform = text.parse().unwrap();
            assert_eq!(platform.to_string(), text);
            let json = serde_json::to_string(&platform).unwrap();
            assert_eq!(json.contains("variant"), text.ends_with("v7"), "{json}");
            assert_eq!(serde_json::from_str::<Platform>(&json).unwrap(), platform);
        }
        let null = r#"{"os":"linux","architecture":"amd64","variant":null}"#;
        let platform: Platform = serde_json::from_str(null).unwrap();
        assert_eq!(platform, Platform::default());
        for text in ["linux", "linux//x", "", "a/b/c/d", "linux/amd64/", "a/b c"] {
            assert!(text.parse::<Platform>().is_err(), "{text}");
        }
        assert_eq!(
            "x\u{1b}[31m".parse::<Platform>().unwrap_err().to_string(),
            "\"x [31m\" is not a platform: write OS/ARCHITECTURE[/VARIANT], such as linux/amd64"
        );
    }

    #[test]
    fn a_variant_is_compared_only_if_one_is_asked_for() {
        let of = |text: &str| text.parse::<Platform>().unwrap();
        assert!(of("linux/amd64").runs(&of("linux/amd64/v3")));
        assert!(of("linux/amd64/v3").runs(&of("linux/amd64/v3")));
        assert!(!of("linux/amd64/v3").runs(&of("linux/amd64")));
        assert!(!of("linux/amd64").runs(&of("linux/arm64")));
    }
}
