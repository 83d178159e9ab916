//! Starts a program as vfork(2) does: the child shares this process's memory until it has executed
//! the program (`clone` with `CLONE_VM | CLONE_VFORK`). No page table is copied, and errors need no
//! pipe.

use super::ports;
use super::raw::{number, syscall};
use alloc::{boxed::Box, ffi::CString, vec::Vec};
use core::arch::asm;
use core::ffi::{CStr, c_char};
use core::mem::MaybeUninit;
use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io::{Errno, Result};
use rustix::process::Pid;

/// A NULL-terminated array of C strings for execve.
#[derive(Debug)]
pub struct Strings {
    _owned: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl Strings {
    /// Takes ownership of the strings.
    pub fn new(strings: Vec<CString>) -> Strings {
        let pointers = strings
            .iter()
            .map(|s| s.as_ptr())
            .chain([core::ptr::null()])
            .collect();
        Strings {
            _owned: strings,
            pointers,
        }
    }

    fn pointer(&self) -> *const *const c_char {
        self.pointers.as_ptr()
    }
}

/// Executes a program in this process. Returns only on failure.
pub fn exec(path: &CStr, argv: &Strings, envp: &Strings) -> Errno {
    // SAFETY: C strings and NULL-terminated arrays of them, which exist during the call.
    let result = unsafe {
        syscall(
            number::EXECVE,
            [
                path.as_ptr() as usize,
                argv.pointer() as usize,
                envp.pointer() as usize,
                0,
                0,
            ],
        )
    };
    Errno::from_raw_os_error(-result as i32)
}

/// User and groups of the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ids {
    /// User.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// Everything that is decided before the child exists.
#[derive(Debug)]
pub struct Plan<'a> {
    /// Paths to try, in order.
    pub candidates: &'a [CString],
    /// Arguments.
    pub argv: &'a Strings,
    /// Environment.
    pub envp: &'a Strings,
    /// Standard input, output and error.
    pub stdio: [BorrowedFd<'a>; 3],
    /// Whether standard input becomes the controlling terminal.
    pub terminal: bool,
    /// Working directory.
    pub cwd: &'a CStr,
    /// User and groups; `None` keeps those of this process.
    pub ids: Option<&'a Ids>,
}

/// Step of the child that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Creating the process.
    Fork,
    /// Session, terminal or standard descriptors.
    Prepare,
    /// Groups and user.
    Identity,
    /// Working directory.
    Chdir,
    /// Execution of all candidates.
    Exec,
}

/// Why a program was not started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// The step that failed.
    pub step: Step,
    /// Its error.
    pub errno: Errno,
}

/// Data shared by parent and child.
struct Child<'a> {
    plan: &'a Plan<'a>,
    /// `None` until the child reports a failure.
    failure: Option<(Step, isize)>,
}

const STACK: usize = 16 * 1024;
const SIGCHLD: usize = 17;
/// HUP, INT, QUIT, PIPE and TERM: the program starts with their default actions.
const DEFAULTED: [usize; 5] = [1, 2, 3, 13, 15];
const CLONE_VM: usize = 0x100;
const CLONE_VFORK: usize = 0x4000;

/// Starts the program in its own session and process group, with no signal blocked. Returns when it
/// was executed or has failed.
///
/// # Errors
///
/// If there is no process for it, or a step of the child fails: names the step.
pub fn spawn(plan: &Plan<'_>) -> core::result::Result<Pid, Failure> {
    let mut child = Child {
        plan,
        failure: None,
    };
    let mut stack = Box::<[u128]>::new_uninit_slice(STACK / size_of::<u128>());
    let pid = clone_sharing_memory(&mut stack, &mut child).map_err(|errno| Failure {
        step: Step::Fork,
        errno,
    })?;
    match child.failure {
        None => Ok(pid),
        Some((step, result)) => {
            // The child has ended, and only this process waits for it.
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
            Err(Failure {
                step,
                errno: Errno::from_raw_os_error(-result as i32),
            })
        }
    }
}

fn clone_sharing_memory(stack: &mut [MaybeUninit<u128>], child: &mut Child<'_>) -> Result<Pid> {
    let top = stack.as_mut_ptr_range().end;
    let result: isize;
    // SAFETY: the child starts on `stack` (16-byte aligned by its type) and calls `in_child`, which
    // never returns. It shares this memory while this thread waits in the system call
    // (CLONE_VFORK). It makes only raw system calls, so no lock or allocator state is used twice.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") number::CLONE as isize => result,
            in("rdi") CLONE_VM | CLONE_VFORK | SIGCHLD,
            in("rsi") top,
            in("rdx") 0,
            in("r10") 0,
            in("r8") 0,
            in("r12") &raw mut *child,
            in("r13") in_child as unsafe extern "C" fn(*mut Child<'_>) -> !,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    if result < 0 {
        return Err(Errno::from_raw_os_error(-result as i32));
    }
    Pid::from_raw(result as i32).ok_or(Errno::AGAIN)
}

/// Runs in the child until execve.
///
/// # Safety
///
/// Only `clone_sharing_memory` may call it, in the child.
unsafe extern "C" fn in_child(child: *mut Child<'_>) -> ! {
    // SAFETY: the parent is suspended, so this is the only reference.
    let child = unsafe { &mut *child };
    // SAFETY: the plan's pointers are valid until execve or exit.
    if let Err(failure) = unsafe { prepare_and_exec(child.plan) } {
        child.failure = Some(failure);
    }
    super::raw::exit(127)
}

/// # Safety
///
/// As for `in_child`.
unsafe fn prepare_and_exec(plan: &Plan<'_>) -> core::result::Result<(), (Step, isize)> {
    let call = |step: Step, number: usize, arguments: [usize; 5]| {
        // SAFETY: every call below passes numbers, or pointers into `plan`.
        let result = unsafe { syscall(number, arguments) };
        if result < 0 {
            Err((step, result))
        } else {
            Ok(result as usize)
        }
    };
    call(Step::Prepare, number::SETSID, [0; 5])?;
    for (target, fd) in plan.stdio.iter().enumerate() {
        let fd = fd.as_raw_fd() as usize;
        if fd == target {
            const F_SETFD: usize = 2;
            call(Step::Prepare, number::FCNTL, [fd, F_SETFD, 0, 0, 0])?;
        } else {
            call(Step::Prepare, number::DUP2, [fd, target, 0, 0, 0])?;
        }
    }
    if plan.terminal {
        const TIOCSCTTY: usize = 0x540e;
        call(Step::Prepare, number::IOCTL, [0, TIOCSCTTY, 0, 0, 0])?;
    }
    // Ignored signals stay ignored over execve. Rust's runtime ignores SIGPIPE, nohup ignores
    // SIGHUP, and a shell ignores the others for background jobs; the program gets the default
    // actions.
    let default_action = [0usize; 4];
    for signal in DEFAULTED {
        call(
            Step::Prepare,
            number::RT_SIGACTION,
            [signal, default_action.as_ptr() as usize, 0, 8, 0],
        )?;
    }
    // A program would keep init's ports over fork and execve, whatever its user, and could read
    // fw_cfg: the configuration, with the first command's environment.
    // SAFETY: takes numbers.
    let result = unsafe { syscall(number::IOPERM, ports::DROP_ALL) };
    ports::drop_result(result).map_err(|_| (Step::Prepare, result))?;
    if let Some(ids) = plan.ids {
        let (uid, gid) = (ids.uid as usize, ids.gid as usize);
        let groups = [ids.groups.len(), ids.groups.as_ptr() as usize, 0, 0, 0];
        call(Step::Identity, number::SETGROUPS, groups)?;
        call(Step::Identity, number::SETRESGID, [gid, gid, gid, 0, 0])?;
        call(Step::Identity, number::SETRESUID, [uid, uid, uid, 0, 0])?;
    }
    call(
        Step::Chdir,
        number::CHDIR,
        [plan.cwd.as_ptr() as usize, 0, 0, 0, 0],
    )?;
    let none_blocked = 0u64;
    call(
        Step::Prepare,
        number::RT_SIGPROCMASK,
        [2, &raw const none_blocked as usize, 0, 8, 0],
    )?;

    // As in execvp: continue if a candidate is missing or not executable, and report the refusal
    // rather than the absence.
    let mut failure = (Step::Exec, -(Errno::NOENT.raw_os_error() as isize));
    for path in plan.candidates {
        let arguments = [
            path.as_ptr() as usize,
            plan.argv.pointer() as usize,
            plan.envp.pointer() as usize,
            0,
            0,
        ];
        let Err((step, result)) = call(Step::Exec, number::EXECVE, arguments) else {
            continue;
        };
        match Errno::from_raw_os_error(-result as i32) {
            Errno::NOENT | Errno::NOTDIR => {}
            Errno::ACCESS => failure = (step, result),
            _ => return Err((step, result)),
        }
    }
    Err(failure)
}
