//! The sections of a saved state. Each has a tag (16 bytes of ASCII, padded with zeros), a version
//! (u32), a length (u64, both little endian), and that many bytes in postcard's format.

use jiffy_wire::state::by;
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

const TAG: usize = 16;
/// Tag, version, length.
const HEAD: usize = TAG + 4 + 8;

/// The release that wrote a state, if known: for messages.
pub type Release<'a> = &'a Option<String>;

/// How many sections of a kind a state can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// Exactly one.
    One,
    /// At most one.
    AtMostOne,
    /// Any number, in their order.
    Any,
}

/// Why sections can't be read.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SectionError {
    /// A section with an unknown tag, of a device or part of a later release.
    #[error("the VM was saved{} with a part that this jiffy does not know: {tag}", by(.release))]
    Unknown {
        /// The section's tag.
        tag: String,
        /// The release that wrote the state, if known.
        release: Option<String>,
    },
    /// A section of a later version.
    #[error(
        "the VM was saved{} with version {version} of its {tag}, this jiffy reads versions up to {newest}",
        by(.release)
    )]
    Version {
        /// The section's tag.
        tag: &'static str,
        /// The section's version.
        version: u32,
        /// The newest version that is read.
        newest: u32,
        /// The release that wrote the state, if known.
        release: Option<String>,
    },
    /// The checksum is right, but the contents are not valid.
    #[error("the saved VM state is damaged: {0}")]
    Contents(String),
}

/// A kind of section, with the version that is written and the newest that is read.
#[derive(Debug, Clone, Copy)]
pub struct Section {
    tag: &'static str,
    version: u32,
}

impl Section {
    /// Tags are ASCII, and none is a prefix of another.
    pub const fn new(tag: &'static str, version: u32) -> Section {
        assert!(tag.len() <= TAG && tag.is_ascii());
        Section { tag, version }
    }

    /// Its tag.
    pub const fn tag(self) -> &'static str {
        self.tag
    }
}

/// The body of a state that is being written.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Appends a section.
    pub fn put(&mut self, kind: Section, part: &impl Serialize) {
        let mut tag = [0; TAG];
        tag[..kind.tag.len()].copy_from_slice(kind.tag.as_bytes());
        self.0.extend(tag);
        self.0.extend(kind.version.to_le_bytes());
        let length = self.0.len();
        self.0.extend(0_u64.to_le_bytes());
        let bytes = std::mem::take(&mut self.0);
        self.0 = postcard::to_extend(part, bytes).expect("states are plain data");
        let written = (self.0.len() - length - 8) as u64;
        self.0[length..length + 8].copy_from_slice(&written.to_le_bytes());
    }

    /// The body.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// A section that was found in a body.
struct Found<'a> {
    tag: &'a str,
    version: u32,
    bytes: &'a [u8],
    taken: bool,
}

/// The sections of a body.
pub struct Sections<'a>(Vec<Found<'a>>);

impl<'a> Sections<'a> {
    /// Splits a body into its sections; their contents are not read yet.
    ///
    /// # Errors
    ///
    /// If a section is cut short or has no valid tag.
    pub fn read(mut body: &'a [u8]) -> Result<Sections<'a>, SectionError> {
        let mut all = Vec::with_capacity(32);
        while !body.is_empty() {
            let (section, rest) = split(body).ok_or_else(|| {
                SectionError::Contents("a section of it is cut short or has no name".into())
            })?;
            all.push(section);
            body = rest;
        }
        Ok(Sections(all))
    }

    /// All sections of a kind.
    ///
    /// # Errors
    ///
    /// If their number is not `count`, or one of them can't be read.
    pub fn take<T: DeserializeOwned>(
        &mut self,
        kind: Section,
        count: Count,
        release: Release<'_>,
    ) -> Result<Vec<T>, SectionError> {
        let of_kind = self.0.iter_mut().filter(|section| section.tag == kind.tag);
        let all: Vec<T> = of_kind
            .map(|section| {
                section.taken = true;
                decode(section, kind, release)
            })
            .collect::<Result<_, _>>()?;
        let tag = kind.tag;
        match (count, all.len()) {
            (Count::Any, _) | (Count::AtMostOne, 0) | (_, 1) => Ok(all),
            (_, 0) => Err(SectionError::Contents(format!("it has no section {tag}"))),
            (_, count) => {
                let what = format!("it has {count} sections {tag}, at most one is allowed");
                Err(SectionError::Contents(what))
            }
        }
    }

    /// The only section of a kind.
    ///
    /// # Errors
    ///
    /// If there is none, or more than one, or it can't be read.
    pub fn one<T: DeserializeOwned>(
        &mut self,
        kind: Section,
        release: Release<'_>,
    ) -> Result<T, SectionError> {
        let mut all = self.take(kind, Count::One, release)?;
        Ok(all.pop().expect("one was taken"))
    }

    /// Checks that all sections were taken.
    ///
    /// # Errors
    ///
    /// If a section was not taken: this release does not know it. The error names the first.
    pub fn finish(self, release: Release<'_>) -> Result<(), SectionError> {
        match self.0.iter().find(|section| !section.taken) {
            None => Ok(()),
            Some(section) => Err(SectionError::Unknown {
                tag: section.tag.to_owned(),
                release: release.clone(),
            }),
        }
    }
}

fn split(body: &[u8]) -> Option<(Found<'_>, &[u8])> {
    let (head, rest) = body.split_at_checked(HEAD)?;
    let (tag, numbers) = head.split_at(TAG);
    let (version, length) = numbers.split_at(4);
    let length = u64::from_le_bytes(length.try_into().ok()?);
    let (bytes, rest) = rest.split_at_checked(usize::try_from(length).ok()?)?;
    let tag = std::str::from_utf8(tag).ok()?.trim_end_matches('\0');
    let plausible = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if tag.is_empty() || !tag.chars().all(plausible) {
        return None;
    }
    let version = u32::from_le_bytes(version.try_into().ok()?);
    let section = Found {
        tag,
        version,
        bytes,
        taken: false,
    };
    Some((section, rest))
}

/// Decodes a section. Each kind has only one version so far.
fn decode<T: DeserializeOwned>(
    section: &Found<'_>,
    kind: Section,
    release: Release<'_>,
) -> Result<T, SectionError> {
    if section.version != kind.version {
        return Err(SectionError::Version {
            tag: kind.tag,
            version: section.version,
            newest: kind.version,
            release: release.clone(),
        });
    }
    let tag = kind.tag;
    let (part, rest) = postcard::take_from_bytes(section.bytes)
        .map_err(|error| SectionError::Contents(format!("section {tag}: {error}")))?;
    match rest.is_empty() {
        true => Ok(part),
        false => {
            let what = format!("section {tag}: bytes are left over");
            Err(SectionError::Contents(what))
        }
    }
}
