//! Reads a kernel file: which boot protocols it speaks, and its configuration.
//!
//! The bytes may come from anywhere: every offset is checked, and nothing is
//! allocated by a number that stands in the file.

mod bytes;
mod bzimage;
mod elf;
mod ikconfig;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::config::Config;

/// Larger files are refused: a kernel with all its debug information, say.
pub const MAX_IMAGE: u64 = 512 << 20;

/// A kernel file, read.
#[derive(Clone, Debug)]
pub struct Image {
    /// What kind of file it is.
    pub format: Format,
    /// Bytes in the file.
    pub size: u64,
    /// The configuration embedded in it, or why there is none to read.
    pub config: Result<Config, NoConfig>,
}

/// The kind of a kernel file and what matters of it for booting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// An x86-64 ELF executable, a vmlinux.
    Elf {
        /// The guest-physical address in its `XEN_ELFNOTE_PHYS32_ENTRY` note;
        /// `None` when it cannot be booted by PVH.
        pvh_entry: Option<u64>,
    },
    /// Linux's compressed image (Documentation/arch/x86/boot.rst).
    BzImage {
        /// The boot protocol's version, major and minor.
        protocol: (u8, u8),
        /// Whether it has a 64-bit entry point at 0x200.
        entry_64: bool,
    },
}

/// Why no configuration could be read from an image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoConfig {
    /// Built without `CONFIG_IKCONFIG`.
    #[error("it carries no configuration (built without CONFIG_IKCONFIG)")]
    Absent,
    /// The payload of a bzImage is compressed by something other than gzip.
    #[error("its payload is compressed with {0}, which is not read here")]
    Compressed(&'static str),
    /// There is one, damaged.
    #[error("its embedded configuration is damaged")]
    Damaged,
}

/// The file cannot be used as a kernel.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It cannot be opened or read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Larger than [`MAX_IMAGE`].
    #[error(
        "{path} has {size} bytes, more than any kernel (at most {MAX_IMAGE}); strip it of debug information"
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// Neither ELF nor bzImage.
    #[error("{path} is neither an ELF kernel (vmlinux) nor a bzImage")]
    Unknown {
        /// The file.
        path: PathBuf,
    },
    /// It looks like a kernel but is not whole, or is for another machine.
    #[error("{path} is not a usable kernel: {problem}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: Malformed,
    },
}

/// What is wrong with a kernel file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// An ELF file, but not for x86-64.
    #[error("it is an ELF file, but not a 64-bit little-endian x86-64 executable")]
    Machine,
    /// A header points outside the file.
    #[error("its headers point outside the file; it is cut short or damaged")]
    Truncated,
    /// Too many program headers.
    #[error("it has more than 128 program headers")]
    ProgramHeaders,
    /// A boot sector without the setup header's magic.
    #[error("its setup header has no HdrS magic")]
    SetupHeader,
}

impl Image {
    /// Reads a kernel file.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let read = |source| ImageError::Read {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(read)?;
        let size = file.metadata().map_err(read)?.len();
        let mut data = Vec::new();
        // One byte more than allowed tells a file that grew, or a device.
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

    /// Reads a kernel from its bytes; `None` when they are no kernel.
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
