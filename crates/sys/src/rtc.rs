//! Interrupts of the hardware clock (Linux, Documentation/admin-guide/rtc.rst).
#![allow(unsafe_code)] // ioctl(2) of a clock.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::path::Path;

/// The first hardware clock.
pub const FIRST: &str = "/dev/rtc0";
/// `_IO('p', 0x03)` of linux/rtc.h, which libc lacks.
const RTC_UIE_ON: libc::Ioctl = 0x7003;

/// A hardware clock that interrupts once a second, until this is dropped.
#[derive(Debug)]
pub struct Seconds(File);

impl Seconds {
    /// Opens a clock and turns its update interrupts on.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such clock, `EBUSY` if another process uses it, `EINVAL` if the clock
    /// has no interrupt, `ENOTTY` if the file is no clock.
    pub fn of(clock: &Path) -> io::Result<Seconds> {
        let file = File::open(clock)?;
        // SAFETY: the request has no argument.
        match unsafe { libc::ioctl(file.as_raw_fd(), RTC_UIE_ON, 0) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(Seconds(file)),
        }
    }

    /// Waits for the next interrupt. Returns at once if there was one since the last call.
    ///
    /// # Errors
    ///
    /// If read(2) fails.
    pub fn wait(&mut self) -> io::Result<()> {
        // An unsigned long: the number of interrupts, and which kinds.
        self.0.read_exact(&mut [0; size_of::<libc::c_ulong>()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_devices_than_clocks_are_refused() {
        let error = Seconds::of(Path::new("/dev/null")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
        let missing = Seconds::of(Path::new("/dev/rtc-that-is-not-there"));
        assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
