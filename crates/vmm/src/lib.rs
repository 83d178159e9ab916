//! The virtual machine monitor: KVM, vCPUs, boot protocols, save and restore.
