//! Everything a snapshot keeps of a VM beside its RAM and disks, and the
//! envelope it travels in.

use crate::devices::DevicesState;
use crate::irq::ChipsState;
use crate::vcpu::VcpuState;
use serde::{Deserialize, Serialize};
use thiserror::Error;

const MAGIC: [u8; 8] = *b"JIFFYVMS";
/// The version written and the only one read.
pub const VERSION: u32 = 1;
const HEADER: usize = 24;
/// A VM of 32 vCPUs has about half a MiB; fw_cfg files come on top.
const MAX_BODY: u64 = 512 << 20;
/// The longest state [`VmState::decode`] takes, bytes.
pub const MAX_ENCODED: u64 = MAX_BODY + HEADER as u64;

/// A VM at rest.
#[derive(Debug, Serialize, Deserialize)]
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

/// A saved state can't be read.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum StateError {
    /// Not what it should be.
    #[error("this is not the saved state of a VM")]
    Magic,
    /// Written by another release.
    #[error("the VM was saved in format {0}, this jiffy reads format {VERSION}")]
    Version(u32),
    /// Shorter or longer than it says.
    #[error("the saved VM state should have {expected} bytes but has {actual}")]
    Length {
        /// By its header.
        expected: u64,
        /// In truth.
        actual: u64,
    },
    /// The checksum differs.
    #[error("the saved VM state is damaged: its checksum does not match")]
    Checksum,
    /// The checksum is right but the contents are not.
    #[error("the saved VM state is damaged: {0}")]
    Contents(String),
}

impl VmState {
    /// Magic, version (u32), CRC-32C of the body (u32), length of the body
    /// (u64), all little endian, and the body in postcard's format.
    pub fn encode(&self) -> Vec<u8> {
        let body = postcard::to_allocvec(self).expect("states are plain data");
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(crc32c::crc32c(&body).to_le_bytes());
        bytes.extend((body.len() as u64).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    /// Reads what [`encode`](VmState::encode) wrote, and nothing else.
    pub fn decode(bytes: &[u8]) -> Result<VmState, StateError> {
        let Some((header, body)) = bytes.split_at_checked(HEADER) else {
            return Err(StateError::Magic);
        };
        if header[..8] != MAGIC {
            return Err(StateError::Magic);
        }
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
        if word(8) != VERSION {
            return Err(StateError::Version(word(8)));
        }
        let expected = u64::from_le_bytes(header[16..24].try_into().expect("8 bytes"));
        let actual = body.len() as u64;
        if expected != actual || actual > MAX_BODY {
            return Err(StateError::Length { expected, actual });
        }
        if word(12) != crc32c::crc32c(body) {
            return Err(StateError::Checksum);
        }
        let (state, rest) = postcard::take_from_bytes(body)
            .map_err(|error| StateError::Contents(error.to_string()))?;
        if !rest.is_empty() {
            return Err(StateError::Contents("bytes are left over".into()));
        }
        Ok(state)
    }
}
