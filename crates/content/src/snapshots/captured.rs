//! A captured VM as its VMM hands it over: descriptors of files that never change.

use jiffy_wire::vmm::MemoryLayout;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Largest state of a VM without its RAM, in bytes.
const MAX_STATE: u64 = 256 << 20;
/// Largest layout, in bytes.
const MAX_LAYOUT: u64 = 256 << 20;

/// A captured VM: the contents of these files never change.
#[derive(Debug, Clone)]
pub struct Captured {
    /// vCPUs, chips and devices.
    pub state: Arc<OwnedFd>,
    /// The ranges that each layer covers, as JSON.
    pub layout: Arc<OwnedFd>,
    /// Layers of RAM, the lowest first.
    pub layers: Vec<Arc<OwnedFd>>,
    /// Nanoseconds for which the vCPUs were paused (until the answer, if they still are).
    pub pause_ns: u64,
}

impl Captured {
    /// The layout, read whole.
    pub fn layout(&self) -> io::Result<MemoryLayout> {
        let text = whole(&self.layout, MAX_LAYOUT)?;
        Ok(serde_json::from_slice(&text)?)
    }

    /// The state, read whole.
    pub fn state(&self) -> io::Result<Vec<u8>> {
        whole(&self.state, MAX_STATE)
    }
}

/// The contents of a memfd that both the VMM and this process have open.
fn whole(file: &OwnedFd, most: u64) -> io::Result<Vec<u8>> {
    jiffy_sys::contents::of(&File::from(file.try_clone()?), most)
}
