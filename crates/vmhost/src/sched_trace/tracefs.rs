//! An instance of the kernel's tracing, with buffers and events of its own.
//!
//! It is a folder in tracefs, which stays when its process is killed. Its owner holds a lock on that
//! folder, so one without is left over.

use super::pages::Format;
use jiffy_sys::locked::Locked;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What the names of our instances begin with; a process id follows.
const PREFIX: &str = "jiffy-";
/// Kernel memory for the buffers of all CPUs, KiB. A switch takes 72 bytes, a wakeup 44.
const BUFFERS_KIB: usize = 32 << 10;
/// Of one CPU, KiB.
const MOST_KIB: usize = 16 << 10;
const LEAST_KIB: usize = 256;
/// A page of a buffer.
const PAGE: usize = 4096;
/// How often an instance that is in use is removed again.
const ATTEMPTS: u32 = 20;

/// A tracefs of our own, which is mounted nowhere.
#[derive(Debug)]
pub struct Tracefs(OwnedFd);

impl Tracefs {
    /// Mounts a tracefs of our own.
    ///
    /// # Errors
    ///
    /// If the kernel has none, or this process lacks `CAP_SYS_ADMIN`.
    pub fn open() -> io::Result<Tracefs> {
        let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        Ok(Tracefs(mount))
    }

    fn instances(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/instances", self.0.as_raw_fd()))
    }

    /// Removes instances of daemons that were killed while they recorded.
    ///
    /// # Errors
    ///
    /// If the folder of instances can't be read, or one can't be locked for another reason than
    /// that it is in use.
    pub fn remove_left_over(&self) -> io::Result<()> {
        for entry in fs::read_dir(self.instances())?.flatten() {
            let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
            if ours && lock(&entry.path())?.is_some() {
                remove(&entry.path());
            }
        }
        Ok(())
    }

    /// Makes an instance that records nothing yet.
    ///
    /// # Errors
    ///
    /// If the instance can't be made, written or locked.
    pub fn instance(self) -> io::Result<Instance> {
        let folder = self.instances();
        let folder = folder.join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir(&folder)?;
        let mut instance = Instance {
            folder,
            _tracefs: self,
            _lock: None,
        };
        instance.write("tracing_on", "0")?;
        instance._lock = lock(&instance.folder)?;
        Ok(instance)
    }
}

fn lock(folder: &Path) -> io::Result<Option<Locked>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Locked::try_exclusive(File::from(open(folder, flags, Mode::empty())?))
}

/// The kernel removes its files with it.
fn remove(instance: &Path) {
    for _ in 0..ATTEMPTS {
        match rustix::fs::rmdir(instance) {
            Err(Errno::BUSY) => std::thread::sleep(Duration::from_millis(10)),
            _ => return,
        }
    }
}

/// An instance; dropping it removes it.
#[derive(Debug)]
pub struct Instance {
    folder: PathBuf,
    /// The folder is reached through it.
    _tracefs: Tracefs,
    _lock: Option<Locked>,
}

impl Drop for Instance {
    fn drop(&mut self) {
        remove(&self.folder);
    }
}

impl Instance {
    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        fs::write(self.folder.join(file), text)
    }

    /// The CPUs' numbers, in order.
    ///
    /// # Errors
    ///
    /// If the folder of CPUs can't be read.
    pub fn cpus(&self) -> io::Result<Vec<u32>> {
        let entries = fs::read_dir(self.folder.join("per_cpu"))?.flatten();
        let number = |name: &str| name.strip_prefix("cpu")?.parse().ok();
        let mut cpus: Vec<u32> = entries
            .filter_map(|entry| number(entry.file_name().to_str()?))
            .collect();
        cpus.sort_unstable();
        Ok(cpus)
    }

    /// Records these events from now on, by the monotonic clock, until the buffers are full.
    ///
    /// # Errors
    ///
    /// If the kernel lacks an event or refuses a setting.
    pub fn start(&self, events: &[&str], cpus: usize) -> io::Result<Vec<Format>> {
        let kib = (BUFFERS_KIB / cpus.max(1)).clamp(LEAST_KIB, MOST_KIB);
        self.write("buffer_size_kb", &kib.to_string())?;
        self.write("trace_clock", "mono")?;
        self.write("options/overwrite", "0")?;
        let enable = |event: &&str| {
            let format = self.folder.join(format!("events/{event}/format"));
            self.write(&format!("events/{event}/enable"), "1")?;
            Ok(Format::read(&fs::read_to_string(format)?))
        };
        let formats = events.iter().map(enable).collect::<io::Result<_>>()?;
        self.write("tracing_on", "1")?;
        Ok(formats)
    }

    /// Records no more.
    ///
    /// # Errors
    ///
    /// If the file can't be written.
    pub fn stop(&self) -> io::Result<()> {
        self.write("tracing_on", "0")
    }

    /// Calls `each` with each page of a CPU's buffer, after the end.
    ///
    /// # Errors
    ///
    /// If the buffer can't be opened or read.
    pub fn pages(&self, cpu: u32, mut each: impl FnMut(&[u8])) -> io::Result<()> {
        let path = self.folder.join(format!("per_cpu/cpu{cpu}/trace_pipe_raw"));
        let mut options = File::options();
        let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
        let mut pipe = options.read(true).custom_flags(nonblocking).open(path)?;
        let mut page = [0; PAGE];
        loop {
            match pipe.read(&mut page) {
                Ok(0) => return Ok(()),
                Ok(length) => each(&page[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// How many events of a CPU were not recorded.
    ///
    /// # Errors
    ///
    /// If the CPU's statistics can't be read.
    pub fn lost(&self, cpu: u32) -> io::Result<u64> {
        let stats = fs::read_to_string(self.folder.join(format!("per_cpu/cpu{cpu}/stats")))?;
        Ok(lost(&stats))
    }
}

fn lost(stats: &str) -> u64 {
    let counts = ["overrun: ", "commit overrun: ", "dropped events: "];
    let count = |line: &str| {
        let mut counts = counts.iter();
        counts.find_map(|name| line.strip_prefix(name)?.trim().parse::<u64>().ok())
    };
    stats.lines().filter_map(count).sum()
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_a_cpu_lost_is_summed() {
        let stats = "entries: 9\noverrun: 1\ncommit overrun: 20\nbytes: 5\n\
            oldest event ts:    11.1\nnow ts:    12.2\ndropped events: 300\nread events: 4000\n";
        assert_eq!(super::lost(stats), 321);
    }
}
