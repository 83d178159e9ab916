//! The part that all kinds of virtio devices share: the transport in front of them.

use super::Shared;
use super::error::DeviceError;
use super::kind::DeviceKind;
use super::wiring::Wiring;
use crate::sections::{Count, Section};
use jiffy_devices::virtio::device::{VirtioDevice, WorkerRole};
use jiffy_devices::virtio::mmio::{MmioTransport, MmioTransportState};
use jiffy_sys::mutex::lock;
use jiffy_wire::vmm::VmmConfig;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;

/// A kind of virtio device. A snapshot keeps the transport's state and the device's own.
pub trait VirtioKind: Debug + Sync + 'static {
    /// A device of this kind.
    type Device: VirtioDevice + 'static;
    /// What a snapshot keeps of it, besides its transport.
    type State: Serialize + DeserializeOwned + Debug + Send + 'static;
    /// [`DeviceKind::SECTION`].
    const SECTION: Section;
    /// [`DeviceKind::NAME`].
    const NAME: &'static str;
    /// [`DeviceKind::COUNT`].
    const COUNT: Count = Count::AtMostOne;

    /// [`DeviceKind::count`].
    fn count(config: &VmmConfig) -> usize;

    /// [`DeviceKind::workers`].
    fn workers(_config: &VmmConfig) -> Vec<WorkerRole> {
        Vec::new()
    }

    /// Creates the device of this number, or restores it if there is a state.
    ///
    /// # Errors
    ///
    /// As for [`DeviceKind::attach`].
    fn create(
        wiring: &Wiring<'_>,
        number: usize,
        state: Option<&Self::State>,
    ) -> Result<Self::Device, DeviceError>;

    /// Its state; it must be paused.
    ///
    /// # Errors
    ///
    /// As for [`DeviceKind::save`].
    fn save(device: &mut Self::Device) -> Result<Self::State, DeviceError>;
}

/// A kind of virtio device, with its transport.
#[derive(Debug)]
pub struct Virtio<K>(pub K);

impl<K: VirtioKind> DeviceKind for Virtio<K> {
    type Device = Shared<MmioTransport<K::Device>>;
    type State = (MmioTransportState, K::State);
    const SECTION: Section = K::SECTION;
    const NAME: &'static str = K::NAME;
    const COUNT: Count = K::COUNT;

    fn count(config: &VmmConfig) -> usize {
        K::count(config)
    }

    fn workers(config: &VmmConfig) -> Vec<WorkerRole> {
        K::workers(config)
    }

    fn attach(
        wiring: &mut Wiring<'_>,
        number: usize,
        state: Option<&Self::State>,
    ) -> Result<Self::Device, DeviceError> {
        let device = K::create(wiring, number, state.map(|state| &state.1))?;
        wiring.add_virtio(device, state.map(|state| &state.0))
    }

    fn pause(device: &Self::Device) {
        lock(device).pause();
    }

    fn resume(device: &Self::Device) {
        // The transport has logged the cause, and reports it to the driver.
        let _ = lock(device).resume();
    }

    fn save(device: &Self::Device) -> Result<Self::State, DeviceError> {
        let mut transport = lock(device);
        Ok((transport.save()?, K::save(transport.device_mut())?))
    }
}
