//! Folders of the host.

use super::error::DeviceError;
use super::virtio::VirtioKind;
use super::wiring::Wiring;
use crate::sections::{Count, Section};
use jiffy_devices::virtio::device::WorkerRole;
use jiffy_devices::virtio::fs::{Fs, FsArgs, FsState};
use jiffy_sys::fds;
use jiffy_wire::files::MESSAGE_MAX;
use jiffy_wire::vmm::VmmConfig;

/// Folders of the host, in the order of the configuration.
#[derive(Debug)]
pub struct FsKind;

impl VirtioKind for FsKind {
    type Device = Fs;
    type State = FsState;
    const SECTION: Section = Section::new("fs", 1);
    const NAME: &'static str = "shared folders";
    const COUNT: Count = Count::Any;

    fn count(config: &VmmConfig) -> usize {
        config.folders.len()
    }

    fn workers(config: &VmmConfig) -> Vec<WorkerRole> {
        config.folders.iter().map(|_| WorkerRole::Fs).collect()
    }

    fn create(
        wiring: &Wiring<'_>,
        number: usize,
        state: Option<&FsState>,
    ) -> Result<Fs, DeviceError> {
        let folder = &wiring.args.config.folders[number];
        let server = folder.server.map(|number| {
            let tag = folder.tag.clone();
            fds::inherited(number).map_err(|_| DeviceError::FsDescriptor { tag, number })
        });
        let args = FsArgs {
            tag: folder.tag.clone(),
            server: server.transpose()?,
            message_max: MESSAGE_MAX,
        };
        Ok(match state {
            None => Fs::new(args)?,
            Some(state) => Fs::restore(args, state)?,
        })
    }

    fn save(device: &Fs) -> FsState {
        device.save()
    }
}
