//! Everything a snapshot keeps of a vCPU.

use super::Vcpu;
use super::tsc::MSR_IA32_TSC;
use crate::hypervisor::{HypervisorError, failed_to};
use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use serde::{Deserialize, Serialize};

/// Most MSRs a state may hold: KVM's limit for one call.
const MAX_MSRS: usize = 4096;

/// A vCPU at rest, as KVM describes it.
#[derive(Debug, Serialize, Deserialize)]
pub struct VcpuState {
    /// CPUID as the guest sees it.
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// Guest TSC frequency, if KVM knows it.
    pub tsc_khz: Option<u32>,
    /// Running, halted, waiting for its start.
    pub mp_state: kvm_mp_state,
    /// General registers.
    pub regs: kvm_regs,
    /// Segments and control registers.
    pub sregs: kvm_sregs,
    /// FPU and vector registers, XSAVE's standard format.
    pub xsave: Box<kvm_xsave>,
    /// Extended control registers.
    pub xcrs: kvm_xcrs,
    /// Debug registers.
    pub debug_regs: kvm_debugregs,
    /// The local APIC's register page.
    pub lapic: kvm_lapic_state,
    /// All MSRs that can be read.
    pub msrs: Vec<kvm_msr_entry>,
    /// Pending exceptions, interrupts, NMIs.
    pub events: kvm_vcpu_events,
}

/// QEMU's own processor (TCG) looks up a program's right to use I/O ports only
/// in a task state segment whose descriptor is not marked busy, which KVM
/// always says of one in use; restored so, a guest's programs lose that right.
/// AMD's processors, which it stands for, take either.
fn for_this_processor(mut sregs: kvm_sregs) -> kvm_sregs {
    const HYPERVISOR_LEAF: u32 = 0x4000_0000;
    const BUSY: u8 = 2;
    let leaf = std::arch::x86_64::__cpuid(HYPERVISOR_LEAF);
    if [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes) == [*b"TCGT", *b"CGTC", *b"GTCG"] {
        sregs.tr.type_ &= !BUSY;
    }
    sregs
}

impl Vcpu {
    /// Reads everything. The vCPU does not run and owes KVM no completion of
    /// an exit. `msrs` are the indices worth keeping.
    pub fn save(&self, msrs: &[u32]) -> Result<VcpuState, HypervisorError> {
        let fd = &self.fd;
        let read = |what| failed_to(what);
        // First: KVM settles pending INIT and start-up signals in it.
        let mp_state = fd.get_mp_state().map_err(read("read a vCPU's activity"))?;
        Ok(VcpuState {
            mp_state,
            regs: fd.get_regs().map_err(read("read a vCPU's registers"))?,
            sregs: fd
                .get_sregs()
                .map_err(read("read a vCPU's control registers"))?,
            xsave: Box::new(
                fd.get_xsave()
                    .map_err(read("read a vCPU's vector registers"))?,
            ),
            xcrs: fd
                .get_xcrs()
                .map_err(read("read a vCPU's extended control registers"))?,
            debug_regs: fd
                .get_debug_regs()
                .map_err(read("read a vCPU's debug registers"))?,
            lapic: fd.get_lapic().map_err(read("read a vCPU's local APIC"))?,
            msrs: self.read_msrs(msrs)?,
            events: fd
                .get_vcpu_events()
                .map_err(read("read a vCPU's pending events"))?,
            cpuid: fd
                .get_cpuid2(KVM_MAX_CPUID_ENTRIES)
                .map_err(read("read a vCPU's CPUID"))?
                .as_slice()
                .to_vec(),
            tsc_khz: fd.get_tsc_khz().ok(),
        })
    }

    /// Writes everything, in the order in which KVM's parts depend on another.
    pub fn restore(&self, state: &VcpuState) -> Result<(), HypervisorError> {
        let fd = &self.fd;
        let write = |what| failed_to(what);
        let too_many = |_| HypervisorError::Capability("room for the saved CPUID");
        let cpuid = CpuId::from_entries(&state.cpuid).map_err(too_many)?;
        fd.set_cpuid2(&cpuid).map_err(write("set a vCPU's CPUID"))?;
        if let Some(khz) = state.tsc_khz
            && fd.get_tsc_khz().ok() != Some(khz)
        {
            fd.set_tsc_khz(khz)
                .map_err(write("set a vCPU's TSC frequency"))?;
        }
        fd.set_mp_state(state.mp_state)
            .map_err(write("set a vCPU's activity"))?;
        fd.set_regs(&state.regs)
            .map_err(write("set a vCPU's registers"))?;
        fd.set_sregs(&for_this_processor(state.sregs))
            .map_err(write("set a vCPU's control registers"))?;
        self.write_xsave(&state.xsave)?;
        fd.set_xcrs(&state.xcrs)
            .map_err(write("set a vCPU's extended control registers"))?;
        fd.set_debug_regs(&state.debug_regs)
            .map_err(write("set a vCPU's debug registers"))?;
        fd.set_lapic(&state.lapic)
            .map_err(write("set a vCPU's local APIC"))?;
        self.write_msrs(&state.msrs)?;
        fd.set_vcpu_events(&state.events)
            .map_err(write("set a vCPU's pending events"))
    }

    /// KVM stops at the first MSR it can't read: leave that out and go on.
    fn read_msrs(&self, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, HypervisorError> {
        let mut wanted = indices.to_vec();
        wanted.truncate(MAX_MSRS);
        let mut read = Vec::with_capacity(wanted.len());
        let mut rest = wanted.as_slice();
        while !rest.is_empty() {
            let entries: Vec<kvm_msr_entry> = rest
                .iter()
                .map(|index| kvm_msr_entry {
                    index: *index,
                    ..Default::default()
                })
                .collect();
            let mut msrs = Msrs::from_entries(&entries)
                .map_err(|_| HypervisorError::Capability("room for its own MSRs"))?;
            let count = self
                .fd
                .get_msrs(&mut msrs)
                .map_err(failed_to("read a vCPU's MSRs"))?;
            read.extend_from_slice(&msrs.as_slice()[..count]);
            rest = rest.get(count + 1..).unwrap_or(&[]);
        }
        Ok(read)
    }

    /// The time stamp counter first: the deadline timer counts on it.
    pub(super) fn write_msrs(&self, saved: &[kvm_msr_entry]) -> Result<(), HypervisorError> {
        let mut entries = saved.to_vec();
        if self.index == 0
            && let Some(at) = saved.iter().position(|msr| msr.index == MSR_IA32_TSC)
            && self.set_tsc(saved[at].data)?
        {
            entries.remove(at);
        }
        let msrs = Msrs::from_entries(&entries)
            .map_err(|_| HypervisorError::Capability("room for the saved MSRs"))?;
        let set = self
            .fd
            .set_msrs(&msrs)
            .map_err(failed_to("set a vCPU's MSRs"))?;
        if let Some(refused) = entries.get(set) {
            tracing::warn!(
                msr = format!("{:#x}", refused.index),
                "this host does not take a saved MSR"
            );
            return Err(HypervisorError::Capability("an MSR the saved guest uses"));
        }
        Ok(())
    }

    #[allow(unsafe_code)] // KVM reads as many bytes as the guest's features need.
    fn write_xsave(&self, xsave: &kvm_xsave) -> Result<(), HypervisorError> {
        // SAFETY: no feature is enabled for guests whose state exceeds the
        // 4096 bytes of `kvm_xsave`: those (AMX) need a permission this
        // process never asks for.
        unsafe { self.fd.set_xsave(xsave) }.map_err(failed_to("set a vCPU's vector registers"))
    }
}
