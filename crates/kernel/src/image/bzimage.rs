//! The setup header of a bzImage (Documentation/arch/x86/boot.rst, "The Real-Mode
//! Kernel Header").

use std::io::Read;

use flate2::read::GzDecoder;

use super::bytes::{array, slice_at, u16_at, u32_at};
use super::{Malformed, NoConfig, ikconfig};
use crate::config::Config;

const BOOT_FLAG: usize = 0x1fe;
const XLF_KERNEL_64: u16 = 1;
/// Most bytes of a vmlinux that are unpacked from a bzImage.
const MAX_PAYLOAD: u64 = 256 << 20;

pub struct Header {
    pub protocol: (u8, u8),
    pub entry_64: bool,
    /// The compressed vmlinux: offset and length in the file.
    payload: Option<(u64, u64)>,
}

impl Header {
    /// Parses the header; `None` if the file does not begin like a boot sector.
    ///
    /// # Errors
    ///
    /// If the boot sector is not followed by a setup header, or the header is cut short.
    pub fn parse(data: &[u8]) -> Result<Option<Self>, Malformed> {
        if u16_at(data, BOOT_FLAG) != Some(0xaa55) {
            return Ok(None);
        }
        if array(data, 0x202) != Some(*b"HdrS") {
            return Err(Malformed::SetupHeader);
        }
        Self::fields(data).map(Some).ok_or(Malformed::Truncated)
    }

    fn fields(data: &[u8]) -> Option<Self> {
        let [minor, major] = array(data, 0x206)?;
        let protocol = (major, minor);
        let entry_64 = protocol >= (2, 12) && u16_at(data, 0x236)? & XLF_KERNEL_64 != 0;
        let payload = if protocol >= (2, 8) {
            // Boot protocol: 0 means four sectors.
            let sectors = u64::from(match *data.get(0x1f1)? {
                0 => 4,
                sectors => sectors,
            });
            let offset = (sectors + 1) * 512 + u64::from(u32_at(data, 0x248)?);
            Some((offset, u64::from(u32_at(data, 0x24c)?)))
        } else {
            None
        };
        Some(Self {
            protocol,
            entry_64,
            payload,
        })
    }

    /// The configuration embedded in the compressed kernel.
    ///
    /// # Errors
    ///
    /// If the payload lies outside `data` or is not compressed with gzip, or the kernel in it has
    /// no configuration or a damaged one.
    pub fn config(&self, data: &[u8]) -> Result<Config, NoConfig> {
        let (offset, length) = self.payload.ok_or(NoConfig::Absent)?;
        let payload = slice_at(data, offset, length).ok_or(NoConfig::Damaged)?;
        if !payload.starts_with(&[0x1f, 0x8b]) {
            return Err(compression(payload).map_or(NoConfig::Absent, NoConfig::Compressed));
        }
        let mut kernel = Vec::new();
        // A decompression error is ignored, since Linux appends the unpacked size to the payload.
        // The bytes unpacked before it are searched.
        let _ = GzDecoder::new(payload)
            .take(MAX_PAYLOAD)
            .read_to_end(&mut kernel);
        ikconfig::find(&kernel)
    }
}

fn compression(payload: &[u8]) -> Option<&'static str> {
    const KNOWN: [(&[u8], &str); 6] = [
        (&[0x28, 0xb5, 0x2f, 0xfd], "zstd"),
        (&[0xfd, b'7', b'z', b'X', b'Z', 0], "xz"),
        (&[0x02, 0x21, 0x4c, 0x18], "lz4"),
        (b"BZh", "bzip2"),
        (&[0x89, b'L', b'Z', b'O'], "lzo"),
        (&[0x5d, 0, 0], "lzma"),
    ];
    KNOWN
        .iter()
        .find(|(magic, _)| payload.starts_with(magic))
        .map(|&(_, name)| name)
}
