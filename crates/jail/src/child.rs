//! The steps of the new process before it executes the program.
//!
//! It shares memory with its parent, whose other threads continue: only system calls, no
//! allocation, no lock, no panic.
#![allow(unsafe_code)] // System calls that rustix lacks, or has only for owned descriptors.

use crate::level::Level;
use crate::mounts;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    MountPropagationFlags, MoveMountFlags, UnmountFlags, mount_change, mount_move, move_mount,
    unmount,
};
use rustix::process::{Resource, Rlimit, chroot, fchdir, pivot_root, setrlimit, setsid};
use rustix::thread::{Gid, Uid};
use rustix::thread::{set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::ptr;

/// The user and group id that a program has inside of its user namespace.
pub const INSIDE: u32 = 1000;

/// The folder inside the empty folder.
pub const INNER: &CStr = c"root";

/// Everything that the child needs, prepared by its parent.
pub struct Plan<'a> {
    pub level: Level,
    pub user: u32,
    pub group: u32,
    pub user_map: &'a [u8],
    pub group_map: &'a [u8],
    pub folder: &'a CStr,
    pub empty: &'a CStr,
    pub limits: &'a [(Resource, Rlimit)],
    /// The descriptors that become 0, 1, …
    pub sources: &'a [RawFd],
    /// Whether a descriptor of the process's own folder in procfs follows them.
    pub own_proc: bool,
    /// The program; with `None` the process exits with status 0.
    pub program: Option<RawFd>,
    pub arguments: *const *const libc::c_char,
    pub environment: *const *const libc::c_char,
    /// Written by the child: the step that failed, and errno.
    pub failed: Option<(Stage, i32)>,
}

/// A step that can fail.
#[derive(Debug, Clone, Copy)]
pub enum Stage {
    Session,
    UserNamespace,
    Mounts,
    Root,
    Folder,
    Descriptors,
    Limits,
    User,
    Execute,
}

impl Stage {
    /// The step's name, to follow "could not".
    pub fn name(self) -> &'static str {
        match self {
            Stage::Session => "create a session",
            Stage::UserNamespace => "map its user into its user namespace",
            Stage::Mounts => "make its mounts private",
            Stage::Root => "enter its empty root",
            Stage::Folder => "enter its folder",
            Stage::Descriptors => "set up its descriptors",
            Stage::Limits => "set its limits",
            Stage::User => "switch to its user",
            Stage::Execute => "execute the program",
        }
    }
}

type Step = Result<(), (Stage, Errno)>;

/// Opens the process's own folder in procfs, with a descriptor number that is not a target.
fn own_proc(plan: &Plan<'_>) -> Result<Option<OwnedFd>, Errno> {
    let Some(program) = plan.program.filter(|_| plan.own_proc) else {
        return Ok(None);
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let proc = rustix::fs::open(c"/proc/self", flags, Mode::empty())?;
    rustix::io::fcntl_dupfd_cloexec(&proc, program + 1).map(Some)
}

/// For [`clone::vfork_into`](crate::clone::vfork_into).
///
/// # Safety
///
/// `plan` is the parent's, which waits.
pub unsafe extern "C" fn run(plan: *mut Plan<'_>) -> ! {
    // SAFETY: the parent lent it, and does not look at it before this process executes a
    // program or ends.
    let plan = unsafe { &mut *plan };
    if let Err((stage, error)) = enter(plan) {
        plan.failed = Some((stage, error.raw_os_error()));
    }
    // SAFETY: ends this process; nothing of the parent's is touched.
    unsafe { libc::_exit(i32::from(plan.failed.is_some())) }
}

fn enter(plan: &Plan<'_>) -> Step {
    setsid().map_err(at(Stage::Session))?;
    default_signals();
    if plan.level == Level::UserNamespace {
        map_user(plan).map_err(at(Stage::UserNamespace))?;
    }
    let proc = own_proc(plan).map_err(at(Stage::Descriptors))?;
    match plan.level.has_own_root() {
        true => leave_file_system(plan)?,
        false => rustix::process::chdir(plan.folder).map_err(at(Stage::Folder))?,
    }
    for (resource, limit) in plan.limits {
        // A lower limit is kept.
        match setrlimit(*resource, *limit) {
            Ok(()) | Err(Errno::PERM) => {}
            Err(error) => return Err((Stage::Limits, error)),
        }
    }
    if plan.level == Level::OwnUser {
        become_user(plan).map_err(at(Stage::User))?;
    }
    leave_keyrings();
    set_no_new_privs(true).map_err(at(Stage::User))?;
    if plan.program.is_none() {
        return Ok(());
    }
    take_descriptors(plan.sources, proc.as_ref()).map_err(at(Stage::Descriptors))?;
    Err((Stage::Execute, execute(plan)))
}

fn at(stage: Stage) -> impl FnOnce(Errno) -> (Stage, Errno) {
    move |error| (stage, error)
}

/// execve resets signal handlers, but ignored signals stay ignored.
fn default_signals() {
    const IGNORED_BY_SOME: [libc::c_int; 6] = [
        libc::SIGPIPE,
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
        libc::SIGCHLD,
    ];
    // SAFETY: no handler is installed; this process has a copy of the table of handlers.
    unsafe {
        for signal in IGNORED_BY_SOME {
            libc::signal(signal, libc::SIG_DFL);
        }
        // A write beyond RLIMIT_FSIZE fails, instead of ending the program.
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut());
    }
}

/// A process without privileges may map its own group only after setgroups is denied
/// (user_namespaces(7)).
fn map_user(plan: &Plan<'_>) -> Result<(), Errno> {
    write(c"/proc/self/setgroups", b"deny")?;
    write(c"/proc/self/uid_map", plan.user_map)?;
    write(c"/proc/self/gid_map", plan.group_map)
}

fn write(path: &CStr, text: &[u8]) -> Result<(), Errno> {
    let file = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, text).map(drop)
}

/// Makes an empty folder the root, and the folder of sockets the working directory. The mount of
/// that folder has no parent, so `..` leads nowhere.
fn leave_file_system(plan: &Plan<'_>) -> Step {
    // Unmounts here must not propagate to other namespaces.
    let propagation = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change(c"/", propagation).map_err(at(Stage::Mounts))?;
    let folder = copy_of(plan.folder).map_err(at(Stage::Folder))?;
    let root = copy_of(plan.empty).map_err(at(Stage::Root))?;
    change_root(&root, plan.empty).map_err(at(Stage::Root))?;
    fchdir(&folder).map_err(at(Stage::Folder))
}

/// The mount of this folder alone: its parents in the file system can't be reached from it. It is
/// read-only, and nothing in it can be executed.
fn copy_of(folder: &CStr) -> Result<OwnedFd, Errno> {
    let attributes = libc::MOUNT_ATTR_RDONLY | mounts::HARMLESS;
    mounts::detached(rustix::fs::CWD, folder, false, attributes)
}

fn change_root(root: &OwnedFd, place: &CStr) -> Result<(), Errno> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(root.as_fd(), c"", rustix::fs::CWD, place, flags)?;
    fchdir(root)?;
    match pivot_root(c".", c".") {
        // The old root is mounted below the new one; the unmount removes it with all its mounts.
        Ok(()) => unmount(c".", UnmountFlags::DETACH)?,
        // The initramfs can't be exchanged by pivot_root, only covered.
        Err(Errno::INVAL) => mount_move(c".", c"/")?,
        Err(error) => return Err(error),
    }
    // A chroot one folder deeper: a process whose root is not the root of its mount namespace can't
    // create a user namespace, in which it would be root again (user_namespaces(7)).
    chroot(INNER)
}

fn become_user(plan: &Plan<'_>) -> Result<(), Errno> {
    let (user, group) = (Uid::from_raw(plan.user), Gid::from_raw(plan.user));
    set_thread_groups(&[Gid::from_raw(plan.group)])?;
    set_thread_res_gid(group, group, group)?;
    // This also drops all capabilities (capabilities(7)).
    set_thread_res_uid(user, user, user)
}

/// Joins a new session keyring, because the program must not have the keys of the old one
/// (keyctl(2)). Fails harmlessly on a kernel without keyrings.
fn leave_keyrings() {
    const KEYCTL_JOIN_SESSION_KEYRING: libc::c_int = 1;
    // SAFETY: no name, so it is a new one without a name.
    unsafe {
        let none = ptr::null::<libc::c_char>();
        libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, none);
    }
}

/// Makes the sources descriptors 0, 1, …, and has execve close all others. Until then this process
/// keeps its parent's locks: if the parent dies, its successor must not look for this process before
/// it has its new command line.
fn take_descriptors(sources: &[RawFd], proc: Option<&OwnedFd>) -> Result<(), Errno> {
    let mut target: RawFd = 0;
    for source in sources.iter().copied().chain(proc.map(AsRawFd::as_raw_fd)) {
        // SAFETY: numbers; what they were here is not used any more.
        if unsafe { libc::dup2(source, target) } < 0 {
            return Err(last_error());
        }
        target += 1;
    }
    let (last, flags) = (libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
    // SAFETY: marks numbers of this process's own table.
    match unsafe { libc::syscall(libc::SYS_close_range, target, last, flags) } {
        0 => Ok(()),
        _ => Err(last_error()),
    }
}

fn execute(plan: &Plan<'_>) -> Errno {
    let Some(program) = plan.program else {
        return Errno::INVAL;
    };
    // SAFETY: an open descriptor that is closed on exec; strings and arrays that end with
    // zero and outlive this process's view of them.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            program,
            c"".as_ptr(),
            plan.arguments,
            plan.environment,
            libc::AT_EMPTY_PATH,
        );
    }
    last_error()
}

fn last_error() -> Errno {
    // SAFETY: the address of this thread's error number, set by the call before. The thread
    // is the parent's, which waits.
    Errno::from_raw_os_error(unsafe { *libc::__errno_location() })
}
