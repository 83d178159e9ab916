//! QEMU's firmware configuration device, as the guest sees it on x86 ports
//! (QEMU, docs/specs/fw_cfg.rst): selector 0x510, data 0x511, DMA 0x514.
//!
//! * [`device`]: the device at its ports.
//! * [`items`]: the selectable items: signature, features, directory, files.
//! * [`dma`]: the DMA request.
//! * [`state`]: what a snapshot keeps of the device.

pub mod device;
mod dma;
pub mod items;
pub mod state;

#[cfg(test)]
mod tests;

pub use device::{FwCfg, PORT, PORTS, Refresh};
pub use items::{FILES_MAX, FwCfgError, FwCfgFile, NAME_MAX};
pub use state::{FwCfgFileState, FwCfgState};
