//! The envelope of a VM's saved state. `jiffy-vmm` writes it and reads the body; the node uses it
//! to tell whether it can read a state at all.
//!
//! | version | what follows the magic, all little endian |
//! |---|---|
//! | 1 | version u32, CRC-32C of the body u32, its length u64, body |
//! | 2 | version u32, CRC-32C of all that follows u32, length of the body u64, release, body |
//! | 3 | as version 2, with another body |
//!
//! Since version 2 the release that wrote the state has 16 bytes of ASCII, padded with zeros.

use thiserror::Error;

/// The first bytes of a state.
pub const MAGIC: [u8; 8] = *b"JIFFYVMS";
/// The version that is written.
pub const VERSION: u32 = 3;
/// The oldest version that is read.
pub const OLDEST: u32 = 1;
/// Bytes of magic, version, checksum and length: the same in every version.
pub const HEADER: usize = 24;
/// Bytes of the release.
pub const RELEASE: usize = 16;
/// Most bytes of a body: a VM of 32 vCPUs has about half a MiB, without fw_cfg files.
pub const MAX_BODY: u64 = 512 << 20;

/// Why the envelope of a saved state can't be read.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EnvelopeError {
    /// The bytes do not begin with the magic of a state.
    #[error("this is not the saved state of a VM")]
    Magic,
    /// A later release wrote the state.
    #[error(
        "the VM was saved in format {version}{}, this jiffy reads formats {OLDEST} to {VERSION}",
        by(.release)
    )]
    Version {
        /// The state's version.
        version: u32,
        /// The release that wrote it, if known.
        release: Option<String>,
    },
    /// The state is shorter or longer than its header says.
    #[error("the saved VM state should have {expected} bytes but has {actual}")]
    Length {
        /// Bytes of the body according to the header.
        expected: u64,
        /// Bytes of the body in the file.
        actual: u64,
    },
    /// The checksum does not match.
    #[error("the saved VM state is damaged: its checksum does not match")]
    Checksum,
}

/// The header before the body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// The version.
    pub version: u32,
    /// The release that wrote the state, if known.
    pub release: Option<String>,
    checksum: u32,
}

impl Envelope {
    /// Bytes from the beginning of a state that [`Envelope::read`] needs.
    pub const BYTES: usize = HEADER + RELEASE;

    /// Checks the first [`BYTES`](Envelope::BYTES) bytes of a state of `whole` bytes, except its
    /// checksum.
    ///
    /// # Errors
    ///
    /// If the magic is wrong, the version is not one that is read, or the header gives another
    /// length than the body has, or more than [`MAX_BODY`].
    pub fn read(start: &[u8], whole: u64) -> Result<Envelope, EnvelopeError> {
        let Some((header, rest)) = start.split_at_checked(HEADER) else {
            return Err(EnvelopeError::Magic);
        };
        if header[..8] != MAGIC {
            return Err(EnvelopeError::Magic);
        }
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
        let version = word(8);
        let release = release_in(rest);
        let before_body = match version {
            1 => HEADER,
            2 | VERSION if rest.len() >= RELEASE => HEADER + RELEASE,
            2 | VERSION => return Err(EnvelopeError::Magic),
            version => return Err(EnvelopeError::Version { version, release }),
        };
        let expected = u64::from_le_bytes(header[16..24].try_into().expect("8 bytes"));
        let actual = whole.saturating_sub(before_body as u64);
        if expected != actual || actual > MAX_BODY {
            return Err(EnvelopeError::Length { expected, actual });
        }
        Ok(Envelope {
            version,
            release: release.filter(|_| version > 1),
            checksum: word(12),
        })
    }
}

/// Opens a whole state: returns the envelope and the body, with a valid checksum.
///
/// # Errors
///
/// If [`Envelope::read`] fails, or the checksum is wrong.
pub fn open(bytes: &[u8]) -> Result<(Envelope, &[u8]), EnvelopeError> {
    let envelope = Envelope::read(bytes, bytes.len() as u64)?;
    let rest = &bytes[HEADER..];
    if envelope.checksum != crc_fast::crc32_iscsi(rest) {
        return Err(EnvelopeError::Checksum);
    }
    let body = match envelope.version {
        1 => rest,
        _ => &rest[RELEASE..],
    };
    Ok((envelope, body))
}

/// Seals this body in a state of this [`VERSION`], written by this release.
pub fn seal(release: &str, body: &[u8]) -> Vec<u8> {
    let mut field = [0; RELEASE];
    let length = release.len().min(RELEASE);
    field[..length].copy_from_slice(&release.as_bytes()[..length]);
    let mut bytes = Vec::with_capacity(HEADER + RELEASE + body.len());
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend((body.len() as u64).to_le_bytes());
    bytes.extend(field);
    bytes.extend(body);
    let checksum = crc_fast::crc32_iscsi(&bytes[HEADER..]);
    bytes[12..16].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// " by jiffy …", if the release is known: for messages.
pub fn by(release: &Option<String>) -> String {
    match release {
        Some(release) => format!(" by jiffy {release}"),
        None => String::new(),
    }
}

/// The release that wrote a state. A later version may store something else here, so anything that
/// does not look like a release is ignored.
fn release_in(rest: &[u8]) -> Option<String> {
    let field = rest.get(..RELEASE)?;
    let text = std::str::from_utf8(field).ok()?.trim_end_matches('\0');
    let plausible = |c: char| c.is_ascii_alphanumeric() || ".-+".contains(c);
    (!text.is_empty() && text.chars().all(plausible)).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_sealed_state_can_be_opened() {
        let bytes = seal("1.2.3", b"body");
        let (envelope, body) = open(&bytes).unwrap();
        assert_eq!((envelope.version, body), (VERSION, &b"body"[..]));
        assert_eq!(envelope.release.as_deref(), Some("1.2.3"));
        let start = &bytes[..Envelope::BYTES];
        assert_eq!(Envelope::read(start, bytes.len() as u64), Ok(envelope));
        let cut = Envelope::read(start, bytes.len() as u64 - 1);
        let [expected, actual] = [4, 3];
        assert_eq!(cut, Err(EnvelopeError::Length { expected, actual }));
    }

    proptest! {
        #[test]
        fn any_changed_bit_or_truncation_is_detected(body in proptest::collection::vec(any::<u8>(), 0..64), at: prop::sample::Index, bit in 0..8) {
            let bytes = seal("1.2.3", &body);
            let at = at.index(bytes.len());
            prop_assert!(open(&bytes[..at]).is_err());
            let mut changed = bytes;
            changed[at] ^= 1_u8 << bit;
            // A changed version may be valid: it says how to read the body.
            let is_version = (MAGIC.len()..MAGIC.len() + 4).contains(&at);
            prop_assert!(open(&changed).is_err() || is_version);
        }

        #[test]
        fn opening_any_bytes_does_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64), whole: u64) {
            let _ = open(&bytes);
            let _ = Envelope::read(&bytes, whole);
            let headed = [&MAGIC[..], &bytes].concat();
            let _ = open(&headed);
            let _ = Envelope::read(&headed, whole);
        }
    }
}
