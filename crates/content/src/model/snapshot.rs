//! What a captured VM is and what it needs.

use super::image::LazyDisk;
use super::vm::{MainState, Spec};
use crate::digests::Known;
use jiffy_wire::api::{ImageSource, MemoryForm};
use jiffy_wire::cpu::Profile;

/// A captured VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Unix time, seconds.
    pub created: u64,
    /// Version of the daemon that made it.
    pub jiffy: String,
    /// The VM's name.
    pub vm: String,
    /// The snapshot that VM came from.
    pub parent: Option<String>,
    /// What the VM is made of.
    pub spec: Spec,
    /// Whether its first command was running.
    pub main: MainState,
    /// BLAKE3 of the image, hexadecimal.
    pub image_digest: String,
    /// BLAKE3 of the kernel's file.
    pub kernel_digest: String,
    /// BLAKE3 of the guests' initramfs.
    pub initramfs_digest: String,
    /// BLAKE3 of the VMM that captured it.
    pub vmm_digest: String,
    /// Features of its processor, to be shown. Release 0.1 wrote flags of /proc/cpuinfo.
    pub cpu_features: Vec<String>,
    /// Its processor; none if its VMM could not tell, and in snapshots of release 0.1.
    pub cpu: Option<Profile>,
    /// How RAM is kept.
    pub memory: MemoryForm,
    /// Bytes it takes on disk.
    pub memory_bytes: u64,
    /// Bytes of other captures' RAM images that it is built on and keeps on disk.
    pub shared_bytes: u64,
    /// Bytes of its other files on disk.
    pub other_bytes: u64,
    /// Its working set comes first in the image.
    pub optimised: bool,
    /// Its root file system is a lazy disk, filled on demand; there is no file of it.
    pub lazy_root: Option<LazyDisk>,
    /// Where it was pulled from, and by which manifest.
    pub source: Option<ImageSource>,
    /// Digests of files that were computed for it, so that the next daemon need not read the
    /// files again.
    pub files: Vec<Known>,
}

impl Manifest {
    /// Notes the processor of the guest that was captured, if it is known.
    pub fn note_processor(&mut self, profile: Option<Profile>) {
        self.cpu_features = profile.as_ref().map(Profile::features).unwrap_or_default();
        self.cpu = profile;
    }

    /// Whether the first command was running.
    pub fn has_main(&self) -> bool {
        self.spec.command.is_some() && self.main == MainState::Started
    }
}
