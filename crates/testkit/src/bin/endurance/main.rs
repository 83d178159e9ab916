//! Captures and restores a working guest repeatedly, without a node: each time in a new
//! `jiffy-vmm`, from the previous one's capture.
//!
//! The guest's PID 1 computes line after line. It writes each to a file and a disk, and sends it
//! over a vsock connection. A restore resets the connection; then PID 1 reconnects and continues
//! with the line that the host asks for.
//!
//! * `host CYCLES MIB`: runs the test and reports the result.

mod guest;
mod host;

use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Length of a line, `number sum\n`, bytes.
const LINE: usize = 20;
const SECTOR: u64 = 512;
const DISK_BYTES: u64 = 16 << 20;
const PORT: u32 = 9000;
/// A byte that asks the guest to check everything it has written.
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

/// Computes the sum of a line from that of the line before.
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
