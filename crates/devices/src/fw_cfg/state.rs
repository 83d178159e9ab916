//! What a snapshot keeps.

use serde::{Deserialize, Serialize};

/// A saved fw_cfg device. The files travel along: a guest may read them at
/// any time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FwCfgState {
    /// Files.
    pub files: Vec<FwCfgFileState>,
    /// The selected item.
    pub selector: u16,
    /// The next byte of it, possibly past its end.
    pub offset: u32,
    /// What the guest wrote of a DMA address, big endian.
    pub dma_address: [u8; 8],
}

/// A saved file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FwCfgFileState {
    /// Name.
    pub name: String,
    /// Contents.
    pub contents: Vec<u8>,
}
