//! Digests (OCI image specification, `descriptor.md`): SHA-256, the name of every blob.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::str::FromStr;

/// The SHA-256 of some bytes, written `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

/// Why a text is not a digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DigestError {
    /// Another algorithm. The OCI image specification also allows SHA-512, which no registry uses.
    #[error("the digest {0:?} is not one of SHA-256, the only kind that is supported")]
    Algorithm(String),
    /// Not 64 lower-case hexadecimal digits after the colon.
    #[error("{0:?} is not a digest: it must be sha256: and 64 lower-case hexadecimal digits")]
    Form(String),
}

impl Digest {
    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The 64 hexadecimal digits, without `sha256:`.
    pub fn hex(&self) -> String {
        let mut hex = String::with_capacity(64);
        for byte in self.0 {
            for digit in [byte >> 4, byte & 15] {
                hex.push(char::from_digit(u32::from(digit), 16).unwrap_or('0'));
            }
        }
        hex
    }

    /// `sha256:` and the first twelve digits, for messages.
    pub fn short(&self) -> String {
        format!("sha256:{}", &self.hex()[..12])
    }
}

/// Computes a [`Digest`] incrementally.
#[derive(Clone, Default)]
pub struct Hasher(Sha256);

impl Hasher {
    /// A hasher without bytes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let shown = || text.chars().take(100).collect::<String>();
        let (algorithm, hex) = text
            .split_once(':')
            .ok_or_else(|| DigestError::Form(shown()))?;
        if algorithm != "sha256" {
            return Err(DigestError::Algorithm(shown()));
        }
        let mut bytes = [0; 32];
        let digits = hex.as_bytes();
        if digits.len() != 64 {
            return Err(DigestError::Form(shown()));
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let (Some(high), Some(low)) = (nibble(pair[0]), nibble(pair[1])) else {
                return Err(DigestError::Form(shown()));
            };
            *byte = high << 4 | low;
        }
        Ok(Self(bytes))
    }
}

fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, DigestError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_survives_a_round_trip() {
        let digest = Digest::of(b"abc");
        let text = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digest.to_string(), text);
        assert_eq!(text.parse(), Ok(digest));
        let mut hasher = Hasher::new();
        hasher.update(b"a");
        hasher.update(b"bc");
        assert_eq!(hasher.finish(), digest);
    }

    #[test]
    fn an_invalid_digest_is_refused() {
        let upper = Digest::of(b"").to_string().to_uppercase();
        for text in [
            "",
            "sha256",
            "sha256:",
            "sha256:00",
            "sha512:00",
            "md5:00",
            "sha256:../../etc/passwd",
            &upper,
            "sha256:é",
        ] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
        let non_hex = format!("sha256:{}", "g".repeat(64));
        assert_eq!(
            non_hex.parse::<Digest>(),
            Err(DigestError::Form(non_hex.clone()))
        );
    }
}
