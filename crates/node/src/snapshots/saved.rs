//! A captured VM that is on disk, whole.

use super::manifest::Manifest;
use crate::vm::start::{Handle, SavedRam};
use jiffy_wire::api::{MemoryForm, Snapshot};
use std::path::{Path, PathBuf};

/// A captured VM's folder and what its manifest says.
#[derive(Debug, Clone)]
pub struct Saved {
    /// The folder.
    pub folder: PathBuf,
    /// What it is.
    pub manifest: Manifest,
}

impl Saved {
    /// Reads the manifest; the error is a sentence without its full stop.
    pub fn open(folder: PathBuf) -> Result<Saved, String> {
        match Manifest::load(&folder) {
            Ok(manifest) => Ok(Saved { folder, manifest }),
            Err(error) => Err(match std::error::Error::source(&error) {
                Some(source) => format!("{error}: {source}"),
                None => error.to_string(),
            }),
        }
    }

    /// vCPUs, chips and devices.
    pub fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// RAM.
    pub fn memory(&self) -> PathBuf {
        memory_in(&self.folder, self.manifest.memory)
    }

    /// The root file system.
    pub fn root(&self) -> PathBuf {
        self.folder.join("root.erofs")
    }

    /// A volume's clone.
    pub fn volume(&self, name: &str) -> PathBuf {
        volume_in(&self.folder, name)
    }

    /// Which chunks the first restore touched.
    pub fn recording(&self) -> PathBuf {
        self.folder.join("recording")
    }

    /// RAM for a VMM to map, if it is kept so.
    pub fn mapped(&self) -> Option<SavedRam> {
        (self.manifest.memory == MemoryForm::Raw).then(|| SavedRam::Mapped {
            layers: vec![Handle::Path(self.memory())],
            layout: None,
        })
    }

    /// As the API shows it.
    pub fn shown(&self, name: &str, golden: bool, used_by: Vec<String>) -> Snapshot {
        let manifest = &self.manifest;
        let spec = &manifest.spec;
        let command = spec.command.as_ref().filter(|_| manifest.has_main());
        Snapshot {
            name: name.to_owned(),
            golden,
            created: manifest.created,
            vm: manifest.vm.clone(),
            parent: manifest.parent.clone(),
            image: spec.image.clone(),
            image_digest: manifest.image_digest.clone(),
            kernel: spec.kernel.clone(),
            kernel_digest: manifest.kernel_digest.clone(),
            initramfs_digest: manifest.initramfs_digest.clone(),
            cpus: spec.cpus,
            memory_mib: spec.memory_mib,
            command: command.map(|command| command.argv.clone()),
            tty: command.is_some_and(|command| command.tty.is_some()),
            volumes: spec.disks.clone(),
            cpu_features: manifest.cpu_features.clone(),
            memory: manifest.memory,
            memory_bytes: manifest.memory_bytes,
            other_bytes: manifest.other_bytes,
            optimised: manifest.optimised,
            used_by,
        }
    }
}

/// RAM's file in such a folder.
pub fn memory_in(folder: &Path, form: MemoryForm) -> PathBuf {
    folder.join(match form {
        MemoryForm::Raw => "ram.raw",
        MemoryForm::Image => "ram.image",
    })
}

/// A volume's file in such a folder, and in a VM's that has its own.
pub fn volume_in(folder: &Path, name: &str) -> PathBuf {
    folder.join("volumes").join(format!("{name}.img"))
}
