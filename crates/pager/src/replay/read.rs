//! Reads recorded chunks with plain reads into a buffer, on one core.

use super::Touches;
use super::report::{Figures, Meter};
use super::strategy::Strategy;
use crate::image::{ChunkImage, Unreadable};
use crate::window::windows;
use jiffy_store::Decoder;
use std::io;

pub(super) fn run(
    image: &dyn ChunkImage,
    touches: &Touches,
    strategy: &Strategy,
) -> io::Result<Figures> {
    if strategy.prefetch {
        return in_windows(image, touches).map_err(io::Error::other);
    }
    in_order(image, touches).map_err(io::Error::other)
}

/// One read per chunk; a chunk that was read already is not read again.
fn in_order(image: &dyn ChunkImage, touches: &Touches) -> Result<Figures, Unreadable> {
    let size = image.chunk_size() as u64;
    let mut buffer = vec![0; image.chunk_size()];
    let mut decoder = Decoder::new();
    let mut there = vec![false; touches.size.div_ceil(size) as usize];
    let mut meter = Meter::start(touches);
    for offset in &touches.offsets {
        meter.begin();
        for chunk in offset / size..(offset + touches.chunk_size).div_ceil(size) {
            if !std::mem::replace(&mut there[chunk as usize], true) {
                image.read(&mut decoder, chunk as u32, &mut buffer)?;
                std::hint::black_box(&buffer);
                meter.faults += 1;
            }
        }
        meter.end();
    }
    Ok(meter.finish())
}

/// Reads the working set as it is stored. A sample is a chunk's share of its window's time.
fn in_windows(image: &dyn ChunkImage, touches: &Touches) -> Result<Figures, Unreadable> {
    let mut decoder = Decoder::new();
    let mut chunk_buffer = vec![0; image.chunk_size()];
    let mut stored_buffer = Vec::new();
    let mut meter = Meter::start(touches);
    let working_set = image.working_set()?;
    let found = working_set
        .iter()
        .filter_map(|chunk| Some((*chunk, image.stored(*chunk)?)));
    for window in windows(found.collect()) {
        meter.begin();
        stored_buffer.resize((window.file.end - window.file.start) as usize, 0);
        image.read_stored(window.file.start, &mut stored_buffer)?;
        meter.faults += 1;
        for (chunk, place) in &window.chunks {
            let stored = &stored_buffer[window.within(place)];
            image.decode(&mut decoder, *chunk, stored, &mut chunk_buffer)?;
            std::hint::black_box(&chunk_buffer);
        }
        meter.end_shared(window.chunks.len());
    }
    // Zero chunks are in no window, and take no time.
    meter.pad(touches.offsets.len());
    Ok(meter.finish())
}
