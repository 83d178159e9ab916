//! Calls that all confined programs need.

use super::filter::{Rule, call, call_with, call_without};

/// The ioctl that sets whether a descriptor blocks.
pub const FIONBIO: u32 = 0x5421;

const EXECUTABLE: u32 = libc::PROT_EXEC as u32;
/// glibc's clone(2) flags of a thread; they can't create a process. Where `clone3` fails with
/// `ENOSYS`, glibc uses `clone` with these flags.
const THREAD: u32 = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID) as u32;
/// The flags of glibc's fork(3).
const FORK: u32 = (libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID | libc::SIGCHLD) as u32;
const PR_SET_NAME: u32 = libc::PR_SET_NAME as u32;
const PR_SET_VMA: u32 = libc::PR_SET_VMA as u32;
const PR_GET_AUXV: u32 = 0x4155_5856;

/// Creating threads; names of threads and of memory, and the processor's features.
pub const THREADS: &[Rule] = &[
    call_with(libc::SYS_clone, 0, &[THREAD]),
    call_with(libc::SYS_prctl, 0, &[PR_SET_NAME, PR_SET_VMA, PR_GET_AUXV]),
];

/// Instead of [`THREADS`]: also the calls of [`crate::fork`], except those that count its threads.
pub const PROCESSES: &[Rule] = &[
    call_with(libc::SYS_clone, 0, &[THREAD, FORK]),
    call_with(
        libc::SYS_prctl,
        0,
        &[
            PR_SET_NAME,
            PR_SET_VMA,
            PR_GET_AUXV,
            libc::PR_SET_PDEATHSIG as u32,
        ],
    ),
    call(libc::SYS_getppid),
    call(libc::SYS_pidfd_open),
    call(libc::SYS_wait4),
    call_with(libc::SYS_kill, 1, &[libc::SIGKILL as u32]),
];

/// Memory that is not executable, locks, clocks, and the exit. Without a call that sends a signal:
/// `abort` ends a process all the same.
pub const PROCESS: &[Rule] = &[
    call(libc::SYS_brk),
    call_without(libc::SYS_mmap, 2, EXECUTABLE),
    call_without(libc::SYS_mprotect, 2, EXECUTABLE),
    call(libc::SYS_mremap),
    call(libc::SYS_munmap),
    call(libc::SYS_madvise),
    call(libc::SYS_futex),
    call(libc::SYS_sched_yield),
    call(libc::SYS_sched_getaffinity),
    call(libc::SYS_clock_gettime),
    call(libc::SYS_clock_nanosleep),
    call(libc::SYS_getrandom),
    call(libc::SYS_gettid),
    call(libc::SYS_getpid),
    call(libc::SYS_rt_sigreturn),
    call(libc::SYS_rt_sigaction),
    call(libc::SYS_rt_sigprocmask),
    call(libc::SYS_sigaltstack),
    call(libc::SYS_restart_syscall),
    call(libc::SYS_exit),
    call(libc::SYS_exit_group),
    call(libc::SYS_set_robust_list),
    call(libc::SYS_rseq),
    // Reading and changing the process's own limits.
    call_with(libc::SYS_prlimit64, 0, &[0]),
];

/// Reading and writing files that are open.
pub const OPEN_FILES: &[Rule] = &[
    call(libc::SYS_close),
    call(libc::SYS_fcntl),
    call(libc::SYS_fstat),
    call(libc::SYS_newfstatat),
    call(libc::SYS_statx),
    call(libc::SYS_lseek),
    call(libc::SYS_read),
    call(libc::SYS_write),
    call(libc::SYS_readv),
    call(libc::SYS_writev),
    call(libc::SYS_pread64),
    call(libc::SYS_pwrite64),
    call(libc::SYS_preadv),
    call(libc::SYS_pwritev),
    call(libc::SYS_preadv2),
    call(libc::SYS_pwritev2),
    call(libc::SYS_fallocate),
    call(libc::SYS_fdatasync),
    call(libc::SYS_fsync),
];

/// Accepting connections on open sockets, and waiting for them.
pub const CONNECTIONS: &[Rule] = &[
    call(libc::SYS_accept4),
    call(libc::SYS_getsockopt),
    call(libc::SYS_recvfrom),
    call(libc::SYS_recvmsg),
    call(libc::SYS_sendto),
    call(libc::SYS_sendmsg),
    call(libc::SYS_shutdown),
    call(libc::SYS_poll),
    call(libc::SYS_ppoll),
    call(libc::SYS_epoll_create1),
    call(libc::SYS_epoll_ctl),
    call(libc::SYS_epoll_wait),
    call(libc::SYS_epoll_pwait),
    call(libc::SYS_epoll_pwait2),
    call(libc::SYS_eventfd2),
];
