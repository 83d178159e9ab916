//! Waits for stdin, stdout and stderr without making them non-blocking, because the shell and later
//! processes share them.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FileType;
use rustix::io::Errno;
use std::io;
use std::os::fd::BorrowedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A blocking descriptor that is used only when it is ready.
pub struct Waited {
    fd: BorrowedFd<'static>,
    registered: Option<AsyncFd<BorrowedFd<'static>>>,
    /// Regular files never block for long, and epoll refuses them.
    always_ready: bool,
}

/// A pipe that polls as writable takes so many bytes without blocking (PIPE_BUF).
const WRITE_PIECE: usize = 4096;

impl Waited {
    /// Waits for `fd`.
    pub fn new(fd: BorrowedFd<'static>) -> Waited {
        let always_ready = rustix::fs::fstat(fd)
            .map(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
            .unwrap_or(true);
        Waited {
            fd,
            registered: None,
            always_ready,
        }
    }

    /// Reads once bytes are available; 0 at the end.
    ///
    /// # Errors
    ///
    /// If `poll` or `read` fails.
    pub async fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.wait(Interest::READABLE, PollFlags::IN).await?;
            match rustix::io::read(self.fd, &mut *buffer) {
                Ok(count) => return Ok(count),
                Err(Errno::INTR | Errno::AGAIN) => {}
                // The terminal was closed, or this process is in its background.
                Err(Errno::IO) => return Ok(0),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Writes all bytes, and waits for a slow reader.
    ///
    /// # Errors
    ///
    /// If `poll` or `write` fails.
    pub async fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.wait(Interest::WRITABLE, PollFlags::OUT).await?;
            let piece = match self.always_ready {
                true => bytes,
                false => &bytes[..bytes.len().min(WRITE_PIECE)],
            };
            match rustix::io::write(self.fd, piece) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    async fn wait(&mut self, interest: Interest, flags: PollFlags) -> io::Result<()> {
        if self.always_ready || ready(self.fd, flags)? {
            return Ok(());
        }
        let registered = match &mut self.registered {
            Some(registered) => registered,
            // Its successor is unsafe because of descriptors that get closed; these three never
            // are.
            #[allow(deprecated)]
            none => none.insert(AsyncFd::with_interest(self.fd, interest)?),
        };
        loop {
            let mut guard = registered.ready(interest).await?;
            // epoll reports edges; poll reports the current state.
            if ready(self.fd, flags)? {
                return Ok(());
            }
            guard.clear_ready();
        }
    }
}

fn ready(fd: BorrowedFd<'_>, flags: PollFlags) -> io::Result<bool> {
    const NOW: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    loop {
        match poll(&mut [PollFd::from_borrowed_fd(fd, flags)], Some(&NOW)) {
            Ok(count) => return Ok(count > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
