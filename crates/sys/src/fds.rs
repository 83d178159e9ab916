//! Sends descriptors with bytes over a Unix socket (`SCM_RIGHTS`, unix(7)), and takes descriptors
//! that this process inherited.

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, send, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Most descriptors of one message. The kernel's limit is 253.
pub const MOST: usize = 64;

const SPACE: usize = rustix::cmsg_space!(ScmRights(MOST));

/// Sends all of `bytes` with `fds` attached to the first of them. The receiver gets duplicates; the
/// caller keeps its own. Blocks until all bytes are sent, unless the socket does not block.
///
/// # Errors
///
/// `InvalidInput` without a byte, or with more than [`MOST`] descriptors. `EPIPE`, without a
/// signal, if the peer has closed. Otherwise if sendmsg(2) or send(2) fails; the peer may have got
/// a part of the bytes then.
pub fn send_with_fds(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if bytes.is_empty() || fds.len() > MOST {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let mut sent = retry(|| {
        sendmsg(
            &socket,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
    })?;
    while sent < bytes.len() {
        sent += retry(|| send(&socket, &bytes[sent..], SendFlags::NOSIGNAL))?;
    }
    Ok(())
}

/// Receives bytes into the start of `buffer` and appends descriptors that came with them, closed on
/// exec. Returns the number of bytes; 0 means that the peer has closed.
///
/// # Errors
///
/// `InvalidData` if more than [`MOST`] descriptors come, or more than this process may open: all of
/// them are closed, so that a peer can't use up this process's descriptors. Otherwise if recvmsg(2)
/// fails.
pub fn recv_with_fds(
    socket: impl AsFd,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = retry(|| {
        recvmsg(
            &socket,
            &mut [IoSliceMut::new(buffer)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
    })?;
    let before = fds.len();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() - before > MOST {
        fds.truncate(before);
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a message carries too many descriptors",
        ));
    }
    Ok(received.bytes)
}

/// Duplicates a descriptor that this process inherited; the duplicate is closed on exec and the
/// original is left open.
///
/// # Errors
///
/// `InvalidInput` for standard streams and numbers that are not open, and if no descriptor is free.
pub fn inherited(number: i32) -> io::Result<OwnedFd> {
    if number < 3 {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    // SAFETY: borrowed for this one call, in which the kernel refuses a number that is not open.
    // Nothing is read, written or closed.
    #[allow(unsafe_code)]
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// Grows the kernel's descriptor table of this process to `number` entries now. The kernel grows it
/// on demand, but in a process with threads each growth waits milliseconds for an RCU grace period.
/// Affects only time.
pub fn make_room(number: u16) {
    let any = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
    if let (Ok(any), Some(last)) = (any, number.checked_sub(1)) {
        // Fails if RLIMIT_NOFILE is lower. The duplicate is closed at once.
        let _ = rustix::io::fcntl_dupfd_cloexec(&any, last.into());
    }
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn make_room_grows_the_table_and_leaves_no_descriptor() {
        let size = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find(|line| line.starts_with("FDSize:"));
            let size = line.unwrap().split_whitespace().nth(1).unwrap();
            size.parse::<usize>().unwrap()
        };
        make_room(700);
        assert!(size() >= 700, "{}", size());
        assert!(inherited(699).is_err(), "it was closed");
        make_room(0);
        make_room(10);
    }

    #[test]
    fn bytes_and_descriptors_arrive_together() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"shared").unwrap();
        send_with_fds(&here, b"hello", &[file.as_fd(), here.as_fd()]).unwrap();

        let mut buffer = [0; 64];
        let mut fds = Vec::new();
        assert_eq!(recv_with_fds(&there, &mut buffer, &mut fds).unwrap(), 5);
        assert_eq!(&buffer[..5], b"hello");
        assert_eq!(fds.len(), 2);
        let flags = rustix::io::fcntl_getfd(&fds[0]).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        let mut received = File::from(fds.remove(0));
        received.rewind().unwrap();
        let mut text = String::new();
        received.read_to_string(&mut text).unwrap();
        assert_eq!(text, "shared");

        drop((here, fds));
        let mut none = Vec::new();
        assert_eq!(recv_with_fds(&there, &mut buffer, &mut none).unwrap(), 0);
        assert!(none.is_empty());
    }

    #[test]
    fn a_long_message_keeps_its_descriptors_once() {
        let (here, there) = UnixStream::pair().unwrap();
        let bytes = vec![7; 1 << 20];
        let sender = std::thread::spawn(move || {
            let passed = File::open("/dev/null").unwrap();
            send_with_fds(&here, &bytes, &[passed.as_fd()]).unwrap();
        });
        let mut buffer = vec![0; 4096];
        let (mut total, mut fds) = (0, Vec::new());
        while total < 1 << 20 {
            let got = recv_with_fds(&there, &mut buffer, &mut fds).unwrap();
            assert!(buffer[..got].iter().all(|byte| *byte == 7));
            total += got;
        }
        sender.join().unwrap();
        assert_eq!((total, fds.len()), (1 << 20, 1));
    }

    #[test]
    fn too_many_descriptors_are_refused_and_closed() {
        // Other tests run at the same time and open files, too, but few of these.
        let open_nulls = || {
            let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            let targets = files.flat_map(|file| std::fs::read_link(file.path()));
            targets.filter(|it| it.as_os_str() == "/dev/null").count()
        };
        let (here, there) = UnixStream::pair().unwrap();
        let null = File::open("/dev/null").unwrap();
        send_with_fds(&here, b"x", &vec![null.as_fd(); MOST + 1]).unwrap_err();
        send_with_fds(&here, b"", &[null.as_fd()]).unwrap_err();

        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
        let many = vec![null.as_fd(); 200];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        sendmsg(
            &here,
            &[IoSlice::new(b"x")],
            &mut control,
            SendFlags::empty(),
        )
        .unwrap();
        let before = open_nulls();
        let mut fds = Vec::new();
        let error = recv_with_fds(&there, &mut [0; 8], &mut fds).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(fds.is_empty());
        assert!(open_nulls() < before + 50);
    }

    #[test]
    fn a_peer_that_has_gone_is_an_error() {
        let (here, there) = UnixStream::pair().unwrap();
        // Closing is not sufficient: between fork and exec, a child of another test has it, too.
        there.shutdown(std::net::Shutdown::Both).unwrap();
        let error = send_with_fds(&here, b"x", &[]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
