//! What differs where the processor we run on is emulated by QEMU's TCG.

use super::cpuid::supported_states;
use crate::hypervisor::{HypervisorError, failed_to};
use kvm_bindings::{CpuId, kvm_sregs, kvm_xcrs};
use kvm_ioctls::VcpuFd;
use std::arch::x86_64::__cpuid;

/// Bit 31 of leaf 1's ECX: a hypervisor is present.
const HYPERVISOR: u32 = 1 << 31;
const HYPERVISOR_LEAF: u32 = 0x4000_0000;

/// Bit 1 of a task state segment's type: it is in use.
const BUSY: u8 = 2;

/// Whether the processor we run on is emulated by QEMU's TCG.
pub fn is_host() -> bool {
    if __cpuid(1).ecx & HYPERVISOR == 0 {
        return false;
    }
    let leaf = __cpuid(HYPERVISOR_LEAF);
    [leaf.ebx, leaf.ecx, leaf.edx] == [*b"TCGT", *b"CGTC", *b"GTCG"].map(u32::from_le_bytes)
}

/// TCG looks up a program's right to use I/O ports only in a task state segment
/// whose descriptor is not marked busy, which KVM always says of one in use;
/// restored so, a guest's programs lose that right. AMD's processors, which it
/// stands for, take either.
pub fn adapt(mut sregs: kvm_sregs) -> kvm_sregs {
    if is_host() {
        sregs.tr.type_ &= !BUSY;
    }
    sregs
}

/// TCG does not tell the KVM inside it when a guest sets XCR0, so KVM would put
/// its own value back at every entry, and the guest would lose vector registers.
/// With all states on from the start both agree.
pub fn enable_all_states(vcpu: &VcpuFd, cpuid: &CpuId) -> Result<(), HypervisorError> {
    let supported = supported_states(cpuid);
    if supported == 0 || !is_host() {
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
