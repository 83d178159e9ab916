//! What differs where the processor we run on is emulated by QEMU's TCG: all that the
//! monitor does for it, and nothing of it applies on real hardware.

use super::cpuid::supported_states;
use crate::hypervisor::{HypervisorError, failed_to};
use kvm_bindings::{CpuId, kvm_sregs, kvm_xcrs};
use kvm_ioctls::VcpuFd;
use std::arch::x86_64::__cpuid;

/// Bit 31 of leaf 1's ECX: a hypervisor is present (Intel SDM volume 2, CPUID).
const HYPERVISOR: u32 = 1 << 31;
/// The leaf with the hypervisor's signature.
const HYPERVISOR_LEAF: u32 = 0x4000_0000;

/// Bit 1 of a task state segment's type: it is in use (Intel SDM volume 3, §8.2.2).
const BUSY: u8 = 2;

/// Whether the processor we run on is emulated by QEMU's TCG.
fn host_is_tcg() -> bool {
    if __cpuid(1).ecx & HYPERVISOR == 0 {
        return false;
    }
    let leaf = __cpuid(HYPERVISOR_LEAF);
    [leaf.ebx, leaf.ecx, leaf.edx] == [*b"TCGT", *b"CGTC", *b"GTCG"].map(u32::from_le_bytes)
}

/// Segment registers as a vCPU is to be given them.
///
/// TCG looks up a program's right to use I/O ports only in a task state segment
/// whose descriptor is not marked busy, which KVM always says of one in use;
/// restored so, a guest's programs lose that right. AMD's processors, which it
/// stands for, take either.
pub fn segment_registers(mut sregs: kvm_sregs) -> kvm_sregs {
    if host_is_tcg() {
        sregs.tr.type_ &= !BUSY;
    }
    sregs
}

/// Enables all extended states of a vCPU that is about to boot.
///
/// TCG does not tell the KVM inside it when a guest sets XCR0, so KVM would put
/// its own value back at every entry, and the guest would lose vector registers.
/// With all states on from the start both agree.
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
