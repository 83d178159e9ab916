//! The `syscall` instruction and thin wrappers around single calls.

use core::arch::asm;
use core::ffi::CStr;
use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use rustix::io::{Errno, Result};
use rustix::process::Pid;

/// Numbers from the kernel's arch/x86/entry/syscalls/syscall_64.tbl.
pub(super) mod number {
    pub const RT_SIGACTION: usize = 13;
    pub const RT_SIGPROCMASK: usize = 14;
    pub const IOCTL: usize = 16;
    pub const DUP2: usize = 33;
    pub const SENDTO: usize = 44;
    pub const CLONE: usize = 56;
    pub const FORK: usize = 57;
    pub const EXECVE: usize = 59;
    pub const KILL: usize = 62;
    pub const FCNTL: usize = 72;
    pub const CHDIR: usize = 80;
    pub const SETSID: usize = 112;
    pub const SETGROUPS: usize = 116;
    pub const SETRESUID: usize = 117;
    pub const SETRESGID: usize = 119;
    pub const SWAPON: usize = 167;
    pub const IOPERM: usize = 173;
    pub const CLOCK_SETTIME: usize = 227;
    pub const CLOCK_GETTIME: usize = 228;
    pub const EXIT_GROUP: usize = 231;
    pub const SIGNALFD4: usize = 289;
    pub const CLOSE_RANGE: usize = 436;
}

/// Makes one system call.
///
/// # Safety
///
/// The arguments must be valid for the call of this number; pointers must be valid for everything
/// that it reads and writes.
#[inline]
pub(super) unsafe fn syscall(number: usize, arguments: [usize; 5]) -> isize {
    let result: isize;
    // SAFETY: the kernel changes only rax, rcx and r11; the caller guarantees the arguments.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            in("r10") arguments[3],
            in("r8") arguments[4],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

fn checked(result: isize) -> Result<usize> {
    if result < 0 {
        Err(Errno::from_raw_os_error(-result as i32))
    } else {
        Ok(result as usize)
    }
}

/// Ends the process.
pub fn exit(status: i32) -> ! {
    loop {
        // SAFETY: takes a number.
        unsafe { syscall(number::EXIT_GROUP, [status as usize, 0, 0, 0, 0]) };
    }
}

/// CLOCK_MONOTONIC in nanoseconds. Uses the system call, because finding the vDSO costs more than
/// init's few readings.
pub fn monotonic_ns() -> u64 {
    let mut time = [0i64; 2];
    // SAFETY: `time` has the layout of `struct timespec`; clock 1 is
    // CLOCK_MONOTONIC and cannot fail.
    unsafe {
        syscall(
            number::CLOCK_GETTIME,
            [1, time.as_mut_ptr() as usize, 0, 0, 0],
        )
    };
    (time[0] as u64)
        .saturating_mul(1_000_000_000)
        .saturating_add(time[1] as u64)
}

/// Sets CLOCK_REALTIME, in nanoseconds since 1970.
///
/// # Errors
///
/// If `clock_settime` fails.
pub fn set_realtime(ns: u64) -> Result<()> {
    let time = [(ns / 1_000_000_000) as i64, (ns % 1_000_000_000) as i64];
    // SAFETY: `time` has the layout of `struct timespec`; clock 0 is
    // CLOCK_REALTIME.
    checked(unsafe { syscall(number::CLOCK_SETTIME, [0, time.as_ptr() as usize, 0, 0, 0]) })
        .map(drop)
}

/// Adds 64 secret bytes to the kernel's random number generator, credits their entropy, and makes
/// it use them from the next number on (random(4)). `device` is /dev/random or /dev/urandom.
///
/// # Errors
///
/// If an ioctl of the device fails.
pub fn reseed(device: &impl AsFd, seed: &[u8; 64]) -> Result<()> {
    const RNDADDENTROPY: usize = 0x4008_5203;
    const RNDRESEEDCRNG: usize = 0x5207;
    /// `struct rand_pool_info` of linux/random.h.
    #[repr(C)]
    struct Pool {
        entropy_bits: i32,
        bytes: i32,
        seed: [u8; 64],
    }
    let pool = Pool {
        entropy_bits: 512,
        bytes: 64,
        seed: *seed,
    };
    let fd = device.as_fd().as_raw_fd() as usize;
    // SAFETY: the kernel reads the structure's two numbers, and as many bytes behind them as the
    // second number says.
    checked(unsafe {
        syscall(
            number::IOCTL,
            [fd, RNDADDENTROPY, &raw const pool as usize, 0, 0],
        )
    })?;
    // SAFETY: takes numbers.
    checked(unsafe { syscall(number::IOCTL, [fd, RNDRESEEDCRNG, 0, 0, 0]) }).map(drop)
}

/// A set of signals, bit N-1 for signal N.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignalSet(pub u64);

impl SignalSet {
    /// These signals.
    pub fn of(signals: &[i32]) -> SignalSet {
        SignalSet(
            signals
                .iter()
                .fold(0, |set, signal| set | 1 << (signal - 1)),
        )
    }
}

/// Blocks exactly the signals in `set`.
pub fn block_only(set: SignalSet) {
    // SAFETY: `set` is eight bytes, as the size says; SIG_SETMASK is 2.
    unsafe {
        syscall(
            number::RT_SIGPROCMASK,
            [2, &raw const set.0 as usize, 0, 8, 0],
        )
    };
}

/// A descriptor from which blocked signals of `set` are read (signalfd(2)).
///
/// # Errors
///
/// If `signalfd4` fails.
pub fn signal_descriptor(set: SignalSet) -> Result<OwnedFd> {
    const CLOEXEC_NONBLOCK: usize = 0o2000000 | 0o4000;
    // SAFETY: `set` has eight bytes, as the size says; the result is a new descriptor without
    // another owner.
    unsafe {
        let fd = checked(syscall(
            number::SIGNALFD4,
            [
                usize::MAX,
                &raw const set.0 as usize,
                8,
                CLOEXEC_NONBLOCK,
                0,
            ],
        ))?;
        Ok(OwnedFd::from_raw_fd(fd as i32))
    }
}

/// Signal numbers in bytes read from a signalfd: records of 128 bytes that begin with the number.
pub fn signals_read(bytes: &[u8]) -> impl Iterator<Item = i32> {
    bytes
        .chunks_exact(128)
        .filter_map(|record| Some(i32::from_ne_bytes(*record.first_chunk::<4>()?)))
}

/// Sends a signal (0 to 64) to a process.
///
/// # Errors
///
/// If `kill` fails, as with `ESRCH` if there is no such process.
pub fn kill(pid: Pid, signal: i32) -> Result<()> {
    // SAFETY: takes numbers.
    checked(unsafe {
        syscall(
            number::KILL,
            [
                pid.as_raw_nonzero().get() as usize,
                signal as usize,
                0,
                0,
                0,
            ],
        )
    })
    .map(drop)
}

/// Sends a signal (0 to 64) to a process group.
///
/// # Errors
///
/// `EPERM` for group 1, because kill(2) treats -1 as every process; otherwise that of `kill`.
pub fn kill_group(group: Pid, signal: i32) -> Result<()> {
    if group == Pid::INIT {
        return Err(Errno::PERM);
    }
    let target = -(group.as_raw_nonzero().get() as isize);
    // SAFETY: takes numbers.
    checked(unsafe { syscall(number::KILL, [target as usize, signal as usize, 0, 0, 0]) }).map(drop)
}

/// Sends a signal to every process except PID 1. Does nothing unless this process is PID 1, because
/// it would reach the whole host.
pub fn kill_all_as_pid1(signal: i32) {
    if rustix::process::getpid() == Pid::INIT {
        // SAFETY: takes numbers.
        unsafe { syscall(number::KILL, [usize::MAX, signal as usize, 0, 0, 0]) };
    }
}

/// Forks: `None` in the child.
///
/// The process must have only one thread.
///
/// # Errors
///
/// If `fork` fails.
pub fn fork() -> Result<Option<Pid>> {
    // SAFETY: fork has no arguments. With one thread the child's memory is consistent.
    let pid = checked(unsafe { syscall(number::FORK, [0; 5]) })?;
    Ok(Pid::from_raw(pid as i32))
}

/// Closes every descriptor from `first` on.
pub fn close_from(first: u32) {
    // SAFETY: close_range takes numbers. Callers own what they close: a forked child calls this
    // first, and uses only descriptors below `first`.
    unsafe {
        syscall(
            number::CLOSE_RANGE,
            [first as usize, u32::MAX as usize, 0, 0, 0],
        )
    };
}

/// Makes `target` a duplicate of `fd` that survives exec.
///
/// # Errors
///
/// If `dup2` fails.
pub fn duplicate_to(fd: &impl AsFd, target: i32) -> Result<()> {
    // SAFETY: dup2 takes numbers. At each call `target` is a standard descriptor or free.
    checked(unsafe {
        syscall(
            number::DUP2,
            [fd.as_fd().as_raw_fd() as usize, target as usize, 0, 0, 0],
        )
    })
    .map(drop)
}

/// Whether descriptor `fd` is open.
pub fn is_open(fd: i32) -> bool {
    const F_GETFD: usize = 1;
    // SAFETY: takes numbers.
    unsafe { syscall(number::FCNTL, [fd as usize, F_GETFD, 0, 0, 0]) >= 0 }
}

/// Takes a descriptor that this process inherited.
pub fn inherited(fd: i32) -> Option<OwnedFd> {
    // SAFETY: it is open, and the caller names a descriptor that was passed to this process and has
    // no other owner in it.
    is_open(fd).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sends on a descriptor by number and ignores the result, for a process that is about to end.
pub fn send_ignoring_errors(fd: i32, bytes: &[u8]) {
    const MSG_DONTWAIT_NOSIGNAL: usize = 0x40 | 0x4000;
    let message = [
        fd as usize,
        bytes.as_ptr() as usize,
        bytes.len(),
        MSG_DONTWAIT_NOSIGNAL,
        0,
    ];
    // SAFETY: the bytes exist during the call, which only reads them. The sixth argument, the
    // length of the address, is not read without an address.
    unsafe { syscall(number::SENDTO, message) };
}

/// Swaps to a device or file (swapon(2)).
///
/// # Errors
///
/// If `swapon` fails.
pub fn swapon(path: &CStr) -> Result<()> {
    // SAFETY: the path is a valid C string.
    checked(unsafe { syscall(number::SWAPON, [path.as_ptr() as usize, 0, 0, 0, 0]) }).map(drop)
}

/// Reads the error of a non-blocking connect or an earlier send.
///
/// # Errors
///
/// That error, if there is one; otherwise that of `getsockopt`.
pub fn socket_error(fd: &impl AsFd) -> Result<()> {
    rustix::net::sockopt::socket_error(fd)?
}

/// Standard output.
#[allow(unused_unsafe)] // rustix takes it for safe when it has std.
pub fn stdout() -> rustix::fd::BorrowedFd<'static> {
    // SAFETY: this program never closes its standard descriptors.
    unsafe { rustix::stdio::stdout() }
}

/// Standard error.
#[allow(unused_unsafe)]
pub fn stderr() -> rustix::fd::BorrowedFd<'static> {
    // SAFETY: as above.
    unsafe { rustix::stdio::stderr() }
}

/// Sets a block device's readahead in sectors of 512 bytes (BLKRASET of linux/fs.h).
///
/// # Errors
///
/// If the ioctl fails.
pub fn set_read_ahead(device: &impl AsFd, sectors: usize) -> Result<()> {
    const BLKRASET: usize = 0x1262;
    let fd = device.as_fd().as_raw_fd() as usize;
    // SAFETY: takes numbers.
    checked(unsafe { syscall(number::IOCTL, [fd, BLKRASET, sectors, 0, 0]) }).map(drop)
}

/// Size of a block device, bytes.
///
/// # Errors
///
/// If the ioctl fails.
pub fn device_bytes(device: &impl AsFd) -> Result<u64> {
    const BLKGETSIZE64: usize = 0x8008_1272;
    let fd = device.as_fd().as_raw_fd() as usize;
    let mut bytes = 0u64;
    let place = &raw mut bytes as usize;
    // SAFETY: the kernel writes 8 bytes to `bytes`, which outlives the call.
    checked(unsafe { syscall(number::IOCTL, [fd, BLKGETSIZE64, place, 0, 0]) })?;
    Ok(bytes)
}

/// Grows a mounted ext4 file system to a number of its blocks.
///
/// # Errors
///
/// If the ioctl fails.
pub fn grow_ext4(folder: &impl AsFd, blocks: u64) -> Result<()> {
    const EXT4_IOC_RESIZE_FS: usize = 0x4008_6610;
    let fd = folder.as_fd().as_raw_fd() as usize;
    let place = &raw const blocks as usize;
    // SAFETY: the kernel reads 8 bytes from `blocks`, which outlives the call.
    checked(unsafe { syscall(number::IOCTL, [fd, EXT4_IOC_RESIZE_FS, place, 0, 0]) }).map(drop)
}
