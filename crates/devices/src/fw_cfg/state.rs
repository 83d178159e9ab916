//! What a snapshot keeps of fw_cfg.

use serde::{Deserialize, Serialize};

/// A saved fw_cfg device, with its files: a guest may read them at any time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FwCfgState {
    /// The files.
    pub files: Vec<FwCfgFileState>,
    /// The selector of the selected item.
    pub selector: u16,
    /// Offset of its next byte, possibly past its end.
    pub offset: u32,
    /// The DMA address as far as the guest has written it, big endian.
    pub dma_address: [u8; 8],
}

/// A saved file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FwCfgFileState {
    /// The file's name.
    pub name: String,
    /// The file's contents.
    pub contents: Vec<u8>,
}
