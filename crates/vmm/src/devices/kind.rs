//! What the monitor needs to know about a kind of device.

use super::error::DeviceError;
use super::wiring::Wiring;
use crate::sections::{Count, Release, Section, SectionError, Sections, Writer};
use jiffy_devices::virtio::device::WorkerRole;
use jiffy_wire::vmm::VmmConfig;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::any::Any;
use std::fmt::Debug;

/// A kind of device.
pub trait DeviceKind: Debug + Sync + 'static {
    /// A device of this kind, attached to its bus.
    type Device: Send + Sync + 'static;
    /// The state that a snapshot keeps of a device.
    type State: Serialize + DeserializeOwned + Debug + Send + 'static;
    /// The section of its state.
    const SECTION: Section;
    /// For messages: "the saved VM and the configuration differ in …".
    const NAME: &'static str;
    /// How many devices of this kind a VM can have.
    const COUNT: Count;

    /// How many devices of this kind a VM with this configuration has.
    fn count(config: &VmmConfig) -> usize;

    /// The threads that the devices of this configuration need.
    fn workers(_config: &VmmConfig) -> Vec<WorkerRole> {
        Vec::new()
    }

    /// Creates the device of this number, or, given a state, restores it (paused), and attaches it
    /// to its bus.
    ///
    /// # Errors
    ///
    /// If the host or a file can't provide what the configuration asks for, KVM refuses an
    /// interrupt or doorbell, or the state is not valid.
    fn attach(
        wiring: &mut Wiring<'_>,
        number: usize,
        state: Option<&Self::State>,
    ) -> Result<Self::Device, DeviceError>;

    /// Stops it after it has finished requests in progress. No vCPU may run.
    fn pause(_device: &Self::Device) {}

    /// Resumes it. A device that can't resume reports that to its driver.
    fn resume(_device: &Self::Device) {}

    /// Its state; it must be paused.
    ///
    /// # Errors
    ///
    /// If it is not paused, or what its server knows can't be saved.
    fn save(device: &Self::Device) -> Result<Self::State, DeviceError>;
}

/// A type-erased [`DeviceKind`].
pub trait AnyKind: Debug + Sync {
    /// [`DeviceKind::SECTION`].
    fn section(&self) -> Section;

    /// [`DeviceKind::workers`].
    fn workers(&self, config: &VmmConfig) -> Vec<WorkerRole>;

    /// Checks that a state has as many devices of this kind as the configuration.
    ///
    /// # Errors
    ///
    /// [`DeviceError::StateDiffers`] if not.
    fn check(&self, config: &VmmConfig, state: &DevicesState) -> Result<(), DeviceError>;

    /// Creates all devices of this kind, in their order.
    ///
    /// # Errors
    ///
    /// If [`DeviceKind::attach`] fails; the first error.
    fn attach_all(
        &self,
        wiring: &mut Wiring<'_>,
        state: Option<&DevicesState>,
    ) -> Result<Vec<Box<dyn AnyDevice>>, DeviceError>;

    /// Reads the states of this kind.
    ///
    /// # Errors
    ///
    /// If their number is not [`DeviceKind::COUNT`], or one of them can't be read.
    fn read(
        &self,
        sections: &mut Sections<'_>,
        release: Release<'_>,
        state: &mut DevicesState,
    ) -> Result<(), SectionError>;
}

impl<K: DeviceKind> AnyKind for K {
    fn section(&self) -> Section {
        K::SECTION
    }

    fn workers(&self, config: &VmmConfig) -> Vec<WorkerRole> {
        K::workers(config)
    }

    fn check(&self, config: &VmmConfig, state: &DevicesState) -> Result<(), DeviceError> {
        match state.of::<K>().count() == K::count(config) {
            true => Ok(()),
            false => Err(DeviceError::StateDiffers(K::NAME)),
        }
    }

    fn attach_all(
        &self,
        wiring: &mut Wiring<'_>,
        state: Option<&DevicesState>,
    ) -> Result<Vec<Box<dyn AnyDevice>>, DeviceError> {
        let mut states = state.into_iter().flat_map(DevicesState::of::<K>);
        (0..K::count(wiring.args.config))
            .map(|number| {
                let device = K::attach(wiring, number, states.next())?;
                Ok(Box::new(Attached::<K>(device)) as Box<dyn AnyDevice>)
            })
            .collect()
    }

    fn read(
        &self,
        sections: &mut Sections<'_>,
        release: Release<'_>,
        state: &mut DevicesState,
    ) -> Result<(), SectionError> {
        state.extend::<K>(sections.take(K::SECTION, K::COUNT, release)?);
        Ok(())
    }
}

/// A device of a kind.
struct Attached<K: DeviceKind>(K::Device);

/// A type-erased device.
pub trait AnyDevice: Any + Send + Sync {
    /// [`DeviceKind::pause`].
    fn pause(&self);
    /// [`DeviceKind::resume`].
    fn resume(&self);
    /// Appends its state.
    ///
    /// # Errors
    ///
    /// As for [`DeviceKind::save`].
    fn save(&self, state: &mut DevicesState) -> Result<(), DeviceError>;
}

impl<K: DeviceKind> AnyDevice for Attached<K> {
    fn pause(&self) {
        K::pause(&self.0);
    }

    fn resume(&self) {
        K::resume(&self.0);
    }

    fn save(&self, state: &mut DevicesState) -> Result<(), DeviceError> {
        state.push::<K>(K::save(&self.0)?);
        Ok(())
    }
}

/// The device, if it is of this kind.
pub fn as_kind<K: DeviceKind>(device: &dyn AnyDevice) -> Option<&K::Device> {
    let device: &dyn Any = device;
    Some(&device.downcast_ref::<Attached<K>>()?.0)
}

/// What a snapshot keeps of all devices, in the order of the registry, devices of one kind in the
/// order of the configuration.
#[derive(Debug, Default)]
pub struct DevicesState(Vec<Box<dyn AnyState>>);

/// The state of a device of a kind.
#[derive(Debug)]
struct Saved<K: DeviceKind>(K::State);

trait AnyState: Any + Debug + Send {
    fn write(&self, sections: &mut Writer);
}

impl<K: DeviceKind> AnyState for Saved<K> {
    fn write(&self, sections: &mut Writer) {
        sections.put(K::SECTION, &self.0);
    }
}

impl DevicesState {
    /// The states of all devices of a kind.
    pub fn of<K: DeviceKind>(&self) -> impl Iterator<Item = &K::State> {
        self.0.iter().filter_map(|state| {
            let state: &dyn Any = &**state;
            Some(&state.downcast_ref::<Saved<K>>()?.0)
        })
    }

    /// The states of all devices of a kind, mutable.
    pub fn of_mut<K: DeviceKind>(&mut self) -> impl Iterator<Item = &mut K::State> {
        self.0.iter_mut().filter_map(|state| {
            let state: &mut dyn Any = &mut **state;
            Some(&mut state.downcast_mut::<Saved<K>>()?.0)
        })
    }

    /// Appends the states of devices.
    pub fn extend<K: DeviceKind>(&mut self, states: impl IntoIterator<Item = K::State>) {
        states.into_iter().for_each(|state| self.push::<K>(state));
    }

    /// Appends the state of a device.
    pub fn push<K: DeviceKind>(&mut self, state: K::State) {
        self.0.push(Box::new(Saved::<K>(state)));
    }

    /// Writes a section for each device.
    pub fn write(&self, sections: &mut Writer) {
        for state in &self.0 {
            state.write(sections);
        }
    }
}
