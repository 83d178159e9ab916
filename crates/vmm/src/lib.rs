//! The virtual machine monitor: KVM, vCPUs, boot protocols, save and restore.
//!
//! A VM is built by [`Builder`], step by step, and is then a [`Vmm`]; the binary `jiffy-vmm` adds
//! little to that.
//!
//! * [`config`]: the configuration of a VM; [`builder`]: builds a VM; [`prepared`]: what is there
//!   before.
//! * [`hypervisor`]: the KVM device.
//! * [`memory`]: guest RAM; [`layout`]: addresses of guest memory.
//! * [`pager`]: RAM that another process fills on page faults (userfaultfd).
//! * [`cpu`]: the guest's processor.
//! * [`vcpu`]: vCPUs and their threads; [`irq`]: interrupt controllers.
//! * [`devices`]: creates the devices, attaches them to buses, connects them with KVM.
//! * [`boot`]: loads kernels by the PVH and Linux boot protocols.
//! * [`capture`]: state and RAM of a VM at one moment, as files.
//! * [`restore`]: the state and RAM of a restored VM; [`gate`]: its time to take a new identity.
//! * [`spare`]: a VMM that is started before its configuration is known.
//! * [`vmm`]: start, pause, save, resume; [`state`]: the saved state, which consists of
//!   [`sections`].
//! * [`watch`]: the main thread's event loop; [`control`]: its socket; [`mailbox`]: its messages.
//! * [`ending`]: why a VM ends.
//! * [`events`]: spans and marks; [`stats`]: KVM's counters.
//! * [`sandbox`]: the system calls that each thread may make.
//! * [`probe`]: probes the host's KVM.

pub mod boot;
pub mod builder;
pub mod capture;
pub mod config;
pub mod control;
pub mod cpu;
pub mod devices;
pub mod ending;
pub mod error;
pub mod events;
pub mod gate;
pub mod hypervisor;
pub mod irq;
pub mod layout;
pub mod mailbox;
pub mod memory;
pub mod pager;
mod poll;
pub mod prepared;
pub mod probe;
pub mod restore;
pub mod sandbox;
pub mod sections;
pub mod spare;
pub mod state;
pub mod stats;
#[cfg(feature = "testing")]
pub mod testing;
pub mod vcpu;
pub mod vmm;
pub mod watch;
pub mod workers;

pub use builder::Builder;
pub use capture::SaveError;
pub use devices::DeviceError;
pub use error::StartError;
pub use events::Events;
pub use prepared::PreparedVm;
pub use state::{StateError, VmState};
pub use vmm::Vmm;
