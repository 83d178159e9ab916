//! vCPUs.
//!
//! * [`entry`]: registers at a kernel's entry point.
//! * [`exit`]: handling exits from the guest.
//! * [`state`]: everything that a snapshot keeps of a vCPU.
//! * [`thread`]: the thread that runs a vCPU, with pause and resume.

pub mod entry;
pub mod exit;
pub mod state;
pub mod thread;

use crate::boot::Entry;
use crate::boot::calls::TscClock;
use crate::cpu::{cpuid, msrs, mtrr, quirks};
use crate::hypervisor::{HypervisorError, failed_to};
use crate::stats::{Sampler, StatsFile};
use jiffy_sys::clock::monotonic_ns;
use jiffy_wire::cpu::Profile;
use kvm_bindings::CpuId;
use kvm_ioctls::{VcpuFd, VmFd};
pub use state::VcpuState;
use std::os::fd::AsRawFd;

/// IA32_MISC_ENABLE, bit 0: fast strings (Intel SDM volume 4).
const FAST_STRINGS: u64 = 1;
const NO_BRANCH_TRACE: u64 = 1 << 11;
const NO_PRECISE_SAMPLING: u64 = 1 << 12;

/// `_IOWR(KVMIO, 0xd5, struct kvm_pre_fault_memory)` (Linux,
/// `Documentation/virt/kvm/api.rst`).
const KVM_PRE_FAULT_MEMORY: libc::Ioctl =
    (3 << 30 | (size_of::<PreFault>() as libc::Ioctl) << 16) | 0xae << 8 | 0xd5;

#[repr(C)]
#[derive(Default)]
struct PreFault {
    address: u64,
    length: u64,
    flags: u64,
    padding: [u64; 5],
}

/// Most vCPUs of a VM.
pub const MAX_VCPUS: u8 = 32;

/// A vCPU without a thread.
#[derive(Debug)]
pub struct Vcpu {
    fd: VcpuFd,
    index: u8,
    stats: Option<StatsFile>,
}

impl Vcpu {
    /// Creates vCPU `index`; its local APIC has that id.
    ///
    /// # Errors
    ///
    /// If `KVM_CREATE_VCPU` fails.
    pub fn create(vm: &VmFd, index: u8) -> Result<Vcpu, HypervisorError> {
        let fd = vm
            .create_vcpu(index.into())
            .map_err(failed_to("create a vCPU"))?;
        // Opened now because KVM serves it only while the vCPU does not run.
        let stats = StatsFile::open(&fd);
        Ok(Vcpu { fd, index, stats })
    }

    /// Frequency of its time stamp counter, kHz.
    pub fn tsc_khz(&self) -> Option<u32> {
        self.fd.get_tsc_khz().ok()
    }

    /// Relates its time stamp counter to the host's clock; `None` if KVM tells too little.
    pub fn tsc_clock(&self) -> Option<TscClock> {
        let khz = self.tsc_khz()?;
        let at_ns = monotonic_ns();
        let tsc = msrs::read(&self.fd, &[msrs::TSC]).ok()?.first()?.data;
        Some(TscClock { tsc, at_ns, khz })
    }

    /// Sets CPUID and the registers that firmware would set. `cpuid` is adapted to this vCPU;
    /// `profile` is what it was limited to.
    ///
    /// # Errors
    ///
    /// If KVM refuses a value.
    pub fn configure(
        &self,
        cpuid: &mut CpuId,
        vcpus: u8,
        profile: Option<&Profile>,
    ) -> Result<(), HypervisorError> {
        cpuid::specialise(cpuid, self.index, vcpus);
        self.fd
            .set_cpuid2(cpuid)
            .map_err(failed_to("set a vCPU's CPUID"))?;
        quirks::enable_extended_states(&self.fd, cpuid)?;
        self.set_firmware_msrs(cpuid, profile)
    }

    /// Sets the registers that firmware would set: memory types, and on Intel's processors fast
    /// strings, without which Linux does not copy with `rep movsb`.
    fn set_firmware_msrs(
        &self,
        cpuid: &CpuId,
        profile: Option<&Profile>,
    ) -> Result<(), HypervisorError> {
        let mut all = Vec::with_capacity(16);
        let given = profile.and_then(|profile| profile.msrs.get(&msrs::ARCH_CAPABILITIES));
        if let Some(given) = given.filter(|_| cpuid::has_arch_capabilities(cpuid.as_slice())) {
            all.push(msrs::entry(msrs::ARCH_CAPABILITIES, *given));
        }
        if cpuid::is_intel(cpuid) {
            let features = FAST_STRINGS | NO_BRANCH_TRACE | NO_PRECISE_SAMPLING;
            all.push(msrs::entry(msrs::MISC_ENABLE, features));
        }
        if cpuid::has_mtrrs(cpuid) {
            all.extend(mtrr::at_boot(cpuid::physical_address_bits(cpuid)));
        }
        msrs::set_at_boot(&self.fd, &all)
    }

    /// Puts the first vCPU at a kernel's entry point. The others wait until the guest starts them.
    ///
    /// # Errors
    ///
    /// If `KVM_GET_SREGS`, `KVM_SET_SREGS` or `KVM_SET_REGS` fails.
    pub fn enter_at(&self, entry: &Entry) -> Result<(), HypervisorError> {
        entry::set(&self.fd, entry)
    }

    /// Maps `length` bytes of guest memory from the guest physical `address` on in KVM's page
    /// tables (`KVM_PRE_FAULT_MEMORY`), so that the guest does not fault there. Errors are ignored,
    /// because this only saves time: KVM before Linux 6.11 does not support it.
    #[allow(unsafe_code)] // An ioctl that kvm-ioctls does not have.
    pub fn map_ahead(&self, address: u64, length: u64) {
        let mut range = PreFault {
            address,
            length,
            ..PreFault::default()
        };
        while range.length > 0 {
            let left = range.length;
            // SAFETY: the ioctl reads and writes this structure.
            let result =
                unsafe { libc::ioctl(self.fd.as_raw_fd(), KVM_PRE_FAULT_MEMORY, &raw mut range) };
            // KVM advances address and length by what it has mapped.
            if result < 0 || range.length >= left {
                return;
            }
        }
    }

    /// Sets the guest's "paused" flag (`KVM_KVMCLOCK_CTRL`). Its clock continued while it was paused,
    /// and its watchdogs must not report a hang. Guests without kvm-clock have no such flag.
    pub fn set_paused_flag(&self) {
        if let Err(error) = self.fd.kvmclock_ctrl()
            && error.errno() != libc::EINVAL
        {
            tracing::warn!(%error, "the guest's \"paused\" flag could not be set; its watchdogs may report a hang");
        }
    }

    /// Its number, from 0.
    pub fn index(&self) -> u8 {
        self.index
    }

    /// Samples its exit counters, if KVM has any. Must be called on its thread.
    pub fn sampler(&self) -> Option<Sampler> {
        StatsFile::open(&self.fd).and_then(Sampler::new)
    }

    /// Takes its exit counters.
    pub fn take_stats(&mut self) -> Option<StatsFile> {
        self.stats.take()
    }
}
