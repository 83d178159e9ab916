//! KVM's own counters: exits by reason, page faults, interrupts.
//!
//! Source: Linux `Documentation/virt/kvm/api.rst`, KVM_GET_STATS_FD.

use jiffy_sys::activity;
use jiffy_sys::clock::monotonic_ns;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

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

/// Shortest time between two samples. One takes a system call, some 2,000 instructions.
const SAMPLE_INTERVAL_NS: u64 = 1_000_000;

/// A counter in the file.
struct Counter {
    name: String,
    /// Where its value is.
    at: u64,
    is_cumulative: bool,
}

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
    ///
    /// # Errors
    ///
    /// If the statistics can't be read; `InvalidData` if their header announces more than KVM has.
    /// Some counters may be added then.
    pub fn add_to(&self, sums: &mut BTreeMap<String, u64>) -> io::Result<()> {
        for Counter { name, at, .. } in self.counters()? {
            let sum = sums.entry(name).or_default();
            *sum = sum.saturating_add(self.value(at)?);
        }
        Ok(())
    }

    /// The counters that the file has. Histograms are skipped.
    fn counters(&self) -> io::Result<Vec<Counter>> {
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
        let counter = |descriptor: &[u8]| {
            let flags = u32::from_ne_bytes(descriptor[..4].try_into().expect("4 bytes"));
            let offset = u32::from_ne_bytes(descriptor[8..12].try_into().expect("4 bytes"));
            let kind = flags & TYPE_MASK;
            if ![TYPE_CUMULATIVE, TYPE_INSTANT, TYPE_PEAK].contains(&kind) {
                return None;
            }
            let name = &descriptor[DESCRIPTOR_BYTES..];
            let length = name.iter().position(|byte| *byte == 0).unwrap_or(name_size);
            Some(Counter {
                name: String::from_utf8_lossy(&name[..length]).into_owned(),
                at: data_at + u64::from(offset),
                is_cumulative: kind == TYPE_CUMULATIVE,
            })
        };
        Ok(descriptors.chunks_exact(size).filter_map(counter).collect())
    }

    fn value(&self, at: u64) -> io::Result<u64> {
        let mut value = [0; 8];
        self.file.read_exact_at(&mut value, at)?;
        Ok(u64::from_ne_bytes(value))
    }
}

/// Samples KVM's counters of a vCPU for the record of its thread's activity. They also count the
/// exits that KVM handles itself.
#[derive(Debug)]
pub struct Sampler {
    stats: StatsFile,
    counters: Vec<Sampled>,
    /// Where the values begin in the file.
    values_at: u64,
    /// A buffer for them.
    values: Vec<u8>,
    next_ns: u64,
}

#[derive(Debug)]
struct Sampled {
    name: Arc<str>,
    /// Where its value begins in the buffer.
    at: usize,
    last: u64,
}

impl Sampler {
    /// A sampler of these statistics; `None` if they can't be read.
    pub fn new(stats: StatsFile) -> Option<Sampler> {
        let mut all = stats.counters().ok()?;
        all.retain(|counter| counter.is_cumulative);
        let values_at = all.iter().map(|counter| counter.at).min()?;
        let counters = all.into_iter().map(|Counter { name, at, .. }| Sampled {
            name: name.into(),
            at: (at - values_at) as usize,
            last: 0,
        });
        let counters: Vec<_> = counters.collect();
        let size = counters.iter().map(|counter| counter.at + 8).max()?;
        (size <= MAX_STATISTICS * 8).then(|| Sampler {
            stats,
            counters,
            values_at,
            values: vec![0; size],
            next_ns: 0,
        })
    }

    /// Samples the counters, unless that was done a short time ago and this is not the last time.
    pub fn sample(&mut self, is_last: bool) {
        let now_ns = monotonic_ns();
        if now_ns < self.next_ns && !is_last {
            return;
        }
        self.next_ns = now_ns + SAMPLE_INTERVAL_NS;
        let file = &self.stats.file;
        if file
            .read_exact_at(&mut self.values, self.values_at)
            .is_err()
        {
            return;
        }
        let values = &self.values;
        let grown = self.counters.iter_mut().filter_map(|counter| {
            let value = values[counter.at..].first_chunk()?;
            let value = u64::from_ne_bytes(*value);
            let count = value.wrapping_sub(std::mem::replace(&mut counter.last, value));
            (count > 0).then(|| (counter.name.clone(), count))
        });
        activity::sample(now_ns, grown);
    }
}
