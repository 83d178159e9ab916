//! The vsock device.

use super::error::DeviceError;
use super::virtio::VirtioKind;
use super::wiring::Wiring;
use crate::sections::Section;
use jiffy_devices::virtio::device::WorkerRole;
use jiffy_devices::virtio::vsock::{Vsock, VsockArgs, VsockState};
use jiffy_wire::vmm::VmmConfig;

/// The vsock device: streams between guest and host.
#[derive(Debug)]
pub struct VsockKind;

impl VirtioKind for VsockKind {
    type Device = Vsock;
    type State = VsockState;
    const SECTION: Section = Section::new("vsock", 1);
    const NAME: &'static str = "a vsock device";

    fn count(config: &VmmConfig) -> usize {
        config.vsock.iter().len()
    }

    fn workers(config: &VmmConfig) -> Vec<WorkerRole> {
        config.vsock.iter().map(|_| WorkerRole::Vsock).collect()
    }

    fn create(
        wiring: &Wiring<'_>,
        number: usize,
        state: Option<&VsockState>,
    ) -> Result<Vsock, DeviceError> {
        let vsock = &wiring.args.config.vsock.as_slice()[number];
        let args = VsockArgs {
            cid: vsock.cid,
            path: vsock.path.clone(),
        };
        Ok(match state {
            None => Vsock::new(args)?,
            Some(state) => Vsock::restore(args, state)?,
        })
    }

    fn save(device: &mut Vsock) -> Result<VsockState, DeviceError> {
        Ok(device.save())
    }
}
