//! The file format of a VM's saved state: everything that a snapshot keeps besides RAM and disks.
//!
//! Since version 3 the body is sections, each with a tag, a version of its own and a
//! length: a changed or a new device changes its own section and nothing else. A
//! section that is unknown, or of a later version, is refused by name. What each
//! section holds is in [`VmState::encode`] and, for devices, in [`crate::devices::registry`].
//!
//! All files in `golden/` must be readable for ever: a test fails when a change to any part
//! of [`VmState`] changes what they mean. Such a change needs a new version of that part's
//! section, a golden file with it, and the old type of that part, from which the new one is
//! made.
//!
//! | version | what follows the magic, all little endian |
//! |---|---|
//! | 1 | version u32, CRC-32C of the body u32, its length u64, body: one tree (`before`) |
//! | 2 | version u32, CRC-32C of all that follows u32, length of the body u64, release, body |
//! | 3 | as version 2; the body consists of [`crate::sections`] |
//!
//! In version 2 the release that wrote the state has 16 bytes of ASCII, padded with zeros, and the
//! body is that of version 1.

mod before;

use crate::devices::{DevicesState, registry};
use crate::irq::ChipsState;
use crate::sections::{Count, Section, SectionError, Sections, Writer, by};
use crate::vcpu::{MAX_VCPUS, VcpuState};

use thiserror::Error;

const MAGIC: [u8; 8] = *b"JIFFYVMS";
/// Bytes of guest RAM.
const MEMORY: Section = Section::new("memory", 1);
/// A vCPU; they are in their order.
const VCPU: Section = Section::new("vcpu", 1);
/// Interrupt controllers, timer chip, clock.
const CHIPS: Section = Section::new("chips", 1);
/// The version that is written.
pub const VERSION: u32 = 3;
/// The oldest version that is read.
pub const OLDEST: u32 = 1;
/// Magic, version, checksum, length: the same in every version.
const HEADER: usize = 24;
const RELEASE: usize = 16;
/// A VM of 32 vCPUs has about half a MiB, without fw_cfg files.
const MAX_BODY: u64 = 512 << 20;
/// More MSRs than KVM lists on any processor.
const MAX_MSRS: usize = 4096;
/// The longest state [`VmState::decode`] takes, bytes.
pub const MAX_ENCODED: u64 = MAX_BODY + (HEADER + RELEASE) as u64;

/// The state of a VM that does not run.
#[derive(Debug)]
pub struct VmState {
    /// Bytes of guest RAM.
    pub memory_size: u64,
    /// vCPUs, the boot processor first.
    pub vcpus: Vec<VcpuState>,
    /// Interrupt controllers, timer chip, clock.
    pub chips: ChipsState,
    /// Devices.
    pub devices: DevicesState,
}

/// Why a saved state can't be read.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum StateError {
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
    /// A section can't be read.
    #[error(transparent)]
    Section(#[from] SectionError),
    /// The state is shorter or longer than its header says.
    #[error("the saved VM state should have {expected} bytes but has {actual}")]
    Length {
        /// Bytes according to the header.
        expected: u64,
        /// Bytes that there are.
        actual: u64,
    },
    /// The checksum does not match.
    #[error("the saved VM state is damaged: its checksum does not match")]
    Checksum,
    /// The checksum is right, but the contents are not valid.
    #[error("the saved VM state is damaged: {0}")]
    Contents(String),
}

impl VmState {
    /// The sections other than those of devices.
    #[cfg(test)]
    pub(crate) const SECTIONS: [Section; 3] = [MEMORY, VCPU, CHIPS];

    /// Encodes the state in the format of this [`VERSION`].
    pub fn encode(&self) -> Vec<u8> {
        let mut parts = Writer::default();
        parts.put(MEMORY, &self.memory_size);
        for vcpu in &self.vcpus {
            parts.put(VCPU, vcpu);
        }
        parts.put(CHIPS, &self.chips);
        self.devices.write(&mut parts);
        let body = parts.finish();
        let mut release = [0; RELEASE];
        let name = env!("CARGO_PKG_VERSION").as_bytes();
        let length = name.len().min(RELEASE);
        release[..length].copy_from_slice(&name[..length]);
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&release), &body);
        let mut bytes = Vec::with_capacity(HEADER + RELEASE + body.len());
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(checksum.to_le_bytes());
        bytes.extend((body.len() as u64).to_le_bytes());
        bytes.extend(release);
        bytes.extend(body);
        bytes
    }

    /// Decodes what [`encode`](VmState::encode) or earlier releases wrote; refuses anything else.
    pub fn decode(bytes: &[u8]) -> Result<VmState, StateError> {
        let Some((header, rest)) = bytes.split_at_checked(HEADER) else {
            return Err(StateError::Magic);
        };
        if header[..8] != MAGIC {
            return Err(StateError::Magic);
        }
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
        let version = word(8);
        let body = match version {
            1 => rest,
            2 | VERSION => rest.get(RELEASE..).ok_or(StateError::Magic)?,
            version => {
                let release = release_in(rest);
                return Err(StateError::Version { version, release });
            }
        };
        let expected = u64::from_le_bytes(header[16..24].try_into().expect("8 bytes"));
        let actual = body.len() as u64;
        if expected != actual || actual > MAX_BODY {
            return Err(StateError::Length { expected, actual });
        }
        if word(12) != crc32c::crc32c(rest) {
            return Err(StateError::Checksum);
        }
        let state = match version {
            VERSION => VmState::from_sections(body, release_in(rest))?,
            _ => before::read(body)?,
        };
        state.check()
    }

    fn from_sections(body: &[u8], release: Option<String>) -> Result<VmState, StateError> {
        let mut parts = Sections::read(body)?;
        let state = VmState {
            memory_size: parts.one(MEMORY, &release)?,
            vcpus: parts.take(VCPU, Count::Any, &release)?,
            chips: parts.one(CHIPS, &release)?,
            devices: registry::read(&mut parts, &release)?,
        };
        parts.finish(&release)?;
        Ok(state)
    }

    /// Refuses more vCPUs or MSRs than KVM could have returned.
    fn check(self) -> Result<VmState, StateError> {
        let many = |vcpu: &VcpuState| vcpu.msrs.len() > MAX_MSRS;
        if self.vcpus.len() > MAX_VCPUS.into() || self.vcpus.iter().any(many) {
            let what = "it has more vCPUs or MSRs than there can be";
            return Err(StateError::Contents(what.into()));
        }
        Ok(self)
    }
}

/// The release that wrote a state. A later version may not have it at this place, so anything that
/// does not look like a release is ignored.
fn release_in(rest: &[u8]) -> Option<String> {
    let field = rest.get(..RELEASE)?;
    let text = std::str::from_utf8(field).ok()?.trim_end_matches('\0');
    let plausible = |c: char| c.is_ascii_alphanumeric() || ".-+".contains(c);
    (!text.is_empty() && text.chars().all(plausible)).then(|| text.to_owned())
}

#[cfg(test)]
mod tests;
