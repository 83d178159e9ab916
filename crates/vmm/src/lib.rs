//! The virtual machine monitor: KVM, vCPUs, boot protocols, save and restore.
//!
//! A VM is made by [`Builder`], step by step, and is then a [`Vmm`]; the
//! binary `jiffy-vmm` does little more than that.
//!
//! * [`config`]: what a VM is made from; [`builder`]: the steps to a VM.
//! * [`hypervisor`]: the KVM device.
//! * [`memory`]: guest RAM; [`layout`]: where things lie in it.
//! * [`pager`]: RAM that a pager serves; [`disk_chunks`]: disks that one fills.
//! * [`cpu`]: what a guest's processor is.
//! * [`vcpu`]: vCPUs and their threads; [`irq`]: interrupt controllers.
//! * [`devices`]: the devices, on the buses and connected with KVM.
//! * [`read_notes`]: what a guest reads of a disk.
//! * [`boot`]: kernels and boot protocols.
//! * [`capture`]: a VM at one moment, in files.
//! * [`restore`]: what a VM goes on from; [`gate`]: its new identity.
//! * [`spare`]: a VMM that waits to be told which VM it is.
//! * [`vmm`]: start, pause, save, resume; [`state`]: what is saved, in
//!   [`sections`].
//! * [`watch`]: the main thread while the guest runs; [`control`]: its socket.
//! * [`ending`]: why it ends.
//! * [`events`]: spans and marks; [`stats`]: KVM's counters.
//! * [`sandbox`]: what each thread may ask of the kernel.
//! * [`probe`]: what kind of KVM this host has.

pub mod boot;
pub mod builder;
pub mod capture;
pub mod config;
pub mod control;
pub mod cpu;
pub mod devices;
pub mod disk_chunks;
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
pub mod probe;
pub mod read_notes;
mod readable;
pub mod restore;
pub mod sandbox;
pub mod sections;
pub mod spare;
pub mod state;
pub mod stats;
pub mod vcpu;
pub mod vmm;
pub mod watch;
pub mod workers;

pub use builder::{Builder, PreparedVm};
pub use capture::SaveError;
pub use devices::DeviceError;
pub use error::StartError;
pub use events::Events;
pub use state::{StateError, VmState};
pub use vmm::Vmm;
