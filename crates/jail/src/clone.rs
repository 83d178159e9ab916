//! Starts a process in new namespaces that shares memory with its parent until it executes a
//! program, as with vfork(2).
//!
//! The cost does not grow with the parent's memory. The child has its own stack; the calling thread
//! waits until the child has executed a program or ended.
#![allow(unsafe_code)] // clone3 has no wrapper that takes a stack and shares memory.

use std::io;

/// Bytes of the child's stack.
const STACK: usize = 64 << 10;

/// `libc` declares it with a type that is too small for the value.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Runs `child` in a new process, and waits until the process has executed a program or ended.
/// `namespaces` are `CLONE_NEW…` flags; with `cgroup` the process starts in that cgroup. Returns
/// its process id.
///
/// # Errors
///
/// If clone3(2) fails. That `child` fails is no error: it tells that in `context`.
///
/// # Safety
///
/// `child` runs in the memory of this process while other threads continue, so it may only do what
/// a signal handler may: system calls, no allocation, no lock, no panic. It must never return, and
/// must change nothing but `context`.
pub unsafe fn vfork_into<C>(
    namespaces: libc::c_int,
    cgroup: Option<i32>,
    child: unsafe extern "C" fn(*mut C) -> !,
    context: &mut C,
) -> io::Result<libc::pid_t> {
    let mut stack = vec![0_u8; STACK];
    // The ABI requires a stack aligned to 16 bytes at a function call.
    let base = stack.as_mut_ptr() as usize;
    let top = (base + STACK) & !15;
    // SAFETY: all-zero is a valid `clone_args`.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = (libc::CLONE_VM | libc::CLONE_VFORK | namespaces) as u64;
    arguments.exit_signal = libc::SIGCHLD as u64;
    arguments.stack = base as u64;
    arguments.stack_size = (top - base) as u64;
    if let Some(cgroup) = cgroup {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = cgroup as u64;
    }
    let result: isize;
    // No signal handler of this process may run in the child.
    let all = AllSignalsBlocked::new();
    // SAFETY: the parent's side is a system call. The child's begins on its own stack, which
    // lives until this function returns: CLONE_VFORK holds this thread until then.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 as isize => result,
            in("rdi") &raw const arguments,
            in("rsi") size_of::<libc::clone_args>(),
            in("r12") child,
            in("r13") &raw mut *context,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    drop(all);
    drop(stack);
    match result {
        0.. => Ok(result as libc::pid_t),
        error => Err(io::Error::from_raw_os_error(-error as i32)),
    }
}

/// Blocks all signals of the calling thread until it is dropped.
struct AllSignalsBlocked(libc::sigset_t);

impl AllSignalsBlocked {
    fn new() -> AllSignalsBlocked {
        // SAFETY: both sets are filled before they are read.
        unsafe {
            let mut all = std::mem::zeroed();
            let mut before = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
            AllSignalsBlocked(before)
        }
    }
}

impl Drop for AllSignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set was filled by `new`.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}
