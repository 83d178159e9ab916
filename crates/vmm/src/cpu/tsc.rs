//! A vCPU's time stamp counter.
//!
//! KVM treats a write to the register as an attempt to synchronise vCPUs if the value is less than
//! a second away from the current one. A value that was saved soon after boot would be lost, and
//! vCPUs that are restored more than a second apart (because a pager had to fetch a page in
//! between) would differ forever. So the first vCPU's counter is set by its offset to the host's
//! counter, which KVM takes unchanged, and all others get the same offset.

use super::msrs;
use crate::hypervisor::{HypervisorError, failed_to};
use kvm_bindings::{
    KVM_CAP_VCPU_ATTRIBUTES, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr,
};
use kvm_ioctls::{VcpuFd, VmFd};
use std::io;
use std::os::fd::AsRawFd;

/// `_IOW(KVMIO, 0xe1, struct kvm_device_attr)` (Linux,
/// `Documentation/virt/kvm/api.rst`).
const KVM_SET_DEVICE_ATTR: libc::Ioctl = device_attr_ioctl(0xe1);
/// `_IOW(KVMIO, 0xe2, struct kvm_device_attr)`.
const KVM_GET_DEVICE_ATTR: libc::Ioctl = device_attr_ioctl(0xe2);

const fn device_attr_ioctl(number: libc::Ioctl) -> libc::Ioctl {
    1 << 30 | (size_of::<kvm_device_attr>() as libc::Ioctl) << 16 | 0xae << 8 | number
}

/// Whether a vCPU's offset can be set: from Linux 5.16 on.
pub fn has_offset(vm: &VmFd) -> bool {
    vm.check_extension_raw(KVM_CAP_VCPU_ATTRIBUTES.into()) > 0
}

/// The offset to the host's counter that all vCPUs of a VM share: `None` before the first was set,
/// or if KVM can't set it.
#[derive(Debug, Default)]
pub struct SharedOffset(Option<u64>);

impl SharedOffset {
    /// Sets a vCPU's counter: for the first vCPU so that it reads `value` (ticks) now, for the
    /// others by the first's offset. Their frequency must be set before. Returns false if KVM can't
    /// set the offset.
    ///
    /// # Errors
    ///
    /// If `KVM_GET_MSRS` of the counter, or `KVM_SET_DEVICE_ATTR` of the offset, fails.
    pub fn apply(&mut self, vcpu: &VcpuFd, value: u64) -> Result<bool, HypervisorError> {
        let mut offset = match self.0 {
            Some(offset) => offset,
            None => {
                let mut offset = 0;
                if device_attr(vcpu, KVM_GET_DEVICE_ATTR, &mut offset).is_err() {
                    return Ok(false);
                }
                let read = msrs::read(vcpu, &[msrs::TSC])?;
                let Some(reads) = read.first().map(|msr| msr.data) else {
                    return Ok(false);
                };
                // Computed from the guest's counter, because KVM may scale the host's.
                offset.wrapping_add(value).wrapping_sub(reads)
            }
        };
        device_attr(vcpu, KVM_SET_DEVICE_ATTR, &mut offset)
            .map_err(|error| failed_to("set a vCPU's time stamp counter")(error.into()))?;
        self.0 = Some(offset);
        Ok(true)
    }
}

#[allow(unsafe_code)] // ioctls that kvm-ioctls has for another processor only.
fn device_attr(vcpu: &VcpuFd, request: libc::Ioctl, offset: &mut u64) -> io::Result<()> {
    let attr = kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: KVM_VCPU_TSC_OFFSET.into(),
        addr: (&raw mut *offset) as u64,
        flags: 0,
    };
    // SAFETY: both ioctls read this structure; its address is that of the eight bytes of the
    // attribute.
    match unsafe { libc::ioctl(vcpu.as_raw_fd(), request, &raw const attr) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypervisor::Hypervisor;

    #[test]
    #[ignore = "needs a real KVM"]
    fn all_vcpus_get_the_tsc_offset_of_the_first() {
        let hypervisor = Hypervisor::open().unwrap();
        // Values from the guest's first second and later; vCPUs restored at once, and seconds
        // apart.
        for saved in [1_000_000, 60_000_000_000] {
            for apart in [100_000, 60_000_000_000] {
                let vm = hypervisor.create_vm().unwrap();
                let mut shared = SharedOffset::default();
                let offsets = [0, 1].map(|number| {
                    let vcpu = vm.create_vcpu(number).unwrap();
                    assert!(shared.apply(&vcpu, saved + apart * number).unwrap());
                    let mut offset = 0;
                    device_attr(&vcpu, KVM_GET_DEVICE_ATTR, &mut offset).unwrap();
                    let reads = msrs::read(&vcpu, &[msrs::TSC]).unwrap()[0].data;
                    assert!(reads >= saved, "{reads} after {saved}");
                    offset
                });
                assert_eq!(offsets[0], offsets[1]);
            }
        }
    }
}
