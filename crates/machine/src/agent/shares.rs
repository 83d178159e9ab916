//! Mounts folders of the host in the machine: passes FUSE's messages between `/dev/fuse` and the
//! virtio-serial port whose other end has a `jiffy-files` on the host.
//!
//! On the port messages follow each other without a gap; each begins with its length
//! (docs/folders.md, "Protocol").

use super::ready;
use crate::shares::{self, Share};
use jiffy_wire::files::MESSAGE_MAX;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount as mount_at, unmount};
use std::ffi::CString;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes of `fuse_out_header`, the shortest answer.
const SHORTEST: usize = 16;
/// How long QEMU may take to announce that the port has a server.
const CONNECTED: Duration = Duration::from_secs(10);

/// Unmounts what an agent that ended has left at these places: every access to it gives ENOTCONN.
pub fn unmount_left(places: &[PathBuf]) {
    for place in places {
        // With all that is mounted below it, which can't be reached through it.
        while unmount(place, UnmountFlags::DETACH).is_ok() {}
    }
}

/// The shares with their numbers, in the order in which to mount them: outer folders first, because a
/// mount hides what is mounted below its place.
pub fn in_order(all: &[Share]) -> Vec<(usize, &Share)> {
    let mut shares: Vec<_> = all.iter().enumerate().collect();
    shares.sort_by_key(|(_, share)| share.path.len());
    shares
}

/// Mounts the share of this number, read-only if it is; `ended` is called when its server has
/// ended.
///
/// # Errors
///
/// If its server does not answer, or the mount fails. The error is a sentence.
pub fn mount(
    number: usize,
    share: &Share,
    ended: impl FnOnce(String) + Send + 'static,
) -> Result<(), String> {
    let target = share.mount_point();
    try_mount(number, share, &target, ended).map_err(|error| {
        format!(
            "the shared folder {} could not be mounted on {}: {error}",
            share.path,
            target.display()
        )
    })
}

fn try_mount(
    number: usize,
    share: &Share,
    target: &Path,
    ended: impl FnOnce(String) + Send + 'static,
) -> io::Result<()> {
    let mut both_ways = OpenOptions::new();
    both_ways
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK);
    let port = both_ways.open(ready::wait_for_port(&shares::port(number))?)?;
    wait_for_server(&port)?;
    let fuse = both_ways.open("/dev/fuse")?;
    DirBuilder::new().recursive(true).create(target)?;
    let data = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
        fuse.as_raw_fd()
    );
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    flags.set(MountFlags::RDONLY, share.read_only);
    mount_at(
        share.path.as_str(),
        target,
        c"fuse",
        flags,
        &*CString::new(data)?,
    )?;
    let name = share.path.clone();
    std::thread::Builder::new()
        .name(format!("share-{number}"))
        .spawn(move || {
            let how = pass(&fuse, &port);
            // Programs that wait for an answer get ENOTCONN from now on.
            drop(fuse);
            let why = how.map_or_else(|error| error.to_string(), |()| "its server ended".into());
            ended(format!("the shared folder {name} is gone: {why}"));
        })?;
    // The first request; it fails if the server has ended.
    match target.metadata() {
        Ok(_) => Ok(()),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NOTCONN) => Err(no_server()),
        Err(error) => Err(error),
    }
}

fn no_server() -> io::Error {
    io::Error::other("its server on the host has ended; see machine/folders.log in the data folder")
}

/// Waits until the port has another end. Until then it reads as if that had been closed.
fn wait_for_server(port: &File) -> io::Result<()> {
    let deadline = Instant::now() + CONNECTED;
    loop {
        let mut state = [PollFd::new(port, PollFlags::OUT)];
        poll(&mut state, Some(&Timespec::default()))?;
        if !state[0].revents().contains(PollFlags::HUP) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(no_server());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Passes requests from `fuse` to `port`, and answers back, until one of them is closed. Neither
/// may block.
fn pass(fuse: &impl AsFd, port: &impl AsFd) -> io::Result<()> {
    const CLOSED: PollFlags = PollFlags::HUP.union(PollFlags::ERR).union(PollFlags::NVAL);
    let mut request = vec![0; MESSAGE_MAX];
    // What of the request is still to be written.
    let mut left = 0..0;
    let mut answers = Answers::new();
    loop {
        // A request is read once the one before is written; answers are always read, so that the
        // server never waits for this side while this side waits for it.
        let (from_fuse, to_port) = match left.is_empty() {
            true => (PollFlags::IN, PollFlags::empty()),
            false => (PollFlags::empty(), PollFlags::OUT),
        };
        let mut states = [
            PollFd::new(fuse, from_fuse),
            PollFd::new(port, PollFlags::IN | to_port),
        ];
        match poll(&mut states, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [fuse_is, port_is] = states.map(|state| state.revents());
        if port_is.contains(PollFlags::IN) {
            match rustix::io::read(port, answers.space()) {
                Ok(0) => return Ok(()),
                Ok(read) => answers.add(read, |answer| put_answer(fuse, answer))?,
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        } else if port_is.intersects(CLOSED) || fuse_is.intersects(CLOSED) {
            return Ok(());
        }
        if fuse_is.contains(PollFlags::IN) {
            match rustix::io::read(fuse, &mut request[..]) {
                Ok(length) => left = 0..length,
                // The program that asked was killed meanwhile.
                Err(Errno::AGAIN | Errno::INTR | Errno::NOENT) => {}
                // It was unmounted.
                Err(Errno::NODEV) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        if !left.is_empty() {
            match rustix::io::write(port, &request[left.clone()]) {
                Ok(written) => left.start += written,
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn put_answer(fuse: &impl AsFd, answer: &[u8]) -> io::Result<()> {
    match rustix::io::retry_on_intr(|| rustix::io::write(fuse, answer)) {
        // Nobody waits for it any more, or the server answered what the kernel did not ask.
        Ok(_) | Err(Errno::NOENT | Errno::INVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Answers from a stream.
struct Answers {
    bytes: Vec<u8>,
    filled: usize,
}

impl Answers {
    fn new() -> Answers {
        Answers {
            bytes: vec![0; MESSAGE_MAX],
            filled: 0,
        }
    }

    /// Where the next bytes go; never empty.
    fn space(&mut self) -> &mut [u8] {
        &mut self.bytes[self.filled..]
    }

    /// Takes what was read into [`space`](Self::space); gives `each` the answers that are complete.
    fn add(
        &mut self,
        read: usize,
        mut each: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        self.filled += read;
        let mut start = 0;
        while let Some(length) = length_of(&self.bytes[start..self.filled])? {
            let Some(answer) = self.bytes[..self.filled].get(start..start + length) else {
                break;
            };
            each(answer)?;
            start += length;
        }
        self.bytes.copy_within(start..self.filled, 0);
        self.filled -= start;
        Ok(())
    }
}

/// The length with which an answer begins, if that is there.
fn length_of(bytes: &[u8]) -> io::Result<Option<usize>> {
    let Some(length) = bytes.first_chunk() else {
        return Ok(None);
    };
    let length = u32::from_ne_bytes(*length) as usize;
    if (SHORTEST..=MESSAGE_MAX).contains(&length) {
        return Ok(Some(length));
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidData,
        format!("its server sent an answer of {length} bytes"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::io::{Read, Write};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::thread::JoinHandle;

    /// A kernel that has `/dev/fuse`, a server that has the port, and the thread between them.
    struct Between {
        kernel: OwnedFd,
        server: UnixStream,
        thread: JoinHandle<io::Result<()>>,
    }

    fn between() -> Between {
        let pair = |kind| {
            let (ours, theirs) =
                socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
            rustix::io::ioctl_fionbio(&theirs, true).unwrap();
            (ours, theirs)
        };
        // As with /dev/fuse, one call is one message.
        let (kernel, fuse) = pair(SocketType::SEQPACKET);
        let (server, port) = pair(SocketType::STREAM);
        Between {
            kernel,
            server: server.into(),
            thread: std::thread::spawn(move || pass(&fuse, &port)),
        }
    }

    fn message(length: usize, byte: u8) -> Vec<u8> {
        let mut message = vec![byte; length];
        message[..4].copy_from_slice(&(length as u32).to_ne_bytes());
        message
    }

    /// A mount whose server has ended.
    struct Left(PathBuf);

    impl Left {
        fn at(place: PathBuf) -> Left {
            let fuse = File::options().read(true).write(true).open("/dev/fuse");
            let fuse = fuse.unwrap();
            let data = format!(
                "fd={},rootmode=40000,user_id=0,group_id=0",
                fuse.as_raw_fd()
            );
            let data = CString::new(data).unwrap();
            mount_at("left", &place, c"fuse", MountFlags::NODEV, &*data).unwrap();
            Left(place)
        }
    }

    impl Drop for Left {
        fn drop(&mut self) {
            let _ = unmount(&self.0, UnmountFlags::DETACH);
        }
    }

    #[test]
    fn what_an_agent_that_ended_has_left_is_unmounted() {
        if !rustix::process::getuid().is_root() || File::open("/dev/fuse").is_err() {
            eprintln!("SKIPPED: only root with /dev/fuse can mount a folder");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let [a, other, none] = ["a", "other", "none"].map(|name| folder.path().join(name));
        let below = a.join("below");
        for place in [&a, &other] {
            std::fs::create_dir(place).unwrap();
        }
        let _other = Left::at(other.clone());
        // Two agents ended, one after another.
        let _lower = Left::at(a.clone());
        let _upper = Left::at(a.clone());
        let is_dead = |place: &Path| {
            let error = place.metadata().err();
            error.and_then(|error| Errno::from_io_error(&error)) == Some(Errno::NOTCONN)
        };
        assert!(is_dead(&a) && is_dead(&other));
        unmount_left(&[below.clone(), a.clone(), none]);
        std::fs::create_dir(&below).unwrap();
        assert!(is_dead(&other));
        // A folder that is no mount stays as it is.
        unmount_left(&[a.clone(), other.clone()]);
        assert!(below.is_dir() && other.is_dir());
    }

    #[test]
    fn outer_folders_are_mounted_first_on_their_own_ports() {
        let shares = ["rw:/a/b", "ro:/", "ro:/a", "rw:/c/d/e"].map(|text| text.parse().unwrap());
        let numbers = in_order(&shares).into_iter().map(|(number, _)| number);
        assert!(numbers.eq([1_usize, 2, 0, 3]));
    }

    #[test]
    fn messages_of_any_length_pass_both_ways() {
        let mut between = between();
        let mut read = vec![0; MESSAGE_MAX];
        for (length, byte) in [(40, 1), (MESSAGE_MAX, 2), (41, 3)] {
            let sent = message(length, byte);
            rustix::io::write(&between.kernel, &sent).unwrap();
            between.server.read_exact(&mut read[..length]).unwrap();
            assert_eq!(read[..length], sent);
        }
        // Answers are cut anywhere.
        let answers = [message(16, 4), message(MESSAGE_MAX, 5), message(17, 6)];
        let all = answers.concat();
        for part in [&all[..2], &all[2..18], &all[18..90_000], &all[90_000..]] {
            between.server.write_all(part).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
        for answer in answers {
            let length = rustix::io::read(&between.kernel, &mut read[..]).unwrap();
            assert!(read[..length] == answer);
        }
        drop(between.server);
        between.thread.join().unwrap().unwrap();
    }

    #[test]
    fn many_requests_that_the_server_does_not_read_delay_no_answer() {
        let mut between = between();
        let kernel = between.kernel.try_clone().unwrap();
        let sender = std::thread::spawn(move || {
            for _ in 0..100 {
                rustix::io::write(&kernel, &message(MESSAGE_MAX, 1)).unwrap();
            }
        });
        // Long after the socket is full.
        std::thread::sleep(Duration::from_millis(200));
        between.server.write_all(&message(16, 2)).unwrap();
        let mut read = vec![0; MESSAGE_MAX];
        assert_eq!(rustix::io::read(&between.kernel, &mut read[..]), Ok(16));
        for _ in 0..100 {
            between.server.read_exact(&mut read).unwrap();
            assert!(read == message(MESSAGE_MAX, 1));
        }
        sender.join().unwrap();
        drop(between.kernel);
        between.thread.join().unwrap().unwrap();
    }

    #[test]
    fn an_answer_of_an_impossible_length_ends_it() {
        for length in [0, 15, MESSAGE_MAX as u32 + 1, u32::MAX] {
            let mut between = between();
            between.server.write_all(&length.to_ne_bytes()).unwrap();
            let error = between.thread.join().unwrap().unwrap_err().to_string();
            assert!(error.contains(&length.to_string()), "{error}");
            let mut read = [0; 1];
            assert_eq!(rustix::io::read(&between.kernel, &mut read), Ok(0));
        }
    }
}
