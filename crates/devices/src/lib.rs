//! The devices of a Jiffy VM. They do not depend on KVM: interrupts and doorbells are event
//! descriptors, guest memory is [`GuestMemory`].
//!
//! * [`bus`]: port and memory-mapped I/O dispatch.
//! * [`virtio`]: the virtio-mmio transport and the devices behind it.
//! * [`serial`](mod@serial): COM1.
//! * [`fw_cfg`]: files for the guest.
//! * [`trace`]: the port on which guest code marks events.
//! * [`power`]: reset and power off.
//! * [`rtc`]: the PC's clock.
//! * [`write_log`]: the dirty log of the pages that devices have written.

pub mod bus;
pub mod fw_cfg;
pub mod power;
pub mod rtc;
pub mod serial;
pub mod trace;
pub mod virtio;
pub mod write_log;

/// Guest RAM as every device sees it.
pub type GuestMemory = vm_memory::GuestMemoryMmap<write_log::WriteLog>;
