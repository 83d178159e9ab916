//! Measures how fast one core reads an image, per codec: `cargo run --release -p jiffy-store
//! --example throughput -- RAM-DUMP`
//!
//! MiB/s count uncompressed bytes of chunks that are not zero, per second of processor time. Every
//! chunk is read and its checksum compared: with one call per chunk, in the order of addresses and
//! in random order, and out of large sequential reads, as a prefetch does.

use jiffy_store::{Codec, Decoder, ImageReader, Kind, WriteOptions, write_image};
use rustix::time::{ClockId, clock_gettime};
use std::error::Error;
use std::fs::File;
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    let Some(dump) = std::env::args_os().nth(1) else {
        return Err("usage: throughput RAM-DUMP".into());
    };
    let source = File::open(&dump)?;
    let folder = tempfile::tempdir()?;
    let target = folder.path().join("image");
    println!(
        "{:>6} {:<17} {:>9} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "chunk", "codec", "file", "ratio", "write", "in order", "random", "µs/chunk", "prefetch"
    );
    for chunk_size in [4 << 10, 8 << 10, 64 << 10] {
        for (name, codec, dictionary) in [
            ("none", Codec::None, false),
            ("lz4", Codec::Lz4, false),
            ("lz4 high", Codec::Lz4High, false),
            ("zstd 1", Codec::Zstd(1), false),
            ("zstd 3", Codec::Zstd(3), false),
            ("zstd 3 dictionary", Codec::Zstd(3), true),
        ] {
            let options = WriteOptions {
                chunk_size,
                codec,
                dictionary,
                ..WriteOptions::default()
            };
            let begun = processor_time(ClockId::ProcessCPUTime);
            let written = write_image(&target, &source, &options)?;
            let writing = processor_time(ClockId::ProcessCPUTime) - begun;
            let image = ImageReader::open(&target)?;
            let mut order: Vec<u32> = Vec::new();
            for index in 0..image.chunks() {
                if image.kind(index)? != Kind::Zero {
                    order.push(index);
                }
            }
            let in_order = best(|| read(&image, &order))?;
            let prefetch = best(|| prefetch(&image, &order))?;
            shuffle(&mut order);
            let random = best(|| read(&image, &order))?;
            let bytes = order.len() as f64 * f64::from(chunk_size);
            let speed = |time: Duration| bytes / time.as_secs_f64() / f64::from(1 << 20);
            println!(
                "{:>5}K {:<17} {:>8.1}M {:>5.1}% {:>9.0} {:>9.0} {:>9.0} {:>9.2} {:>9.0}",
                chunk_size >> 10,
                name,
                written.file_bytes as f64 / f64::from(1 << 20),
                100.0 * written.stored_bytes as f64 / bytes,
                speed(writing),
                speed(in_order),
                speed(random),
                random.as_secs_f64() * 1e6 / order.len() as f64,
                speed(prefetch),
            );
        }
    }
    Ok(())
}

/// The least processor time that this thread spent in one of several runs.
fn best(mut run: impl FnMut() -> Result<(), Box<dyn Error>>) -> Result<Duration, Box<dyn Error>> {
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let begun = processor_time(ClockId::ThreadCPUTime);
        run()?;
        best = best.min(processor_time(ClockId::ThreadCPUTime) - begun);
    }
    Ok(best)
}

fn processor_time(clock: ClockId) -> Duration {
    clock_gettime(clock).try_into().expect("it is not negative")
}

/// Reads the chunks one by one.
fn read(image: &ImageReader, order: &[u32]) -> Result<(), Box<dyn Error>> {
    let mut decoder = Decoder::new();
    let mut chunk = vec![0; image.chunk_size() as usize];
    for index in order {
        image.read_chunk_with(&mut decoder, *index, &mut chunk)?;
    }
    Ok(())
}

/// Reads the file in large pieces and decodes the chunks out of them.
fn prefetch(image: &ImageReader, order: &[u32]) -> Result<(), Box<dyn Error>> {
    const PIECE: u64 = 4 << 20;
    let mut decoder = Decoder::new();
    let mut chunk = vec![0; image.chunk_size() as usize];
    let mut piece: Vec<u8> = Vec::new();
    let mut at = 0;
    for index in order {
        let Some(range) = image.stored_range(*index)? else {
            continue;
        };
        if range.start < at || range.end > at + piece.len() as u64 {
            at = range.start;
            let length = PIECE.max(range.end - at).min(image.file_bytes() - at);
            piece.resize(length as usize, 0);
            image.read_stored(at, &mut piece)?;
        }
        let stored = &piece[(range.start - at) as usize..(range.end - at) as usize];
        image.decode(&mut decoder, *index, stored, &mut chunk)?;
    }
    Ok(())
}

/// The same order every time.
fn shuffle(order: &mut [u32]) {
    let mut state = 1_u64;
    for last in (1..order.len()).rev() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        order.swap(last, (state >> 33) as usize % (last + 1));
    }
}
