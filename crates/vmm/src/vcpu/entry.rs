//! Registers at a kernel's entry point: 32-bit protected mode, paging off,
//! flat segments. PVH and Linux's 32-bit protocol agree on these.
//!
//! Sources: Xen `docs/misc/pvh`; Linux `Documentation/arch/x86/boot.rst`.

use crate::boot::Entry;
use crate::hypervisor::{HypervisorError, failed_to};
use crate::layout;
use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;

const CR0_PROTECTED: u64 = 1;
const CODE: u8 = 0xb;
const DATA: u8 = 0x3;
const BUSY_TSS: u8 = 0xb;
/// Bit 1 of EFLAGS is always set; interrupts are off.
const FLAGS: u64 = 2;

pub(super) fn set(vcpu: &VcpuFd, entry: &Entry) -> Result<(), HypervisorError> {
    let mut sregs = vcpu
        .get_sregs()
        .map_err(failed_to("read a vCPU's registers"))?;
    sregs.cs = flat(0x10, CODE);
    for segment in [
        &mut sregs.ds,
        &mut sregs.es,
        &mut sregs.fs,
        &mut sregs.gs,
        &mut sregs.ss,
    ] {
        *segment = flat(0x18, DATA);
    }
    sregs.tr = kvm_segment {
        limit: 0x67,
        type_: BUSY_TSS,
        present: 1,
        ..Default::default()
    };
    sregs.gdt = kvm_dtable {
        base: layout::GDT,
        limit: 0x1f,
        ..Default::default()
    };
    sregs.idt = kvm_dtable::default();
    sregs.cr0 = CR0_PROTECTED;
    sregs.cr4 = 0;
    sregs.efer = 0;
    vcpu.set_sregs(&sregs)
        .map_err(failed_to("set a vCPU's registers"))?;
    vcpu.set_regs(&kvm_regs {
        rip: entry.rip,
        rbx: entry.rbx,
        rsi: entry.rsi,
        rflags: FLAGS,
        ..Default::default()
    })
    .map_err(failed_to("set a vCPU's registers"))
}

fn flat(selector: u16, type_: u8) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: 0,
        db: 1,
        s: 1,
        l: 0,
        g: 1,
        ..Default::default()
    }
}
