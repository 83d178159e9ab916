//! The machine's size and shared folders, stored in `machine.json`.

use crate::error::MachineError;
use crate::shares::{self, Share};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// QEMU's accelerator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accelerator {
    /// TCG.
    #[default]
    Tcg,
    /// TCG with a clock that counts instructions (`-icount`), one nanosecond each. Measurements
    /// repeat to a thousandth, whatever the host's load.
    TcgInstructionClock,
    /// KVM of the host, which must be hardware-backed and allow nesting.
    Kvm,
}

/// Options of a start. `None` keeps the saved value, or the default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// RAM in MiB.
    pub memory_mib: Option<u32>,
    /// CPUs.
    pub cpus: Option<u8>,
    /// Largest size of a new data disk in GiB.
    pub disk_gib: Option<u32>,
    /// QEMU's accelerator.
    pub accelerator: Option<Accelerator>,
    /// Its kernel, see [`Size::kernel`].
    pub kernel: Option<Option<PathBuf>>,
    /// Folders of the host that the machine shares.
    pub shares: Option<Vec<Share>>,
}

/// The machine's saved size and shared folders.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Size {
    /// Version of this format: 1.
    pub format: u32,
    /// RAM in MiB.
    pub memory_mib: u32,
    /// CPUs.
    pub cpus: u8,
    /// Largest size of the data disk in GiB.
    pub disk_gib: u32,
    /// QEMU's accelerator.
    pub accelerator: Accelerator,
    /// A kernel with sched_ext, in which `jiffy-sched` runs; `None` for the one in the share folder.
    /// Older releases do not write this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<PathBuf>,
    /// Folders of the host that it shares: none by default, because everything in the machine can
    /// read them. Older releases do not write this.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<Share>,
}

const FORMAT: u32 = 1;

impl Size {
    /// Half of the host's memory, at most 4 GiB. One CPU, because software emulation runs all CPUs
    /// on one host thread.
    pub fn default_for_host() -> Size {
        let pages = rustix::system::sysinfo();
        let host_mib = (pages.totalram as u64 * u64::from(pages.mem_unit)) >> 20;
        Size {
            format: FORMAT,
            memory_mib: (host_mib / 2).clamp(1024, 4096) as u32,
            cpus: 1,
            disk_gib: 64,
            accelerator: Accelerator::Tcg,
            kernel: None,
            shares: Vec::new(),
        }
    }

    /// Reads the saved size; the default if there is none.
    ///
    /// # Errors
    ///
    /// If the file can't be read, is of another version, or has a value out of range.
    pub fn load(path: &Path) -> Result<Size, MachineError> {
        let saved = |message: String| MachineError::Saved {
            path: path.into(),
            message,
        };
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Size::default_for_host());
            }
            Err(error) => return Err(MachineError::file(path, error)),
        };
        let size: Size =
            serde_json::from_slice(&bytes).map_err(|error| saved(error.to_string()))?;
        if size.format != FORMAT {
            return Err(saved(format!(
                "it has version {}, this Jiffy knows version {FORMAT}",
                size.format
            )));
        }
        size.check()?;
        Ok(size)
    }

    /// Saves it atomically.
    ///
    /// # Errors
    ///
    /// If the file can't be written.
    pub fn save(&self, path: &Path) -> Result<(), MachineError> {
        let bytes = serde_json::to_vec_pretty(self)
            .map_err(|error| MachineError::file(path, error.into()))?;
        jiffy_sys::durable::replace(path, &bytes).map_err(|error| MachineError::file(path, error))
    }

    /// Applies `options`.
    ///
    /// # Errors
    ///
    /// If a value is out of range, or the shares are not valid (see [`shares::check`]).
    pub fn with(mut self, options: Options) -> Result<Size, MachineError> {
        self.memory_mib = options.memory_mib.unwrap_or(self.memory_mib);
        self.cpus = options.cpus.unwrap_or(self.cpus);
        self.disk_gib = options.disk_gib.unwrap_or(self.disk_gib);
        self.accelerator = options.accelerator.unwrap_or(self.accelerator);
        self.kernel = options.kernel.unwrap_or(self.kernel);
        self.shares = options.shares.unwrap_or(self.shares);
        self.check()?;
        Ok(self)
    }

    fn check(&self) -> Result<(), MachineError> {
        let refuse = |message: &str| Err(MachineError::Options(message.into()));
        if !(512..=1_048_576).contains(&self.memory_mib) {
            return refuse("the machine's memory must be between 512 MiB and 1 TiB");
        }
        if !(1..=32).contains(&self.cpus) {
            return refuse("the machine can have 1 to 32 CPUs");
        }
        if !(1..=16_384).contains(&self.disk_gib) {
            return refuse("the machine's disk must be between 1 GiB and 16 TiB");
        }
        shares::check(&self.shares)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_size_is_kept_except_for_given_options() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machine.json");
        let size = Size::load(&path)
            .unwrap()
            .with(Options {
                memory_mib: Some(2048),
                ..Options::default()
            })
            .unwrap();
        size.save(&path).unwrap();
        assert_eq!(Size::load(&path).unwrap(), size);
        assert_eq!(size.memory_mib, 2048);
        assert_eq!(size.cpus, Size::default_for_host().cpus);
    }

    #[test]
    fn shares_are_kept_replaced_and_cleared() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machine.json");
        // As written by a release that shares nothing.
        let old =
            r#"{"format": 1, "memory_mib": 1024, "cpus": 1, "disk_gib": 64, "accelerator": "tcg"}"#;
        std::fs::write(&path, old).unwrap();
        let size = Size::load(&path).unwrap();
        assert_eq!(size.shares, []);
        let share = Share {
            path: "/a".into(),
            read_only: true,
        };
        let with = |size: Size, shares: Option<Vec<Share>>| {
            let options = Options {
                shares,
                ..Options::default()
            };
            size.with(options)
        };
        let size = with(size, Some(vec![share.clone()])).unwrap();
        size.save(&path).unwrap();
        let size = Size::load(&path).unwrap();
        assert_eq!(size.shares, std::slice::from_ref(&share));
        let size = with(size, None).unwrap();
        assert_eq!(size.shares, std::slice::from_ref(&share));
        with(size.clone(), Some(vec![share; 2])).unwrap_err();
        let size = with(size, Some(Vec::new())).unwrap();
        size.save(&path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.contains("shares"), "older releases read it: {text}");
    }

    #[test]
    fn another_kernel_is_kept_and_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machine.json");
        let with = |kernel: Option<Option<PathBuf>>| {
            let options = Options {
                kernel,
                ..Options::default()
            };
            let size = Size::load(&path).unwrap().with(options).unwrap();
            size.save(&path).unwrap();
            size.kernel
        };
        let vmlinux = PathBuf::from("/cache/sched-1/vmlinux");
        assert_eq!(with(Some(Some(vmlinux.clone()))), Some(vmlinux.clone()));
        assert_eq!(with(None), Some(vmlinux));
        assert_eq!(with(Some(None)), None);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.contains("kernel"), "older releases read it: {text}");
    }

    #[test]
    fn invalid_sizes_and_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machine.json");
        std::fs::write(&path, "{}").unwrap();
        assert!(matches!(Size::load(&path), Err(MachineError::Saved { .. })));
        for options in [
            Options {
                memory_mib: Some(1),
                ..Options::default()
            },
            Options {
                cpus: Some(0),
                ..Options::default()
            },
        ] {
            let error = Size::default_for_host().with(options).unwrap_err();
            assert!(matches!(error, MachineError::Options(_)), "{error}");
        }
    }
}
