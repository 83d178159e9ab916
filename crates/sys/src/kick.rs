//! A signal that makes one thread leave a blocking call.
//!
//! The signal is SIGRTMIN. Its handler stores 1 into a byte that the thread has set (for a vCPU:
//! `immediate_exit` of its `kvm_run`), so that a kick right before the call is not lost.
#![allow(unsafe_code)] // Signal handlers and a thread-local pointer.

use std::cell::Cell;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

thread_local! {
    static FLAG: Cell<*const AtomicU8> = const { Cell::new(ptr::null()) };
}

extern "C" fn on_kick(_signal: libc::c_int) {
    let flag = FLAG.get();
    if !flag.is_null() {
        // SAFETY: `with_flag` keeps the byte alive while the pointer is set.
        unsafe { (*flag).store(1, Ordering::SeqCst) };
    }
}

/// Installs the handler. Call it once per process, before any thread is kicked.
///
/// # Errors
///
/// If sigaction(2) fails.
pub fn install() -> io::Result<()> {
    // SAFETY: all-zero is a valid sigaction. The handler only loads a thread-local without
    // destructor and stores to an atomic.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_kick as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(libc::SIGRTMIN(), &action, ptr::null_mut())
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Runs `body`; meanwhile a kick of this thread sets `flag` to 1.
pub fn with_flag<T>(flag: &AtomicU8, body: impl FnOnce() -> T) -> T {
    struct Clear;
    impl Drop for Clear {
        fn drop(&mut self) {
            FLAG.set(ptr::null());
        }
    }
    FLAG.set(flag);
    let _clear = Clear;
    body()
}

/// A thread that can be kicked. The owner must not join the thread (after which its id may be
/// reused) while it may still call [`Target::kick`].
#[derive(Debug, Clone, Copy)]
pub struct Target(libc::pid_t);

impl Target {
    /// The calling thread.
    pub fn current() -> Target {
        // SAFETY: gettid has no arguments and can't fail.
        Target(unsafe { libc::gettid() })
    }

    /// Sends the signal. Does nothing if the thread has ended.
    pub fn kick(self) {
        // SAFETY: tgkill with this process's id reaches no other process.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.0, libc::SIGRTMIN()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_kick_interrupts_a_call_and_sets_the_flag() {
        install().unwrap();
        let (send, receive) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let flag = AtomicU8::new(0);
            with_flag(&flag, || {
                send.send(Target::current()).unwrap();
                while flag.load(Ordering::SeqCst) == 0 {
                    // Only a signal ends the poll early.
                    unsafe { libc::poll(ptr::null_mut(), 0, 100_000) };
                }
            });
        });
        let target = receive.recv().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        target.kick();
        thread.join().unwrap();
        target.kick();
    }
}
