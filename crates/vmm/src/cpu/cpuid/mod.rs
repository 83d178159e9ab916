//! CPUID of a guest: all features that KVM supports on this host, except those that a VM has no use
//! for or that a snapshot can't keep, with the topology of the VM: one socket, one thread per core.
//! `docs/cpu.md` lists them.
//!
//! * `features`: the hidden features, with reasons.
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

/// FDP_EXCPTN_ONLY and ZERO_FCS_FDS in EBX of leaf 7: they describe the processor's behaviour,
/// which a guest's CPUID can't change.
const EBX_X87: u32 = 1 << 6 | 1 << 13;

/// A processor's vendor, as far as CPUID differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vendor {
    /// Intel.
    Intel,
    /// AMD, and Hygon, whose processors derive from AMD's.
    Amd,
    /// Any other vendor.
    Other,
}

impl Vendor {
    /// Reads the vendor from leaf 0, which comes first.
    pub fn of(entries: &[kvm_cpuid_entry2]) -> Vendor {
        let first = entries.first().filter(|leaf| leaf.function == 0);
        match first.map(|leaf| leaf.ebx.to_le_bytes()).as_ref() {
            Some(b"Genu") => Vendor::Intel,
            Some(b"Auth" | b"Hygo") => Vendor::Amd,
            _ => Vendor::Other,
        }
    }

    /// The processor's name for the guest, independent of the host's.
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
    /// Whether KVM emulates the TSC deadline timer.
    pub tsc_deadline: bool,
    /// EBX of leaf 7 of the host's processor.
    pub leaf_7_ebx: u32,
}

impl Host {
    /// Reads these properties from this processor.
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

/// The CPUID that all vCPUs of a VM share: what KVM supports on this host, limited to what
/// `profile` has.
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

/// All that a guest can have on this host, including features that are hidden from guests that
/// boot.
pub fn unhidden(supported: &CpuId, host: Host) -> Vec<kvm_cpuid_entry2> {
    let mut entries = supported.as_slice().to_vec();
    for entry in &mut entries {
        add(entry, host);
    }
    entries
}

/// Adds features that KVM's list omits.
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

/// XCR0 with all states that `cpuid` has; 0 without XSAVE.
pub fn supported_states(cpuid: &CpuId) -> u64 {
    leaf(cpuid, 0xd).map_or(0, |entry| u64::from(entry.edx) << 32 | u64::from(entry.eax))
}

/// Whether the guest sees an Intel processor.
pub fn is_intel(cpuid: &CpuId) -> bool {
    Vendor::of(cpuid.as_slice()) == Vendor::Intel
}

/// Whether the guest has IA32_ARCH_CAPABILITIES.
pub fn has_arch_capabilities(entries: &[kvm_cpuid_entry2]) -> bool {
    let mut leaves = entries.iter();
    let leaf = leaves.find(|entry| entry.function == 7 && entry.index == 0);
    leaf.is_some_and(|entry| entry.edx & EDX_ARCH_CAPABILITIES != 0)
}

/// Whether the guest has memory type range registers.
pub fn has_mtrrs(cpuid: &CpuId) -> bool {
    leaf(cpuid, 1).is_some_and(|entry| entry.edx & EDX_MTRR != 0)
}

/// Width of a guest's physical addresses, bits.
pub fn physical_address_bits(cpuid: &CpuId) -> u32 {
    // 36 without that leaf (Intel SDM volume 3, 4.1.4).
    leaf(cpuid, 0x8000_0008).map_or(36, |entry| entry.eax & 0xff)
}

fn leaf(cpuid: &CpuId, function: u32) -> Option<&kvm_cpuid_entry2> {
    let mut entries = cpuid.as_slice().iter();
    entries.find(|entry| entry.function == function && entry.index == 0)
}

#[cfg(test)]
mod tests;
