//! KVM's own counters: exits by reason, page faults, interrupts.
//!
//! Source: Linux `Documentation/virt/kvm/api.rst`, KVM_GET_STATS_FD.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

/// `_IO(KVMIO, 0xce)`
const KVM_GET_STATS_FD: libc::c_ulong = 0xaece;

const HEADER_BYTES: usize = 24;
const DESCRIPTOR_BYTES: usize = 16;
/// KVM has some dozens of statistics; a file with more is not valid.
const MAX_STATISTICS: usize = 1024;
const MAX_NAME: usize = 256;

const TYPE_MASK: u32 = 0xf;
const TYPE_CUMULATIVE: u32 = 0;
const TYPE_INSTANT: u32 = 1;
const TYPE_PEAK: u32 = 2;

/// The statistics of a VM or of a vCPU. They can be read while it runs.
#[derive(Debug)]
pub struct StatsFile {
    file: File,
}

impl StatsFile {
    /// Opens the statistics of a VM's or a vCPU's descriptor; `None` on kernels before 5.14, which
    /// have none.
    #[allow(unsafe_code)] // An ioctl that returns a descriptor.
    pub fn open(fd: &impl AsRawFd) -> Option<StatsFile> {
        // SAFETY: the ioctl takes no argument.
        let stats = unsafe { libc::ioctl(fd.as_raw_fd(), KVM_GET_STATS_FD) };
        if stats < 0 {
            return None;
        }
        // SAFETY: KVM just created this descriptor for this process.
        let file = unsafe { File::from_raw_fd(stats) };
        Some(StatsFile { file })
    }

    /// Adds every counter to `sums` under KVM's name. Histograms are skipped.
    pub fn add_to(&self, sums: &mut BTreeMap<String, u64>) -> io::Result<()> {
        let mut header = [0; HEADER_BYTES];
        self.file.read_exact_at(&mut header, 0)?;
        let word = |number: usize| {
            let at = number * 4;
            u32::from_ne_bytes(header[at..at + 4].try_into().expect("4 bytes")) as usize
        };
        let (name_size, count) = (word(1), word(2));
        let (descriptors_at, data_at) = (word(4) as u64, word(5) as u64);
        if name_size > MAX_NAME || count > MAX_STATISTICS {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let size = DESCRIPTOR_BYTES + name_size;
        let mut descriptors = vec![0; size * count];
        self.file.read_exact_at(&mut descriptors, descriptors_at)?;
        for descriptor in descriptors.chunks_exact(size) {
            let flags = u32::from_ne_bytes(descriptor[..4].try_into().expect("4 bytes"));
            let offset = u32::from_ne_bytes(descriptor[8..12].try_into().expect("4 bytes"));
            let kind = flags & TYPE_MASK;
            if ![TYPE_CUMULATIVE, TYPE_INSTANT, TYPE_PEAK].contains(&kind) {
                continue;
            }
            let mut value = [0; 8];
            self.file
                .read_exact_at(&mut value, data_at + u64::from(offset))?;
            let name = &descriptor[DESCRIPTOR_BYTES..];
            let length = name.iter().position(|byte| *byte == 0).unwrap_or(name_size);
            let name = String::from_utf8_lossy(&name[..length]).into_owned();
            let sum = sums.entry(name).or_default();
            *sum = sum.saturating_add(u64::from_ne_bytes(value));
        }
        Ok(())
    }
}
