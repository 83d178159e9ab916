//! Captures and restores a working guest repeatedly, without a node: each time in a new
//! `jiffy-vmm`, from the previous one's capture.
//!
//! As PID 1 of a guest it computes line after line, and puts each into a file,
//! onto a disk, and over a vsock connection, which every restore resets: then
//! it connects anew and goes on with the line that the host asks for.
//!
//! * `host CYCLES MIB`: runs the test and reports the result.

mod guest;
mod host;

use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// `number sum\n`
const LINE: usize = 20;
const SECTOR: u64 = 512;
const DISK_BYTES: u64 = 16 << 20;
const PORT: u32 = 9000;
/// Asks the guest to check all that it has written.
const CHECK: u8 = b'C';

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["host", cycles, memory_mib] => host::host(cycles, memory_mib),
        _ if std::process::id() == 1 => guest::guest(),
        _ => Err("host CYCLES MIB".into()),
    };
    if let Err(error) = done {
        eprintln!("endurance: {error}");
        std::process::exit(1);
    }
}

/// The sum of a line: that of the one before, and work on it.
fn next_sum(sum: u32, number: u64) -> u32 {
    (0..2000).fold(sum, |sum, turn| {
        sum.wrapping_mul(1_664_525)
            .wrapping_add(number as u32 ^ turn)
    })
}

fn line(number: u64, sum: u32) -> [u8; LINE] {
    let text = format!("{number:010} {sum:08x}\n");
    text.as_bytes().try_into().expect("ten digits and eight")
}

fn place(number: u64) -> u64 {
    number * SECTOR % DISK_BYTES
}
