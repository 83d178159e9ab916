//! What CPUID shows a guest: all that KVM supports on this host, less what a VM
//! has no use for or what a snapshot could not keep, with the topology of the VM:
//! one socket, one thread a core. `docs/cpu.md` has it point by point.
//!
//! * `features`: what is hidden, and why.
//! * `topology`: ids, cores and caches.
//!
//! Sources: Intel SDM volume 2, CPUID; AMD APM volume 3, appendix E; Linux
//! `Documentation/virt/kvm/x86/cpuid.rst`.

mod features;
mod topology;

use jiffy_wire::cpu::Profile;
use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use std::arch::x86_64::{__cpuid, __cpuid_count};
pub use topology::specialise;

const ECX_HYPERVISOR: u32 = 1 << 31;
const ECX_TSC_DEADLINE: u32 = 1 << 24;
const EDX_MTRR: u32 = 1 << 12;
const EDX_ARCH_CAPABILITIES: u32 = 1 << 29;

/// FDP_EXCPTN_ONLY and ZERO_FCS_FDS in EBX of leaf 7: what the processor does,
/// whatever a guest is told.
const EBX_X87: u32 = 1 << 6 | 1 << 13;

/// Who made a processor, by what CPUID differs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vendor {
    /// Intel.
    Intel,
    /// AMD, and Hygon, whose processors are AMD's.
    Amd,
    /// Any other.
    Other,
}

impl Vendor {
    /// By leaf 0, which comes first.
    pub fn of(entries: &[kvm_cpuid_entry2]) -> Vendor {
        let first = entries.first().filter(|leaf| leaf.function == 0);
        match first.map(|leaf| leaf.ebx.to_le_bytes()).as_ref() {
            Some(b"Genu") => Vendor::Intel,
            Some(b"Auth" | b"Hygo") => Vendor::Amd,
            _ => Vendor::Other,
        }
    }

    /// What a guest reads as its processor's name: nothing of the host's.
    fn brand(self) -> &'static [u8] {
        match self {
            Vendor::Intel => b"Intel Processor (Jiffy)",
            Vendor::Amd => b"AMD Processor (Jiffy)",
            Vendor::Other => b"x86-64 Processor (Jiffy)",
        }
    }
}

/// What CPUID depends on besides KVM's list.
#[derive(Debug, Clone, Copy)]
pub struct Host {
    /// KVM emulates the TSC deadline timer.
    pub tsc_deadline: bool,
    /// EBX of leaf 7, as the processor has it.
    pub leaf_7_ebx: u32,
}

impl Host {
    /// Of this processor.
    pub fn read(tsc_deadline: bool) -> Host {
        let leaf_7_ebx = match __cpuid(0).eax {
            7.. => __cpuid_count(7, 0).ebx,
            _ => 0,
        };
        Host {
            tsc_deadline,
            leaf_7_ebx,
        }
    }
}

/// What the vCPUs of a VM share, from what KVM supports on this host, and of that no
/// more than `profile` has.
pub fn for_vm(supported: &CpuId, vcpus: u8, host: Host, profile: Option<&Profile>) -> CpuId {
    let supported = supported.as_slice();
    let vendor = Vendor::of(supported);
    let mut entries = Vec::with_capacity(supported.len() + 3);
    entries.extend(
        supported
            .iter()
            .filter(|entry| !features::is_dropped(entry)),
    );
    for entry in &mut entries {
        features::hide(entry, vendor);
        add(entry, host);
        if let 0x8000_0002..=0x8000_0004 = entry.function {
            set_brand(entry, vendor.brand());
        }
        topology::set(entry, vendor, vcpus);
    }
    if let Some(profile) = profile {
        features::limit(&mut entries, profile);
    }
    features::size_xsave(&mut entries);
    topology::add_levels(&mut entries, vcpus);
    CpuId::from_entries(&entries).expect("a few entries more than KVM gave, below its limit")
}

/// All that a guest can have on this host, also what guests that boot are not shown.
pub fn unhidden(supported: &CpuId, host: Host) -> Vec<kvm_cpuid_entry2> {
    let mut entries = supported.as_slice().to_vec();
    for entry in &mut entries {
        add(entry, host);
    }
    entries
}

/// Adds what KVM's list leaves out.
fn add(entry: &mut kvm_cpuid_entry2, host: Host) {
    match (entry.function, entry.index) {
        (1, _) => {
            entry.ecx |= ECX_HYPERVISOR;
            if host.tsc_deadline {
                entry.ecx |= ECX_TSC_DEADLINE;
            }
        }
        (7, 0) => entry.ebx |= host.leaf_7_ebx & EBX_X87,
        _ => {}
    }
}

/// A third of the processor's name.
fn set_brand(entry: &mut kvm_cpuid_entry2, brand: &[u8]) {
    let at = (entry.function - 0x8000_0002) as usize * 16;
    let mut words = (at..at + 16).step_by(4).map(|at| {
        let byte = |at: usize| brand.get(at).copied().unwrap_or(0);
        u32::from_le_bytes([byte(at), byte(at + 1), byte(at + 2), byte(at + 3)])
    });
    for register in [
        &mut entry.eax,
        &mut entry.ebx,
        &mut entry.ecx,
        &mut entry.edx,
    ] {
        *register = words.next().unwrap_or(0);
    }
}

/// XCR0 with every state on that `cpuid` has; 0 without XSAVE.
pub fn supported_states(cpuid: &CpuId) -> u64 {
    leaf(cpuid, 0xd).map_or(0, |entry| u64::from(entry.edx) << 32 | u64::from(entry.eax))
}

/// Whether the guest sees a processor of Intel's.
pub fn is_intel(cpuid: &CpuId) -> bool {
    Vendor::of(cpuid.as_slice()) == Vendor::Intel
}

/// Whether the guest has IA32_ARCH_CAPABILITIES.
pub fn has_arch_capabilities(entries: &[kvm_cpuid_entry2]) -> bool {
    let mut leaves = entries.iter();
    let leaf = leaves.find(|entry| entry.function == 7 && entry.index == 0);
    leaf.is_some_and(|entry| entry.edx & EDX_ARCH_CAPABILITIES != 0)
}

/// Whether the guest sees memory type range registers.
pub fn has_mtrrs(cpuid: &CpuId) -> bool {
    leaf(cpuid, 1).is_some_and(|entry| entry.edx & EDX_MTRR != 0)
}

/// Bits of a guest's physical addresses.
pub fn physical_address_bits(cpuid: &CpuId) -> u32 {
    // 36 where no leaf says so (Intel SDM volume 3, 4.1.4).
    leaf(cpuid, 0x8000_0008).map_or(36, |entry| entry.eax & 0xff)
}

fn leaf(cpuid: &CpuId, function: u32) -> Option<&kvm_cpuid_entry2> {
    let mut entries = cpuid.as_slice().iter();
    entries.find(|entry| entry.function == function && entry.index == 0)
}

#[cfg(test)]
mod tests;
