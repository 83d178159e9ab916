//! The files from which the machine boots: Debian's cloud kernel and Jiffy's initramfs.
//!
//! * [`cpio`]: the archive format.
//! * [`bzimage`]: the ELF kernel inside Debian's vmlinuz.
//! * [`module`]: kernel modules in load order.
//! * [`build`]: builds the files.

pub mod build;
pub mod bzimage;
pub mod cpio;
pub mod module;

use std::path::{Path, PathBuf};

/// Why an image could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The kernel image can't be booted.
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
        /// Its path.
        path: PathBuf,
        /// The cause.
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
