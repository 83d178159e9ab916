//! The ELF kernel inside a bzImage.
//!
//! QEMU boots an ELF kernel with a PVH note directly. That saves the
//! decompression inside the machine, which in pure software costs most of a second.

use super::ImageError;
use std::io::Read;

/// A kernel larger than this is not unpacked, bytes.
const MAX_KERNEL: u64 = 512 * 1024 * 1024;

/// Takes the ELF file out of a bzImage whose payload is zstd-compressed, as
/// Debian's are (Linux, Documentation/arch/x86/boot.rst: `payload_offset`).
pub fn elf_kernel(image: &[u8]) -> Result<Vec<u8>, ImageError> {
    let field =
        |at: usize| -> Option<u32> { Some(u32::from_le_bytes(*image.get(at..)?.first_chunk()?)) };
    let bad = |what: &str| ImageError::Kernel(what.into());
    if image.get(0x202..0x206) != Some(b"HdrS") {
        return Err(bad("it has no boot header"));
    }
    let setup_sectors = match image[0x1f1] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let offset = field(0x248).ok_or_else(|| bad("its boot header is cut short"))? as usize;
    let length = field(0x24c).ok_or_else(|| bad("its boot header is cut short"))? as usize;
    let start = (setup_sectors + 1) * 512 + offset;
    let payload = start
        .checked_add(length)
        .and_then(|end| image.get(start..end))
        .ok_or_else(|| bad("its payload lies outside the file"))?;
    let decoder = ruzstd::decoding::StreamingDecoder::new(payload)
        .map_err(|_| bad("its payload is not zstd-compressed"))?;
    let mut kernel = Vec::new();
    decoder
        .take(MAX_KERNEL)
        .read_to_end(&mut kernel)
        .map_err(|_| bad("its payload does not decompress"))?;
    if !kernel.starts_with(b"\x7fELF") {
        return Err(bad("its payload is no ELF file"));
    }
    Ok(kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_bzimage_is_refused_with_a_reason() {
        for bytes in [vec![], vec![0; 100], vec![0xff; 4096]] {
            let error = elf_kernel(&bytes).unwrap_err();
            assert!(matches!(error, ImageError::Kernel(_)), "{error}");
        }
    }

    #[test]
    fn a_payload_outside_the_file_is_refused() {
        let mut image = vec![0; 4096];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&u32::MAX.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        let ImageError::Kernel(why) = elf_kernel(&image).unwrap_err() else {
            panic!("wrong kind");
        };
        assert!(why.contains("outside"), "{why}");
    }
}
