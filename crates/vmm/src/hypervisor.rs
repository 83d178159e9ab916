//! The KVM device and a VM's descriptor with its interrupt controllers.

use crate::layout;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm, VmFd};
use std::io;
use thiserror::Error;

/// The KVM API every Linux since 2.6.22 has.
const API_VERSION: i32 = 12;

/// KVM can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HypervisorError {
    /// `/dev/kvm` is missing or closed to us.
    #[error("/dev/kvm can't be opened")]
    Open(#[source] io::Error),
    /// Not the API of Linux's KVM.
    #[error("/dev/kvm speaks API version {0}; 12 is needed")]
    Version(i32),
    /// A capability every KVM of the last ten years has.
    #[error("this host's KVM lacks {0}")]
    Capability(&'static str),
    /// A system call failed.
    #[error("KVM failed to {what}")]
    Call {
        /// What was tried, after "to".
        what: &'static str,
        /// Why not.
        source: kvm_ioctls::Error,
    },
}

impl HypervisorError {
    /// What the user can do.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            HypervisorError::Open(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                "add yourself to the group `kvm`, or set the device's permissions; `jiffy doctor` tells more".into()
            }
            _ => "`jiffy doctor` says what this host's KVM can do".into(),
        })
    }
}

/// Names what was tried, for `map_err`.
pub(crate) fn failed_to(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> HypervisorError {
    move |source| HypervisorError::Call { what, source }
}

/// The open KVM device.
#[derive(Debug)]
pub struct Hypervisor {
    kvm: Kvm,
}

impl Hypervisor {
    /// Opens `/dev/kvm` and checks that it can do what is needed.
    pub fn open() -> Result<Hypervisor, HypervisorError> {
        let kvm = Kvm::new()
            .map_err(|error| HypervisorError::Open(io::Error::from_raw_os_error(error.errno())))?;
        let version = kvm.get_api_version();
        if version != API_VERSION {
            return Err(HypervisorError::Version(version));
        }
        Ok(Hypervisor { kvm })
    }

    /// A VM without interrupt controllers.
    pub(crate) fn create_bare_vm(&self) -> Result<VmFd, HypervisorError> {
        let vm = self.kvm.create_vm().map_err(failed_to("create a VM"))?;
        vm.set_tss_address(layout::KVM_TSS)
            .map_err(failed_to("place its task state segment"))?;
        Ok(vm)
    }

    /// A VM with interrupt controllers. There is no timer chip (PIT) until a
    /// guest asks for one.
    pub fn create_vm(&self) -> Result<VmFd, HypervisorError> {
        let vm = self.create_bare_vm()?;
        for (cap, name) in [
            (Cap::UserMemory, "user memory"),
            (Cap::ImmediateExit, "immediate exit"),
            (Cap::Ioeventfd, "ioeventfd"),
            (Cap::Irqfd, "irqfd"),
        ] {
            if !vm.check_extension(cap) {
                return Err(HypervisorError::Capability(name));
            }
        }
        vm.create_irq_chip()
            .map_err(failed_to("create interrupt controllers"))?;
        Ok(vm)
    }

    /// What CPUID can show a guest on this host.
    pub fn supported_cpuid(&self) -> Result<CpuId, HypervisorError> {
        self.kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(failed_to("list supported CPUID leaves"))
    }

    /// Whether KVM emulates the TSC deadline timer.
    pub fn has_tsc_deadline(&self) -> bool {
        self.kvm.check_extension(Cap::TscDeadlineTimer)
    }

    /// MSRs that a snapshot must keep.
    pub fn msrs_to_save(&self) -> Result<Vec<u32>, HypervisorError> {
        let list = self
            .kvm
            .get_msr_index_list()
            .map_err(failed_to("list MSRs"))?;
        Ok(list.as_slice().to_vec())
    }
}
