//! Everything that a snapshot keeps of a vCPU.

use super::Vcpu;
use crate::cpu::profile::GuestProcessor;
use crate::cpu::tsc::SharedOffset;
use crate::cpu::{msrs, quirks};
use crate::hypervisor::{HypervisorError, failed_to};
use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use serde::{Deserialize, Serialize};

/// The state of a vCPU that does not run, in KVM's types.
#[derive(Debug, Serialize, Deserialize)]
pub struct VcpuState {
    /// CPUID as the guest sees it.
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// Guest TSC frequency, kHz, if KVM knows it.
    pub tsc_khz: Option<u32>,
    /// Running, halted, or waiting for its start.
    pub mp_state: kvm_mp_state,
    /// General registers.
    pub regs: kvm_regs,
    /// Segments and control registers.
    pub sregs: kvm_sregs,
    /// FPU and vector registers, XSAVE's standard format.
    pub xsave: Box<kvm_xsave>,
    /// Extended control registers; none where the host has no XSAVE.
    pub xcrs: kvm_xcrs,
    /// Debug registers.
    pub debug_regs: kvm_debugregs,
    /// The local APIC's register page.
    pub lapic: kvm_lapic_state,
    /// MSRs ([`msrs::to_save`]).
    pub msrs: Vec<kvm_msr_entry>,
    /// Pending exceptions, interrupts, NMIs.
    pub events: kvm_vcpu_events,
}

impl VcpuState {
    /// The part that describes the guest's processor.
    pub fn processor(&self) -> GuestProcessor<'_> {
        GuestProcessor {
            cpuid: &self.cpuid,
            msrs: &self.msrs,
            tsc_khz: self.tsc_khz,
        }
    }
}

impl Vcpu {
    /// Reads the state. The vCPU must not run, and KVM must have completed its last exit. `listed`
    /// are the MSRs that KVM lists.
    ///
    /// # Errors
    ///
    /// If one of KVM's calls that read the state fails. An unknown frequency of the time stamp
    /// counter is no error.
    pub fn save(&self, listed: &[u32]) -> Result<VcpuState, HypervisorError> {
        let fd = &self.fd;
        let read = |what| failed_to(what);
        // First, because KVM processes pending INIT and start-up signals in this call.
        let mp_state = fd.get_mp_state().map_err(read("read a vCPU's activity"))?;
        let cpuid = fd
            .get_cpuid2(KVM_MAX_CPUID_ENTRIES)
            .map_err(read("read a vCPU's CPUID"))?;
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
            msrs: msrs::read(fd, &msrs::to_save(listed, cpuid.as_slice()))?,
            events: fd
                .get_vcpu_events()
                .map_err(read("read a vCPU's pending events"))?,
            cpuid: cpuid.as_slice().to_vec(),
            tsc_khz: fd.get_tsc_khz().ok(),
        })
    }

    /// Writes the state in the order in which KVM's parts depend on each other. The vCPUs of a VM
    /// share `tsc`; the first vCPU must be restored first.
    ///
    /// # Errors
    ///
    /// If KVM refuses a value.
    pub fn restore(
        &self,
        state: &VcpuState,
        tsc: &mut SharedOffset,
    ) -> Result<(), HypervisorError> {
        let fd = &self.fd;
        let write = |what| failed_to(what);
        let too_many = |_| HypervisorError::Capability("room for the saved CPUID".into());
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
        fd.set_sregs(&quirks::segment_registers(state.sregs))
            .map_err(write("set a vCPU's control registers"))?;
        self.write_xsave(&state.xsave)?;
        // KVM refuses the call without XSAVE.
        if state.xcrs.nr_xcrs > 0 {
            fd.set_xcrs(&state.xcrs)
                .map_err(write("set a vCPU's extended control registers"))?;
        }
        fd.set_debug_regs(&state.debug_regs)
            .map_err(write("set a vCPU's debug registers"))?;
        fd.set_lapic(&state.lapic)
            .map_err(write("set a vCPU's local APIC"))?;
        let counter = state.msrs.iter().find(|msr| msr.index == msrs::TSC);
        let set_already: &[u32] = match counter {
            Some(counter) if tsc.apply(fd, counter.data)? => &[msrs::TSC],
            _ => &[],
        };
        msrs::write(fd, &state.msrs, set_already)?;
        fd.set_vcpu_events(&state.events)
            .map_err(write("set a vCPU's pending events"))
    }

    #[allow(unsafe_code)] // KVM reads as many bytes as the guest's features need.
    fn write_xsave(&self, xsave: &kvm_xsave) -> Result<(), HypervisorError> {
        // SAFETY: no feature is enabled for guests whose state exceeds the 4096 bytes of
        // `kvm_xsave`: that is only AMX, which needs a permission that this process never requests.
        unsafe { self.fd.set_xsave(xsave) }.map_err(failed_to("set a vCPU's vector registers"))
    }
}
