//! The profile of a guest's processor, and of the most that a host can give a guest.

use super::cpuid::{self, Host};
use super::msrs;
use crate::hypervisor::{Hypervisor, HypervisorError, failed_to};
use jiffy_wire::cpu::{self as wire, Leaf, Profile};
use kvm_bindings::{CpuId, kvm_cpuid_entry2, kvm_msr_entry};
use thiserror::Error;

/// A host's processor lacks what a guest needs.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProfileError {
    /// The guest was captured.
    #[error("this host can't continue the saved VM: it lacks {}", .0.join(", "))]
    Lacking(Vec<String>),
    /// The configuration asks for a profile.
    #[error("{0}")]
    Wanted(String),
}

impl ProfileError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            ProfileError::Lacking(_) => "restore it on a host whose processor has these features, or boot the VM again; boot VMs that are to move between hosts with `--cpu-profile`".into(),
            ProfileError::Wanted(_) => "run `jiffy doctor --cpu` to see what this host can give a VM".into(),
        })
    }
}

/// What this host can give a guest, and its sources.
#[derive(Debug)]
pub struct HostCpu {
    /// CPUID as KVM supports it.
    pub supported: CpuId,
    /// What CPUID depends on besides.
    pub host: Host,
    /// What a captured guest may have. Earlier releases also showed guests features that are hidden
    /// from guests that boot today (for example IA32_ARCH_CAPABILITIES on AMD's processors), and
    /// KVM still provides those.
    restorable: Profile,
}

impl HostCpu {
    /// Reads it from KVM.
    ///
    /// # Errors
    ///
    /// If `KVM_GET_SUPPORTED_CPUID`, or `KVM_GET_MSRS` of the device, fails.
    pub fn of(hypervisor: &Hypervisor) -> Result<HostCpu, HypervisorError> {
        let supported = hypervisor.supported_cpuid()?;
        let host = Host::read(hypervisor.has_tsc_deadline());
        let mut restorable = of_cpuid(&cpuid::unhidden(&supported, host));
        restorable.tsc_scaling = hypervisor.has_tsc_scaling();
        if cpuid::has_arch_capabilities(supported.as_slice())
            && let Some(value) = hypervisor.feature_msr(msrs::ARCH_CAPABILITIES)?
        {
            restorable.msrs.insert(msrs::ARCH_CAPABILITIES, value);
        }
        Ok(HostCpu {
            supported,
            host,
            restorable,
        })
    }

    /// The profile of a guest that boots without limits.
    pub fn shown(&self) -> Profile {
        let cpuid = cpuid::for_vm(&self.supported, 1, self.host, None);
        let mut profile = of_cpuid(cpuid.as_slice());
        profile.tsc_scaling = self.restorable.tsc_scaling;
        if cpuid::has_arch_capabilities(cpuid.as_slice()) {
            profile.msrs = self.restorable.msrs.clone();
        }
        profile
    }

    /// Checks that a captured guest can continue on this host. `tsc_khz` is the frequency of a new
    /// vCPU's time stamp counter.
    ///
    /// # Errors
    ///
    /// If this host lacks features; the error names them.
    pub fn check(
        &mut self,
        guest: &GuestProcessor<'_>,
        tsc_khz: Option<u32>,
    ) -> Result<(), ProfileError> {
        self.restorable.tsc_khz = tsc_khz;
        let lacking = of_guest(guest).lacking(&self.restorable);
        match lacking.is_empty() {
            true => Ok(()),
            false => Err(ProfileError::Lacking(lacking)),
        }
    }
}

/// This host's processor, as `jiffy-vmm cpu` prints it.
///
/// # Errors
///
/// If KVM can't be used, as of [`Hypervisor::open`] and [`HostCpu::of`], or creates no VM or vCPU.
pub fn of_host() -> Result<wire::Host, HypervisorError> {
    let hypervisor = Hypervisor::open()?;
    let host_cpu = HostCpu::of(&hypervisor)?;
    let vm = hypervisor.create_bare_vm()?;
    let vcpu = vm.create_vcpu(0).map_err(failed_to("create a vCPU"))?;
    let tsc_khz = vcpu.get_tsc_khz().ok();
    let counting = |profile| Profile { tsc_khz, ..profile };
    Ok(wire::Host {
        shown: counting(host_cpu.shown()),
        restorable: counting(host_cpu.restorable),
    })
}

/// The part of a captured vCPU's state that describes its processor. It is the same for all
/// vCPUs of a VM.
#[derive(Debug, Clone, Copy)]
pub struct GuestProcessor<'a> {
    /// CPUID as the guest sees it.
    pub cpuid: &'a [kvm_cpuid_entry2],
    /// The guest's MSRs.
    pub msrs: &'a [kvm_msr_entry],
    /// Frequency of its time stamp counter, kHz, if known.
    pub tsc_khz: Option<u32>,
}

/// The profile of a captured guest.
pub fn of_guest(guest: &GuestProcessor<'_>) -> Profile {
    let mut profile = of_cpuid(guest.cpuid);
    let capabilities = guest.msrs.iter();
    profile.msrs = capabilities
        .filter(|msr| msr.index == msrs::ARCH_CAPABILITIES)
        .filter(|_| cpuid::has_arch_capabilities(guest.cpuid))
        .map(|msr| (msr.index, msr.data))
        .collect();
    profile.tsc_khz = guest.tsc_khz;
    profile
}

fn of_cpuid(entries: &[kvm_cpuid_entry2]) -> Profile {
    let leaf = |entry: &kvm_cpuid_entry2| {
        let mut leaf = Leaf {
            leaf: entry.function,
            index: entry.index,
            registers: [entry.eax, entry.ebx, entry.ecx, entry.edx],
        };
        // Ids differ between vCPUs.
        match entry.function {
            0x1 => leaf.registers[1] &= 0x00ff_ffff,
            0xb => leaf.registers[3] = 0,
            0x8000_001e => leaf.registers[..2].fill(0),
            _ => {}
        }
        leaf
    };
    Profile::new(entries.iter().map(leaf).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_with_since_hidden_features_can_be_restored() {
        let leaf = |function, [eax, ebx, ecx, edx]: [u32; 4]| kvm_cpuid_entry2 {
            function,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        };
        // AuthenticAMD with IA32_ARCH_CAPABILITIES and PDCM, which are hidden.
        let supported = CpuId::from_entries(&[
            leaf(0, [7, 0x6874_7541, 0x444d_4163, 0x6974_6e65]),
            leaf(1, [0, 0, 1 << 15, 1 << 26]),
            leaf(7, [0, 0, 0, 1 << 29]),
        ])
        .unwrap();
        let host = Host {
            tsc_deadline: true,
            leaf_7_ebx: 0,
        };
        let shown = of_cpuid(cpuid::for_vm(&supported, 1, host, None).as_slice());
        let guest = of_cpuid(supported.as_slice());
        assert_eq!(guest.lacking(&shown), ["pdcm", "arch_capabilities"]);
        let restorable = of_cpuid(&cpuid::unhidden(&supported, host));
        assert_eq!(guest.lacking(&restorable), [""; 0]);
        assert_eq!(shown.lacking(&restorable), [""; 0]);
    }

    #[test]
    #[ignore = "needs a real KVM"]
    fn a_host_can_restore_its_own_profile() {
        let host = of_host().unwrap();
        let profile = host.shown;
        assert_eq!(profile.lacking(&host.restorable), [""; 0]);
        assert!(profile.tsc_khz.is_some_and(|khz| khz > 0));
        profile.check().unwrap();
        assert_eq!(profile.lacking(&profile), [""; 0]);
        let features = profile.features();
        for feature in ["sse2", "lm", "nx", "hypervisor", "kvm_clocksource2"] {
            assert!(features.iter().any(|name| name == feature), "{feature}");
        }
        assert!(
            !features
                .iter()
                .any(|name| name == "pdcm" || name == "waitpkg")
        );
        let text = serde_json::to_string(&profile).unwrap();
        let mut sorted = profile;
        sorted.cpuid.sort_by_key(|leaf| (leaf.leaf, leaf.index));
        assert_eq!(serde_json::from_str::<Profile>(&text).unwrap(), sorted);
    }
}
