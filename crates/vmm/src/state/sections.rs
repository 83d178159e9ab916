//! Sections: a tag, a version, a length, and so many bytes.

use super::StateError;
use serde::Serialize;
use serde::de::DeserializeOwned;

const TAG: usize = 16;
/// Tag, version, length.
const HEAD: usize = TAG + 4 + 8;

/// Bytes of guest RAM.
pub const MEMORY: Kind = Kind::new("memory", 1);
/// A vCPU; they come in their order.
pub const VCPU: Kind = Kind::new("vcpu", 1);
/// Interrupt controllers, timer chip, clock.
pub const CHIPS: Kind = Kind::new("chips", 1);

/// What release wrote a state, if it says so: for sentences.
pub type Release<'a> = &'a Option<String>;

/// A kind of section, with the version that is written and the newest that is read.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    tag: &'static str,
    version: u32,
}

impl Kind {
    /// Tags are ASCII, and not the beginning of one another.
    pub const fn new(tag: &'static str, version: u32) -> Kind {
        assert!(tag.len() <= TAG && tag.is_ascii());
        Kind { tag, version }
    }
}

/// A body that is being written.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Appends a section.
    pub fn put(&mut self, kind: Kind, part: &impl Serialize) {
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

    /// Appends a section of what there may be.
    pub fn put_some(&mut self, kind: Kind, part: Option<&impl Serialize>) {
        if let Some(part) = part {
            self.put(kind, part);
        }
    }

    /// The body.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

struct Section<'a> {
    tag: &'a str,
    version: u32,
    bytes: &'a [u8],
    taken: bool,
}

/// The sections of a body.
pub struct Sections<'a>(Vec<Section<'a>>);

impl<'a> Sections<'a> {
    /// Finds them; what they hold is not looked at.
    pub fn read(mut body: &'a [u8]) -> Result<Sections<'a>, StateError> {
        let mut all = Vec::with_capacity(32);
        while !body.is_empty() {
            let (section, rest) = split(body).ok_or_else(|| {
                StateError::Contents("a section of it is cut short or has no name".into())
            })?;
            all.push(section);
            body = rest;
        }
        Ok(Sections(all))
    }

    /// All of a kind.
    pub fn all<T: DeserializeOwned>(
        &mut self,
        kind: Kind,
        release: Release<'_>,
    ) -> Result<Vec<T>, StateError> {
        let of_kind = self.0.iter_mut().filter(|section| section.tag == kind.tag);
        of_kind
            .map(|section| {
                section.taken = true;
                decode(section, kind, release)
            })
            .collect()
    }

    /// The only one of a kind, if there is one.
    pub fn optional<T: DeserializeOwned>(
        &mut self,
        kind: Kind,
        release: Release<'_>,
    ) -> Result<Option<T>, StateError> {
        let mut all = self.all(kind, release)?;
        match all.len() {
            0 | 1 => Ok(all.pop()),
            count => {
                let tag = kind.tag;
                let what = format!("it has {count} sections {tag}, and there can be one");
                Err(StateError::Contents(what))
            }
        }
    }

    /// The only one of a kind.
    pub fn one<T: DeserializeOwned>(
        &mut self,
        kind: Kind,
        release: Release<'_>,
    ) -> Result<T, StateError> {
        let missing = || StateError::Contents(format!("it has no section {}", kind.tag));
        self.optional(kind, release)?.ok_or_else(missing)
    }

    /// The tag of one that nobody wanted.
    pub fn left(&self) -> Option<String> {
        let left = self.0.iter().find(|section| !section.taken);
        left.map(|section| section.tag.to_owned())
    }
}

fn split(body: &[u8]) -> Option<(Section<'_>, &[u8])> {
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
    let section = Section {
        tag,
        version,
        bytes,
        taken: false,
    };
    Some((section, rest))
}

/// Each kind has one version so far.
fn decode<T: DeserializeOwned>(
    section: &Section<'_>,
    kind: Kind,
    release: Release<'_>,
) -> Result<T, StateError> {
    if section.version != kind.version {
        return Err(StateError::SectionVersion {
            tag: kind.tag,
            version: section.version,
            newest: kind.version,
            release: release.clone(),
        });
    }
    let tag = kind.tag;
    let (part, rest) = postcard::take_from_bytes(section.bytes)
        .map_err(|error| StateError::Contents(format!("section {tag}: {error}")))?;
    match rest.is_empty() {
        true => Ok(part),
        false => {
            let what = format!("section {tag}: bytes are left over");
            Err(StateError::Contents(what))
        }
    }
}
