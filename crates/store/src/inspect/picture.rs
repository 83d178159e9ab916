//! The address space as a PNG, coloured by kind of chunk.

use super::map::step;
use super::summary::cells;
use crate::error::ImageError;
use crate::format::Kind;
use crate::reader::ImageReader;

/// Width of a picture, pixels.
const WIDTH: u32 = 512;
/// Greatest height of a picture, pixels.
const MAX_HEIGHT: u32 = 2048;

/// Red, green and blue of a kind, distinct for colour-blind readers too.
pub fn colour(kind: Kind) -> [u8; 3] {
    match kind {
        Kind::Zero => [0x20, 0x20, 0x20],
        Kind::Raw => [0xd5, 0x5e, 0x00],
        Kind::Lz4 => [0x56, 0xb4, 0xe9],
        Kind::Zstd => [0x00, 0x9e, 0x73],
        Kind::ZstdDictionary => [0xf0, 0xe4, 0x42],
        Kind::Parent => [0xcc, 0x79, 0xa7],
        Kind::Backing => [0x00, 0x72, 0xb2],
    }
}

/// A picture of the address space, row by row from the top, 512 pixels wide. A chunk is a square of
/// pixels; in a large image a pixel is several chunks and has the colour of the most frequent kind
/// that is not zero.
///
/// # Errors
///
/// If the table of chunks can't be read or is damaged.
pub fn png(image: &ImageReader) -> Result<Vec<u8>, ImageError> {
    let chunks = image.chunks();
    // The largest squares with which the picture is not higher than wide.
    let side = [16, 8, 4, 2]
        .into_iter()
        .find(|side| u64::from(chunks) <= u64::from(WIDTH / side).pow(2))
        .unwrap_or(1);
    let step = step(chunks, WIDTH * MAX_HEIGHT);
    let across = WIDTH / side;
    let rows = chunks.div_ceil(step).div_ceil(across).max(1);
    let outside = Kind::ALL.len() as u8;
    let mut pixels = vec![outside; (WIDTH * rows * side) as usize];
    for (number, found) in (0_u32..).zip(cells(image, step)) {
        let (kind, _) = found?;
        let (left, top) = (number % across * side, number / across * side);
        for row in top..top + side {
            let start = (row * WIDTH + left) as usize;
            pixels[start..start + side as usize].fill(kind as u8);
        }
    }
    let mut palette: Vec<u8> = Kind::ALL.into_iter().flat_map(colour).collect();
    palette.extend([0xff; 3]);
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, WIDTH, rows * side);
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_palette(palette);
    // It is written to memory, with as many pixels as the header says: nothing can fail.
    encoder
        .write_header()
        .and_then(|mut writer| writer.write_image_data(&pixels))
        .expect("a picture of the right size is written into memory");
    Ok(bytes)
}
