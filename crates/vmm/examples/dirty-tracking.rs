//! Measures the cost of finding the pages that a guest has written, with each of Linux's methods,
//! for RAM as it is mapped in practice. On the instruction clock a nanosecond is one instruction of
//! kernel, monitor and guest together:
//!
//! ```sh
//! cargo build --release -p jiffy-vmm --example dirty-tracking
//! built=target/x86_64-unknown-linux-gnu/release
//! $built/jiffy-lab run --icount --file $built/examples/dirty-tracking:/dirty-tracking \
//!     -- /dirty-tracking
//! ```
//!
//! `docs/dirty-tracking.md` has the figures.
//!
//! All of the guest's RAM is in use; the guest has two loops. In each round tracking is armed, the
//! guest writes some pages that are spread over RAM and reads [`WORKING_SET`] pages that it had
//! read before, and the monitor writes one page, as a device does. Then the guest is stopped, and
//! the written pages are found and copied into a file.
#![allow(unsafe_code)] // ioctls, and memory given to KVM.

use anyhow::{Context, Result, ensure};
use jiffy_sys::clock::monotonic_ns;
use jiffy_sys::memfd::{self, Pages};
use jiffy_sys::pagemap::{Pagemap, Wanted, push};
use jiffy_vmm::hypervisor::Hypervisor;
use jiffy_vmm::memory::{Frozen, GuestRam, layers};
use jiffy_wire::vmm::{Extent, Memory, PageSize};
use kvm_bindings::{
    KVM_MEM_LOG_DIRTY_PAGES, kvm_clear_dirty_log, kvm_enable_cap, kvm_regs,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::slice;
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

const PAGE: u64 = 4096;
/// Pages the guest writes in a round.
const PAGES: [u64; 3] = [64, 1024, 4096];
/// Pages that the guest reads after tracking was armed: 32 MiB, contiguous.
const WORKING_SET: u64 = 8192;
/// Rounds with the same pages. The first round writes them for the first time; of the others, the
/// last is reported.
const ROUNDS: usize = 3;
/// The page the monitor writes.
const BY_MONITOR: u64 = 2;

/// How written pages are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Not at all.
    Nothing,
    /// As Jiffy does for the first captures: written pages of a private mapping are the process's
    /// own. Arming is `GuestRam::freeze`.
    OwnPages,
    /// As Jiffy does for later captures: KVM's dirty log, and the monitor's own.
    Logs,
    /// `KVM_GET_DIRTY_LOG`, which arms again.
    KvmLog,
    /// The same with `KVM_CLEAR_DIRTY_LOG`; all pages are dirty at first.
    KvmLogManual,
    /// `clear_refs`; all entries of the page map are read.
    SoftDirtyRead,
    /// `clear_refs`; the kernel scans the entries.
    SoftDirtyScan,
    /// Asynchronous write protection by a userfaultfd; one scan finds and arms.
    WriteProtect,
}

impl Way {
    const ALL: [Way; 8] = [
        Way::Nothing,
        Way::OwnPages,
        Way::Logs,
        Way::KvmLog,
        Way::KvmLogManual,
        Way::SoftDirtyRead,
        Way::SoftDirtyScan,
        Way::WriteProtect,
    ];

    /// Whether arming is a freeze, which also finds and copies.
    fn is_freeze(self) -> bool {
        matches!(self, Way::OwnPages | Way::Logs)
    }

    fn name(self) -> &'static str {
        match self {
            Way::Nothing => "nothing",
            Way::OwnPages => "own pages (Jiffy, at first)",
            Way::Logs => "logs (Jiffy, later)",
            Way::KvmLog => "KVM log",
            Way::KvmLogManual => "KVM log, manual",
            Way::SoftDirtyRead => "soft-dirty, pagemap",
            Way::SoftDirtyScan => "soft-dirty, scan",
            Way::WriteProtect => "write protection, scan",
        }
    }
}

/// How RAM is mapped while it is tracked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mapping {
    /// As in a VM that was never captured.
    Shared,
    /// As in a VM that was captured.
    Private,
}

/// Nanoseconds, or instructions, of one round.
#[derive(Debug, Clone, Copy, Default)]
struct Round {
    arm: u64,
    writes: u64,
    /// Exits from the guest while it wrote pages.
    exits: u64,
    reads: u64,
    find: u64,
    /// Pages that were found.
    found: u64,
    monitor_seen: bool,
    copy: Copied,
}

/// The pages that were found and copied into a file.
#[derive(Debug, Clone, Copy, Default)]
struct Copied {
    bytes: u64,
    took: u64,
}

fn main() -> Result<()> {
    let hypervisor = Hypervisor::open()?;
    // Only the cases whose size in MiB and name contain the argument.
    let only = std::env::args().nth(1).unwrap_or_default();
    for size_mib in [128, 1024] {
        let mut ways = Way::ALL.to_vec();
        ways.retain(|way| format!("{size_mib} {}", way.name()).contains(&only));
        if ways.is_empty() {
            continue;
        }
        let mut base = Guest::create(&hypervisor, size_mib)?;
        base.fill()?;
        let whole = copy(&base, slice::from_ref(&(0..base.ram.size())))?;
        println!(
            "RAM of {size_mib} MiB, all in use; a copy of it takes {}\n",
            whole.took
        );
        let base = base.ram.freeze()?;
        let shared = ways.iter().filter(|way| !way.is_freeze());
        let shared = shared.map(|way| (*way, Mapping::Shared));
        let private = ways.iter().map(|way| (*way, Mapping::Private));
        let mut measured = Vec::new();
        for (way, mapping) in shared.chain(private) {
            let rounds = rounds_of(&hypervisor, &base, whole, way, mapping)
                .with_context(|| format!("{} {mapping:?}", way.name()))?;
            measured.push((way, mapping, rounds));
        }
        for (index, pages) in PAGES.into_iter().enumerate() {
            println!(
                "{pages} pages written:\n\n\
                 | mapped | way | first arm | find | copy | arm | pause | first writes | writes | exits | reads | found | copied | of the monitor |\n\
                 |---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|"
            );
            for (way, mapping, rounds) in &measured {
                let first = rounds[index * ROUNDS];
                let last = rounds[index * ROUNDS + ROUNDS - 1];
                let seen = if last.monitor_seen { "seen" } else { "missed" };
                let figures = [
                    rounds[0].arm,
                    last.find,
                    last.copy.took,
                    last.arm,
                    last.find + last.copy.took + last.arm,
                    first.writes,
                    last.writes,
                    last.exits,
                    last.reads,
                    last.found,
                    last.copy.bytes / PAGE,
                ];
                let figures = figures.map(|figure| figure.to_string()).join(" | ");
                println!("| {mapping:?} | {} | {figures} | {seen} |", way.name());
            }
            println!();
        }
    }
    Ok(())
}

/// [`ROUNDS`] rounds for each number of pages, in one VM.
fn rounds_of(
    hypervisor: &Hypervisor,
    base: &Frozen,
    whole: Copied,
    way: Way,
    mapping: Mapping,
) -> Result<Vec<Round>> {
    let size = base.layout.size;
    let mut guest = match (way, mapping) {
        // Its first freeze starts from a shared mapping.
        (_, Mapping::Shared) | (Way::OwnPages | Way::Logs, _) => {
            let mut guest = Guest::create(hypervisor, (size >> 20) as u32)?;
            guest.fill()?;
            guest
        }
        _ => {
            let layers = layers::assemble(
                base.files
                    .iter()
                    .map(|file| file.try_clone())
                    .collect::<Result<_, _>>()?,
                Some(base.layout.clone()),
                size,
            )?;
            let mut guest = Guest::with(hypervisor, GuestRam::from_layers(layers, size)?)?;
            guest.run(READ, 0, PAGE, size / PAGE)?;
            guest
        }
    };
    let mut tracker = Tracker::new(way, &guest)?;
    if way == Way::Logs {
        while !guest.ram.wants_log() {
            guest.ram.freeze()?;
        }
        guest.ram.keep_log(&guest.vm);
        guest.ram.freeze()?;
    }
    let mut rounds: Vec<Round> = Vec::new();
    for pages in PAGES {
        let stride = size / pages;
        for number in 0..ROUNDS {
            let mut round = Round::default();
            let frozen;
            (round.arm, frozen) = timed(|| tracker.arm(&guest))?;
            // A freeze has found and copied already, in ranges that it chose.
            let mut pieces = None;
            if let Some(frozen) = frozen {
                if way == Way::OwnPages {
                    let found = rounds.last().map_or(0, |last| last.find);
                    round.arm = round.arm.saturating_sub(found);
                }
                let covers = frozen.layout.covers.last().into_iter().flatten();
                let range = |extent: &Extent| extent.offset..extent.offset + extent.length;
                pieces = Some(covers.map(range).collect::<Vec<_>>());
            }
            guest.value += 1;
            let before = guest.exits()?;
            (round.writes, ()) = timed(|| guest.run(WRITE, stride / 2, stride, pages))?;
            round.exits = guest.exits()? - before;
            (round.reads, ()) = timed(|| guest.run(READ, size / 2, PAGE, WORKING_SET))?;
            let of_monitor = GuestAddress(BY_MONITOR * PAGE);
            guest.ram.memory().write_obj(guest.value, of_monitor)?;
            let found;
            (round.find, found) = timed(|| tracker.find(&guest))?;
            round.found = found
                .iter()
                .map(|range| (range.end - range.start) / PAGE)
                .sum();
            let has = |page: u64| found.iter().any(|range| range.contains(&(page * PAGE)));
            round.monitor_seen = has(BY_MONITOR);
            for page in 0..pages {
                let page = (stride / 2 + page * stride) / PAGE;
                ensure!(way == Way::Nothing || has(page), "page {page} is missed");
            }
            if number == ROUNDS - 1 {
                // Not in each round: reading maps more of RAM here.
                let pieces = pieces.as_ref().unwrap_or(&found);
                round.copy = match pieces.as_slice() {
                    [range] if range.end - range.start == size => whole,
                    _ => copy(&guest, pieces)?,
                };
                if way.is_freeze() {
                    round.arm = round.arm.saturating_sub(round.copy.took);
                }
            }
            rounds.push(round);
        }
    }
    Ok(rounds)
}

fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(u64, T)> {
    let begun = monotonic_ns();
    let done = work()?;
    Ok((monotonic_ns() - begun, done))
}

/// Copies ranges of RAM into a new file.
fn copy(guest: &Guest, ranges: &[Range<u64>]) -> Result<Copied> {
    let (took, ()) = timed(|| {
        let file = memfd::create("copy", guest.ram.size(), Pages::Small)?;
        ranges
            .iter()
            .try_for_each(|range| write_out(guest, &file, range.clone()))
    })?;
    let bytes = ranges.iter().map(|range| range.end - range.start).sum();
    Ok(Copied { bytes, took })
}

fn write_out(guest: &Guest, file: &File, range: Range<u64>) -> Result<()> {
    let mut at = range.start;
    while at < range.end {
        // SAFETY: the range is in guest RAM; the kernel reads it, and no reference to it is made.
        let count = unsafe {
            libc::pwrite(
                file.as_raw_fd(),
                (guest.base + at) as *const libc::c_void,
                (range.end - at) as usize,
                at as i64,
            )
        };
        ensure!(count > 0, io::Error::last_os_error());
        at += count as u64;
    }
    Ok(())
}

/// A VM with one vCPU and no devices.
struct Guest {
    vcpu: VcpuFd,
    vm: Arc<VmFd>,
    ram: GuestRam,
    /// Address at which RAM is mapped here.
    base: u64,
    /// The value that the guest writes.
    value: u32,
}

const CODE: u64 = PAGE;
/// `again: mov [esi], eax; add esi, edi; dec ecx; jnz again; out 0x10, al`
const WRITE: u64 = CODE;
/// The same with `mov ebx, [esi]`.
const READ: u64 = CODE + 16;
const PROGRAM: [u8; 25] = [
    0x89, 0x06, 0x01, 0xfe, 0x49, 0x75, 0xf9, 0xe6, 0x10, 0, 0, 0, 0, 0, 0, 0, //
    0x8b, 0x1e, 0x01, 0xfe, 0x49, 0x75, 0xf9, 0xe6, 0x10,
];

impl Guest {
    fn create(hypervisor: &Hypervisor, size_mib: u32) -> Result<Guest> {
        let ram = GuestRam::create(&Memory {
            size_mib,
            pages: PageSize::Small,
            prefault: false,
        })?;
        Guest::with(hypervisor, ram)
    }

    fn with(hypervisor: &Hypervisor, ram: GuestRam) -> Result<Guest> {
        ram.memory().write_slice(&PROGRAM, GuestAddress(CODE))?;
        let vm = hypervisor.create_vm()?;
        ram.register(&vm)?;
        let vcpu = vm.create_vcpu(0)?;
        vcpu.set_cpuid2(&hypervisor.supported_cpuid()?)?;
        // Protected mode without paging: the guest would write its page tables, too.
        let mut sregs = vcpu.get_sregs()?;
        for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
            segment.base = 0;
            segment.limit = u32::MAX;
            segment.type_ = 3;
            (segment.db, segment.g) = (1, 1);
        }
        sregs.cs.type_ = 0xb;
        sregs.cr0 |= 1;
        vcpu.set_sregs(&sregs)?;
        let regions: Vec<_> = ram.memory().iter().collect();
        ensure!(regions.len() == 1, "RAM is in one piece");
        let base = regions[0].as_ptr() as u64;
        Ok(Guest {
            vcpu,
            vm: Arc::new(vm),
            ram,
            base,
            value: 7,
        })
    }

    /// Touches all of RAM, here and in the guest.
    fn fill(&mut self) -> Result<()> {
        // Without the pages of the program.
        let count = self.ram.size() / PAGE - BY_MONITOR;
        self.run(WRITE, BY_MONITOR * PAGE, PAGE, count)
    }

    /// Runs one of the loops over `count` addresses.
    fn run(&mut self, program: u64, from: u64, stride: u64, count: u64) -> Result<()> {
        self.vcpu.set_regs(&kvm_regs {
            rip: program,
            rax: self.value.into(),
            rcx: count,
            rsi: from,
            rdi: stride,
            rflags: 2,
            ..kvm_regs::default()
        })?;
        let exit = self.vcpu.run()?;
        ensure!(matches!(exit, VcpuExit::IoOut(0x10, _)), "{exit:?}");
        Ok(())
    }

    /// Exits so far, by KVM's own count.
    fn exits(&self) -> Result<u64> {
        let name = format!("{}-{}", std::process::id(), self.vm.as_raw_fd());
        let path = format!("/sys/kernel/debug/kvm/{name}/exits");
        let text = fs::read_to_string(&path).context(path)?;
        Ok(text.trim().parse()?)
    }

    fn addresses(&self) -> Range<u64> {
        self.base..self.base + self.ram.size()
    }

    /// Ranges of host addresses, as offsets in RAM.
    fn offsets(&self, ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
        let offset = |range: Range<u64>| range.start - self.base..range.end - self.base;
        ranges.into_iter().map(offset).collect()
    }
}

/// The state of a method.
struct Tracker {
    way: Way,
    map: Pagemap,
    pagemap: File,
    clear_refs: Option<File>,
    uffd: Option<OwnedFd>,
    log: Vec<u64>,
    armed: bool,
}

impl Tracker {
    fn new(way: Way, guest: &Guest) -> Result<Tracker> {
        let clear_refs = matches!(way, Way::SoftDirtyRead | Way::SoftDirtyScan)
            .then(|| File::options().write(true).open("/proc/self/clear_refs"));
        let uffd = (way == Way::WriteProtect).then(userfaultfd);
        if way == Way::KvmLogManual {
            // RAM is not write-protected all at once, and all of it counts as written until it is
            // cleared.
            guest.vm.enable_cap(&kvm_enable_cap {
                cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
                args: [3, 0, 0, 0],
                ..kvm_enable_cap::default()
            })?;
        }
        Ok(Tracker {
            way,
            map: Pagemap::open()?,
            pagemap: File::open("/proc/self/pagemap")?,
            clear_refs: clear_refs.transpose()?,
            uffd: uffd.transpose()?,
            log: Vec::new(),
            armed: false,
        })
    }

    /// Arms tracking; returns the result if this is a freeze.
    fn arm(&mut self, guest: &Guest) -> Result<Option<Frozen>> {
        let first = !std::mem::replace(&mut self.armed, true);
        match self.way {
            Way::Nothing => {}
            Way::OwnPages | Way::Logs => return Ok(Some(guest.ram.freeze()?)),
            Way::KvmLog if first => log_writes(guest)?,
            Way::KvmLog => {}
            Way::KvmLogManual => {
                if first {
                    log_writes(guest)?;
                    self.log = vec![u64::MAX; (guest.ram.size() / PAGE / 64) as usize];
                }
                let argument = kvm_clear_dirty_log {
                    num_pages: (guest.ram.size() / PAGE) as u32,
                    __bindgen_anon_1: kvm_bindings::kvm_clear_dirty_log__bindgen_ty_1 {
                        dirty_bitmap: self.log.as_mut_ptr().cast(),
                    },
                    ..kvm_clear_dirty_log::default()
                };
                // SAFETY: the log has a bit for each page.
                unsafe { call(&*guest.vm, KVM_CLEAR_DIRTY_LOG, &raw const argument) }?;
            }
            Way::SoftDirtyRead | Way::SoftDirtyScan => {
                let file = self.clear_refs.as_ref().context("no clear_refs")?;
                file.write_all_at(b"4", 0)?;
            }
            Way::WriteProtect if first => {
                let uffd = self.uffd.as_ref().context("no userfaultfd")?;
                let Range { start, end } = guest.addresses();
                let mut register = [start, end - start, UFFDIO_REGISTER_MODE_WP, 0];
                // SAFETY: `struct uffdio_register`; pages keep their contents.
                unsafe { call(uffd, UFFDIO_REGISTER, register.as_mut_ptr()) }?;
                let protect = [start, end - start, UFFDIO_WRITEPROTECT_MODE_WP];
                // SAFETY: `struct uffdio_writeprotect`; writes continue; the kernel lifts the
                // protection automatically.
                unsafe { call(uffd, UFFDIO_WRITEPROTECT, protect.as_ptr()) }?;
            }
            Way::WriteProtect => {}
        }
        Ok(None)
    }

    /// The ranges of RAM that were written since tracking was armed.
    fn find(&mut self, guest: &Guest) -> Result<Vec<Range<u64>>> {
        let addresses = guest.addresses();
        Ok(match self.way {
            Way::Nothing => Vec::new(),
            Way::OwnPages => guest.offsets(Pagemap::open()?.own_pages(addresses)?),
            Way::Logs => {
                let written = guest.ram.written()?.into_iter();
                let range = |extent: Extent| extent.offset..extent.offset + extent.length;
                written.map(range).collect()
            }
            Way::KvmLog | Way::KvmLogManual => {
                self.log = guest.vm.get_dirty_log(0, guest.ram.size() as usize)?;
                ranges_of(&self.log)
            }
            Way::SoftDirtyRead => guest.offsets(self.read_soft_dirty(addresses)?),
            Way::SoftDirtyScan => guest.offsets(self.map.scan(addresses, &SOFT_DIRTY)?),
            Way::WriteProtect => guest.offsets(self.map.scan(addresses, &WRITTEN)?),
        })
    }

    fn read_soft_dirty(&self, addresses: Range<u64>) -> Result<Vec<Range<u64>>> {
        let mut found = Vec::new();
        let mut bytes = vec![0; 64 << 10];
        let mut page = addresses.start / PAGE;
        while page < addresses.end / PAGE {
            let count = (bytes.len() as u64 / 8).min(addresses.end / PAGE - page);
            let entries = &mut bytes[..count as usize * 8];
            self.pagemap.read_exact_at(entries, page * 8)?;
            for (number, entry) in (page..).zip(entries.chunks_exact(8)) {
                let entry = u64::from_le_bytes(entry.try_into().expect("8 bytes"));
                if entry & 1 << 55 != 0 {
                    push(&mut found, number * PAGE..(number + 1) * PAGE);
                }
            }
            page += count;
        }
        Ok(found)
    }
}

/// Starts KVM's dirty log.
fn log_writes(guest: &Guest) -> Result<()> {
    let slot = kvm_userspace_memory_region {
        slot: 0,
        flags: KVM_MEM_LOG_DIRTY_PAGES,
        guest_phys_addr: 0,
        memory_size: guest.ram.size(),
        userspace_addr: guest.base,
    };
    // SAFETY: the existing slot, with another flag.
    Ok(unsafe { guest.vm.set_user_memory_region(slot) }?)
}

fn ranges_of(log: &[u64]) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    for (index, word) in log.iter().enumerate() {
        let mut left = *word;
        while left != 0 {
            let page = index as u64 * 64 + u64::from(left.trailing_zeros());
            push(&mut found, page * PAGE..(page + 1) * PAGE);
            left &= left - 1;
        }
    }
    found
}

const KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2: u32 = 168;
/// `_IOWR(0xae, 0xc0, struct kvm_clear_dirty_log)`
const KVM_CLEAR_DIRTY_LOG: u32 = 0xc018_aec0;

/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`
const UFFDIO_API: u32 = 0xc018_aa3f;
/// `_IOWR(0xaa, 0, struct uffdio_register)`
const UFFDIO_REGISTER: u32 = 0xc020_aa00;
/// `_IOWR(0xaa, 6, struct uffdio_writeprotect)`
const UFFDIO_WRITEPROTECT: u32 = 0xc018_aa06;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1;
/// Shared memory, missing pages, and asynchronous write protection, which needs no handler.
const FEATURES: u64 = 1 << 12 | 1 << 13 | 1 << 15;

/// `PAGE_IS_SOFT_DIRTY`
const SOFT_DIRTY: Wanted = Wanted {
    flags: 0,
    inverted: 0,
    all_of: 1 << 7,
    any_of: 0,
    returned: 1 << 7,
};
/// `PAGE_IS_WRITTEN`, with `PM_SCAN_WP_MATCHING` and `PM_SCAN_CHECK_WPASYNC`
const WRITTEN: Wanted = Wanted {
    flags: 1 << 0 | 1 << 1,
    inverted: 0,
    all_of: 1 << 1,
    any_of: 0,
    returned: 1 << 1,
};

fn userfaultfd() -> Result<OwnedFd> {
    // SAFETY: takes flags alone.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
    ensure!(fd >= 0, io::Error::last_os_error());
    // SAFETY: the descriptor was just created.
    let uffd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let mut api = [0xaa, FEATURES, 0];
    // SAFETY: `struct uffdio_api`.
    unsafe { call(&uffd, UFFDIO_API, api.as_mut_ptr()) }.context("UFFDIO_API")?;
    Ok(uffd)
}

/// An ioctl.
///
/// # Safety
///
/// The argument must be of the type that the request takes.
unsafe fn call<T>(fd: &impl AsRawFd, request: u32, argument: *const T) -> Result<i32> {
    // SAFETY: as the caller promises.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), request as libc::Ioctl, argument) };
    ensure!(done >= 0, io::Error::last_os_error());
    Ok(done)
}
