//! What the machine boots: Debian's cloud kernel and an initramfs of our own.
//!
//! * [`cpio`]: the archive format.
//! * [`bzimage`]: the ELF kernel inside Debian's vmlinuz.
//! * [`module`]: kernel modules in load order.
//! * [`build`]: puts them together.

pub mod build;
pub mod bzimage;
pub mod cpio;
pub mod module;

use std::path::{Path, PathBuf};

/// Why an image could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The kernel image is not what we can boot.
    #[error("the kernel image can't be used: {0}")]
    Kernel(String),
    /// The kernel package lacks a module.
    #[error("the kernel package has no module {0}")]
    NoModule(String),
    /// A module is damaged.
    #[error("the module {0} {1}")]
    Module(String, String),
    /// A file could not be read or written.
    #[error("{}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl ImageError {
    fn file(path: &Path, source: std::io::Error) -> ImageError {
        ImageError::File {
            path: path.into(),
            source,
        }
    }
}
