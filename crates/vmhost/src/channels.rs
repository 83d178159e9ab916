//! Channels on which jailed VMMs ask for connections, because they connect to nothing by name
//! ([`jiffy_sys::dial`]).
//!
//! Each channel has a task of its own, which ends with its VMM. It makes one connection at a time and
//! waits until the VMM has taken the answer, so a VMM that floods its channel, sends anything else or
//! takes no answers delays itself only. A VMM that outlives its daemon gets new channels from the next
//! one ([`renew`]); until then nothing is connected.

use crate::dial::dial;
use jiffy_content::model::image::LazyDisk;
use jiffy_content::model::vm::VmRecord;
use jiffy_content::paths::Paths;
use jiffy_sys::dial::{self as channel, REQUEST, socket_of_port};
use jiffy_wire::lines;
use jiffy_wire::pager::OnBehalf;
use jiffy_wire::vmm::{ControlRequest, ControlResponse};
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

/// Time between two connections of a VMM on average.
const GAP: Duration = Duration::from_millis(1);
/// Connections that a VMM may have at once after it had none for a while.
const BURST: u32 = 128;
/// How long an adopted VMM has to accept a channel. It may have to wait for memory first.
const ACCEPT_TIME: Duration = Duration::from_secs(120);
/// Longest answer to the offer of a channel, bytes.
const MAX_ANSWER: usize = 4096;

/// What a VMM asks to be connected to.
#[derive(Debug, Clone)]
pub enum Target {
    /// Programs that listen for its guest.
    Programs,
    /// The pager, for its memory.
    Memory,
    /// The pager, for a disk that it fills.
    Disk(LazyDisk),
}

/// The node's end of a channel.
#[derive(Debug)]
pub struct Channel {
    target: Target,
    end: OwnedFd,
}

/// Two connected sockets.
///
/// # Errors
///
/// If `socketpair` fails.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        flags,
        None,
    )?)
}

impl Channel {
    /// A channel, and the VMM's end of it.
    ///
    /// # Errors
    ///
    /// If `socketpair` fails.
    pub fn new(target: Target) -> io::Result<(Channel, OwnedFd)> {
        let (end, theirs) = pair()?;
        Ok((Channel { target, end }, theirs))
    }

    /// Serves the VMM with this process id, which runs the VM `id`, until it ends.
    pub fn serve(self, paths: &Paths, id: &str, pid: u32) {
        // Few answers wait for a VMM that takes none. The kernel raises it to its minimum.
        let bounded = set_socket_send_buffer_size(&self.end, 1);
        let stream = StdStream::from(self.end);
        match bounded
            .map_err(io::Error::from)
            .and_then(|()| UnixStream::from_std(stream))
        {
            Ok(stream) => {
                let (paths, id, target) = (paths.clone(), id.to_owned(), self.target);
                tokio::spawn(answer_all(stream, move |port| {
                    connect(&target, &paths, &id, pid, port)
                }));
            }
            Err(error) => debug!(id, %error, "a VMM's channel can't be served"),
        }
    }
}

/// Gives a VMM that outlived its daemon new channels. One of an earlier release has none, and connects
/// by itself.
pub fn renew(paths: &Paths, record: &VmRecord, pid: u32) {
    let disk = record.root.as_ref().and_then(|root| root.lazy.clone());
    let memory = record.paged.as_ref().map(|_| Target::Memory);
    for target in [Some(Target::Programs), memory, disk.map(Target::Disk)] {
        let Some(target) = target else { continue };
        let (paths, id) = (paths.clone(), record.id.clone());
        tokio::spawn(async move {
            match timeout(ACCEPT_TIME, offer(&paths, &id, &target)).await {
                Ok(Ok(stream)) => {
                    let end = OwnedFd::from(stream);
                    Channel { target, end }.serve(&paths, &id, pid);
                }
                Ok(Err(error)) => debug!(id, %error, "a VMM has taken no channel"),
                Err(_) => debug!(id, "a VMM has taken no channel in time"),
            }
        });
    }
}

/// Makes a connection to a VMM's control socket its channel.
async fn offer(paths: &Paths, id: &str, target: &Target) -> io::Result<StdStream> {
    let socket = match target {
        Target::Programs => paths.vsock_socket(id),
        Target::Memory => paths.vm_memory_socket(id),
        Target::Disk(_) => paths.vm_disk_socket(id),
    };
    let request = ControlRequest::Dial {
        // In a jail it has no other name.
        socket: socket.file_name().unwrap_or_default().into(),
    };
    let mut stream = dial(&paths.control_socket(id)).await?;
    let line = lines::encode(&request)?;
    stream.write_all(&line).await?;
    taken(&mut stream).await?;
    stream.into_std()
}

/// Receives a VMM's answer to the offer of a channel.
pub(crate) async fn taken(stream: &mut UnixStream) -> io::Result<()> {
    // Byte by byte: what follows the answer is a request of the VMM.
    let mut answer = Vec::new();
    while answer.last() != Some(&b'\n') && answer.len() < MAX_ANSWER {
        answer.push(stream.read_u8().await?);
    }
    match serde_json::from_slice(&answer)? {
        ControlResponse::Ok => Ok(()),
        other => Err(io::Error::other(format!("it answered {other:?}"))),
    }
}

/// Answers the requests of one VMM until its end of the channel is closed.
async fn answer_all(mut channel: UnixStream, connect: impl Fn(u32) -> io::Result<StdStream>) {
    let mut next = Instant::now();
    let mut request = [0; REQUEST];
    while channel.read_exact(&mut request).await.is_ok() {
        let (now, ahead) = (Instant::now(), BURST * GAP);
        next = next.max(now) + GAP;
        if next > now + ahead {
            sleep_until(next - ahead).await;
        }
        let connected = connect(u32::from_le_bytes(request));
        let answered = || channel::answer(&channel, &connected);
        if channel
            .async_io(Interest::WRITABLE, answered)
            .await
            .is_err()
        {
            return;
        }
    }
}

fn connect(target: &Target, paths: &Paths, id: &str, pid: u32, port: u32) -> io::Result<StdStream> {
    match target {
        Target::Programs => channel::connect(&socket_of_port(&paths.vsock_socket(id), port)),
        Target::Memory => on_behalf(channel::connect(&paths.pager_vm_socket(id))?, pid),
        Target::Disk(disk) => {
            let name = disk.name();
            // A pager of release 0.1 listens beside the sockets of VMs' memory.
            let connected = channel::connect(&paths.disk_socket(&name))
                .or_else(|_| channel::connect(&paths.pager_vm_socket(&name)));
            on_behalf(connected?, pid)
        }
    }
}

/// Tells the pager which VMM the connection is for: it would take it for the daemon's.
fn on_behalf(stream: StdStream, pid: u32) -> io::Result<StdStream> {
    let line = lines::encode(&OnBehalf { on_behalf_of: pid })?;
    match send(&stream, &line, SendFlags::NOSIGNAL)? {
        sent if sent == line.len() => Ok(stream),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_sys::dial::{Dialer, channel_of};
    use jiffy_sys::handed;
    use std::io::{ErrorKind, Read, Write};
    use std::os::unix::net::UnixListener;
    use std::path::{Path, PathBuf};

    /// A VM's folder, and its VMM's end of a channel to programs.
    fn served(name: &str) -> (tempfile::TempDir, PathBuf, StdStream) {
        let folder = tempfile::tempdir().unwrap();
        let vsock = folder.path().join("vsock.sock");
        let (channel, theirs) = Channel::new(Target::Programs).unwrap();
        let stream = StdStream::from(channel.end);
        set_socket_send_buffer_size(&stream, 1).unwrap();
        let stream = UnixStream::from_std(stream).unwrap();
        let path = vsock.clone();
        tokio::spawn(answer_all(stream, move |port| {
            channel::connect(&socket_of_port(&path, port))
        }));
        let theirs = StdStream::from(theirs);
        let handed = theirs.try_clone().unwrap();
        handed::replace(channel_of(Path::new(name)), handed.into());
        (folder, vsock, theirs)
    }

    async fn answered(dialer: &mut Dialer) -> io::Result<StdStream> {
        loop {
            match dialer.answer().unwrap() {
                Some(answer) => return answer,
                None => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
    }

    #[tokio::test]
    async fn a_vmm_is_connected_to_programs_on_ports() {
        let (_folder, vsock, _theirs) = served("/nowhere/programs");
        let listener = UnixListener::bind(socket_of_port(&vsock, 1024)).unwrap();
        let mut dialer = Dialer::new(Path::new("/nowhere/programs"));
        dialer.ask(5).unwrap();
        let nobody = answered(&mut dialer).await.unwrap_err();
        assert_eq!(nobody.kind(), ErrorKind::ConnectionRefused);
        dialer.ask(1024).unwrap();
        let mut connection = answered(&mut dialer).await.unwrap();
        connection.write_all(b"x").unwrap();
        listener.accept().unwrap().0.read_exact(&mut [0]).unwrap();
    }

    #[tokio::test]
    async fn a_vmm_that_floods_is_slowed_down_and_delays_no_other() {
        let (_folder, _, mut flooding) = served("/nowhere/flood");
        let (_other_folder, vsock, _theirs) = served("/nowhere/beside");
        let _listener = UnixListener::bind(socket_of_port(&vsock, 7)).unwrap();
        flooding.set_nonblocking(true).unwrap();
        while flooding.write(&[0x55; 1021]).is_ok() {}
        let mut dialer = Dialer::new(Path::new("/nowhere/beside"));
        let begun = Instant::now();
        dialer.ask(7).unwrap();
        answered(&mut dialer).await.unwrap();
        assert!(begun.elapsed() < Duration::from_secs(20));
        // It gets few answers ahead of what it takes, and few in a second.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let waiting = rustix::io::ioctl_fionread(&flooding).unwrap();
        assert!((1..64).contains(&waiting), "{waiting}");
        let (begun, mut taken) = (Instant::now(), 0);
        while begun.elapsed() < Duration::from_millis(500) {
            taken += flooding.read(&mut [0; 64]).unwrap_or(0);
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        let most = begun.elapsed().as_millis() as usize + 2 * BURST as usize + 64;
        assert!(taken > 0 && taken <= most, "{taken} of {most}");
    }

    #[tokio::test]
    async fn a_channel_ends_with_its_vmm() {
        let (channel, theirs) = Channel::new(Target::Programs).unwrap();
        let stream = UnixStream::from_std(channel.end.into()).unwrap();
        let serving = tokio::spawn(answer_all(stream, |_| Err(ErrorKind::NotFound.into())));
        rustix::net::shutdown(&theirs, rustix::net::Shutdown::Both).unwrap();
        timeout(Duration::from_secs(10), serving)
            .await
            .unwrap()
            .unwrap();
    }

    #[tokio::test]
    async fn the_pager_is_told_whose_connection_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let listener = UnixListener::bind(&path).unwrap();
        let _stream = on_behalf(channel::connect(&path).unwrap(), 1234).unwrap();
        let mut line = [0; 22];
        listener.accept().unwrap().0.read_exact(&mut line).unwrap();
        assert_eq!(&line[..], b"{\"on_behalf_of\":1234}\n");
    }
}
