//! A captured VM: descriptors of files that never change.

use crate::devices::DeviceError;
use crate::hypervisor::HypervisorError;
use crate::memory::{Frozen, MemoryError};
use crate::state::VmState;
use jiffy_sys::memfd::{self, Pages};
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use thiserror::Error;

/// Why a VM could not be saved.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The VM runs.
    #[error("the VM must be paused before it can be saved")]
    Running,
    /// A vCPU's thread has ended.
    #[error("vCPU {0} has ended")]
    VcpuGone(usize),
    /// KVM refused a call.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    /// A device can't be saved.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Guest RAM can't be frozen.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A file for the saved state can't be created.
    #[error("a file for the captured state could not be created")]
    File(#[source] io::Error),
}

/// State and RAM of a VM at one moment.
#[derive(Debug)]
pub struct Capture {
    /// [`VmState`], encoded.
    pub state: File,
    /// The layout of the layers, JSON.
    pub layout: File,
    /// RAM, the lowest layer first.
    pub layers: Vec<Arc<File>>,
    /// How long the vCPUs were stopped, nanoseconds.
    pub pause_ns: u64,
    /// Bytes of RAM that were copied.
    pub copied_bytes: u64,
}

impl Capture {
    /// Writes state and layout into memfds.
    ///
    /// # Errors
    ///
    /// If a memfd can't be created.
    pub fn new(state: &VmState, frozen: Frozen, pause_ns: u64) -> Result<Capture, SaveError> {
        let layout = serde_json::to_vec(&frozen.layout).expect("a layout is plain data");
        Ok(Capture {
            state: file("jiffy VM state", &state.encode()).map_err(SaveError::File)?,
            layout: file("jiffy RAM layout", &layout).map_err(SaveError::File)?,
            layers: frozen.files,
            pause_ns,
            copied_bytes: frozen.copied,
        })
    }
}

fn file(name: &str, contents: &[u8]) -> io::Result<File> {
    let mut file = memfd::create(name, 0, Pages::Small)?;
    file.write_all(contents)?;
    Ok(file)
}
