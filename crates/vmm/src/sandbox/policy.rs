//! The system calls that each role needs once the guest runs.

use super::Role;
use jiffy_devices::virtio::device::WorkerRole;
use jiffy_sys::handed;
use jiffy_sys::seccomp::filter::{Filter, Refusal, Rule, call, call_with, call_without};
use jiffy_sys::seccomp::lists::FIONBIO;
use jiffy_sys::tap_queue;

const EXECUTABLE: u32 = libc::PROT_EXEC as u32;
const UNIX: &[u32] = &[libc::AF_UNIX as u32];
const FIONREAD: u32 = 0x541b;

// Needed by every thread's memory allocator, locks, clock, log and end.
const COMMON: &[Rule] = &[
    call(libc::SYS_brk),
    call_without(libc::SYS_mmap, 2, EXECUTABLE),
    call_without(libc::SYS_mprotect, 2, EXECUTABLE),
    call(libc::SYS_mremap),
    call(libc::SYS_munmap),
    call(libc::SYS_madvise),
    call(libc::SYS_futex),
    call(libc::SYS_sched_yield),
    call(libc::SYS_clock_gettime),
    call(libc::SYS_clock_nanosleep),
    call(libc::SYS_getrandom),
    call(libc::SYS_read),
    call(libc::SYS_write),
    call(libc::SYS_writev),
    call(libc::SYS_close),
    call(libc::SYS_gettid),
    call(libc::SYS_getpid),
    call(libc::SYS_rt_sigreturn),
    call(libc::SYS_rt_sigprocmask),
    call(libc::SYS_sigaltstack),
    call(libc::SYS_restart_syscall),
    call(libc::SYS_exit),
    call(libc::SYS_exit_group),
    // abort() after a panic.
    call(libc::SYS_tgkill),
];

/// Needed at the start of a thread that is created after the sandbox is in force.
const START: &[Rule] = &[
    call(libc::SYS_set_robust_list),
    call(libc::SYS_rseq),
    call(libc::SYS_prctl),
    call(libc::SYS_sched_getaffinity),
];

const KVM: u32 = 0xae << 8;
const RUN: u32 = KVM | 0x80;
const fn read(number: u32, size: usize) -> u32 {
    2 << 30 | (size as u32) << 16 | KVM | number
}
const fn write(number: u32, size: usize) -> u32 {
    1 << 30 | (size as u32) << 16 | KVM | number
}
const fn both(number: u32, size: usize) -> u32 {
    3 << 30 | (size as u32) << 16 | KVM | number
}

/// Running a vCPU, reading its state, and creating the timer chip late.
const VCPU_IOCTLS: &[u32] = &[
    RUN,
    read(0x81, size_of::<kvm_bindings::kvm_regs>()),
    read(0x83, size_of::<kvm_bindings::kvm_sregs>()),
    both(0x88, size_of::<kvm_bindings::kvm_msrs>()),
    read(0x8e, size_of::<kvm_bindings::kvm_lapic_state>()),
    both(0x91, size_of::<kvm_bindings::kvm_cpuid2>()),
    read(0x98, size_of::<kvm_bindings::kvm_mp_state>()),
    read(0x9f, size_of::<kvm_bindings::kvm_vcpu_events>()),
    read(0xa1, size_of::<kvm_bindings::kvm_debugregs>()),
    read(0xa4, size_of::<kvm_bindings::kvm_xsave>()),
    read(0xa6, size_of::<kvm_bindings::kvm_xcrs>()),
    KVM | 0xa3,
    // Setting the guest's "paused" flag.
    KVM | 0xad,
    write(0x77, size_of::<kvm_bindings::kvm_pit_config>()),
    read(0x9f, size_of::<kvm_bindings::kvm_pit_state2>()),
    write(0xa0, size_of::<kvm_bindings::kvm_pit_state2>()),
    // Opening its statistics, if its activity is recorded.
    KVM | 0xce,
    // A disk makes its doorbell blocking when the guest starts it.
    FIONBIO,
];

/// Reading the state of the VM.
const MAIN_IOCTLS: &[u32] = &[
    both(0x02, size_of::<kvm_bindings::kvm_msr_list>()),
    both(0x62, size_of::<kvm_bindings::kvm_irqchip>()),
    read(0x7c, size_of::<kvm_bindings::kvm_clock_data>()),
    read(0x9f, size_of::<kvm_bindings::kvm_pit_state2>()),
    FIONBIO,
    FIONREAD,
    tap_queue::TUNSETOFFLOAD,
    tap_queue::TUNSETQUEUE,
    // Finding written pages for a capture: starting and reading KVM's dirty log.
    jiffy_sys::pagemap::PAGEMAP_SCAN,
    write(0x46, size_of::<kvm_bindings::kvm_userspace_memory_region>()),
    write(0x42, size_of::<kvm_bindings::kvm_dirty_log>()),
    // Unregistering memory that a pager has filled.
    jiffy_sys::userfaultfd::UNREGISTER,
];

static VCPU: Filter = filter_of(&[
    COMMON,
    &[
        call_with(libc::SYS_ioctl, 1, VCPU_IOCTLS),
        call(libc::SYS_fcntl),
        call(libc::SYS_eventfd2),
        call(libc::SYS_epoll_ctl),
        // Shortening a console log that has grown long.
        call(libc::SYS_pread64),
        call(libc::SYS_pwrite64),
        call(libc::SYS_lseek),
        call(libc::SYS_ftruncate),
        // Closing the streams of a vsock device that the guest resets.
        call(libc::SYS_shutdown),
        call(libc::SYS_sendto),
        call(libc::SYS_recvfrom),
    ],
]);

/// In builds for tests, a descriptor is checked before it is closed.
const CHECKED_CLOSE: Rule = call_with(libc::SYS_fcntl, 1, &[libc::F_GETFD as u32]);

/// Reading and writing a disk's file.
const FILE: &[Rule] = &[
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

const DISK: &[Rule] = &[
    call(libc::SYS_poll),
    call(libc::SYS_ppoll),
    call(libc::SYS_epoll_wait),
    call_with(libc::SYS_ioctl, 1, &[FIONBIO]),
];

static BLOCK: Filter = filter_of(&[COMMON, FILE, DISK, START]);

/// Connecting to Unix sockets: only in a VMM that was not handed its files. Others ask for connections
/// (`jiffy_sys::dial`).
const CONNECT: &[Rule] = &[
    call_with(libc::SYS_socket, 0, UNIX),
    call(libc::SYS_connect),
];

/// Sending requests to the pager, and asking for a connection to it.
const PAGER: &[Rule] = &[
    call(libc::SYS_sendto),
    call(libc::SYS_recvfrom),
    call(libc::SYS_recvmsg),
    CHECKED_CLOSE,
];

static BLOCK_ON_DEMAND: Filter = filter_of(&[COMMON, FILE, DISK, PAGER, START]);

static BLOCK_ON_DEMAND_BY_NAME: Filter = filter_of(&[COMMON, FILE, DISK, PAGER, START, CONNECT]);

/// Serving sockets: of vsock, and the control socket.
const SOCKETS: &[Rule] = &[
    call(libc::SYS_epoll_pwait2),
    call(libc::SYS_epoll_ctl),
    call(libc::SYS_accept4),
    call(libc::SYS_recvfrom),
    call(libc::SYS_recvmsg),
    call(libc::SYS_sendto),
    call(libc::SYS_sendmsg),
    call(libc::SYS_readv),
    call(libc::SYS_shutdown),
    call(libc::SYS_getsockopt),
    call(libc::SYS_fcntl),
    call(libc::SYS_poll),
    call(libc::SYS_ppoll),
];

const VSOCK_IOCTLS: &[Rule] = &[call_with(libc::SYS_ioctl, 1, &[FIONBIO, FIONREAD])];

static VSOCK: Filter = filter_of(&[COMMON, SOCKETS, VSOCK_IOCTLS, START]);

static VSOCK_BY_NAME: Filter = filter_of(&[COMMON, SOCKETS, VSOCK_IOCTLS, START, CONNECT]);

static NET: Filter = filter_of(&[
    COMMON,
    &[
        call(libc::SYS_epoll_pwait2),
        call(libc::SYS_epoll_ctl),
        call(libc::SYS_readv),
        // Setting offloads and the number of queues that the driver negotiated.
        call_with(
            libc::SYS_ioctl,
            1,
            &[tap_queue::TUNSETOFFLOAD, tap_queue::TUNSETQUEUE],
        ),
        // The socket, when passt has closed its end.
        CHECKED_CLOSE,
    ],
    START,
]);

static FS: Filter = filter_of(&[
    COMMON,
    &[
        call(libc::SYS_epoll_pwait2),
        call(libc::SYS_epoll_ctl),
        call(libc::SYS_sendto),
        call(libc::SYS_recvfrom),
    ],
    START,
]);

/// The main thread starts the others, whose filters are added to its own, so it may make all calls
/// of any device's thread.
const MAIN_CALLS: &[Rule] = &[
    call(libc::SYS_eventfd2),
    call_with(libc::SYS_ioctl, 1, MAIN_IOCTLS),
    // Device threads.
    call(libc::SYS_clone3),
    call(libc::SYS_clone),
    call(libc::SYS_seccomp),
    // Captures are written into new files.
    call(libc::SYS_memfd_create),
    call(libc::SYS_ftruncate),
    // Reading the length of a configuration that a spare has received.
    call(libc::SYS_fstat),
    call(libc::SYS_newfstatat),
    call(libc::SYS_statx),
];

/// Writing the exit record and written pages, reading a configuration that a spare has received,
/// and removing sockets.
const BY_NAME: &[Rule] = &[
    call(libc::SYS_openat),
    call(libc::SYS_rename),
    call(libc::SYS_unlink),
    call(libc::SYS_unlinkat),
];

static MAIN: Filter = filter_of(&[COMMON, FILE, SOCKETS, MAIN_CALLS, START]);

static MAIN_BY_NAME: Filter =
    filter_of(&[COMMON, FILE, SOCKETS, MAIN_CALLS, START, CONNECT, BY_NAME]);

const fn filter_of(lists: &[&[Rule]]) -> Filter {
    Filter::build(lists, Refusal::Signal)
}

/// The filter of a role in this process.
pub fn filter(role: Role) -> &'static Filter {
    match role {
        Role::Main => &MAIN,
        Role::MainByName => &MAIN_BY_NAME,
        Role::Vcpu => &VCPU,
        Role::Device(WorkerRole::Block) => &BLOCK,
        Role::Device(WorkerRole::BlockOnDemand) if handed::is_used() => &BLOCK_ON_DEMAND,
        Role::Device(WorkerRole::BlockOnDemand) => &BLOCK_ON_DEMAND_BY_NAME,
        Role::Device(WorkerRole::Vsock) if handed::is_used() => &VSOCK,
        Role::Device(WorkerRole::Vsock) => &VSOCK_BY_NAME,
        Role::Device(WorkerRole::Net) => &NET,
        Role::Device(WorkerRole::Fs) => &FS,
    }
}
