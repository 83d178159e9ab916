//! Why a kernel can't be booted.

use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Why a kernel, an initrd or a command line can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BootError {
    /// The file is missing, not a regular file, or not permitted.
    #[error("the {what} {} can't be opened", path.display())]
    Open {
        /// `kernel` or `initrd`.
        what: &'static str,
        /// The file's path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Reading failed, or the file was shortened meanwhile.
    #[error("the {what} {} can't be read", path.display())]
    Read {
        /// `kernel` or `initrd`.
        what: &'static str,
        /// The file's path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a kernel that can be booted.
    #[error("the kernel {} can't be booted", path.display())]
    Kernel {
        /// The file's path.
        path: PathBuf,
        /// The cause.
        source: KernelError,
    },
    /// The initrd is empty.
    #[error("the initrd {} is empty", path.display())]
    EmptyInitrd {
        /// The file's path.
        path: PathBuf,
    },
    /// The initrd and the kernel don't fit into RAM together.
    #[error("the initrd {} has {} KiB, but besides the kernel only {} KiB fit", path.display(), size >> 10, room >> 10)]
    InitrdTooLarge {
        /// The file's path.
        path: PathBuf,
        /// Its size, bytes.
        size: u64,
        /// The space that is left, bytes.
        room: u64,
    },
    /// The command line with the devices' parameters is too long.
    #[error(
        "the kernel command line has {length} bytes with the parameters of the devices; this kernel takes {limit}"
    )]
    CommandLineTooLong {
        /// Bytes without the zero.
        length: usize,
        /// The limit, bytes.
        limit: usize,
    },
    /// A zero byte would end the command line.
    #[error("the kernel command line contains a zero byte at position {0}")]
    CommandLineZero(usize),
}

impl BootError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            BootError::Kernel { source, .. } => source.hint(),
            BootError::InitrdTooLarge { .. } => Some("give the VM more memory (--memory)".into()),
            BootError::CommandLineTooLong { .. } => {
                Some("use fewer disks or shorter kernel arguments".into())
            }
            _ => None,
        }
    }
}

/// What is wrong with a kernel image.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The file is empty.
    #[error("the file is empty")]
    Empty,
    /// The file is neither ELF nor bzImage.
    #[error("it is {0}, not an ELF kernel or a bzImage")]
    Foreign(&'static str),
    /// The file ends before a part that its headers announce.
    #[error("it is cut short: {what} ends at byte {end}, the file has {length}")]
    CutShort {
        /// The name of the part.
        what: String,
        /// Where the part ends.
        end: u64,
        /// The file's size.
        length: u64,
    },
    /// The ELF file is not for x86-64.
    #[error("it is an ELF file for {0}, not for x86-64")]
    WrongMachine(String),
    /// The ELF file is not an executable.
    #[error("it is an ELF {0}, not an executable")]
    NotExecutable(&'static str),
    /// Headers that contradict the format.
    #[error("its headers are damaged: {0}")]
    Damaged(String),
    /// No PVH note.
    #[error("it has no PVH entry point")]
    NoPvhNote,
    /// A segment reaches outside RAM.
    #[error(
        "it needs memory up to {} MiB, but the VM has RAM only up to {} MiB there",
        end.div_ceil(1 << 20),
        ram_end >> 20
    )]
    OutsideRam {
        /// End of the kernel, guest physical address.
        end: u64,
        /// End of low RAM, guest physical address.
        ram_end: u64,
    },
    /// A segment covers the first MiB.
    #[error("it must be loaded at {0:#x}, below 1 MiB, where the boot structures are")]
    TooLow(u64),
    /// Two segments share an address.
    #[error("its segments at {first:#x} and {second:#x} overlap")]
    Overlap {
        /// The lower segment's address.
        first: u64,
        /// The higher segment's address.
        second: u64,
    },
    /// The entry point is in no segment.
    #[error("its entry point {0:#x} is outside its segments")]
    EntryOutside(u64),
    /// An old or special bzImage.
    #[error("it is a bzImage that {0}")]
    OldBzImage(String),
    /// The file can't be read.
    #[error("it can't be read")]
    Io(#[from] io::Error),
}

impl KernelError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            KernelError::NoPvhNote => {
                "build it with CONFIG_PVH=y, or give the bzImage; `jiffy kernel check` lists what else is missing".into()
            }
            KernelError::OutsideRam { .. } => "give the VM more memory (--memory)".into(),
            KernelError::Foreign(_) | KernelError::NotExecutable(_) | KernelError::WrongMachine(_) => {
                "give an uncompressed vmlinux with a PVH note, or a bzImage, for x86-64".into()
            }
            KernelError::CutShort { .. } | KernelError::Damaged(_) | KernelError::Empty => {
                "copy or build the kernel again".into()
            }
            _ => return None,
        })
    }

    /// Names what the file seems to be, if it is neither ELF nor bzImage.
    pub(super) fn foreign(head: &[u8]) -> KernelError {
        let at =
            |offset: usize, magic: &[u8]| head.get(offset..offset + magic.len()) == Some(magic);
        KernelError::Foreign(if at(0, &[0x1f, 0x8b]) {
            "a gzip file"
        } else if at(0, &[0x28, 0xb5, 0x2f, 0xfd]) {
            "a zstd file"
        } else if at(0, b"\xfd7zXZ\0") {
            "an xz file"
        } else if at(0, &[0x04, 0x22, 0x4d, 0x18]) || at(0, &[0x02, 0x21, 0x4c, 0x18]) {
            "an lz4 file"
        } else if at(56, b"ARM\x64") {
            "a Linux image for arm64"
        } else if at(0, b"#!") || head.iter().all(|byte| (9..127).contains(byte)) {
            "text"
        } else {
            "some other data"
        })
    }
}
