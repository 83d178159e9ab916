//! The file format of a VM's saved state: everything that a snapshot keeps besides RAM and disks.
//!
//! Since version 3 the body is sections, each with a tag, a version of its own and a
//! length: a changed or a new device changes its own section and nothing else. A
//! section that is unknown, or of a later version, is refused by name. What each
//! section holds is in [`VmState::encode`] and, for devices, in [`crate::devices::registry`].
//!
//! All files in `golden/` must be readable forever: a test fails when a change to any part
//! of [`VmState`] changes what they mean. Such a change needs a new version of that part's
//! section, a golden file with it, and the old type of that part, from which the new one is
//! made.
//!
//! [`jiffy_wire::state`] has the header before the body. In versions 1 and 2 the body is one tree
//! (`legacy`), in version 3 it consists of [`crate::sections`].

mod legacy;

use crate::devices::{DevicesState, registry};
use crate::irq::ChipsState;
use crate::sections::{Count, Section, SectionError, Sections, Writer};
use crate::vcpu::{MAX_VCPUS, VcpuState};
use jiffy_wire::state::{Envelope, EnvelopeError, MAX_BODY, VERSION, open, seal};
use thiserror::Error;

/// Bytes of guest RAM.
const MEMORY: Section = Section::new("memory", 1);
/// A vCPU; they are in their order.
const VCPU: Section = Section::new("vcpu", 1);
/// Interrupt controllers, timer chip, clock.
const CHIPS: Section = Section::new("chips", 1);
/// More MSRs than KVM lists on any processor.
const MAX_MSRS: usize = 4096;
/// The longest state [`VmState::decode`] takes, bytes.
pub const MAX_ENCODED: u64 = MAX_BODY + Envelope::BYTES as u64;

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
    /// It is no state, not whole, or of a later version.
    #[error(transparent)]
    Envelope(#[from] EnvelopeError),
    /// A section can't be read.
    #[error(transparent)]
    Section(#[from] SectionError),
    /// The checksum is right, but the contents are not valid.
    #[error("the saved VM state is damaged: {0}")]
    Contents(String),
}

impl VmState {
    /// The sections other than those of devices.
    #[cfg(test)]
    pub(crate) const SECTIONS: [Section; 3] = [MEMORY, VCPU, CHIPS];

    /// Encodes the state in the format of this version.
    pub fn encode(&self) -> Vec<u8> {
        let mut parts = Writer::default();
        parts.put(MEMORY, &self.memory_size);
        for vcpu in &self.vcpus {
            parts.put(VCPU, vcpu);
        }
        parts.put(CHIPS, &self.chips);
        self.devices.write(&mut parts);
        let body = parts.finish();
        seal(env!("CARGO_PKG_VERSION"), &body)
    }

    /// Decodes what [`encode`](VmState::encode) or earlier releases wrote.
    ///
    /// # Errors
    ///
    /// If it is no state, not whole, or of a later version, if a section is missing, unknown or not
    /// valid, or if it has more vCPUs or MSRs than KVM could have returned.
    pub fn decode(bytes: &[u8]) -> Result<VmState, StateError> {
        let (envelope, body) = open(bytes)?;
        let state = match envelope.version {
            VERSION => VmState::from_sections(body, envelope.release)?,
            _ => legacy::read(body)?,
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
            let what = "it has more vCPUs or MSRs than KVM allows";
            return Err(StateError::Contents(what.into()));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests;
