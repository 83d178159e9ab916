//! The devices of a VM: created from its configuration or from a saved state, attached to the
//! buses, and connected with KVM.
//!
//! * [`registry`]: all kinds of devices. A new kind is a line there.
//! * [`kind`]: what the monitor needs to know about each kind.
//! * [`block`], [`vsock`], [`entropy`], [`balloon`], [`net`], [`fs`], [`serial`],
//!   [`fw_cfg`], [`power`], [`rtc`], [`trace`]: each kind's connection between the configuration and the
//!   device.
//! * [`virtio`]: the part that all virtio devices share.
//! * `folder_session`: what the server of a shared folder knows of the guest's files.
//! * `disk_chunks`: disks that a pager fills.
//! * `limits`: rate limits, changed while the guest runs.
//! * `read_notes`: notes which parts of a disk a guest reads.
//! * [`wiring`]: windows, ports, interrupts and doorbells.

pub mod balloon;
pub mod block;
pub(crate) mod disk_chunks;
pub mod entropy;
mod error;
mod folder_session;
pub mod fs;
pub mod fw_cfg;
pub mod kind;
mod limits;
pub mod net;
pub mod power;
mod read_notes;
pub mod registry;
pub mod rtc;
pub mod serial;
pub mod trace;
pub mod virtio;
pub mod vsock;
pub(crate) mod wiring;

pub use error::DeviceError;
pub use kind::DevicesState;

use crate::events::Events;
use crate::irq::LazyPit;
use crate::mailbox::Mailbox;
use crate::memory::GuestRam;
use crate::vcpu::exit::Board;
use jiffy_devices::power::PowerSwitch;
use jiffy_devices::virtio::device::Workers;
use jiffy_devices::virtio::mmio::Wires;
use jiffy_wire::vmm::VmmConfig;
use kind::{AnyDevice, DeviceKind};
use kvm_ioctls::VmFd;
use read_notes::ReadNotes;
use registry::REGISTRY;
use std::sync::{Arc, Mutex};
use wiring::Wiring;

/// A device that a bus and others share.
pub(crate) type Shared<D> = Arc<Mutex<D>>;

/// What is needed to create devices.
pub struct DeviceArgs<'a> {
    /// The VM's configuration.
    pub config: &'a VmmConfig,
    /// KVM's VM.
    pub vm: &'a Arc<VmFd>,
    /// Guest RAM.
    pub ram: &'a Arc<GuestRam>,
    /// Receives the guest's reports about its identity.
    pub mailbox: &'a Arc<Mailbox>,
    /// Starts the devices' threads.
    pub workers: &'a Arc<dyn Workers>,
    /// Receives marks.
    pub events: &'a Arc<Events>,
}

/// All devices of a VM.
pub struct Devices {
    /// Buses and what else a vCPU needs.
    pub board: Board,
    /// `virtio_mmio.device=` parameters, one per device.
    pub parameters: String,
    /// In the order of the [`registry`].
    all: Vec<Box<dyn AnyDevice>>,
    reads: Option<Arc<ReadNotes>>,
}

impl Devices {
    /// Creates the devices, or, given a state, restores them, paused. `wires` are those made
    /// [ahead](wiring::ahead), or none.
    ///
    /// # Errors
    ///
    /// If the state has other devices than the configuration, or as of [`DeviceKind::attach`].
    pub fn create(
        args: &DeviceArgs<'_>,
        wires: Vec<Wires>,
        state: Option<&DevicesState>,
    ) -> Result<Devices, DeviceError> {
        if let Some(state) = state {
            for kind in REGISTRY {
                kind.check(args.config, state)?;
            }
        }
        let power = Arc::new(PowerSwitch::new().map_err(DeviceError::Event)?);
        let mut wiring = Wiring::new(args, power, wires);
        let mut all = Vec::with_capacity(16);
        for kind in REGISTRY {
            all.extend(kind.attach_all(&mut wiring, state)?);
        }
        Ok(Devices {
            board: Board {
                ports: Arc::new(wiring.ports),
                mmio: Arc::new(wiring.mmio),
                pit: Arc::new(LazyPit::new(args.vm.clone())),
                power: wiring.power,
            },
            parameters: wiring.parameters,
            all,
            reads: wiring.reads.into_inner(),
        })
    }

    /// Stops all devices after they have finished requests in progress. No vCPU may run.
    pub fn pause(&self) {
        self.all.iter().for_each(|device| device.pause());
    }

    /// Resumes all devices. A device that can't resume reports that to its driver.
    pub fn resume(&self) {
        self.all.iter().for_each(|device| device.resume());
    }

    /// The state of all devices, which must be paused.
    ///
    /// # Errors
    ///
    /// As for [`DeviceKind::save`].
    pub fn save(&self) -> Result<DevicesState, DeviceError> {
        let mut state = DevicesState::default();
        for device in &self.all {
            device.save(&mut state)?;
        }
        Ok(state)
    }

    /// The first device of a kind.
    pub fn first<K: DeviceKind>(&self) -> Option<&K::Device> {
        self.all::<K>().next()
    }

    /// All devices of a kind, in their order.
    pub fn all<K: DeviceKind>(&self) -> impl Iterator<Item = &K::Device> {
        let all = self.all.iter();
        all.filter_map(|device| kind::as_kind::<K>(&**device))
    }
}

pub(crate) fn shared<D>(device: D) -> Shared<D> {
    Arc::new(Mutex::new(device))
}
