//! The program in measured guests. As PID 1 it reads a disk, works in a shared folder or serves
//! traffic, as the kernel's parameters say; as another program it is a TCP server, or one of HTTP.

mod disk;
mod folder;
mod network;

use anyhow::Result;
use jiffy_bench::plan::FAILURE;
use jiffy_bench::{http, traffic, work};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

/// Data register of COM1.
const COM1: u64 = 0x3f8;

fn main() {
    if std::process::id() != 1 {
        let is_http = std::env::args().nth(1).as_deref() == Some(http::ARGUMENT);
        let served = match is_http {
            true => network::answer_in_http(),
            false => network::answer(),
        };
        if let Err(error) = served {
            eprintln!("{error:#}");
            std::process::exit(1);
        }
        return;
    }
    let port = OpenOptions::new().write(true).open("/dev/port");
    let port = port.expect("the initramfs has /dev/port");
    let has = |parameter: &str| std::env::var_os(parameter).is_some();
    let measured = if has(traffic::PARAMETER) {
        network::serve(&port)
    } else if has(work::PARAMETER) {
        folder::measure(&port)
    } else {
        disk::measure(&port)
    };
    if let Err(error) = measured {
        let _ = say(&port, FAILURE);
        for byte in format!("{error:#}\n").bytes() {
            let _ = say(&port, byte);
        }
    }
    loop {
        std::thread::park();
    }
}

/// Writes a byte to COM1.
fn say(port: &File, byte: u8) -> Result<()> {
    Ok(port.write_all_at(&[byte], COM1)?)
}
