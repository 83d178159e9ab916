//! Handles a system call that a thread's role does not allow.
//!
//! The kernel sends SIGSYS. The handler records the call's number and the thread, signals an event,
//! and blocks the thread; the main thread then ends the VM with a message. On the main thread
//! itself, the handler prints the message and ends the process.
#![allow(unsafe_code)] // A signal handler.

use std::io;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

static CALL: AtomicI64 = AtomicI64::new(-1);
static THREAD: AtomicI32 = AtomicI32::new(0);
static WAKEUP_FD: AtomicI32 = AtomicI32::new(-1);
static WAKEUP: OnceLock<EventFd> = OnceLock::new();

/// A forbidden system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Violation {
    /// The system call's number.
    pub call: i64,
    /// The thread's id.
    pub thread: i32,
}

/// Readable after a violation; `None` until [`install`] was called.
pub fn wakeup() -> Option<&'static EventFd> {
    WAKEUP.get()
}

/// The first violation, if there was one.
pub fn first() -> Option<Violation> {
    match CALL.load(Ordering::SeqCst) {
        -1 => None,
        call => Some(Violation {
            call,
            thread: THREAD.load(Ordering::SeqCst),
        }),
    }
}

pub(super) fn install() -> io::Result<()> {
    let wakeup = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
    let wakeup = WAKEUP.get_or_init(|| wakeup);
    WAKEUP_FD.store(std::os::fd::AsRawFd::as_raw_fd(wakeup), Ordering::SeqCst);
    // SAFETY: all-zero is a valid sigaction; the handler calls only
    // async-signal-safe functions.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_violation
            as extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void)
            as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGSYS, &action, ptr::null_mut())
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// `si_syscall` of a SIGSYS siginfo: after signo, errno, code, padding and the
/// call's address.
const SI_SYSCALL: usize = 24;

extern "C" fn on_violation(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a siginfo that outlives the handler; write,
    // getpid, gettid, clock_nanosleep and _exit are async-signal-safe, and
    // every role may call them.
    unsafe {
        let call = info.cast::<u8>().add(SI_SYSCALL).cast::<i32>().read();
        let thread = libc::gettid();
        let _ = CALL.compare_exchange(-1, call.into(), Ordering::SeqCst, Ordering::SeqCst);
        THREAD.store(thread, Ordering::SeqCst);
        if thread == libc::getpid() {
            report_and_exit(call);
        }
        let one = 1u64;
        libc::write(
            WAKEUP_FD.load(Ordering::SeqCst),
            (&raw const one).cast(),
            size_of::<u64>(),
        );
        let second = libc::timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        loop {
            libc::clock_nanosleep(libc::CLOCK_MONOTONIC, 0, &second, ptr::null_mut());
        }
    }
}

/// Reports on the main thread and ends the process.
unsafe fn report_and_exit(call: i32) -> ! {
    let mut digits = *b"jiffy-vmm: the main thread made the forbidden system call 000\n";
    let mut rest = call;
    for place in (digits.len() - 4..digits.len() - 1).rev() {
        digits[place] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    // SAFETY: both are async-signal-safe.
    unsafe {
        libc::write(2, digits.as_ptr().cast(), digits.len());
        libc::_exit(1)
    }
}
