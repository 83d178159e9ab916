//! What CPUID shows a guest: all that KVM supports on this host, less what a
//! VM has no use for, with the topology of the VM: one socket, one thread a core.
//!
//! Sources: Intel SDM volume 2, CPUID; AMD APM volume 3, appendix E; Linux
//! `Documentation/virt/kvm/x86/cpuid.rst`.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

const ECX_MONITOR: u32 = 1 << 3;
const ECX_VMX: u32 = 1 << 5;
const ECX_TSC_DEADLINE: u32 = 1 << 24;
const ECX_HYPERVISOR: u32 = 1 << 31;
const EDX_HTT: u32 = 1 << 28;

const AMD_ECX_CMP_LEGACY: u32 = 1 << 1;
const AMD_ECX_SVM: u32 = 1 << 2;
const AMD_ECX_PERFCTR_CORE: u32 = 1 << 23;

const SIGNIFICANT_INDEX: u32 = 1;

/// What the vCPUs of a VM share, from what KVM supports on this host.
pub fn for_vm(supported: &CpuId, vcpus: u8, tsc_deadline: bool) -> CpuId {
    let supported = supported.as_slice();
    let amd = supported
        .first()
        .is_some_and(|leaf| [*b"Auth", *b"Hygo"].contains(&leaf.ebx.to_le_bytes()));
    let mut entries = Vec::with_capacity(supported.len() + 3);
    for entry in supported.iter().filter(|entry| !dropped(entry)) {
        let mut entry = *entry;
        match entry.function {
            0x1 => {
                entry.ecx = entry.ecx & !(ECX_MONITOR | ECX_VMX) | ECX_HYPERVISOR;
                if tsc_deadline {
                    entry.ecx |= ECX_TSC_DEADLINE;
                }
                if vcpus > 1 {
                    entry.edx |= EDX_HTT;
                }
            }
            0x4 | 0x8000_001d => share_caches(&mut entry, vcpus),
            0x8000_0001 => {
                entry.ecx &= !(AMD_ECX_PERFCTR_CORE | AMD_ECX_SVM);
                if amd && vcpus > 1 {
                    entry.ecx |= AMD_ECX_CMP_LEGACY;
                }
            }
            // Cores of the package less one, and bits of an APIC id.
            0x8000_0008 if amd => entry.ecx = u32::from(vcpus - 1) | id_bits(vcpus) << 12,
            _ => {}
        }
        entries.push(entry);
    }
    add_topology(&mut entries, vcpus);
    CpuId::from_entries(&entries).expect("a few entries more than KVM gave, below its limit")
}

/// Sets the ids of vCPU `index`.
pub fn specialise(cpuid: &mut CpuId, index: u8, vcpus: u8) {
    let id = u32::from(index);
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            0x1 => {
                let logical = u32::from(vcpus).next_power_of_two();
                entry.ebx = entry.ebx & 0xffff | logical << 16 | id << 24;
            }
            0xb => entry.edx = id,
            0x8000_001e => {
                entry.eax = id;
                entry.ebx = id;
                entry.ecx = 0;
            }
            _ => {}
        }
    }
}

/// XCR0 with every state on that `cpuid` has; 0 without XSAVE.
pub fn supported_states(cpuid: &CpuId) -> u64 {
    cpuid
        .as_slice()
        .iter()
        .find(|entry| entry.function == 0xd && entry.index == 0)
        .map_or(0, |entry| u64::from(entry.edx) << 32 | u64::from(entry.eax))
}

/// Whether the guest sees a processor of Intel's.
pub fn is_intel(cpuid: &CpuId) -> bool {
    cpuid
        .as_slice()
        .first()
        .is_some_and(|leaf| leaf.function == 0 && leaf.ebx.to_le_bytes() == *b"Genu")
}

/// Whether the processor we run on is itself emulated by QEMU's TCG.
pub fn host_is_tcg() -> bool {
    use std::arch::x86_64::__cpuid;
    if __cpuid(1).ecx & ECX_HYPERVISOR == 0 {
        return false;
    }
    let leaf = __cpuid(0x4000_0000);
    [leaf.ebx, leaf.ecx, leaf.edx] == [*b"TCGT", *b"CGTC", *b"GTCG"].map(u32::from_le_bytes)
}

/// Adds the extended topology leaf where the host has one: threads (level 1),
/// then cores (level 2).
fn add_topology(entries: &mut Vec<kvm_cpuid_entry2>, vcpus: u8) {
    if entries.first().is_none_or(|leaf| leaf.eax < 0xb) {
        return;
    }
    let level = |index: u32, shift: u32, count: u32, kind: u32| kvm_cpuid_entry2 {
        function: 0xb,
        index,
        flags: SIGNIFICANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: kind << 8 | index,
        ..Default::default()
    };
    let at = entries
        .iter()
        .position(|entry| entry.function > 0xb)
        .unwrap_or(entries.len());
    entries.splice(
        at..at,
        [
            level(0, 0, 1, 1),
            level(1, id_bits(vcpus), vcpus.into(), 2),
            level(2, 0, 0, 0),
        ],
    );
}

/// What no VM shows: MWAIT, performance counters (they would not survive a
/// move), and topology, which is written anew.
fn dropped(entry: &kvm_cpuid_entry2) -> bool {
    matches!(
        entry.function,
        0x5 | 0xa | 0xb | 0x1f | 0x8000_000a | 0x8000_0022
    )
}

/// Only a last-level cache is shared between cores.
fn share_caches(entry: &mut kvm_cpuid_entry2, vcpus: u8) {
    let level = entry.eax >> 5 & 7;
    let sharing = if level >= 3 { u32::from(vcpus) - 1 } else { 0 };
    entry.eax = entry.eax & !(0xfff << 14) | sharing << 14;
    if entry.function == 0x4 && entry.eax & 0x1f != 0 {
        entry.eax = entry.eax & !(0x3f << 26) | (u32::from(vcpus) - 1) << 26;
    }
}

/// Bits that hold an APIC id of this many vCPUs.
fn id_bits(vcpus: u8) -> u32 {
    u32::from(vcpus).next_power_of_two().trailing_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            ..Default::default()
        }
    }

    fn host() -> CpuId {
        let mut entries = [
            entry(0),
            entry(1),
            entry(4),
            entry(5),
            entry(0xa),
            entry(0xb),
            entry(0xd),
            entry(0x8000_0001),
            entry(0x8000_0008),
            entry(0x8000_001e),
        ];
        entries[0].eax = 0x16;
        entries[0].ebx = u32::from_le_bytes(*b"Auth");
        entries[1].ecx = ECX_MONITOR;
        entries[2].eax = 3 << 5 | 1;
        CpuId::from_entries(&entries).unwrap()
    }

    fn of(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        *cpuid
            .as_slice()
            .iter()
            .find(|entry| entry.function == function && entry.index == index)
            .unwrap()
    }

    #[test]
    fn each_vcpu_has_its_own_ids() {
        let mut cpuid = for_vm(&host(), 6, true);
        for index in [0, 5] {
            specialise(&mut cpuid, index, 6);
            let id = u32::from(index);
            assert_eq!(of(&cpuid, 1, 0).ebx, id << 24 | 8 << 16);
            assert_eq!(of(&cpuid, 0xb, 0).edx, id);
            assert_eq!(of(&cpuid, 0xb, 1).edx, id);
            assert_eq!(of(&cpuid, 0x8000_001e, 0).eax, id);
        }
        assert_eq!(of(&cpuid, 0xb, 1).eax, 3, "six ids need three bits");
        assert_eq!(of(&cpuid, 0xb, 1).ebx, 6);
        assert_eq!(of(&cpuid, 4, 0).eax >> 26, 5);
        assert_eq!(of(&cpuid, 4, 0).eax >> 14 & 0xfff, 5);
        assert_eq!(of(&cpuid, 0x8000_0008, 0).ecx, 3 << 12 | 5);
    }

    #[test]
    fn a_guest_sees_a_hypervisor_and_its_timer_but_no_mwait() {
        let cpuid = for_vm(&host(), 1, true);
        let ecx = of(&cpuid, 1, 0).ecx;
        assert_eq!(ecx, ECX_HYPERVISOR | ECX_TSC_DEADLINE);
        assert_eq!(of(&cpuid, 1, 0).edx & EDX_HTT, 0);
        for gone in [5, 0xa] {
            assert!(!cpuid.as_slice().iter().any(|entry| entry.function == gone));
        }
    }

    #[test]
    fn leaf_order_is_kept() {
        let cpuid = for_vm(&host(), 2, false);
        let functions: Vec<u32> = cpuid.as_slice().iter().map(|e| e.function).collect();
        assert!(functions.is_sorted(), "{functions:x?}");
    }
}
