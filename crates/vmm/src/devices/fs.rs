//! Folders of the host.

use super::error::DeviceError;
use super::folder_session;
use super::virtio::VirtioKind;
use super::wiring::Wiring;
use crate::sections::{Count, Section};
use jiffy_devices::virtio::device::WorkerRole;
use jiffy_devices::virtio::fs::{Fs, FsArgs, FsState};
use jiffy_sys::fds;
use jiffy_wire::files::MESSAGE_MAX;
use jiffy_wire::vmm::VmmConfig;
use serde::{Deserialize, Serialize};

/// What a snapshot keeps of a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FolderState {
    /// The device.
    pub device: FsState,
    /// What its server knew of the guest's files, as the server wrote it. Only a server reads it.
    pub session: Vec<u8>,
}

/// Folders of the host, in the order of the configuration.
#[derive(Debug)]
pub struct FsKind;

impl VirtioKind for FsKind {
    type Device = Fs;
    type State = FolderState;
    // Version 1 had no session, so no guest could continue from it, and none was captured.
    const SECTION: Section = Section::new("fs", 2);
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
        state: Option<&FolderState>,
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
        let Some(state) = state else {
            return Ok(Fs::new(args)?);
        };
        let mut device = Fs::restore(args, &state.device)?;
        if device.has_server() {
            folder_session::restore(&mut device, &state.session)
                .map_err(|why| DeviceError::FsSession(folder.tag.clone(), why))?;
        }
        Ok(device)
    }

    fn save(device: &mut Fs) -> Result<FolderState, DeviceError> {
        let state = device.save();
        let session = folder_session::save(device)
            .map_err(|why| DeviceError::FsSession(state.tag.clone(), why))?;
        Ok(FolderState {
            device: state,
            session,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If this fails, VMs that were captured before can't be restored: a change needs a new version.
    #[test]
    fn the_saved_form_of_version_2_does_not_drift() {
        let state = FolderState {
            device: FsState {
                tag: "folder0".into(),
            },
            session: vec![0, 0xff, 1],
        };
        let bytes = postcard::to_allocvec(&state).unwrap();
        assert_eq!(bytes, b"\x07folder0\x03\0\xff\x01");
        assert_eq!(postcard::from_bytes(&bytes), Ok(state));
    }
}
