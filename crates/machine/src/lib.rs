//! The QEMU machine in which VMs run where the host has no real KVM.
