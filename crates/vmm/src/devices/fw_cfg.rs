//! fw_cfg: files for the guest.

use super::error::DeviceError;
use super::kind::DeviceKind;
use super::wiring::Wiring;
use super::{Devices, Shared, shared};
use crate::sections::{Count, Section};
use jiffy_devices::fw_cfg::{self, FwCfg, FwCfgFile, FwCfgState};
use jiffy_sys::mutex::lock;
use jiffy_wire::vmm::{FwCfgContents, VmmConfig};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Largest fw_cfg file read from disk, bytes.
const FILE_MAX: u64 = 64 << 20;

/// fw_cfg. The device exists even without files.
#[derive(Debug)]
pub struct FwCfgKind;

impl DeviceKind for FwCfgKind {
    type Device = Shared<FwCfg>;
    type State = FwCfgState;
    const SECTION: Section = Section::new("fw_cfg", 1);
    const NAME: &'static str = "fw_cfg";
    const COUNT: Count = Count::One;

    fn count(_config: &VmmConfig) -> usize {
        1
    }

    fn attach(
        wiring: &mut Wiring<'_>,
        _number: usize,
        state: Option<&FwCfgState>,
    ) -> Result<Shared<FwCfg>, DeviceError> {
        let memory = wiring.args.ram.memory().clone();
        let device = shared(match state {
            None => FwCfg::new(files(wiring.args.config)?, memory)?,
            Some(state) => FwCfg::restore(memory, state)?,
        });
        wiring.add_ports(fw_cfg::PORT, fw_cfg::PORTS, device.clone())?;
        Ok(device)
    }

    fn save(device: &Shared<FwCfg>) -> Result<FwCfgState, DeviceError> {
        Ok(lock(device).save())
    }
}

impl Devices {
    /// Replaces the contents of these files of fw_cfg.
    ///
    /// # Errors
    ///
    /// If the device refuses a file ([`fw_cfg::FwCfgError`]).
    pub fn replace_fw_cfg(&self, files: Vec<FwCfgFile>) -> Result<(), DeviceError> {
        match self.first::<FwCfgKind>() {
            Some(device) => Ok(lock(device).replace(files)?),
            None => Ok(()),
        }
    }

    /// From now on a file of fw_cfg is generated again whenever the guest selects it.
    pub fn refresh_fw_cfg(&self, name: &str, refresh: fw_cfg::Refresh) {
        if let Some(device) = self.first::<FwCfgKind>() {
            lock(device).refresh_on_select(name, refresh);
        }
    }
}

/// Reads the files that the configuration gives the guest.
///
/// # Errors
///
/// If a file can't be read, or is larger than 64 MiB.
pub fn files(config: &VmmConfig) -> Result<Vec<FwCfgFile>, DeviceError> {
    config
        .fw_cfg
        .iter()
        .map(|file| {
            let contents = match &file.contents {
                FwCfgContents::Text(text) => text.clone().into_bytes(),
                FwCfgContents::File(path) => {
                    read_bounded(path).map_err(|source| DeviceError::FwCfgRead {
                        path: path.clone(),
                        source,
                    })?
                }
            };
            Ok(FwCfgFile {
                name: file.name.clone(),
                contents,
            })
        })
        .collect()
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut contents = Vec::new();
    File::open(path)?
        .take(FILE_MAX + 1)
        .read_to_end(&mut contents)?;
    if contents.len() as u64 > FILE_MAX {
        return Err(io::Error::other(format!(
            "it is larger than {} MiB",
            FILE_MAX >> 20
        )));
    }
    Ok(contents)
}
