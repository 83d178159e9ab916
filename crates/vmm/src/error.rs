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

/// A VM could not be built.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// None, or more than KVM's guests are given here.
    #[error("a VM can have 1 to {MAX_VCPUS} vCPUs, not {0}")]
    Vcpus(u8),
    /// KVM.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    /// Guest RAM.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The pager.
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// A device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Kernel, initrd or command line.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The saved state can't be read.
    #[error(transparent)]
    State(#[from] crate::state::StateError),
    /// The saved state is of another VM.
    #[error("the saved VM has {saved} {what}, the configuration says {configured}")]
    StateDiffers {
        /// `vCPUs` or `bytes of memory`.
        what: &'static str,
        /// In the state.
        saved: u64,
        /// In the configuration.
        configured: u64,
    },
    /// The saved guest's processor, or that which a VM is to have.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// A descriptor or thread.
    #[error("the host could not provide {what}")]
    Host {
        /// What was wanted.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
}

impl StartError {
    /// What the user can do.
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
