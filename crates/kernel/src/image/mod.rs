//! Reads a kernel file: its boot protocols and its configuration.
//!
//! The bytes are untrusted: every offset is checked, and no allocation depends on a number in the
//! file.

mod bytes;
mod bzimage;
mod elf;
mod ikconfig;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::config::Config;

/// Largest file that is read, bytes. A kernel with all its debug information may be larger.
pub const MAX_IMAGE: u64 = 512 << 20;

/// A parsed kernel file.
#[derive(Clone, Debug)]
pub struct Image {
    /// Its format.
    pub format: Format,
    /// Bytes in the file.
    pub size: u64,
    /// Its embedded configuration, or why it can't be read.
    pub config: Result<Config, NoConfig>,
}

/// Format of a kernel file, with its boot properties.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// An x86-64 ELF executable, a vmlinux.
    Elf {
        /// Guest-physical address in its `XEN_ELFNOTE_PHYS32_ENTRY` note; `None` if PVH can't boot
        /// it.
        pvh_entry: Option<u64>,
    },
    /// Linux's compressed image (Linux, Documentation/arch/x86/boot.rst).
    BzImage {
        /// The boot protocol's version, major and minor.
        protocol: (u8, u8),
        /// Whether it has a 64-bit entry point at 0x200.
        entry_64: bool,
    },
}

/// Why an image's configuration can't be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoConfig {
    /// The kernel was built without `CONFIG_IKCONFIG`.
    #[error("it carries no configuration (built without CONFIG_IKCONFIG)")]
    Absent,
    /// The payload of a bzImage is not compressed with gzip.
    #[error("its payload is compressed with {0}, which is not supported")]
    Compressed(&'static str),
    /// The configuration is damaged.
    #[error("its embedded configuration is damaged")]
    Damaged,
}

/// Why a file can't be used as a kernel.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It cannot be opened or read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// It is larger than [`MAX_IMAGE`].
    #[error(
        "{path} has {size} bytes, more than any kernel (at most {MAX_IMAGE}); strip it of debug information"
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size, bytes.
        size: u64,
    },
    /// It is neither ELF nor bzImage.
    #[error("{path} is neither an ELF kernel (vmlinux) nor a bzImage")]
    Unknown {
        /// The file.
        path: PathBuf,
    },
    /// It is a kernel, but not whole or for another machine.
    #[error("{path} is not a usable kernel: {problem}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: Malformed,
    },
}

/// Defect of a kernel file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// It is an ELF file, but not for x86-64.
    #[error("it is an ELF file, but not a 64-bit little-endian x86-64 executable")]
    Machine,
    /// A header points outside the file.
    #[error("its headers point outside the file; it is cut short or damaged")]
    Truncated,
    /// It has too many program headers.
    #[error("it has more than 128 program headers")]
    ProgramHeaders,
    /// It has a boot sector, but not the setup header's magic.
    #[error("its setup header has no HdrS magic")]
    SetupHeader,
}

impl Image {
    /// Reads a kernel file.
    ///
    /// # Errors
    ///
    /// If the file can't be read, is larger than [`MAX_IMAGE`], or is no usable kernel.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let read = |source| ImageError::Read {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(read)?;
        let size = file.metadata().map_err(read)?.len();
        let mut data = Vec::new();
        // One byte more than allowed: the file may have grown, and a device has no size.
        file.take(MAX_IMAGE + 1)
            .read_to_end(&mut data)
            .map_err(read)?;
        if size > MAX_IMAGE || data.len() as u64 > MAX_IMAGE {
            return Err(ImageError::TooLarge {
                path: path.to_owned(),
                size: size.max(data.len() as u64),
            });
        }
        match Self::parse(&data) {
            Ok(Some(image)) => Ok(image),
            Ok(None) => Err(ImageError::Unknown {
                path: path.to_owned(),
            }),
            Err(problem) => Err(ImageError::Malformed {
                path: path.to_owned(),
                problem,
            }),
        }
    }

    /// Parses a kernel; `None` if the bytes are not a kernel.
    ///
    /// # Errors
    ///
    /// If the bytes begin like a kernel, but are damaged, cut short or for another machine.
    pub fn parse(data: &[u8]) -> Result<Option<Self>, Malformed> {
        let size = data.len() as u64;
        if data.starts_with(elf::MAGIC) {
            let pvh_entry = elf::pvh_entry(data)?;
            let config = ikconfig::find(data);
            return Ok(Some(Self {
                format: Format::Elf { pvh_entry },
                size,
                config,
            }));
        }
        if let Some(header) = bzimage::Header::parse(data)? {
            return Ok(Some(Self {
                format: Format::BzImage {
                    protocol: header.protocol,
                    entry_64: header.entry_64,
                },
                size,
                config: header.config(data),
            }));
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests;
