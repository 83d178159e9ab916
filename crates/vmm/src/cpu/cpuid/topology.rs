//! Ids, cores and caches of a VM: one socket, one thread per core, a last-level cache that all
//! share.

use super::Vendor;
use kvm_bindings::kvm_cpuid_entry2;

const EDX_HTT: u32 = 1 << 28;
const AMD_ECX_CMP_LEGACY: u32 = 1 << 1;
const SIGNIFICANT_INDEX: u32 = 1;

/// Sets the fields that are the same for all vCPUs of a VM.
pub fn set(entry: &mut kvm_cpuid_entry2, vendor: Vendor, vcpus: u8) {
    let several = vcpus > 1;
    match entry.function {
        0x1 => set_bit(&mut entry.edx, EDX_HTT, several),
        0x4 | 0x8000_001d => share_caches(entry, vcpus),
        0x8000_0001 if vendor == Vendor::Amd => {
            set_bit(&mut entry.ecx, AMD_ECX_CMP_LEGACY, several);
        }
        // Cores of the package less one, and bits of an APIC id.
        0x8000_0008 if vendor == Vendor::Amd => {
            entry.ecx = u32::from(vcpus - 1) | id_bits(vcpus) << 12;
        }
        _ => {}
    }
}

/// Sets the ids of vCPU `index`.
pub fn specialise(cpuid: &mut kvm_bindings::CpuId, index: u8, vcpus: u8) {
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

/// Adds the extended topology leaf if the host has one: threads (level 1), then cores (level 2).
pub fn add_levels(entries: &mut Vec<kvm_cpuid_entry2>, vcpus: u8) {
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

/// Only the last-level cache is shared between cores.
fn share_caches(entry: &mut kvm_cpuid_entry2, vcpus: u8) {
    // Cache type 0 ends the list.
    if entry.eax & 0x1f == 0 {
        return;
    }
    let level = entry.eax >> 5 & 7;
    let sharing = if level >= 3 { u32::from(vcpus) - 1 } else { 0 };
    entry.eax = entry.eax & !(0xfff << 14) | sharing << 14;
    if entry.function == 0x4 {
        entry.eax = entry.eax & !(0x3f << 26) | (u32::from(vcpus) - 1) << 26;
    }
}

/// How many bits hold the APIC ids of `vcpus` vCPUs.
fn id_bits(vcpus: u8) -> u32 {
    u32::from(vcpus).next_power_of_two().trailing_zeros()
}

fn set_bit(register: &mut u32, bit: u32, on: bool) {
    *register = if on {
        *register | bit
    } else {
        *register & !bit
    };
}
