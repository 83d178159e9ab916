//! The platform of an image.

use crate::error::one_line;
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
    /// Variant of the architecture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

impl Default for Platform {
    /// `linux/amd64`, the platform of VMs.
    fn default() -> Self {
        Self {
            os: "linux".to_owned(),
            architecture: "amd64".to_owned(),
            variant: None,
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match self.variant.as_deref() {
            None | Some("") => Ok(()),
            Some(variant) => write!(f, "/{variant}"),
        }
    }
}

impl FromStr for Platform {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let parts: Vec<&str> = text.split('/').collect();
        let word = |part: &&str| {
            !part.is_empty()
                && part.len() <= 64
                && part
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b))
        };
        if !(2..=3).contains(&parts.len()) || !parts.iter().all(word) {
            return Err(format!(
                "{:?} is not a platform: write OS/ARCHITECTURE[/VARIANT], such as linux/amd64",
                one_line(text)
            ));
        }
        Ok(Self {
            os: parts[0].to_owned(),
            architecture: parts[1].to_owned(),
            variant: parts.get(2).map(|&variant| variant.to_owned()),
        })
    }
}
