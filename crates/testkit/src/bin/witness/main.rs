//! A program for VMs under test, and for the machine: it does some work and detects inconsistencies.
//!
//! * `count FILE`: counts in FILE, up to ten times a second. Each time it appends a random number
//!   to `FILE.random`. If the monotonic clock ever goes backwards, it writes that to `FILE.bad`.
//! * `lines FILE`: writes line after line to FILE and to stdout, each with a checksum; completes
//!   short writes.
//! * `paint FILE TAG FIRST STEP`: from page FIRST on fills each STEPth page of FILE with a pattern
//!   of TAG and the page's number.
//! * `look FILE`: prints the tags of all pages as `TAG*COUNT…`, or reports a page with mixed
//!   contents.
//! * `clock`: prints the time of day, in seconds since 1970.
//! * `cid`: prints the guest's vsock address.
//! * `seeds`: prints this process's `AT_RANDOM` and the first bytes of `getrandom`. Python, for
//!   example, seeds its hashes from such bytes.
//! * `ask ADDRESS SECONDS`: sends stdin to a TCP server and prints its answer; then, on stderr, how
//!   the connection ended: `closed`, `refused`, `reset` or `no end`.
//! * `fill FILE KIB`: makes FILE as large as its file system allows, but for some KiB.
//! * `watch SECONDS`: looks for two VMMs of one VM, and prints them; at the end, how often it looked
//!   and how many VMMs there were at most.

#![allow(unsafe_code)] // Two system calls that std lacks: ioctl, clock_gettime.

mod machine;

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Error, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, SystemTime};

const PAGE: usize = 4096;
/// `_IO(7, 0xb9)`, linux/vm_sockets.h.
const IOCTL_VM_SOCKETS_GET_LOCAL_CID: libc::Ioctl = 0x7b9;

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["count", file] => count(file),
        ["lines", file] => lines(file),
        ["paint", file, tag, first, step] => {
            paint(file, number(tag)?, number(first)?, number(step)?)
        }
        ["look", file] => look(file),
        ["clock"] => clock(),
        ["cid"] => cid(),
        ["ask", address, seconds] => machine::ask(address, number(seconds)?),
        ["fill", file, kib] => machine::fill(file, number(kib)?),
        ["watch", seconds] => machine::watch(number(seconds)?),
        ["seeds"] => {
            println!("{}", seeds()?);
            Ok(())
        }
        _ => Err(Error::other(
            "count, lines, paint, look, clock, cid, seeds, ask, fill or watch",
        )),
    }
}

fn number(text: &str) -> io::Result<usize> {
    text.parse().map_err(Error::other)
}

fn monotonic_ns() -> i64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a local timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

fn seeds() -> io::Result<String> {
    let mut bytes = [0u8; 32];
    // SAFETY: AT_RANDOM is the address of 16 bytes (getauxval(3)), which stay;
    // getrandom writes at most the given number of bytes, which exist.
    let got = unsafe {
        let given = libc::getauxval(libc::AT_RANDOM) as *const u8;
        std::ptr::copy_nonoverlapping(given, bytes.as_mut_ptr(), 16);
        libc::getrandom(bytes[16..].as_mut_ptr().cast(), 16, 0)
    };
    if got != 16 {
        return Err(Error::last_os_error());
    }
    let mut text = String::new();
    for (at, byte) in bytes.iter().enumerate() {
        let space = if at == 16 { " " } else { "" };
        let _ = write!(text, "{space}{byte:02x}");
    }
    Ok(text)
}

fn count(path: &str) -> io::Result<()> {
    std::fs::write(format!("{path}.seeds"), seeds()?)?;
    let file = File::create(path)?;
    let mut numbers = File::create(format!("{path}.random"))?;
    let mut source = File::open("/dev/urandom")?;
    let mut last = monotonic_ns();
    for n in 1u64.. {
        let mut random = [0; 8];
        source.read_exact(&mut random)?;
        numbers.write_all(format!("{:016x}\n", u64::from_ne_bytes(random)).as_bytes())?;
        file.write_all_at(format!("{n:010}\n").as_bytes(), 0)?;
        for _ in 0..5 {
            let now = monotonic_ns();
            if now < last {
                let bad = format!("{last} was followed by {now}\n");
                std::fs::write(format!("{path}.bad"), bad)?;
            }
            last = now;
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}

fn lines(path: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    let mut stdout = io::stdout();
    let mut sum = 1u32;
    for n in 1u64.. {
        // The sum shows any error in the computation.
        for turn in 0..2000 {
            sum = sum.wrapping_mul(1_664_525).wrapping_add(n as u32 ^ turn);
        }
        let line = format!("{n} {sum:08x}\n");
        file.write_all(line.as_bytes())?;
        stdout.write_all(line.as_bytes())?;
        stdout.flush()?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn word(page: usize, tag: usize) -> [u8; 8] {
    ((tag << 32 | page) as u64).to_ne_bytes()
}

fn paint(path: &str, tag: usize, first: usize, step: usize) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    let pages = file.metadata()?.len() as usize / PAGE;
    for page in (first..pages).step_by(step) {
        file.write_all_at(&word(page, tag).repeat(PAGE / 8), (page * PAGE) as u64)?;
    }
    Ok(())
}

fn look(path: &str) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut bytes = [0; PAGE];
    let mut text = String::new();
    let mut run = (0, 0);
    for page in 0..file.metadata()?.len() as usize / PAGE {
        file.read_exact(&mut bytes)?;
        let tag = u64::from_ne_bytes(bytes[..8].try_into().expect("eight")) as usize >> 32;
        if bytes[..8] != word(page, tag) || bytes[8..] != bytes[..PAGE - 8] {
            return Err(Error::other(format!("page {page} has mixed contents")));
        }
        if run.0 != tag {
            flush(&mut text, run);
            run = (tag, 0);
        }
        run.1 += 1;
    }
    flush(&mut text, run);
    println!("{text}");
    Ok(())
}

fn flush(text: &mut String, (tag, count): (usize, usize)) {
    if count > 0 {
        let _ = write!(text, "{tag}*{count} ");
    }
}

fn clock() -> io::Result<()> {
    let now = SystemTime::UNIX_EPOCH.elapsed().map_err(Error::other)?;
    println!("{:.6}", now.as_secs_f64());
    Ok(())
}

fn cid() -> io::Result<()> {
    let device = File::open("/dev/vsock")?;
    let mut cid = 0u32;
    // SAFETY: the ioctl writes one u32, which exists.
    match unsafe { libc::ioctl(device.as_raw_fd(), IOCTL_VM_SOCKETS_GET_LOCAL_CID, &mut cid) } {
        0 => {
            println!("{cid}");
            Ok(())
        }
        _ => Err(Error::last_os_error()),
    }
}
