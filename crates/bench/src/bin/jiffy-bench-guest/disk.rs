//! Reads `/dev/vda` with O_DIRECT between two marks on COM1. The kernel parameter `disk_read=`,
//! which arrives in the environment, selects the kind of reads.

use crate::say;
use anyhow::{Context, Result, bail};
use jiffy_bench::disk::{BYTES, PIECE_RANDOM, PIECE_SEQUENTIAL, RANDOM_READS, Reading};
use jiffy_bench::plan::MARKER;
use rustix::mount::{MountFlags, mount};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// Linux, uapi/asm-generic/fcntl.h, on x86-64.
const O_DIRECT: i32 = 0o40000;

/// Reads between two marks.
pub fn measure(port: &File) -> Result<()> {
    let text = std::env::var("disk_read").context("disk_read= is missing")?;
    let reading: Reading = text.parse()?;
    mount("devtmpfs", "/dev", "devtmpfs", MountFlags::empty(), c"")?;
    let disk = OpenOptions::new()
        .read(true)
        .custom_flags(O_DIRECT)
        .open("/dev/vda")
        .context("/dev/vda")?;
    let mut memory = vec![1; PIECE_SEQUENTIAL + 4096];
    let start = memory.as_ptr().addr().next_multiple_of(4096) - memory.as_ptr().addr();
    let buffer = &mut memory[start..start + PIECE_SEQUENTIAL];
    if reading.warm {
        pass(&disk, &reading, buffer)?;
    } else {
        // Warm-up: one read outside of the measured range.
        disk.read_exact_at(buffer, BYTES)?;
    }
    say(port, MARKER)?;
    pass(&disk, &reading, buffer)?;
    say(port, MARKER)
}

fn pass(disk: &File, reading: &Reading, buffer: &mut [u8]) -> Result<()> {
    if !reading.random {
        for offset in (0..BYTES).step_by(PIECE_SEQUENTIAL) {
            disk.read_exact_at(buffer, offset)?;
        }
    } else {
        let piece = &mut buffer[..PIECE_RANDOM];
        let pieces = BYTES / PIECE_RANDOM as u64;
        let mut place: u64 = 1;
        for _ in 0..RANDOM_READS {
            // Knuth's MMIX generator: every VMM gets the same offsets.
            place = place
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            disk.read_exact_at(piece, (place >> 33) % pieces * PIECE_RANDOM as u64)?;
        }
    }
    if buffer[0] == 1 {
        bail!("a read of the disk returned no bytes");
    }
    Ok(())
}
