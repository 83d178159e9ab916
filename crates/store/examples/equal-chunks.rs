//! Measures how many bytes it saves to refer to chunks of a VM's RAM in its root file system
//! instead of storing them: `equal-chunks RAM.image ROOT`.
//!
//! Rewrites the image beside the root, into a temporary folder, without and with the root as its
//! backing file.

use jiffy_store::optimise::{Contents, options_of};
use jiffy_store::{Backing, Codec, ImageReader, WriteOptions, Written, write_image};
use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(ram), Some(root)) = (arguments.next(), arguments.next()) else {
        return Err("usage: equal-chunks RAM.image ROOT".into());
    };
    let image = ImageReader::open(&ram)?;
    let folder = tempfile::tempdir()?;
    let write = |backing| -> Result<(Written, Duration), Box<dyn Error>> {
        let options = WriteOptions {
            codec: Codec::Zstd(3),
            parent: None,
            parent_name: None,
            backing,
            ..options_of(&image)?
        };
        let begun = Instant::now();
        let written = write_image(&folder.path().join("image"), &Contents(&image), &options)?;
        Ok((written, begun.elapsed()))
    };
    let (without, plain_time) = write(None)?;
    let begun = Instant::now();
    let backing = Backing::open(&root)?;
    println!(
        "the root has {:.1} MiB; its digest and table took {:?}",
        mib(backing.reference.size),
        begun.elapsed()
    );
    let (with, search_time) = write(Some(backing))?;
    let (before, after) = (without.stored_bytes, with.stored_bytes);
    println!(
        "without: {:.2} MiB stored, written in {plain_time:?}",
        mib(before)
    );
    println!(
        "with:    {:.2} MiB stored, written in {search_time:?}; {} of {} chunks are in the root",
        mib(after),
        with.in_backing,
        with.chunks - with.zero
    );
    println!(
        "saved:   {:.2} MiB, {:.1} %",
        mib(before - after),
        (before - after) as f64 / before.max(1) as f64 * 100.0
    );
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
