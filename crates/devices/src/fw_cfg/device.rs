//! The fw_cfg device at its ports.

use super::dma;
use super::items::{FwCfgError, FwCfgFile, Items, Position};
use super::state::{FwCfgFileState, FwCfgState};
use crate::GuestMemory;
use crate::bus::BusDevice;
use std::sync::Arc;
use vm_memory::GuestAddress;

/// First port.
pub const PORT: u64 = 0x510;
/// Number of ports.
pub const PORTS: u64 = 12;

const SELECTOR: u64 = 0;
const DATA: u64 = 1;
const DMA: u64 = 4;
const DMA_BYTES: u64 = 8;

/// The value of the DMA register, big endian.
const DMA_SIGNATURE: [u8; 8] = *b"QEMU CFG";

/// Generates the contents of a file that depends on the current time; they must always have the
/// same length.
pub type Refresh = Box<dyn FnMut() -> Vec<u8> + Send>;

/// The fw_cfg device. The guest can only read; writes of items are refused.
pub struct FwCfg {
    refresh: Option<(u16, Refresh)>,
    items: Items,
    memory: Arc<GuestMemory>,
    position: Position,
    dma_address: [u8; 8],
}

impl FwCfg {
    /// A device with these files. DMA requests are in `memory`.
    ///
    /// # Errors
    ///
    /// If a file is not valid, two have the same name, or there are more than
    /// [`FILES_MAX`](super::FILES_MAX).
    pub fn new(files: Vec<FwCfgFile>, memory: Arc<GuestMemory>) -> Result<FwCfg, FwCfgError> {
        Ok(FwCfg {
            refresh: None,
            items: Items::new(files)?,
            memory,
            position: Position {
                selector: 0,
                offset: 0,
            },
            dma_address: [0; 8],
        })
    }

    /// Restores a saved device.
    ///
    /// # Errors
    ///
    /// As for [`new`](FwCfg::new), for the files of the state.
    pub fn restore(memory: Arc<GuestMemory>, state: &FwCfgState) -> Result<FwCfg, FwCfgError> {
        let files = state.files.iter().map(|file| FwCfgFile {
            name: file.name.clone(),
            contents: file.contents.clone(),
        });
        let mut device = FwCfg::new(files.collect(), memory)?;
        device.position = Position {
            selector: state.selector,
            offset: state.offset,
        };
        device.dma_address = state.dma_address;
        Ok(device)
    }

    /// Replaces the contents of the files with these names; other files stay. The selected item is
    /// read from its beginning again.
    ///
    /// # Errors
    ///
    /// If a file is not valid.
    pub fn replace(&mut self, files: Vec<FwCfgFile>) -> Result<(), FwCfgError> {
        let others = self.items.files().iter();
        let others = others.filter(|old| files.iter().all(|new| new.name != old.name));
        let all = others.cloned().chain(files.iter().cloned()).collect();
        self.items = Items::new(all)?;
        self.refresh = None;
        self.position = Position::at_start(0);
        Ok(())
    }

    /// From now on `refresh` generates the contents of the file `name` again whenever the guest
    /// selects it through the selector port.
    pub fn refresh_on_select(&mut self, name: &str, refresh: Refresh) {
        self.refresh = self.items.selector(name).map(|item| (item, refresh));
    }

    /// The device's state, files included.
    pub fn save(&self) -> FwCfgState {
        FwCfgState {
            files: self
                .items
                .files()
                .iter()
                .map(|file| FwCfgFileState {
                    name: file.name.clone(),
                    contents: file.contents.clone(),
                })
                .collect(),
            selector: self.position.selector,
            offset: self.position.offset,
            dma_address: self.dma_address,
        }
    }
}

impl Position {
    pub(super) fn at_start(selector: u16) -> Position {
        Position {
            selector,
            offset: 0,
        }
    }

    /// The unread bytes of the selected item.
    pub(super) fn rest<'a>(&self, items: &'a Items) -> &'a [u8] {
        items
            .get(self.selector)
            .get(self.offset as usize..)
            .unwrap_or(&[])
    }

    /// Advances the offset, which saturates.
    pub(super) fn skip(&mut self, count: u32) {
        self.offset = self.offset.saturating_add(count);
    }
}

impl std::fmt::Debug for FwCfg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FwCfg")
            .field("items", &self.items)
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}

impl BusDevice for FwCfg {
    /// The data port returns consecutive bytes of the selected item, any number at once (`rep
    /// insb`), and zeros past its end.
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match offset {
            DATA => {
                let rest = self.position.rest(&self.items);
                let count = rest.len().min(data.len());
                data[..count].copy_from_slice(&rest[..count]);
                data[count..].fill(0);
                self.position
                    .skip(u32::try_from(data.len()).unwrap_or(u32::MAX));
            }
            DMA.. => {
                let start = ((offset - DMA).min(DMA_BYTES)) as usize;
                let from = &DMA_SIGNATURE[start..];
                let count = from.len().min(data.len());
                data[..count].copy_from_slice(&from[..count]);
                data[count..].fill(0);
            }
            _ => data.fill(0),
        }
    }

    /// The selector takes 16 bits, little endian. The DMA register takes a 64-bit address, big
    /// endian, as one or two writes; writing its low half starts the request. Writes to the data
    /// port are ignored.
    fn write(&mut self, offset: u64, data: &[u8]) {
        match (offset, data) {
            (SELECTOR, [low, high]) => {
                let selector = u16::from_le_bytes([*low, *high]);
                if let Some((item, refresh)) = &mut self.refresh
                    && *item == selector
                {
                    self.items.replace(selector, refresh());
                }
                self.position = Position::at_start(selector);
            }
            (DMA.., _) => {
                let start = (offset - DMA) as usize;
                let Some(end) = start.checked_add(data.len()) else {
                    return;
                };
                if !matches!((start, end), (0, 4) | (4, 8) | (0, 8)) {
                    return;
                }
                self.dma_address[start..end].copy_from_slice(data);
                if end == self.dma_address.len() {
                    let address = u64::from_be_bytes(std::mem::take(&mut self.dma_address));
                    let address = GuestAddress(address);
                    dma::run(&self.items, &mut self.position, &self.memory, address);
                }
            }
            _ => {}
        }
    }
}
