//! Content digests as OCI writes them.

use sha2::Digest as _;
use std::fmt;
use std::str::FromStr;

/// A SHA-256, written `sha256:HEX`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(sha2::Sha256::digest(bytes).into())
    }

    /// Its 64 hexadecimal digits.
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
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

impl FromStr for Digest {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Digest, &'static str> {
        let hex = text
            .strip_prefix("sha256:")
            .ok_or("only sha256 digests are supported")?;
        let small = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if hex.len() != 64 || !hex.bytes().all(small) {
            return Err("a sha256 digest has 64 hexadecimal digits");
        }
        let mut bytes = [0; 32];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[2 * index..2 * index + 2], 16)
                .map_err(|_| "a sha256 digest has 64 hexadecimal digits")?;
        }
        Ok(Digest(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_survives_a_round_trip() {
        let digest = Digest::of(b"");
        let text = digest.to_string();
        assert!(text.starts_with("sha256:e3b0c44298fc1c14"), "{text}");
        assert_eq!(text.parse(), Ok(digest));
        assert!("md5:00".parse::<Digest>().is_err());
        assert!("sha256:../../etc/passwd".parse::<Digest>().is_err());
        assert!(text.to_uppercase().parse::<Digest>().is_err());
    }
}
