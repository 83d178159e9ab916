//! The devices of a Jiffy VM. No KVM here: interrupts and doorbells are event
//! descriptors, guest memory is [`GuestMemory`].
//!
//! * [`bus`]: port and memory-mapped I/O dispatch.
//! * [`virtio`]: the virtio-mmio transport and the devices behind it.

pub mod bus;
pub mod virtio;

/// Guest RAM as every device sees it.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;
