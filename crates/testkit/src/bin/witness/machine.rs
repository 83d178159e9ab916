//! What the witness does in the machine, beside VMs.

use rustix::fs::{FallocateFlags, fallocate};
use rustix::net::sockopt;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Error, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Blocks of the file systems that are filled.
const BLOCK: u64 = 4096;
/// Pause after which a client that waits for an answer asks whether the server is still there.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// Pause between two looks at the VMMs.
const LOOK: Duration = Duration::from_millis(50);
/// `PF_EXITING` of the kernel's `sched.h`: the process ends, and its descriptors are being closed.
const PF_EXITING: u32 = 4;

/// Sends stdin to a server, prints what it answers, and then how the connection ended.
pub fn ask(address: &str, seconds: usize) -> io::Result<()> {
    let address: SocketAddr = address.parse().map_err(Error::other)?;
    let limit = Duration::from_secs(seconds as u64);
    let mut request = Vec::new();
    io::stdin().read_to_end(&mut request)?;
    let end = match asked(address, &request, limit) {
        Ok(()) => "closed",
        Err(error) => match error.kind() {
            ErrorKind::ConnectionRefused => "refused",
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => "reset",
            ErrorKind::WouldBlock | ErrorKind::TimedOut => "no end",
            _ => return Err(error),
        },
    };
    eprintln!("{end}");
    Ok(())
}

/// Copies the answer to stdout until the server closes the connection.
fn asked(address: SocketAddr, request: &[u8], limit: Duration) -> io::Result<()> {
    let until = Instant::now() + limit;
    let mut server = TcpStream::connect_timeout(&address, limit)?;
    // A VM that was killed closes no connection.
    sockopt::set_socket_keepalive(&server, true)?;
    sockopt::set_tcp_keepidle(&server, KEEPALIVE)?;
    sockopt::set_tcp_keepintvl(&server, KEEPALIVE)?;
    server.write_all(request)?;
    let mut buffer = [0; 4096];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        server.set_read_timeout(Some(left))?;
        match server.read(&mut buffer)? {
            0 => {
                let _ = server.shutdown(Shutdown::Both);
                return Ok(());
            }
            count => io::stdout().write_all(&buffer[..count])?,
        }
    }
}

/// Takes all blocks of the file system that are free, then gives `kib` KiB back.
pub fn fill(path: &str, kib: usize) -> io::Result<()> {
    let file = File::create(path)?;
    let mut length = 0;
    let mut piece = 1 << 40;
    while piece >= BLOCK {
        match fallocate(&file, FallocateFlags::empty(), length, piece) {
            Ok(()) => length += piece,
            Err(rustix::io::Errno::NOSPC) => piece /= 2,
            Err(error) => return Err(error.into()),
        }
    }
    file.set_len(length.saturating_sub((kib as u64) << 10))?;
    println!("{} KiB", length >> 10);
    Ok(())
}

/// Looks for two VMMs of one VM.
pub fn watch(seconds: usize) -> io::Result<()> {
    let until = Instant::now() + Duration::from_secs(seconds as u64);
    let (mut looks, mut most) = (0, 0);
    while Instant::now() < until {
        let mut of_vms: HashMap<String, u32> = HashMap::new();
        for pid in processes()? {
            let Some(id) = vm_of(pid) else { continue };
            // The first was seen earlier: it may have ended before the second began.
            if let Some(first) = of_vms.insert(id.clone(), pid)
                && vm_of(first).is_some_and(|one| one == id)
                && vm_of(pid).is_some_and(|one| one == id)
                && vm_of(first).is_some_and(|one| one == id)
            {
                println!("twice: {id} is in the processes {first} and {pid}");
            }
        }
        looks += 1;
        most = most.max(of_vms.len());
        std::thread::sleep(LOOK);
    }
    println!("{looks} looks, at most {most} VMMs");
    Ok(())
}

fn processes() -> io::Result<impl Iterator<Item = u32>> {
    let entries = fs::read_dir("/proc")?.flatten();
    Ok(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()))
}

/// The id of the VM whose VMM this process is. A spare has none. A child that a VMM has forked shares
/// its command line, but leads no session.
fn vm_of(pid: u32) -> Option<String> {
    let of = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
    of("comm").filter(|name| name.trim_end() == "jiffy-vmm")?;
    let line = of("cmdline")?;
    let id = line.split("/vms/").nth(1)?.split('/').next()?;
    let stat = of("stat")?;
    // The state, the parent, the group, the session, the terminal, its group, the flags (proc(5)).
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    let leads = fields.get(3)?.parse() == Ok(pid);
    let ends = fields.get(6)?.parse::<u32>().ok()? & PF_EXITING != 0;
    let lives = !ends && !["Z", "X"].contains(&fields[0]);
    (leads && lives && !id.starts_with('-')).then(|| id.to_owned())
}
