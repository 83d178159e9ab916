//! The probe's guest: 64 KiB, long mode, no interrupts.
#![allow(unsafe_code)] // Assembly, and memory given to KVM.

use crate::hypervisor::{Hypervisor, HypervisorError, failed_to};
use jiffy_devices::GuestMemory;
use jiffy_sys::{clock::monotonic_ns, kick};
use kvm_bindings::{
    Msrs, kvm_dtable, kvm_msr_entry, kvm_regs, kvm_segment, kvm_userspace_memory_region,
};
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use std::arch::{asm, global_asm};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

const SIZE: usize = 0x1_0000;
const LEVEL_4: u64 = 0x1000;
const LEVEL_3: u64 = 0x2000;
const LEVEL_2: u64 = 0x3000;
const GDT: u64 = 0x4000;
const CODE: u64 = 0x5000;
const STACK: u64 = 0xf000;

/// The guest reads the number of iterations here; 0 sends it to ring 3.
const COUNT_PORT: u16 = 0x10;
/// The guest reports the end of a round here.
const ROUND_PORT: u16 = 0x11;
/// The guest reports the CS that its `syscall` arrived with here.
const ARRIVED_PORT: u16 = 0x12;

const KERNEL_CODE: u16 = 0x08;
const KERNEL_DATA: u16 = 0x10;
const USER_CODE: u16 = 0x1b;
const USER_DATA: u16 = 0x23;

const MSR_STAR: u32 = 0xc000_0081;
const MSR_LSTAR: u32 = 0xc000_0082;
const MSR_SFMASK: u32 = 0xc000_0084;
/// Long mode enabled and active, system calls enabled, no-execute disabled.
const EFER: u64 = 1 << 10 | 1 << 8 | 1;

// Copied into the guest, so it must not refer to any absolute address.
global_asm!(
    ".pushsection .rodata.jiffy_probe, \"a\"",
    ".globl jiffy_probe_start",
    "jiffy_probe_start:",
    "2:",
    "mov $0x10, %edx",
    "in %dx, %eax",
    "test %eax, %eax",
    "jz 4f",
    "3:",
    "dec %eax",
    "jnz 3b",
    "mov $0x11, %edx",
    "out %al, %dx",
    "jmp 2b",
    "4:",
    "lea 5f(%rip), %rax",
    "mov %rsp, %rcx",
    "push $0x23",
    "push %rcx",
    "push $2",
    "push $0x1b",
    "push %rax",
    "iretq",
    "5:",
    "syscall",
    "ud2",
    ".globl jiffy_probe_syscall",
    "jiffy_probe_syscall:",
    // At a privilege other than 0, or with another CS, one of these faults, and without an IDT a
    // fault ends the guest.
    "mov %cr0, %rcx",
    "mov %cs, %eax",
    "mov $0x12, %edx",
    "out %ax, %dx",
    "jmp 2b",
    ".globl jiffy_probe_end",
    "jiffy_probe_end:",
    ".popsection",
    options(att_syntax)
);

unsafe extern "C" {
    static jiffy_probe_start: u8;
    static jiffy_probe_syscall: u8;
    static jiffy_probe_end: u8;
}

/// The outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// As on a real processor.
    Done,
    /// Different from a real processor.
    Failed,
    /// The time limit was exceeded.
    Late,
}

/// The guest, ready to run.
pub(super) struct ProbeGuest {
    vcpu: VcpuFd,
    late: bool,
    // After the vCPU: KVM knows the memory's addresses.
    _vm: VmFd,
    _memory: GuestMemory,
}

impl ProbeGuest {
    pub(super) fn create(hypervisor: &Hypervisor) -> Result<ProbeGuest, HypervisorError> {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), SIZE)])
            .map_err(|_| HypervisorError::Capability("64 KiB of memory".into()))?;
        let syscall = write_program(&memory);
        let vm = hypervisor.create_bare_vm()?;
        let region = memory.iter().next().expect("one range was made");
        // SAFETY: the mapping has this size, is used by nothing else, and is dropped after the VM.
        unsafe {
            vm.set_user_memory_region(kvm_userspace_memory_region {
                slot: 0,
                flags: 0,
                guest_phys_addr: 0,
                memory_size: SIZE as u64,
                userspace_addr: region.as_ptr() as u64,
            })
        }
        .map_err(failed_to("register the probe's memory"))?;
        let vcpu = vm.create_vcpu(0).map_err(failed_to("create a vCPU"))?;
        vcpu.set_cpuid2(&hypervisor.supported_cpuid()?)
            .map_err(failed_to("set a vCPU's CPUID"))?;
        set_registers(&vcpu, syscall)?;
        Ok(ProbeGuest {
            vcpu,
            late: false,
            _vm: vm,
            _memory: memory,
        })
    }

    /// Runs `body`; after `limit`, the guest is stopped and not entered again.
    pub(super) fn with_watchdog<T>(
        &mut self,
        limit: Duration,
        body: impl FnOnce(&mut ProbeGuest) -> T,
    ) -> T {
        let flag = &raw mut self.vcpu.get_kvm_run().immediate_exit;
        // SAFETY: kvm_run is mapped as long as the vCPU lives; the byte is accessed atomically by
        // this thread's signal handler and by the kernel.
        let flag = unsafe { AtomicU8::from_ptr(flag) };
        let target = kick::Target::current();
        let done = AtomicBool::new(kick::install().is_err());
        std::thread::scope(|scope| {
            let watchdog = scope.spawn(|| {
                std::thread::park_timeout(limit);
                // Repeated until `body` is done, because the guest may be entered once more.
                while !done.load(Ordering::SeqCst) {
                    target.kick();
                    std::thread::park_timeout(Duration::from_millis(1));
                }
            });
            let result = kick::with_flag(flag, || body(self));
            done.store(true, Ordering::SeqCst);
            watchdog.thread().unpark();
            result
        })
    }

    /// Runs one round of `count` iterations. Returns how long it took, nanoseconds, including entry
    /// and exit; `None` if the guest was too slow or failed.
    pub(super) fn round(&mut self, count: u32) -> Option<u64> {
        let begun = monotonic_ns();
        (self.run(count) == Some(ROUND_PORT)).then(|| monotonic_ns() - begun)
    }

    /// Sends the guest to ring 3, where it makes a system call.
    pub(super) fn try_syscall(&mut self) -> Outcome {
        match self.run(0) {
            Some(ARRIVED_PORT) => Outcome::Done,
            _ if self.late => Outcome::Late,
            _ => Outcome::Failed,
        }
    }

    /// Runs the guest until it reports something, and returns the port; gives it `count` when it
    /// asks. The CS that it reports must be the kernel's.
    fn run(&mut self, count: u32) -> Option<u16> {
        while !self.late {
            match self.vcpu.run() {
                Ok(VcpuExit::IoIn(COUNT_PORT, data)) => {
                    data.copy_from_slice(&count.to_le_bytes()[..data.len().min(4)]);
                }
                Ok(VcpuExit::IoOut(ROUND_PORT, _)) => return Some(ROUND_PORT),
                Ok(VcpuExit::IoOut(ARRIVED_PORT, cs)) if *cs == KERNEL_CODE.to_le_bytes() => {
                    return Some(ARRIVED_PORT);
                }
                Err(error) if error.errno() == libc::EINTR => self.late = true,
                _ => return None,
            }
        }
        None
    }
}

/// Runs the same loop in this process; nanoseconds for `count` iterations.
pub(super) fn native_round(count: u32) -> u64 {
    let begun = monotonic_ns();
    // SAFETY: only decrements a register.
    unsafe {
        asm!("2:", "dec {0:e}", "jnz 2b", inout(reg) count => _, options(nomem, nostack));
    }
    monotonic_ns() - begun
}

/// Writes page tables, descriptors and code; returns the address at which the system call arrives.
fn write_program(memory: &GuestMemory) -> u64 {
    let start = &raw const jiffy_probe_start;
    // SAFETY: the three symbols belong to one range of read-only data.
    let (code, syscall) = unsafe {
        let length = (&raw const jiffy_probe_end).offset_from(start);
        let syscall = (&raw const jiffy_probe_syscall).offset_from(start);
        (
            std::slice::from_raw_parts(start, length as usize),
            syscall as u64,
        )
    };
    let write = |address: u64, bytes: &[u8]| {
        memory
            .write_slice(bytes, GuestAddress(address))
            .expect("the probe's memory has room")
    };
    // Present, writable, accessible from ring 3; the last level is one page of 2 MiB.
    write(LEVEL_4, &(LEVEL_3 | 7).to_le_bytes());
    write(LEVEL_3, &(LEVEL_2 | 7).to_le_bytes());
    write(LEVEL_2, &0x87u64.to_le_bytes());
    let descriptors: [u64; 5] = [
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        0x00af_fb00_0000_ffff,
        0x00cf_f300_0000_ffff,
    ];
    for (address, descriptor) in (GDT..).step_by(8).zip(descriptors) {
        write(address, &descriptor.to_le_bytes());
    }
    write(CODE, code);
    CODE + syscall
}

fn set_registers(vcpu: &VcpuFd, syscall: u64) -> Result<(), HypervisorError> {
    let mut sregs = vcpu
        .get_sregs()
        .map_err(failed_to("read the probe's registers"))?;
    let segment = |selector: u16, type_: u8, long: u8| kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        s: 1,
        l: long,
        db: 1 - long,
        g: 1,
        ..Default::default()
    };
    sregs.cs = segment(KERNEL_CODE, 0xb, 1);
    sregs.ds = segment(KERNEL_DATA, 0x3, 0);
    (sregs.es, sregs.fs, sregs.gs, sregs.ss) = (sregs.ds, sregs.ds, sregs.ds, sregs.ds);
    sregs.tr = kvm_segment {
        limit: 0x67,
        type_: 0xb,
        present: 1,
        ..Default::default()
    };
    sregs.gdt = kvm_dtable {
        base: GDT,
        limit: 5 * 8 - 1,
        ..Default::default()
    };
    sregs.idt = kvm_dtable::default();
    sregs.cr0 = 1 << 31 | 1 << 5 | 1;
    sregs.cr3 = LEVEL_4;
    sregs.cr4 = 1 << 5;
    sregs.efer = EFER;
    vcpu.set_sregs(&sregs)
        .map_err(failed_to("set the probe's registers"))?;
    vcpu.set_regs(&kvm_regs {
        rip: CODE,
        rsp: STACK,
        rflags: 2,
        ..Default::default()
    })
    .map_err(failed_to("set the probe's registers"))?;
    let msr = |index, data| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let msrs = Msrs::from_entries(&[
        msr(MSR_STAR, u64::from(KERNEL_CODE) << 32),
        msr(MSR_LSTAR, syscall),
        msr(MSR_SFMASK, 0),
    ])
    .expect("three MSRs");
    vcpu.set_msrs(&msrs)
        .map_err(failed_to("set the probe's system call entry"))?;
    Ok(())
}

// The assembly above contains these numbers as literals.
const _: () = assert!(
    COUNT_PORT == 0x10
        && ROUND_PORT == 0x11
        && ARRIVED_PORT == 0x12
        && USER_CODE == 0x1b
        && USER_DATA == 0x23
);
