//! A vCPU's time stamp counter.
//!
//! KVM takes what is written to the register for an attempt to synchronise it
//! with what it would be anyway, if that is less than a second away. What was
//! saved soon after a boot would be lost so: the first vCPU's counter is set by
//! its offset to the host's, which is taken as it is. Those of the others, which
//! were read one after the other, are then written, and so synchronised with it.

use super::Vcpu;
use crate::hypervisor::{HypervisorError, failed_to};
use kvm_bindings::{
    KVM_CAP_VCPU_ATTRIBUTES, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, Msrs, kvm_device_attr,
    kvm_msr_entry,
};
use kvm_ioctls::VmFd;
use std::io;
use std::os::fd::AsRawFd;

/// Intel SDM volume 4, IA32_TIME_STAMP_COUNTER.
pub(super) const MSR_IA32_TSC: u32 = 0x10;

/// `_IOW(KVMIO, 0xe1, struct kvm_device_attr)` (Linux,
/// `Documentation/virt/kvm/api.rst`).
const KVM_SET_DEVICE_ATTR: libc::Ioctl = device_attr_ioctl(0xe1);
/// `_IOW(KVMIO, 0xe2, struct kvm_device_attr)`.
const KVM_GET_DEVICE_ATTR: libc::Ioctl = device_attr_ioctl(0xe2);

const fn device_attr_ioctl(number: libc::Ioctl) -> libc::Ioctl {
    1 << 30 | (size_of::<kvm_device_attr>() as libc::Ioctl) << 16 | 0xae << 8 | number
}

/// Whether a VM's vCPUs let their offset be set: from Linux 5.16 on.
pub fn has_offset(vm: &VmFd) -> bool {
    vm.check_extension_raw(KVM_CAP_VCPU_ATTRIBUTES.into()) > 0
}

impl Vcpu {
    /// Has the counter read `value` now. Its frequency is set already. False
    /// if KVM does not let its offset be set.
    pub(super) fn set_tsc(&self, value: u64) -> Result<bool, HypervisorError> {
        let mut offset = 0;
        if self.device_attr(KVM_GET_DEVICE_ATTR, &mut offset).is_err() {
            return Ok(false);
        }
        let entry = kvm_msr_entry {
            index: MSR_IA32_TSC,
            ..Default::default()
        };
        let mut msrs = Msrs::from_entries(&[entry]).expect("one MSR");
        self.fd
            .get_msrs(&mut msrs)
            .map_err(failed_to("read a vCPU's time stamp counter"))?;
        let reads = msrs.as_slice()[0].data;
        // Not the host's counter and its frequency: KVM may scale it.
        let mut offset = offset.wrapping_add(value).wrapping_sub(reads);
        self.device_attr(KVM_SET_DEVICE_ATTR, &mut offset)
            .map(|()| true)
            .map_err(|error| failed_to("set a vCPU's time stamp counter")(error.into()))
    }

    #[allow(unsafe_code)] // ioctls that kvm-ioctls has for another processor only.
    fn device_attr(&self, request: libc::Ioctl, offset: &mut u64) -> io::Result<()> {
        let attr = kvm_device_attr {
            group: KVM_VCPU_TSC_CTRL,
            attr: KVM_VCPU_TSC_OFFSET.into(),
            addr: (&raw mut *offset) as u64,
            flags: 0,
        };
        // SAFETY: the structure is the one both ioctls read, and the address in
        // it is that of the eight bytes which this attribute has.
        match unsafe { libc::ioctl(self.fd.as_raw_fd(), request, &raw const attr) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypervisor::Hypervisor;

    #[test]
    #[ignore = "needs a real KVM"]
    fn counters_that_were_read_one_after_the_other_are_set_alike() {
        let hypervisor = Hypervisor::open().unwrap();
        // In its first second, and later.
        for saved in [1_000_000, 60_000_000_000] {
            let vm = hypervisor.create_vm().unwrap();
            let vcpus = [0, 1].map(|index| Vcpu::create(&vm, index).unwrap());
            let offsets = [0, 1].map(|number: usize| {
                let entry = kvm_msr_entry {
                    index: MSR_IA32_TSC,
                    data: saved + 100_000 * number as u64,
                    ..Default::default()
                };
                vcpus[number].write_msrs(&[entry]).unwrap();
                let mut offset = 0;
                vcpus[number]
                    .device_attr(KVM_GET_DEVICE_ATTR, &mut offset)
                    .unwrap();
                offset
            });
            assert_eq!(offsets[0], offsets[1]);
        }
    }
}
