//! Extracts the ELF kernel from a bzImage.
//!
//! QEMU boots an ELF kernel with a PVH note directly. That avoids decompression in the machine,
//! which takes most of a second in software emulation.

use super::ImageError;
use std::io::Read;

/// Largest unpacked kernel, bytes.
const MAX_KERNEL: u64 = 512 * 1024 * 1024;

/// Magic number of lz4's legacy format (`lz4 -l`), which Linux' build uses: blocks, each after its
/// length (lz4's lz4_Frame_format.md, "Legacy frame").
const LZ4_LEGACY: [u8; 4] = 0x184c_2102u32.to_le_bytes();
/// Largest unpacked block of that format, bytes.
const LZ4_BLOCK: i32 = 8 << 20;

/// Extracts the ELF file from a bzImage whose payload is compressed with zstd or LZ4, as Debian's
/// are (Linux, Documentation/arch/x86/boot.rst: `payload_offset`).
///
/// # Errors
///
/// If it has no boot header, its payload lies outside of it or can't be unpacked, or that is no ELF
/// file.
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
    let kernel = match payload.strip_prefix(&LZ4_LEGACY) {
        Some(blocks) => unpack_lz4(blocks),
        None => unpack_zstd(payload),
    };
    let kernel = kernel.map_err(bad)?;
    if !kernel.starts_with(b"\x7fELF") {
        return Err(bad("its payload is not an ELF file"));
    }
    Ok(kernel)
}

fn unpack_zstd(payload: &[u8]) -> Result<Vec<u8>, &'static str> {
    let decoder = ruzstd::decoding::StreamingDecoder::new(payload)
        .map_err(|_| "its payload is compressed neither with zstd nor with LZ4")?;
    let mut kernel = Vec::new();
    decoder
        .take(MAX_KERNEL)
        .read_to_end(&mut kernel)
        .map_err(|_| "its payload does not decompress")?;
    Ok(kernel)
}

/// Unpacks LZ4 blocks. Linux' build appends the unpacked size after the last block.
fn unpack_lz4(mut blocks: &[u8]) -> Result<Vec<u8>, &'static str> {
    const BAD: &str = "its payload does not decompress";
    let mut kernel = Vec::new();
    while let Some((length, rest)) = blocks.split_first_chunk() {
        if rest.is_empty() {
            break;
        }
        let length = u32::from_le_bytes(*length) as usize;
        let (block, rest) = rest.split_at_checked(length).ok_or(BAD)?;
        kernel.extend(lz4::block::decompress(block, Some(LZ4_BLOCK)).map_err(|_| BAD)?);
        if kernel.len() as u64 > MAX_KERNEL {
            return Err(BAD);
        }
        blocks = rest;
    }
    Ok(kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bzImage with this payload.
    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 4096];
        image[0x1f1] = 7;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        image.extend_from_slice(payload);
        image
    }

    #[test]
    fn an_lz4_payload_is_unpacked_block_by_block() {
        let kernel: Vec<u8> = b"\x7fELF"
            .iter()
            .copied()
            .chain((0..200).cycle().take(9 << 20))
            .collect();
        let mut payload = LZ4_LEGACY.to_vec();
        for block in kernel.chunks(LZ4_BLOCK as usize) {
            let packed = lz4::block::compress(block, None, false).unwrap();
            payload.extend_from_slice(&(packed.len() as u32).to_le_bytes());
            payload.extend_from_slice(&packed);
        }
        let blocks = payload.len();
        payload.extend_from_slice(&(kernel.len() as u32).to_le_bytes());
        assert!(elf_kernel(&image(&payload)).unwrap() == kernel);
        // A payload that is cut off is refused.
        for end in [LZ4_LEGACY.len() + 2, LZ4_LEGACY.len() + 40, blocks - 1] {
            let cut = elf_kernel(&image(&payload[..end]));
            assert!(cut.is_err(), "{end} of {blocks}");
        }
    }

    #[test]
    fn a_file_that_is_no_bzimage_is_refused_with_a_reason() {
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
