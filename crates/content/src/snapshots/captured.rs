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
/// Most bytes of a layout for each page of RAM, as each page is in one extent at most, and in all
/// besides.
const LAYOUT_PER_PAGE: u64 = 64;
const LAYOUT_BESIDES: u64 = 64 << 10;
/// Bytes of a page.
pub(super) const PAGE: u64 = 4096;

/// A captured VM: the contents of these files never change.
#[derive(Debug, Clone)]
pub struct Captured {
    /// vCPUs, chips and devices.
    pub state: Arc<OwnedFd>,
    /// The ranges that each layer covers, as JSON.
    pub layout: Arc<OwnedFd>,
    /// Layers of RAM, the lowest first.
    pub layers: Vec<Arc<OwnedFd>>,
    /// Bytes of RAM that the VM has.
    pub ram: u64,
    /// Nanoseconds for which the vCPUs were paused (until the answer, if they still are).
    pub pause_ns: u64,
}

impl Captured {
    /// The layout, read whole.
    ///
    /// # Errors
    ///
    /// If the file can't be read, is too large, or is not such JSON. `InvalidData` if it is not of
    /// the VM's RAM.
    pub fn layout(&self) -> io::Result<MemoryLayout> {
        let most = self.ram / PAGE * LAYOUT_PER_PAGE + LAYOUT_BESIDES;
        let text = whole(&self.layout, most.min(MAX_LAYOUT))?;
        let layout: MemoryLayout = serde_json::from_slice(&text)?;
        if layout.size != self.ram {
            let problem = format!(
                "it would have {} bytes, and the VM has {} bytes of RAM",
                layout.size, self.ram
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        Ok(layout)
    }

    /// The state, read whole.
    ///
    /// # Errors
    ///
    /// If the file can't be read, or has more than 256 MiB.
    pub fn state(&self) -> io::Result<Vec<u8>> {
        whole(&self.state, MAX_STATE)
    }
}

/// The contents of a memfd that both the VMM and this process have open.
fn whole(file: &OwnedFd, most: u64) -> io::Result<Vec<u8>> {
    jiffy_sys::contents::of(&File::from(file.try_clone()?), most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_sys::memfd::{self, Pages};
    use std::os::unix::fs::FileExt;

    const RAM: u64 = 1 << 20;

    fn captured(layout: &str) -> Captured {
        let text = memfd::create("layout", layout.len() as u64, Pages::Small).unwrap();
        text.write_all_at(layout.as_bytes(), 0).unwrap();
        let layer = memfd::create("layer", RAM, Pages::Small).unwrap();
        let layer: Arc<OwnedFd> = Arc::new(layer.into());
        Captured {
            state: layer.clone(),
            layout: Arc::new(text.into()),
            layers: vec![layer],
            ram: RAM,
            pause_ns: 0,
        }
    }

    #[test]
    fn a_layout_of_other_memory_than_the_vms_is_refused() {
        let fits = format!("{{\"size\":{RAM},\"covers\":[[[0,4096],[8192,4096]]]}}");
        assert_eq!(captured(&fits).layout().unwrap().covers[0].len(), 2);
        for size in [0, RAM - 4096, RAM + 4096, 32 << 40] {
            let other = format!("{{\"size\":{size},\"covers\":[]}}");
            let error = captured(&other).layout().unwrap_err();
            assert!(error.to_string().contains("of RAM"), "{error}");
        }
    }

    #[test]
    fn a_layout_is_bounded_by_the_number_of_pages() {
        // Each page in an extent of its own, as in the longest form that is read.
        let extents = (0..RAM / 4096).map(|page| {
            let offset = page * 4096;
            format!("{{\"offset\":{offset},\"length\":4096}}")
        });
        let extents = extents.collect::<Vec<_>>().join(",");
        let longest = format!("{{\"size\":{RAM},\"covers\":[[{extents}]]}}");
        captured(&longest).layout().unwrap();
        let error = captured(&longest.repeat(16)).layout().unwrap_err();
        assert!(error.to_string().contains("more than the limit"), "{error}");
    }
}
