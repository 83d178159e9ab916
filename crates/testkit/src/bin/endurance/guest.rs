//! Runs as PID 1 of the guest.

#![allow(unsafe_code)] // A vsock socket, which std lacks.

use super::{CHECK, DISK_BYTES, LINE, PORT, Result, SECTOR, line, next_sum, place};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

pub fn guest() -> Result<()> {
    let error = work().unwrap_err();
    let _ = fs::write("/dev/console", format!("endurance: {error}\n"));
    loop {
        std::thread::park();
    }
}

/// Computes and stores lines forever.
fn work() -> Result<std::convert::Infallible> {
    mount_devices()?;
    let mut lines = OpenOptions::new()
        .create(true)
        .read(true)
        .append(true)
        .open("/lines")?;
    let disk = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DSYNC)
        .open("/dev/vda")?;
    let mut connection: Option<File> = None;
    let (mut number, mut sum) = (0, 1);
    loop {
        number += 1;
        sum = next_sum(sum, number);
        let line = line(number, sum);
        lines.write_all(&line)?;
        let mut sector = line.repeat(SECTOR as usize / LINE);
        sector.resize(SECTOR as usize, 0);
        disk.write_all_at(&sector, place(number))?;
        while let Err(error) = send(&mut connection, &line, &lines, number) {
            // A reset means that the guest was restored. The host knows which lines it has read.
            if !matches!(error.raw_os_error(), Some(error) if is_reset(error)) {
                return Err(error.into());
            }
            connection = None;
        }
        if let Some(connection) = &mut connection
            && check_requested(connection)?
        {
            let said = check(&lines, &disk, number)?;
            connection.write_all(said.as_bytes())?;
        }
    }
}

fn is_reset(error: i32) -> bool {
    [
        libc::ECONNRESET,
        libc::EPIPE,
        libc::ENOTCONN,
        libc::ETIMEDOUT,
        libc::ECONNREFUSED,
    ]
    .contains(&error)
}

/// Sends a line. On a new connection, sends all lines that the host lacks.
fn send(connection: &mut Option<File>, line: &[u8], lines: &File, number: u64) -> io::Result<()> {
    if let Some(connection) = connection {
        return connection.write_all(line);
    }
    let mut new = connect()?;
    let mut wanted = [0; 8];
    if let Err(error) = new.read_exact(&mut wanted) {
        return Err(match error.kind() {
            io::ErrorKind::UnexpectedEof => io::Error::from_raw_os_error(libc::ECONNRESET),
            _ => error,
        });
    }
    let wanted = u64::from_le_bytes(wanted);
    if wanted == 0 || wanted > number + 1 {
        let what = format!("the host expects line {wanted}, but the guest is at line {number}");
        return Err(io::Error::other(what));
    }
    let mut missing = vec![0; (number + 1 - wanted) as usize * LINE];
    lines.read_exact_at(&mut missing, (wanted - 1) * LINE as u64)?;
    new.write_all(&missing)?;
    *connection = Some(new);
    Ok(())
}

fn connect() -> io::Result<File> {
    // SAFETY: socket(2) takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the socket was just created and has no other owner.
    let socket = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    // SAFETY: all zeros is a valid address of this kind.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_port = PORT;
    address.svm_cid = libc::VMADDR_CID_HOST;
    let length = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    // SAFETY: the address is valid and has the given length.
    let done = unsafe { libc::connect(fd, (&raw const address).cast(), length) };
    match done {
        0 => Ok(socket),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the host has asked for a check.
fn check_requested(connection: &File) -> io::Result<bool> {
    let mut byte = [0u8];
    // SAFETY: the kernel writes at most one byte, which exists.
    let got = unsafe {
        libc::recv(
            connection.as_raw_fd(),
            byte.as_mut_ptr().cast(),
            1,
            libc::MSG_DONTWAIT,
        )
    };
    // No byte yet, or a reset, which the next line will report.
    Ok(got == 1 && byte[0] == CHECK)
}

/// Drops the caches, then checks everything that was written against the expected lines.
fn check(lines: &File, disk: &File, last: u64) -> io::Result<String> {
    fs::write("/proc/sys/vm/drop_caches", "3")?;
    let mut sum = 1;
    let mut found = [0; LINE];
    for number in 1..=last {
        sum = next_sum(sum, number);
        let expected = line(number, sum);
        lines.read_exact_at(&mut found, (number - 1) * LINE as u64)?;
        if found != expected {
            return Ok(format!("line {number} of the file is wrong\n"));
        }
        // A later line overwrites a sector after one pass over the disk.
        if number + DISK_BYTES / SECTOR > last {
            disk.read_exact_at(&mut found, place(number))?;
            if found != expected {
                return Ok(format!("line {number} of the disk is wrong\n"));
            }
        }
    }
    let length = lines.metadata()?.len();
    if length != last * LINE as u64 {
        return Ok(format!("the file has {length} bytes after line {last}\n"));
    }
    Ok(format!("all {last} lines are right\n"))
}

fn mount_devices() -> io::Result<()> {
    for (kind, target) in [(c"devtmpfs", c"/dev"), (c"proc", c"/proc")] {
        // SAFETY: every pointer is to a string of this program's, or null
        // where mount(2) allows it.
        let done = unsafe {
            libc::mount(
                kind.as_ptr(),
                target.as_ptr(),
                kind.as_ptr(),
                0,
                std::ptr::null(),
            )
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
