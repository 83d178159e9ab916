//! The MSRs that a snapshot keeps, and the order in which they are written back.
//!
//! The list is explicit, because KVM's list has registers that can be read and not written
//! (IA32_PERF_CAPABILITIES of a guest without performance counters), that belong to features no
//! guest has here (counters, VMX, SVM, SGX, processor trace, Hyper-V, SMM), or that make KVM write
//! to guest memory (MSR_KVM_WALL_CLOCK, which a guest writes whenever it reads the wall clock).
//! EFER, the bases of FS and GS, and the APIC's base are in `kvm_sregs`.
//!
//! Sources: Intel SDM volume 4; AMD APM volume 2, appendix A; Linux
//! `arch/x86/kvm/x86.c`, `Documentation/virt/kvm/x86/msr.rst`.

use super::mtrr;
use crate::hypervisor::{HypervisorError, failed_to};
use kvm_bindings::{Msrs, kvm_cpuid_entry2, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

/// IA32_TIME_STAMP_COUNTER.
pub const TSC: u32 = 0x10;
/// IA32_ARCH_CAPABILITIES.
pub const ARCH_CAPABILITIES: u32 = 0x10a;
/// IA32_MISC_ENABLE.
pub const MISC_ENABLE: u32 = 0x1a0;

/// Most registers that KVM takes in one call (`MAX_IO_MSRS` less one).
const MOST_IN_A_CALL: usize = 255;

/// Consecutive registers that are kept.
struct Kept {
    first: u32,
    count: u32,
    name: &'static str,
    when: When,
}

/// The condition under which a register is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// KVM lists the register (`KVM_GET_MSR_INDEX_LIST`).
    Listed,
    /// KVM lists the register, and the guest has this bit of CPUID.
    ListedAnd(Bit),
    /// The guest has this bit of CPUID; KVM has the register but does not list it.
    Has(Bit),
}

/// A bit of EDX of a leaf (index 0).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bit {
    leaf: u32,
    edx: u32,
}

const MTRR: Bit = Bit {
    leaf: 1,
    edx: 1 << 12,
};
const HAS_ARCH_CAPABILITIES: Bit = Bit {
    leaf: 7,
    edx: 1 << 29,
};

const fn one(first: u32, name: &'static str) -> Kept {
    Kept {
        first,
        count: 1,
        name,
        when: When::Listed,
    }
}

const fn mtrr(first: u32, count: u32, name: &'static str) -> Kept {
    Kept {
        first,
        count,
        name,
        when: When::Has(MTRR),
    }
}

/// In the order in which they are written.
const KEPT: &[Kept] = &[
    // Capabilities first, because KVM checks later registers against them: TSX_CTRL exists if
    // ARCH_CAPABILITIES says so, CPUID faulting if PLATFORM_INFO does.
    one(0x8b, "IA32_BIOS_SIGN_ID"),
    Kept {
        first: ARCH_CAPABILITIES,
        count: 1,
        name: "IA32_ARCH_CAPABILITIES",
        when: When::ListedAnd(HAS_ARCH_CAPABILITIES),
    },
    one(0xce, "PLATFORM_INFO"),
    one(0x3a, "IA32_FEATURE_CONTROL"),
    one(MISC_ENABLE, "IA32_MISC_ENABLE"),
    one(0x140, "MISC_FEATURES_ENABLES"),
    one(0xc001_0015, "HWCR"),
    one(0x1fc, "POWER_CTL"),
    one(0x17a, "IA32_MCG_STATUS"),
    // Memory types; the register that enables them comes after them.
    mtrr(mtrr::FIXED_64K, 1, "IA32_MTRR_FIX64K"),
    mtrr(mtrr::FIXED_16K, 2, "IA32_MTRR_FIX16K"),
    mtrr(mtrr::FIXED_4K, 8, "IA32_MTRR_FIX4K"),
    mtrr(mtrr::PHYSICAL, mtrr::PHYSICAL_COUNT, "IA32_MTRR_PHYS"),
    mtrr(mtrr::DEFAULT_TYPE, 1, "IA32_MTRR_DEF_TYPE"),
    one(0x277, "IA32_PAT"),
    // Mitigations.
    one(0x122, "IA32_TSX_CTRL"),
    one(0x48, "IA32_SPEC_CTRL"),
    one(0xc001_011f, "VIRT_SPEC_CTRL"),
    // Used by the guest's kernel and its programs.
    one(0x174, "IA32_SYSENTER_CS"),
    one(0x175, "IA32_SYSENTER_ESP"),
    one(0x176, "IA32_SYSENTER_EIP"),
    one(0xc000_0081, "STAR"),
    one(0xc000_0082, "LSTAR"),
    one(0xc000_0083, "CSTAR"),
    one(0xc000_0084, "FMASK"),
    one(0xc000_0102, "KERNEL_GS_BASE"),
    one(0xc000_0103, "TSC_AUX"),
    one(0xda0, "IA32_XSS"),
    one(0xd90, "IA32_BNDCFGS"),
    one(0x1d9, "IA32_DEBUGCTL"),
    // The counter comes first: KVM compares the deadline with it.
    one(TSC, "IA32_TIME_STAMP_COUNTER"),
    one(0x3b, "IA32_TSC_ADJUST"),
    one(0x6e0, "IA32_TSC_DEADLINE"),
    // KVM's own registers. How page faults are reported comes before their enabling. The clock
    // comes last: it depends on the TSC, and KVM reads a page for it that a pager may have to
    // fetch.
    one(0x4b56_4d05, "MSR_KVM_POLL_CONTROL"),
    one(0x4b56_4d04, "MSR_KVM_PV_EOI_EN"),
    one(0x4b56_4d06, "MSR_KVM_ASYNC_PF_INT"),
    one(0x4b56_4d02, "MSR_KVM_ASYNC_PF_EN"),
    one(0x4b56_4d03, "MSR_KVM_STEAL_TIME"),
    one(0x4b56_4d01, "MSR_KVM_SYSTEM_TIME_NEW"),
];

const _: () = {
    let (mut count, mut at) = (0, 0);
    while at < KEPT.len() {
        count += KEPT[at].count as usize;
        at += 1;
    }
    assert!(count <= MOST_IN_A_CALL);
};

/// The registers to save for a guest with this CPUID, where KVM lists those in `listed`.
pub fn to_save(listed: &[u32], cpuid: &[kvm_cpuid_entry2]) -> Vec<u32> {
    let has = |bit: Bit| {
        let leaf = |entry: &&kvm_cpuid_entry2| entry.function == bit.leaf && entry.index == 0;
        let leaf = cpuid.iter().find(leaf);
        leaf.is_some_and(|entry| entry.edx & bit.edx != 0)
    };
    KEPT.iter()
        .flat_map(|kept| (kept.first..kept.first + kept.count).map(|index| (index, kept.when)))
        .filter(|(index, when)| match *when {
            When::Listed => listed.contains(index),
            When::ListedAnd(bit) => listed.contains(index) && has(bit),
            When::Has(bit) => has(bit),
        })
        .map(|(index, _)| index)
        .collect()
}

/// Reads registers. KVM stops at the first that this guest does not have; that one is skipped.
///
/// # Errors
///
/// If KVM fails for another reason.
pub fn read(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, HypervisorError> {
    let mut values = Vec::with_capacity(indices.len());
    let mut rest = indices;
    while !rest.is_empty() {
        let entries: Vec<kvm_msr_entry> = rest.iter().map(|index| entry(*index, 0)).collect();
        let mut msrs = Msrs::from_entries(&entries).expect("fewer than KVM takes");
        let count = vcpu
            .get_msrs(&mut msrs)
            .map_err(failed_to("read a vCPU's MSRs"))?;
        values.extend_from_slice(&msrs.as_slice()[..count]);
        rest = rest.get(count + 1..).unwrap_or(&[]);
    }
    Ok(values)
}

/// The registers of `saved` that are written back, in this order. Others are not kept any more, or
/// never were.
fn in_order(saved: &[kvm_msr_entry]) -> Vec<kvm_msr_entry> {
    KEPT.iter()
        .flat_map(|kept| kept.first..kept.first + kept.count)
        .filter_map(|index| saved.iter().find(|msr| msr.index == index))
        .map(|msr| entry(msr.index, msr.data))
        .collect()
}

/// Writes saved registers back, except those that are set already.
///
/// # Errors
///
/// If KVM refuses a value.
pub fn write(
    vcpu: &VcpuFd,
    saved: &[kvm_msr_entry],
    set_already: &[u32],
) -> Result<(), HypervisorError> {
    let mut entries = in_order(saved);
    entries.retain(|msr| !set_already.contains(&msr.index));
    let mut rest = entries.as_slice();
    while !rest.is_empty() {
        let count = set(vcpu, rest)?;
        // A register that this KVM does not know reads as zero anyway.
        match rest.get(count) {
            Some(msr) if msr.data != 0 => {
                return Err(HypervisorError::Msr {
                    index: msr.index,
                    name: name(msr.index),
                    value: msr.data,
                });
            }
            _ => rest = rest.get(count + 1..).unwrap_or(&[]),
        }
    }
    Ok(())
}

/// Writes the registers of a vCPU that is to boot. Registers that KVM refuses are skipped: the vCPU
/// does not have them.
///
/// # Errors
///
/// If `KVM_SET_MSRS` fails for another reason.
pub fn set_at_boot(vcpu: &VcpuFd, msrs: &[kvm_msr_entry]) -> Result<(), HypervisorError> {
    let mut rest = msrs;
    while !rest.is_empty() {
        let count = set(vcpu, rest)?;
        rest = rest.get(count + 1..).unwrap_or(&[]);
    }
    Ok(())
}

/// Sets registers and returns how many were set: all, or those before one that KVM refused.
fn set(vcpu: &VcpuFd, entries: &[kvm_msr_entry]) -> Result<usize, HypervisorError> {
    let msrs = Msrs::from_entries(entries).expect("fewer than KVM takes");
    vcpu.set_msrs(&msrs).map_err(failed_to("set a vCPU's MSRs"))
}

/// A register with a value.
pub fn entry(index: u32, data: u64) -> kvm_msr_entry {
    kvm_msr_entry {
        index,
        data,
        ..Default::default()
    }
}

fn name(index: u32) -> &'static str {
    KEPT.iter()
        .find(|kept| (kept.first..kept.first + kept.count).contains(&index))
        .map_or("unknown", |kept| kept.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// IA32_PERF_CAPABILITIES.
    const PERF_CAPABILITIES: u32 = 0x345;

    fn cpuid(mtrr: bool, arch_capabilities: bool) -> [kvm_cpuid_entry2; 2] {
        let mut leaves = [1, 7].map(|function| kvm_cpuid_entry2 {
            function,
            ..Default::default()
        });
        leaves[0].edx = u32::from(mtrr) << 12;
        leaves[1].edx = u32::from(arch_capabilities) << 29;
        leaves
    }

    fn place(indices: &[u32], wanted: u32) -> usize {
        let at = indices.iter().position(|index| *index == wanted);
        at.unwrap_or_else(|| panic!("{wanted:#x} is missing"))
    }

    #[test]
    fn only_msrs_that_kvm_lists_and_the_guest_has_are_saved() {
        let listed = [
            0x6e0,
            PERF_CAPABILITIES,
            TSC,
            0xc1,
            0x186,
            0x309,
            0x480,
            0x4000_0000,
            0x4b56_4d00,
            0x9e,
            0x570,
            0x10a,
            0xc000_0082,
        ];
        assert_eq!(
            to_save(&listed, &cpuid(false, false)),
            [0xc000_0082, TSC, 0x6e0]
        );
        let all = to_save(&listed, &cpuid(true, true));
        assert_eq!(all.len(), 4 + 11 + 16 + 1);
        assert_eq!(all[0], ARCH_CAPABILITIES);
    }

    #[test]
    fn msrs_are_written_in_the_order_of_their_dependencies() {
        let every: Vec<u32> = KEPT
            .iter()
            .flat_map(|kept| kept.first..kept.first + kept.count)
            .collect();
        let mut distinct = every.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), every.len());
        // A hostile or old state may have other registers, duplicates, and any order.
        let mut saved: Vec<kvm_msr_entry> = every.iter().map(|index| entry(*index, 7)).collect();
        saved.reverse();
        saved.extend([entry(PERF_CAPABILITIES, 0x2000), entry(TSC, 8)]);
        saved.extend(vec![entry(0x174, 9); 5000]);
        let written = in_order(&saved);
        let written: Vec<u32> = written.iter().map(|msr| msr.index).collect();
        assert_eq!(written, every);
        let before = |first, second| {
            let places = [first, second].map(|index| place(&written, index));
            assert!(places[0] < places[1], "{first:#x} before {second:#x}");
        };
        before(TSC, 0x6e0);
        before(ARCH_CAPABILITIES, 0x122);
        before(0xce, 0x140);
        before(0x200, mtrr::DEFAULT_TYPE);
        before(0x4b56_4d06, 0x4b56_4d02);
        assert_eq!(written.last(), Some(&0x4b56_4d01));
    }

    #[test]
    #[ignore = "needs a real KVM"]
    fn an_msr_that_kvm_refuses_is_named_unless_its_value_is_zero() {
        let vm = crate::hypervisor::Hypervisor::open().unwrap();
        let vm = vm.create_vm().unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        // Memory types that do not exist.
        let bad = [entry(mtrr::FIXED_64K, u64::MAX), entry(0x174, 0x10)];
        let error = write(&vcpu, &bad, &[]).unwrap_err().to_string();
        assert_eq!(
            error,
            "this host's KVM refuses 0xffffffffffffffff for the saved guest's IA32_MTRR_FIX64K (MSR 0x250)"
        );
        // Without CPUID the guest has none of these.
        let unknown = [entry(0xda0, 0), entry(0xd90, 0), entry(0x174, 0x10)];
        write(&vcpu, &unknown, &[]).unwrap();
        assert_eq!(read(&vcpu, &[0x174]).unwrap()[0].data, 0x10);
        // A register that an earlier release saved from KVM's list is ignored.
        write(&vcpu, &[entry(PERF_CAPABILITIES, u64::MAX)], &[]).unwrap();
    }
}
