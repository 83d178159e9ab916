//! Why a VM could not be built, and what the user can do.

use crate::boot::BootError;
use crate::config::ConfigError;
use crate::cpu::profile::ProfileError;
use crate::devices::DeviceError;
use crate::hypervisor::HypervisorError;
use crate::memory::MemoryError;
use crate::pager::PagerError;
use crate::vcpu::MAX_VCPUS;
pub use jiffy_sys::causes::sentence;
use std::io;
use thiserror::Error;

/// Why a VM could not be built.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration can't be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There are no vCPUs, or more than [`MAX_VCPUS`].
    #[error("a VM can have 1 to {MAX_VCPUS} vCPUs, not {0}")]
    Vcpus(u8),
    /// KVM refused a call.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    /// Guest RAM can't be created.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The pager can't be used.
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// A device can't be created.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The kernel, the initrd or the command line can't be used.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The saved state can't be read.
    #[error(transparent)]
    State(#[from] crate::state::StateError),
    /// The saved state belongs to another VM.
    #[error("the saved VM has {saved} {what}, but the configuration has {configured}")]
    StateDiffers {
        /// `vCPUs` or `bytes of memory`.
        what: &'static str,
        /// The value in the state.
        saved: u64,
        /// The value in the configuration.
        configured: u64,
    },
    /// This host can't provide the processor of the saved guest or of the profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// A descriptor or a thread can't be created.
    #[error("the host could not provide {what}")]
    Host {
        /// What could not be provided.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
}

impl StartError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            StartError::Hypervisor(error) => error.hint(),
            StartError::Memory(error) => error.hint(),
            StartError::Pager(error) => error.hint(),
            StartError::Device(error) => error.hint(),
            StartError::Boot(error) => error.hint(),
            StartError::Profile(error) => error.hint(),
            StartError::Config(_)
            | StartError::Vcpus(_)
            | StartError::State(_)
            | StartError::StateDiffers { .. }
            | StartError::Host { .. } => None,
        }
    }
}
