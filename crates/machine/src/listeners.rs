//! The TCP sockets on which QEMU's user network accepts connections for the machine.

use jiffy_sys::backlog;
use rustix::io::Errno;
use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_acceptconn, socket_domain};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::io;

/// Gives the sockets on which QEMU listens a large backlog, where the kernel lets this process do that
/// (as for ptrace(2)). QEMU makes it 1, so that of three clients that come at once one waits for a
/// second, or is reset after its first bytes.
pub fn enlarge_backlogs(qemu: Pid) {
    if let Err(error) = enlarge_all(qemu) {
        tracing::debug!(%error, "the backlogs of QEMU's sockets can't be enlarged");
    }
}

fn enlarge_all(qemu: Pid) -> io::Result<()> {
    let process = pidfd_open(qemu, PidfdFlags::empty())?;
    let folder = format!("/proc/{}/fd", qemu.as_raw_nonzero());
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let is_socket = std::fs::read_link(entry.path())
            .is_ok_and(|link| link.as_os_str().as_encoded_bytes().starts_with(b"socket:"));
        let number = entry.file_name().to_string_lossy().parse();
        let (true, Ok(number)) = (is_socket, number) else {
            continue;
        };
        let socket = match pidfd_getfd(&process, number, PidfdGetfdFlags::empty()) {
            // QEMU closes connections meanwhile.
            Err(Errno::BADF) => continue,
            socket => socket?,
        };
        if socket_domain(&socket)? == AddressFamily::INET && socket_acceptconn(&socket)? {
            backlog::enlarge(&socket)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::listen;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    #[test]
    fn many_clients_connect_before_one_is_accepted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listen(&listener, 1).unwrap();
        let address = listener.local_addr().unwrap();
        // As QEMU does, this process has other descriptors, too.
        let _other = std::os::unix::net::UnixStream::pair().unwrap();
        enlarge_all(rustix::process::getpid()).unwrap();
        let connect = |_| TcpStream::connect_timeout(&address, Duration::from_millis(500));
        let clients: Result<Vec<_>, _> = (0..20).map(connect).collect();
        clients.unwrap();
    }
}
