//! The KVM device, and a VM's descriptor with its interrupt controllers.

use crate::layout;
use jiffy_sys::handed;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_msr_entry};
use kvm_ioctls::{Cap, Kvm, VmFd};
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::path::Path;
use thiserror::Error;

/// Path of the KVM device.
const DEVICE: &str = "/dev/kvm";
/// The KVM API version of every Linux since 2.6.22.
const API_VERSION: i32 = 12;

/// OSXSAVE in ECX of leaf 1: the kernel uses XSAVE, which it may not do although the processor has
/// it.
const ECX_OSXSAVE: u32 = 1 << 27;

/// KVM capabilities that are needed from the start or at the first capture.
const NEEDED: [(Cap, &str); 14] = [
    (Cap::UserMemory, "user memory"),
    (Cap::Irqchip, "interrupt controllers"),
    (
        Cap::SetTssAddr,
        "setting the address of its task state segment",
    ),
    (Cap::ExtCpuid, "CPUID that user space sets"),
    (Cap::Irqfd, "irqfd"),
    (Cap::Ioeventfd, "ioeventfd"),
    (Cap::ImmediateExit, "immediate exit"),
    (Cap::PitState2, "the timer chip's state"),
    (Cap::AdjustClock, "kvm-clock's adjustment"),
    (Cap::MpState, "vCPUs' activity"),
    (Cap::VcpuEvents, "vCPUs' pending events"),
    (Cap::Debugregs, "debug registers"),
    (Cap::Xsave, "XSAVE state"),
    (Cap::GetTscKhz, "the TSC's frequency"),
];

/// Names all missing capabilities. KVM has extended control registers only if the host's kernel
/// uses XSAVE.
fn check(xsave: bool, has: impl Fn(Cap) -> bool) -> Result<(), HypervisorError> {
    let xcrs = xsave.then_some((Cap::Xcrs, "extended control registers"));
    let missing: Vec<&str> = NEEDED
        .into_iter()
        .chain(xcrs)
        .filter(|(capability, _)| !has(*capability))
        .map(|(_, name)| name)
        .collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(HypervisorError::Capability(missing.join(", "))),
    }
}

/// Why KVM can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HypervisorError {
    /// `/dev/kvm` is missing, or this user may not open it.
    #[error("/dev/kvm can't be opened")]
    Open(#[source] io::Error),
    /// The API version is not that of Linux's KVM.
    #[error("/dev/kvm has API version {0}; version 12 is needed")]
    Version(i32),
    /// A capability is missing that every KVM of the last ten years provides.
    #[error("this host's KVM lacks {0}")]
    Capability(String),
    /// More vCPUs are wanted than KVM allows.
    #[error("this host's KVM allows a VM at most {most} vCPUs, not {wanted}")]
    Vcpus {
        /// The configured number.
        wanted: u8,
        /// `KVM_CAP_MAX_VCPUS`.
        most: usize,
    },
    /// KVM refused a saved guest's register.
    #[error("this host's KVM refuses {value:#x} for the saved guest's {name} (MSR {index:#x})")]
    Msr {
        /// The register's index.
        index: u32,
        /// Its name.
        name: &'static str,
        /// The saved value.
        value: u64,
    },
    /// A system call failed.
    #[error("KVM failed to {what}")]
    Call {
        /// What was tried, to be read after "failed to".
        what: &'static str,
        /// The cause.
        source: kvm_ioctls::Error,
    },
}

impl HypervisorError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            HypervisorError::Open(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                "add yourself to the group `kvm`, or set the device's permissions; run `jiffy doctor` for details".into()
            }
            _ => "run `jiffy doctor` to see what this host's KVM can do".into(),
        })
    }
}

/// Builds the error of a failed call, for `map_err`.
pub(crate) fn failed_to(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> HypervisorError {
    move |source| HypervisorError::Call { what, source }
}

/// The open KVM device.
#[derive(Debug)]
pub struct Hypervisor {
    kvm: Kvm,
}

impl Hypervisor {
    /// Opens `/dev/kvm` and checks its API version and its capabilities.
    ///
    /// # Errors
    ///
    /// If `/dev/kvm` can't be opened, or its API version or a capability is missing.
    pub fn open() -> Result<Hypervisor, HypervisorError> {
        let kvm = match handed::take(Path::new(DEVICE)) {
            // SAFETY: the node handed over KVM's device under this name; nothing else owns the
            // descriptor.
            #[allow(unsafe_code)]
            Some(device) => unsafe { Kvm::from_raw_fd(device.into_raw_fd()) },
            None => Kvm::new().map_err(|error| {
                HypervisorError::Open(io::Error::from_raw_os_error(error.errno()))
            })?,
        };
        let version = kvm.get_api_version();
        if version != API_VERSION {
            return Err(HypervisorError::Version(version));
        }
        let xsave = std::arch::x86_64::__cpuid(1).ecx & ECX_OSXSAVE != 0;
        check(xsave, |capability| kvm.check_extension(capability))?;
        Ok(Hypervisor { kvm })
    }

    /// Checks that a VM may have `wanted` vCPUs.
    ///
    /// # Errors
    ///
    /// [`HypervisorError::Vcpus`] if KVM allows fewer.
    pub fn check_vcpus(&self, wanted: u8) -> Result<(), HypervisorError> {
        // Every KVM allows one.
        if wanted > 1 {
            let most = self.kvm.get_max_vcpus();
            if usize::from(wanted) > most {
                return Err(HypervisorError::Vcpus { wanted, most });
            }
        }
        Ok(())
    }

    /// Creates a VM without interrupt controllers.
    pub(crate) fn create_bare_vm(&self) -> Result<VmFd, HypervisorError> {
        let vm = self.kvm.create_vm().map_err(failed_to("create a VM"))?;
        vm.set_tss_address(layout::KVM_TSS)
            .map_err(failed_to("set the address of the task state segment"))?;
        Ok(vm)
    }

    /// Creates a VM with interrupt controllers. The timer chip (PIT) is created only when the guest
    /// uses it.
    ///
    /// # Errors
    ///
    /// If `KVM_CREATE_VM`, `KVM_SET_TSS_ADDR` or `KVM_CREATE_IRQCHIP` fails.
    pub fn create_vm(&self) -> Result<VmFd, HypervisorError> {
        let vm = self.create_bare_vm()?;
        vm.create_irq_chip()
            .map_err(failed_to("create interrupt controllers"))?;
        Ok(vm)
    }

    /// The CPUID that KVM supports on this host.
    ///
    /// # Errors
    ///
    /// If `KVM_GET_SUPPORTED_CPUID` fails.
    pub fn supported_cpuid(&self) -> Result<CpuId, HypervisorError> {
        self.kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(failed_to("list supported CPUID leaves"))
    }

    /// Whether KVM emulates the TSC deadline timer.
    pub fn has_tsc_deadline(&self) -> bool {
        self.kvm.check_extension(Cap::TscDeadlineTimer)
    }

    /// Whether a guest's TSC may have any frequency.
    pub fn has_tsc_scaling(&self) -> bool {
        self.kvm.check_extension(Cap::TscControl)
    }

    /// An MSR that describes the processor, with all features that KVM can give a guest; `None` if
    /// KVM does not have it.
    ///
    /// # Errors
    ///
    /// If `KVM_GET_MSRS` of the device fails.
    pub fn feature_msr(&self, index: u32) -> Result<Option<u64>, HypervisorError> {
        if !self.kvm.check_extension(Cap::GetMsrFeatures) {
            return Ok(None);
        }
        let entry = kvm_msr_entry {
            index,
            ..kvm_msr_entry::default()
        };
        let mut msrs = Msrs::from_entries(&[entry]).expect("one MSR");
        let count = self
            .kvm
            .get_msrs(&mut msrs)
            .map_err(failed_to("read an MSR that describes the processor"))?;
        Ok(msrs.as_slice()[..count].first().map(|msr| msr.data))
    }

    /// The MSRs that KVM lists as a guest's state: most of those that a snapshot keeps, and more.
    ///
    /// # Errors
    ///
    /// If `KVM_GET_MSR_INDEX_LIST` fails.
    pub fn listed_msrs(&self) -> Result<Vec<u32>, HypervisorError> {
        let list = self
            .kvm
            .get_msr_index_list()
            .map_err(failed_to("list MSRs"))?;
        Ok(list.as_slice().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_missing_kvm_capabilities_are_named_in_one_sentence() {
        check(true, |_| true).unwrap();
        check(false, |capability| capability != Cap::Xcrs).unwrap();
        let lacks = |capability| ![Cap::Xcrs, Cap::VcpuEvents].contains(&capability);
        assert_eq!(
            check(true, lacks).unwrap_err().to_string(),
            "this host's KVM lacks vCPUs' pending events, extended control registers"
        );
    }
}
