//! The VMM's workarounds for QEMU's TCG, if it emulates the host's processor. None of them applies
//! to real hardware. Two others are outside the VMM: TCG loses interrupts
//! (`machine::agent::heartbeat`), and hangs VMs in a machine with more than one vCPU (`cli::args`,
//! `jiffy machine start --cpus`); `machine::qemu` starts it with one thread (ARCHITECTURE.md).

use super::cpuid::supported_states;
use crate::hypervisor::{HypervisorError, failed_to};
use kvm_bindings::{CpuId, kvm_sregs, kvm_xcrs};
use kvm_ioctls::VcpuFd;
use std::arch::x86_64::__cpuid;

/// Bit 31 of leaf 1's ECX: a hypervisor is present (Intel SDM volume 2, CPUID).
const HYPERVISOR: u32 = 1 << 31;
/// The leaf with the hypervisor's signature.
const HYPERVISOR_LEAF: u32 = 0x4000_0000;

/// Bit 1 of a task state segment's type: busy (Intel SDM volume 3, §8.2.2).
const BUSY: u8 = 2;

/// Whether QEMU's TCG emulates the host's processor.
fn host_is_tcg() -> bool {
    if __cpuid(1).ecx & HYPERVISOR == 0 {
        return false;
    }
    let leaf = __cpuid(HYPERVISOR_LEAF);
    [leaf.ebx, leaf.ecx, leaf.edx] == [*b"TCGT", *b"CGTC", *b"GTCG"].map(u32::from_le_bytes)
}

/// Segment registers as a vCPU must get them.
///
/// TCG checks a program's permission to use I/O ports only if the task state segment's descriptor
/// is not marked busy, but KVM reports a segment in use as busy. A guest that was restored so would
/// lose that permission for its programs. AMD's processors, which TCG emulates, accept both.
pub fn segment_registers(mut sregs: kvm_sregs) -> kvm_sregs {
    if host_is_tcg() {
        sregs.tr.type_ &= !BUSY;
    }
    sregs
}

/// Enables all extended states of a vCPU that is about to boot.
///
/// TCG does not tell the KVM inside it when a guest sets XCR0, so KVM would write its own value
/// back at every entry, and the guest would lose vector registers. With all states enabled from the
/// start, both values agree.
///
/// # Errors
///
/// If `KVM_SET_XCRS` fails.
pub fn enable_extended_states(vcpu: &VcpuFd, cpuid: &CpuId) -> Result<(), HypervisorError> {
    let supported = supported_states(cpuid);
    if supported == 0 || !host_is_tcg() {
        return Ok(());
    }
    let mut xcrs = kvm_xcrs {
        nr_xcrs: 1,
        ..Default::default()
    };
    xcrs.xcrs[0].value = supported;
    vcpu.set_xcrs(&xcrs)
        .map_err(failed_to("set a vCPU's extended control registers"))
}
