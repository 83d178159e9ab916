//! The console, which shows output of services and the first command in guests without a channel to
//! a node.

use crate::poll::{PollSet, Token};
use alloc::collections::VecDeque;
use rustix::event::PollFlags;
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Most bytes queued for a slow console; more are dropped.
const LIMIT: usize = 256 * 1024;

/// The system console, if the kernel has one.
#[derive(Debug)]
pub struct Console {
    device: Option<OwnedFd>,
    unsent: VecDeque<u8>,
}

impl Console {
    /// Opens /dev/console.
    pub fn open() -> Console {
        let flags = OFlags::WRONLY | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Console {
            device: rustix::fs::open(c"/dev/console", flags, Mode::empty()).ok(),
            unsent: VecDeque::new(),
        }
    }

    /// A console on this device, for tests and processes that are not PID 1.
    pub fn on(device: Option<OwnedFd>) -> Console {
        Console {
            device,
            unsent: VecDeque::new(),
        }
    }

    /// Whether more can be queued.
    pub fn has_room(&self) -> bool {
        self.unsent.len() < LIMIT / 2
    }

    /// Writes bytes; queues those that the device does not accept now.
    pub fn write(&mut self, bytes: &[u8]) {
        if self.device.is_some() && self.unsent.len() + bytes.len() <= LIMIT {
            self.unsent.extend(bytes);
            self.flush();
        }
    }

    /// Writes `name: line`.
    pub fn write_line(&mut self, name: &str, line: &[u8]) {
        self.write(name.as_bytes());
        self.write(b": ");
        self.write(line);
        self.write(b"\n");
    }

    /// Polls the device only while bytes are queued.
    pub fn interest<'a>(&'a self, set: &mut PollSet<'a>) {
        if let (Some(device), false) = (&self.device, self.unsent.is_empty()) {
            set.add(device, PollFlags::OUT, Token::Console);
        }
    }

    /// Writes queued bytes.
    pub fn flush(&mut self) {
        let Some(device) = &self.device else { return };
        while !self.unsent.is_empty() {
            match rustix::io::write(device, self.unsent.as_slices().0) {
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => {
                    self.device = None;
                    self.unsent.clear();
                    return;
                }
            }
        }
    }
}
